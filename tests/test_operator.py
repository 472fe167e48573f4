"""`softmax` as an operator: autograd, what is no plain tensor, and `torch.compile`."""

import contextlib
import math
import os
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import fastest, gradient
from kernels.lab import backend
from tests import forks
from tests.fakes import FakeKernel
from tests.helpers import DIMS, LAYOUTS, STEMS, assert_right, contiguous_for, tensor

# ---- out, and autograd ---------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "every second"])
def test_out_counts_as_changed(layout):
    """Autograd then refuses to use the values that it has saved."""
    x, w = tensor(3, 5), tensor(3, 5, seed=1).requires_grad_()
    out = LAYOUTS[layout](3, 5)
    version = out._version
    y = w * out
    fastest.softmax(x, out=out)
    assert out._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_out_that_requires_a_gradient_is_refused():
    x, out = tensor(3, 5), tensor(3, 5).requires_grad_()
    for target in (out, out * 2):
        with pytest.raises(RuntimeError, match=r"where out requires a gradient"):
            fastest.softmax(x, out=target)
    with torch.no_grad():
        assert fastest.softmax(x, out=out) is out
    assert_right(out.detach(), x)


@pytest.mark.parametrize("stem", [*STEMS, "columns"])
@pytest.mark.parametrize("shift", [-3, 0, 3])
def test_out_may_share_memory_through_dlpack(stem, shift):
    """Then its storage is another one, and may begin elsewhere, at common addresses."""
    shape, dim, dtype = contiguous_for(stem)
    size = math.prod(shape)
    buffer = tensor(size + 8, dtype=dtype)
    x, alias = buffer[4:][:size], torch.from_dlpack(buffer[4 + shift :])[:size]
    assert alias.data_ptr() == x.data_ptr() + dtype.itemsize * shift
    x, out = x.view(shape), alias.view(shape)
    before = x.clone()
    fastest.softmax(x, dim, out=out)
    assert_right(out, before, dim)


def test_out_between_the_rows_of_x_is_right():
    wide = tensor(6, 40)
    x, out = wide[::2], wide[1:].view(-1)[:120].view(3, 40)
    before = x.clone()
    fastest.softmax(x, out=out)
    assert_right(out, before)


def test_out_of_inference_mode():
    x = tensor(3, 5)
    with torch.inference_mode():
        out = torch.empty_like(x)
        assert_right(fastest.softmax(x, out=out), x)
        assert_right(fastest.softmax(out.copy_(x)), x)


# ---- the gradient --------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dim"), DIMS)
def test_the_gradient_is_torchs(shape, dim):
    for dtype in fastest.DTYPES:
        x, weights = tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype).sign()
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = fastest.softmax(ours, dim)
        assert_right(y.detach(), x, dim)
        (y * weights).sum().backward()
        (torch.softmax(theirs, dim) * weights).sum().backward()
        near = 4 * torch.finfo(dtype).eps  # of 1, the largest softmax
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=near)


def test_the_gradient_is_computed_by_the_courses_kernel(monkeypatch):
    kernel = FakeKernel(gradient.gradient_kernel)
    monkeypatch.setattr(gradient, "gradient_kernel", kernel)
    monkeypatch.setattr(gradient._backward, "launches", {})
    x = tensor(3, 64).requires_grad_()
    y = fastest.softmax(x)
    assert not kernel.calls
    y.sum().backward()
    assert len(kernel.calls) == 1


def test_the_gradient_is_that_of_differences():
    x = tensor(2, 3, 2, dtype=torch.float64).requires_grad_()
    for dim, view in ((0, x), (1, x.transpose(0, 2)), (2, x[:, 1:])):
        assert torch.autograd.gradcheck(
            lambda v, dim=dim: fastest.softmax(v, dim), view
        )
    assert torch.autograd.gradgradcheck(lambda v: fastest.softmax(v, 1), x)


