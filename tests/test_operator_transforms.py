"""Transforms, batches and derivatives of the operator are those of torch.softmax."""

import warnings
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from kernels import fastest
from kernels.lab import backend
from tests.helpers import assert_right, tensor


def tangent_of(f, x, v):
    """The derivative of f at x along v, by a dual tensor."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x.clone(), v))).tangent


def square_sum(f):
    return lambda x: f(x).pow(2).sum()


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),)),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.sin()),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x.sin()),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad": lambda f, x: torch.func.grad(square_sum(f))(x),
    "hessian": lambda f, x: torch.func.hessian(square_sum(f))(x),
    "reverse of reverse": lambda f, x: torch.func.jacrev(
        torch.func.jacrev(square_sum(f))
    )(x),
    "forward of forward": lambda f, x: torch.func.jacfwd(
        torch.func.jacfwd(square_sum(f))
    )(x),
    "reverse of forward": lambda f, x: torch.func.jacrev(
        torch.func.jacfwd(square_sum(f))
    )(x),
    "vmap": lambda f, x: torch.vmap(f)(x[None].expand(3, *x.shape)),
    "vmap of columns": lambda f, x: torch.vmap(f, in_dims=1, out_dims=1)(
        x[:, None].expand(-1, 3, -1)
    ),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(square_sum(f)))(
        torch.stack([x, x.sin()])
    ),
    "vmap of vmap": lambda f, x: torch.vmap(torch.vmap(f))(x.expand(2, 3, *x.shape)),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "constant": lambda f, x: torch.func.grad(lambda w: (w * f(x)).sum())(x.sin()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_as_torchs(transform, dim, dtype):
    x = tensor(3, 5, dtype=dtype)
    fastest.softmax(x, dim)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")  # vmap's loop
        ours = TRANSFORMS[transform](lambda v: fastest.softmax(v, dim), x)
    theirs = TRANSFORMS[transform](lambda v: torch.softmax(v, dim), x)
    torch.testing.assert_close(ours, theirs)


def zeros_like(x):
    """Zeros that have no memory, as autograd makes them."""
    return torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device)


def gradient(f, x, given, **how):
    """The gradient of f at x, from the given gradient for its result."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, given, **how)[0]


# Autograd batches with an older vmap, which is no transform of `torch.func`. Neither
# its batches nor its zeros have memory.
BATCHES = {
    "gradients": lambda f, x: gradient(
        f, x, torch.stack([x, x.sin(), x.cos(), -x]), is_grads_batched=True
    ),
    "jacobian": partial(torch.autograd.functional.jacobian, vectorize=True),
    "hessian": lambda f, x: torch.autograd.functional.hessian(
        square_sum(f), x, vectorize=True
    ),
    "calls": lambda f, x: torch._vmap_internals._vmap(f)(torch.stack([x, x.sin()])),
    "zeros": lambda f, x: f(zeros_like(x)),
    "the gradient of zeros": lambda f, x: gradient(f, x, zeros_like(x)),
}


# The gradient is PyTorch's kernel in float64, and the course's in float32.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_and_zeros_of_autograd_are_as_torchs(kind, dtype):
    x = tensor(3, 5, dtype=dtype)
    fastest.softmax(x)
    ours = BATCHES[kind](lambda v: fastest.softmax(v, 1), x)
    theirs = BATCHES[kind](lambda v: torch.softmax(v, 1), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(3, 5), (3,)])  # an example has 1 dimension, or none
@pytest.mark.parametrize("dim", [1, -2])
def test_vmap_refuses_a_dimension_that_an_example_lacks(dim, shape):
    """The operator itself, too, which nothing checks arguments for."""
    for f in (fastest.softmax, torch.ops.kernels.softmax):
        with pytest.raises(IndexError, match=f"dim must be from -1 to 0 .*got {dim}"):
            torch.vmap(lambda v, f=f: f(v, dim))(tensor(*shape))


@pytest.mark.parametrize("device", ["meta", backend.DEVICE])
def test_the_operator_refuses_a_dimension_that_is_not_there(device):
    x = torch.empty(3, 5, device=device)
    with pytest.raises(IndexError, match=r"dim must be from -2 to 1 .*got 7"):
        torch.ops.kernels.softmax(x, 7)


@pytest.mark.thorough
@pytest.mark.parametrize("transform", sorted(set(TRANSFORMS) - {"functionalize"}))
def test_compiled_transforms_are_as_torchs(transform):
    torch.compiler.reset()
    x = tensor(3, 5, dtype=torch.float64)
    compiled = torch.compile(TRANSFORMS[transform], backend="aot_eager")
    ours = compiled(lambda v: fastest.softmax(v, 1), x)
    theirs = TRANSFORMS[transform](lambda v: torch.softmax(v, 1), x)
    torch.testing.assert_close(ours, theirs)


def test_dual_tensors_keep_their_tangents():
    x = tensor(3, 5, dtype=torch.float64)
    fastest.softmax(x)
    ours = tangent_of(fastest.softmax, x, x.sin())
    theirs = tangent_of(lambda v: torch.softmax(v, 1), x, x.sin())
    torch.testing.assert_close(ours, theirs)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone(), x.sin())
        with pytest.raises(RuntimeError, match="x has a tangent"):
            fastest.softmax(dual, out=torch.empty_like(x))
        assert_right(fastest.softmax(x, out=torch.empty_like(x)), x)


@pytest.fixture
def cuda_autocast():
    """As `torch.autocast("cuda")`, which does nothing without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", False)


@pytest.mark.usefixtures("cuda_autocast")
def test_the_dtype_stays_under_autocast(monkeypatch):
    """CUDA's autocast widens `torch.softmax`, a CPU's does not: tensors are fakes."""
    monkeypatch.setattr(backend, "DEVICE", "cuda")
    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=torch.float16, device="cuda")
        assert torch.softmax(x, 1).dtype == torch.float32
        dtypes = [fastest.softmax(x).dtype, torch.vmap(fastest.softmax)(x).dtype]
        dtypes.append(torch.func.jvp(fastest.softmax, (x,), (x,))[0].dtype)
        with forward_ad.dual_level():
            dtypes.append(fastest.softmax(x).dtype)
    assert set(dtypes) == {torch.float16}


def test_derivatives_of_every_kind_are_those_of_differences():
    x = tensor(2, 3, dtype=torch.float64).requires_grad_()
    for dim in (0, 1):
        f = partial(fastest.softmax, dim=dim)
        how = {"check_batched_grad": True}
        assert torch.autograd.gradcheck(
            f, x, check_forward_ad=True, check_batched_forward_grad=True, **how
        )
        assert torch.autograd.gradgradcheck(
            f, x, check_fwd_over_rev=True, check_rev_over_rev=True, **how
        )