def test_no_gradient_where_none_is_wanted():
    x = tensor(3, 5).requires_grad_()
    with pytest.raises(RuntimeError, match=r"out must be None.*no_grad"):
        fastest.softmax(x, out=torch.empty_like(x))
    with torch.no_grad():
        out = torch.empty_like(x)
        assert fastest.softmax(x).grad_fn is None
        assert_right(fastest.softmax(x, out=out), x.detach())
    assert fastest.softmax(x).requires_grad


@pytest.mark.parametrize(
    ("x", "dim"),
    [
        (tensor(3, 33), -1),
        (tensor(2, 3, 5).transpose(0, 2), 1),
        (tensor(2, 3, dtype=torch.float64), 0),
        (tensor(4, 6, dtype=torch.bfloat16)[:, 1:], 1),
        (tensor(0, 5), 1),
        (tensor(), 0),
    ],
)
def test_is_a_proper_operator(x, dim):
    operator = torch.ops.kernels.softmax.default
    torch.library.opcheck(operator, (x, dim))
    torch.library.opcheck(operator, (x, dim, torch.float64))
    if x.dtype.itemsize > 2:
        torch.library.opcheck(operator, (x.detach().clone().requires_grad_(), dim))


# ---- what is no plain tensor ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_negative_bit_is_obeyed(dtype):
    z = torch.randn(4, 33, dtype=dtype, generator=torch.Generator().manual_seed(0))
    z = z.to(backend.DEVICE)
    x = z.conj().imag
    assert x.is_neg()
    for _ in range(2):
        assert_right(fastest.softmax(x), x.clone())
    fastest.softmax(z.imag)
    assert_right(fastest.softmax(x), x.clone())
    out, before = z.clone().conj().imag, x.clone()
    fastest.softmax(x, out=out)
    assert_right(out.clone(), before)


class Logged(torch.Tensor):
    """A wrapper without memory of its own, which notes what is called on it."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        how = {"dtype": inner.dtype, "device": inner.device}
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), requires_grad=requires_grad, **how
        )

    def __init__(self, inner, requires_grad=False):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.log.append(str(func))
        unwrapped = [a.inner if isinstance(a, cls) else a for a in args]
        result = func(*unwrapped, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def test_a_wrapper_subclass_goes_through_the_operator():
    x = tensor(3, 33)
    fastest.softmax(x)  # the wrapper looks just like x
    Logged.log.clear()
    y = fastest.softmax(Logged(x))
    assert isinstance(y, Logged) and Logged.log == ["kernels.softmax.default"]
    assert_right(y.inner, x)
    z = Logged(x, requires_grad=True)
    (gradient,) = torch.autograd.grad(fastest.softmax(z), z, Logged(torch.ones_like(x)))
    assert isinstance(gradient, Logged)
    fastest.softmax(x, out=(out := Logged(torch.empty_like(x))))
    assert_right(out.inner, x)


def test_a_subclass_without_memory_is_refused_by_a_sentence():
    x = tensor(3, 33)
    fastest.softmax(x)
    with pytest.raises(
        ValueError, match=r"must have memory, got a Tensor of .*\(3, 33\)"
    ):
        fastest.softmax(torch._to_functional_tensor(x))


def test_a_parameter_is_taken():
    x = torch.nn.Parameter(tensor(3, 33))
    y = fastest.softmax(x)
    assert type(y) is torch.Tensor and y.requires_grad
    assert_right(y.detach(), x.detach())


def test_fake_tensors_stay_fake():
    x = tensor(3, 33)
    fastest.softmax(x)
    with FakeTensorMode() as mode:
        for fake in (mode.from_tensor(x), torch.empty(3, 33, device=backend.DEVICE)):
            y = fastest.softmax(fake, dtype=torch.float64)
            assert isinstance(y, FakeTensor)
            assert (y.shape, y.dtype, y.device) == (x.shape, torch.float64, x.device)


TRACERS = {
    **{kind: {"tracing_mode": kind} for kind in ("real", "fake", "symbolic")},
    "before dispatch": {"pre_dispatch": True},
}


def called_by(traced: torch.fx.GraphModule) -> list:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", TRACERS)
def test_make_fx_records_the_operator(kind):
    x, z = tensor(3, 33), tensor(3, 33, seed=1)
    fastest.softmax(x)
    traced = make_fx(lambda v: fastest.softmax(v), **TRACERS[kind])(x)
    assert called_by(traced) == [torch.ops.kernels.softmax.default]
    assert_right(traced(z), z)


def test_torch_fx_records_the_operator():
    """Its tracer passes no tensor, but what stands for one."""
    traced = torch.fx.symbolic_trace(lambda v: fastest.softmax(v, 0))
    assert called_by(traced) == [torch.ops.kernels.softmax.default]
    x = tensor(3, 33)
    torch.testing.assert_close(traced(x), torch.softmax(x, 0))
    traced = torch.fx.symbolic_trace(lambda dim: fastest.softmax(x, dim))
    torch.testing.assert_close(traced(0), torch.softmax(x, 0))


def test_a_dim_may_depend_on_a_traced_shape():
    x = tensor(3, 33)
    rows_of = lambda v: fastest.softmax(v, v.shape[0] - 2)  # noqa: E731
    traced = make_fx(rows_of, tracing_mode="symbolic")(x)
    torch.testing.assert_close(traced(x), torch.softmax(x, 1))


def test_inference_mode_goes_before_the_mode_of_gradients():
    x = tensor(3, 33).requires_grad_()
    for _ in range(4):
        with torch.inference_mode(), torch.enable_grad():
            y = fastest.softmax(x)
        assert y.is_inference() and not y.requires_grad
        assert fastest.softmax(x).requires_grad


@pytest.mark.parametrize("x", [[1.0], 1.0, None, torch.Tensor])
def test_what_is_no_tensor_is_named_in_a_mode_for_functions(x):
    with torch.device(backend.DEVICE), pytest.raises(TypeError, match="x must be a"):
        fastest.softmax(x)


@pytest.mark.parametrize("name", ["functionalize", "vmap"])
def test_make_fx_records_a_transform_for_any_shape(name):
    x, z = tensor(3, 33), tensor(3, 33, seed=1)
    transformed = getattr(torch.func, name)(lambda v: fastest.softmax(v))
    traced = make_fx(transformed, tracing_mode="symbolic")(x)
    assert_right(traced(z), z)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("dim", [-1, 0])
def test_vmap_takes_each_part_of_a_nested_tensor(dim):
    parts = tensor(3, 5), tensor(2, 5)
    nested = torch.nested.nested_tensor([*parts])
    found = torch.vmap(lambda x: fastest.softmax(x, dim))(nested)
    for y, x in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(y, torch.softmax(x, dim))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
def test_the_tracer_of_torchscript_records_the_operator():
    x, z = tensor(3, 33), tensor(3, 33, seed=1)
    fastest.softmax(x)
    traced = torch.jit.trace(fastest.softmax, (x,), check_trace=False)
    assert "kernels::softmax" in str(traced.graph)
    assert_right(traced(z), z)


def test_a_dispatch_mode_sees_the_operator():
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.append(str(func))
            return func(*args, **(kwargs or {}))

    log, x = [], tensor(3, 33)
    fastest.softmax(x)
    with Log():
        y = fastest.softmax(x)
    assert log == ["kernels.softmax.default"]
    assert_right(y, x)


@pytest.mark.parametrize("device", [None, backend.DEVICE])
@pytest.mark.parametrize("n_known", [0, 4])
def test_a_mode_for_functions_hears_of_the_operator(n_known, device):
    class Log(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            log.append(str(func))
            return func(*args, **(kwargs or {}))

    log, x = [], tensor(3, 33)
    around = torch.device(device) if device else contextlib.nullcontext()
    for _ in range(n_known):
        fastest.softmax(x)
    with around, Log():
        y = fastest.softmax(x)
        fastest.softmax(x, out=torch.empty_like(x))
    assert log.count("kernels.softmax.default") == 2
    assert_right(y, x)


def test_export_holds_the_operator():
    class Module(torch.nn.Module):
        def forward(self, x):
            return fastest.softmax(x, 0, dtype=torch.float64)

    x = tensor(3, 33)
    fastest.softmax(x)
    for strict in (False, True):
        program = torch.export.export(Module(), (x,), strict=strict)
        assert "kernels.softmax.default" in str(program.graph)
        assert_right(program.module()(x), x.double(), 0)


def test_dtensors_keep_their_shards():
    """Of a call without a dtype, and of one with another."""
    code = f"device = {backend.DEVICE!r}\n{SHARDED}"
    run = forks.python(code, env=dict(os.environ), cwd=backend.ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["S(0)", *2 * ["S(0)", "S(0)", *4 * "R"]]


SHARDED = """
import warnings
warnings.simplefilter("ignore")
from kernels import softmax
import torch
from torch.distributed import init_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh, x = init_device_mesh(device, (2,)), torch.randn(4, 6, device=device)
whole = DTensor.from_local(x, mesh, [Shard(0)])
with torch.inference_mode():  # first of all: autograd is not asked then
    print("S(0)" if softmax(whole).placements[0] == Shard(0) else "R")
for dtype in (None, torch.float64):
    softmax(x, dtype=dtype)
    for place in (Shard(0), Shard(1), Replicate()):
        whole = DTensor.from_local(x, mesh, [place]).requires_grad_()
        y = softmax(whole, dtype=dtype)
        if place != Shard(1):
            torch.testing.assert_close(y.to_local(), torch.softmax(x, 1, dtype=dtype))
        y.pow(2).sum().backward()
        for shards in (y, whole.grad):
            print("S(0)" if shards.placements[0] == Shard(0) else "R")
"""


# ---- the compiler --------------------------------------------------------------------


def attention(x, dim):
    """The softmax amid other operations, which the compiler takes in one graph."""
    return 2 * fastest.softmax(x * 3, dim) + 1


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("how", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_in_one_graph(how, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=how, dynamic=dynamic)
    for shape, dim in (((3, 33), -1), ((4, 21), -1), ((2, 3, 5), 1), ((7, 4), 0)):
        x = tensor(*shape)
        torch.testing.assert_close(compiled(x, dim), attention(x, dim))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(ours, dim).pow(2).sum().backward()
        (2 * torch.softmax(theirs * 3, dim) + 1).pow(2).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("how", BACKENDS)
def test_compiles_with_out(how):
    torch.compiler.reset()
    compiled = torch.compile(fastest.softmax, fullgraph=True, backend=how)
    x = tensor(4, 21)
    before, out = x.clone(), torch.empty_like(x)
    assert compiled(x, out=out) is out
    assert_right(out, before)
    compiled(x, 0, out=x)
    assert_right(x, before, 0)


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(300, 64), (300, 33), (4, 50257), (4, 2**18)])
def test_compiles_in_every_mode(mode, shape):
    """The last two modes but one replay CUDA graphs from the third call on."""
    torch.compiler.reset()

    @partial(torch.compile, mode=mode, fullgraph=True)
    def twice(x):
        return fastest.softmax(fastest.softmax(x) * 2)

    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = tensor(*shape, seed=seed)
        between = fastest.softmax(x)
        torch.testing.assert_close(twice(x), fastest.softmax(between * 2))
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = tensor(*shape, seed=seed)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        weights = tensor(*shape, seed=seed + 1)
        (twice(ours) * weights).sum().backward()
        (torch.softmax(torch.softmax(theirs, 1) * 2, 1) * weights).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES[:2])
def test_compiles_for_any_size(mode):
    torch.compiler.reset()
    compiled = torch.compile(attention, mode=mode, dynamic=True, fullgraph=True)
    for n_cols in (64, 33, 1001, 50257, 2**18, 1001):
        torch.compiler.cudagraph_mark_step_begin()
        x = tensor(3, n_cols)
        torch.testing.assert_close(compiled(x, -1), attention(x, -1))
