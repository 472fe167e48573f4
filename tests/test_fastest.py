"""One softmax for every shape: PyTorch's answers, by the kernel that the rule names."""

import itertools
import math
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import cooperative, fastest, online, tiled, unaligned
from kernels.lab import (
    backend,
    check,
    compile,
    direct,
    gpu,
    launch,
    meter,
    operator,
)
from tests.helpers import FakeKernel, assert_right
from tests.lab.test_direct import launches_for

INF = float("inf")
SINGLE, HALF = torch.float32, torch.bfloat16
STEMS = {
    **{"tiled": tiled, "unaligned": unaligned},
    **{"online": online, "cooperative": cooperative},
}
OLDER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)

SHAPES = ((), (5,), (3, 7), (2, 9, 3), (3, 2, 5, 4), (2, 3, 1, 5, 3))
DIMS = [(shape, dim) for shape in SHAPES for dim in range(max(len(shape), 1))]
EMPTY = ((0,), (0, 5), (5, 0), (2, 0, 3), (0, 0, 0))


def tensor(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """A random tensor of any rank, on the device that kernels run on."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(backend.DEVICE, dtype)


def sliced(*shape: int, step: int, **how: object) -> torch.Tensor:
    """Every step-th index of each dimension of a larger tensor, from the second on."""
    wide = tensor(*(step * n + 1 for n in shape), **how)
    return wide[tuple(slice(1, step * n + 1, step) for n in shape)]


def permuted(*shape: int, **how: object) -> torch.Tensor:
    return tensor(*shape[::-1], **how).permute(tuple(range(len(shape)))[::-1])


def expanded(*shape: int, keep: Callable[[int], bool], **how: object) -> torch.Tensor:
    """A tensor in which those dimensions repeat one index whose place is not kept."""
    sizes = [n if keep(place) else 1 for place, n in enumerate(shape)]
    return tensor(*sizes, **how).expand(shape)


LAYOUTS = {
    "contiguous": tensor,
    "permuted": permuted,
    "sliced": partial(sliced, step=1),
    "every second": partial(sliced, step=2),
    "expanded": partial(expanded, keep=lambda place: place % 2 == 0),
    "all alike": partial(expanded, keep=lambda place: False),
    "offset": lambda *shape, **how: tensor(math.prod(shape) + 1, **how)[1:].view(shape),
}
WRITABLE = ("contiguous", "permuted", "sliced", "every second", "offset")


def width_for(stem: str, dtype: torch.dtype = torch.float32) -> int:
    """A width, as small as can be, at which a few rows go to this chapter's kernel."""
    odd = int(stem == "unaligned")
    widths = (9 * 2**power + odd for power in range(3, 17))
    return next(n for n in widths if fastest.choose(3, n, dtype) == stem)


def input_of(stem: str, n_rows: int = 3, **how: object) -> torch.Tensor:
    """A matrix of few rows that goes to this chapter's kernel."""
    if stem == "online":
        return tensor(50, n_rows, **how).t()
    return tensor(n_rows, width_for(stem, how.get("dtype", torch.float32)), **how)


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(fastest.softmax)
    assert summary, summary


@pytest.mark.parametrize("dtype", fastest.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_rank_any_dim(layout, dtype):
    for shape, dim in DIMS:
        x = LAYOUTS[layout](*shape, dtype=dtype)
        y = fastest.softmax(x, dim)
        assert y.is_contiguous() and y.dtype == dtype and y.shape == shape
        assert_right(y, x, dim)


def test_dimensions_count_from_the_end_as_well():
    for shape, dim in DIMS:
        x = tensor(*shape)
        y = fastest.softmax(x, dim - max(len(shape), 1))
        assert torch.equal(y, fastest.softmax(x, dim))
    assert torch.equal(fastest.softmax(x), fastest.softmax(x, -1))


@pytest.mark.parametrize("dtype", fastest.DTYPES)
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_gives_empty(shape, dtype):
    x = torch.empty(shape, dtype=dtype, device=backend.DEVICE)
    for dim in range(len(shape)):
        y = fastest.softmax(x, dim)
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
        assert fastest.softmax(x, dim, out=y) is y


def test_float64_keeps_its_precision():
    x = tensor(3, 9000, dtype=torch.float64)
    assert_right(fastest.softmax(x), x)
    with pytest.raises(AssertionError):
        assert_right(torch.softmax(x.float(), 1).double(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", STEMS)
def test_large_magnitudes(stem, dtype):
    largest = torch.finfo(dtype).max
    x = input_of(stem, dtype=dtype)
    x[0], x[0, 1] = -largest, largest  # their difference is no number of the dtype
    x[1], x[1, -1] = largest, largest / 2
    x[2] = 1024 + 8 * x[2].round()
    assert_right(fastest.softmax(x), x)


@pytest.mark.parametrize("stem", STEMS)
def test_infinities_and_nan(stem):
    x = input_of(stem, n_rows=5)
    half = x.shape[1] // 2
    x[0, :half], x[1, half:], x[2] = -INF, -INF, -INF
    x[3, -1], x[4, 0] = INF, float("nan")
    y = fastest.softmax(x)
    assert_right(y, x)
    assert y.isnan().all(1).tolist() == [False, False, True, True, True]
    assert y.isnan().any(1).tolist() == [False, False, True, True, True]


def test_moves_what_it_says():
    for shape in ((37, 33), (3, 781), (200, 4)):
        x = tensor(*shape)
        assert meter.count(fastest.softmax, x).values == meter.fused(*shape)
    for x, dim in ((tensor(3, 50, 7), 1), (tensor(33, 37).t(), 1)):
        counted = meter.count(fastest.softmax, x, dim).values
        assert counted == meter.passes(x.numel(), 1, passes=2)


# ---- where the result goes -----------------------------------------------------------


@pytest.mark.parametrize("layout", WRITABLE)
def test_out_of_any_strides(layout):
    for shape, dim in DIMS:
        x, out = tensor(*shape), LAYOUTS[layout](*shape, seed=1)
        assert fastest.softmax(x, dim, out=out) is out
        assert_right(out, x, dim)


@pytest.mark.parametrize("dtype", fastest.DTYPES)
def test_out_at_any_address(dtype):
    for n_cols, offset in itertools.product((1, 8, 33, 781), (0, 1, 4, 7)):
        x = tensor(2, n_cols + 8, dtype=dtype)[:, offset : offset + n_cols]
        buffer = torch.full((2 * n_cols + 16,), 7, dtype=dtype, device=x.device)
        out = buffer[offset : offset + 2 * n_cols].view(2, n_cols)
        assert_right(fastest.softmax(x, out=out), x)
        out.fill_(7)
        assert (buffer == 7).all()


@pytest.mark.parametrize("layout", WRITABLE)
def test_out_may_be_x_itself(layout):
    for shape, dim in DIMS:
        x = LAYOUTS[layout](*shape)
        before = x.clone()
        assert fastest.softmax(x, dim, out=x) is x
        assert_right(x, before, dim)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("shift", [-3, 3])
def test_out_may_overlap_x(stem, shift):
    shape = (5, 300) if stem == "online" else (2, width_for(stem))
    buffer = tensor(math.prod(shape) + 3)
    x, out = buffer[:-3].view(shape), buffer[3:].view(shape)
    if shift < 0:
        x, out = out, x
    before = x.clone()
    dim = 0 if stem == "online" else 1
    fastest.softmax(x, dim, out=out)
    assert_right(out, before, dim)


def test_only_out_is_written():
    x, wide = tensor(4, 50), torch.full((4, 60), 7.0, device=backend.DEVICE)
    assert_right(fastest.softmax(x, out=wide[:, 5:55]), x)
    assert (wide[:, :5] == 7).all() and (wide[:, 55:] == 7).all()


def test_an_out_with_one_place_for_many_values_is_refused():
    x, out = tensor(4, 5), tensor(1, 5).expand(4, 5)
    with pytest.raises(RuntimeError, match="single memory location"):
        fastest.softmax(x, out=out)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        ([1.0], TypeError, r"out must be a torch\.Tensor, got list"),
        (tensor(2, 3).double(), TypeError, r"must be torch\.float32 as.*got.*float64"),
        (tensor(3, 2), ValueError, r"\(2, 3\).*got \(3, 2\).*empty_like"),
        (tensor(2, 3, 1), ValueError, r"\(2, 3\).*got \(2, 3, 1\).*empty_like"),
        (torch.ones(2, 3, device="meta"), ValueError, r"got \(2, 3\) on 'meta'"),
    ],
)
def test_an_unfit_out_is_named(out, error, words):
    with pytest.raises(error, match=words):
        fastest.softmax(tensor(2, 3), out=out)


# ---- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "dim", "error", "words"),
    [
        ([[1.0]], 0, TypeError, r"x must be a torch\.Tensor, got list"),
        (tensor(2, 3).int(), 0, TypeError, r"float64, got torch\.int32.*x\.float\(\)"),
        (tensor(2, 3) > 0, 0, TypeError, r"or float64, got torch\.bool"),
        (torch.ones(2, 3, device="meta"), 0, ValueError, r"'meta'; move it with x\.to"),
        (tensor(2, 3), 2, IndexError, r"from -2 to 1 for shape \(2, 3\), got 2"),
        (tensor(2, 3), -3, IndexError, r"from -2 to 1 for shape \(2, 3\), got -3"),
        (tensor(), 1, IndexError, r"from -1 to 0 for shape \(\), got 1"),
        (tensor(2, 3), "1", TypeError, r"dim must be an int, got '1'"),
        (tensor(2, 3), None, TypeError, r"dim must be an int, got None"),
        (tensor(2, 3), (0, 1), TypeError, r"dim must be an int, got \(0, 1\)"),
        (tensor(2, 3), [0], TypeError, r"dim must be an int, got \[0\]"),
        (tensor(2, 3), 1.0, TypeError, r"dim must be an int, got 1\.0"),
        (tensor(2, 3), True, TypeError, r"dim must be an int, got True"),
        (tensor(2, 3).to_sparse(), 1, ValueError, r"strided, got torch\.sparse_coo"),
    ],
)
def test_bad_input_is_named(x, dim, error, words):
    fastest.softmax(tensor(2, 3), 1)  # a good call before does not make it good
    with pytest.raises(error, match=words):
        fastest.softmax(x, dim)
    if isinstance(x, torch.Tensor):
        with pytest.raises(error, match=words):
            fastest.softmax(x, dim, out=torch.empty(x.shape, dtype=x.dtype))


# ---- another dtype -------------------------------------------------------------------

WIDER = [
    *[(torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
    *[(torch.bfloat16, torch.float64), (torch.float32, torch.float64)],
]
CONVERTED = [
    *[(torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
    *[(torch.bfloat16, torch.float16), (torch.int64, torch.float32)],
    (torch.bool, torch.float64),
]


@pytest.mark.parametrize(("of_x", "dtype"), WIDER + CONVERTED)
@pytest.mark.parametrize("stem", STEMS)
def test_a_dtype_is_that_of_the_converted_input(stem, of_x, dtype):
    x = input_of(stem, dtype=torch.float32).to(of_x)
    for view in (x, x[:, 1:], x.t()):
        for _ in range(2):
            y = fastest.softmax(view, 1, dtype=dtype)
            assert y.is_contiguous()
            assert_right(y, view.to(dtype), 1)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    assert fastest.softmax(x, 1, dtype=dtype, out=out) is out
    assert_right(out, x.to(dtype), 1)


def test_a_wider_dtype_takes_no_pass_of_its_own():
    for of_x, dtype in WIDER[:2]:
        for n_cols in (33, 64):
            x = tensor(20, n_cols, dtype=of_x)
            moved = meter.count(fastest.softmax, x, dtype=dtype)
            assert moved.values == meter.fused(20, n_cols)
            assert moved.bytes == x.numel() * (of_x.itemsize + dtype.itemsize)


def test_values_that_a_narrower_dtype_lacks_are_as_in_torch():
    x = torch.tensor([[1e5, 1e5, 0.0], [1.0, 2.0, 1e-9]], device=backend.DEVICE)
    ours = fastest.softmax(x, 1, dtype=torch.float16)
    theirs = torch.softmax(x, 1, dtype=torch.float16)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[0].isnan().any()


@pytest.mark.parametrize(("of_x", "dtype"), [*WIDER, *CONVERTED[:3]])
def test_the_gradient_has_the_dtype_of_x(of_x, dtype):
    x, weights = tensor(3, 33, dtype=of_x), tensor(3, 33, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (fastest.softmax(ours, 1, dtype=dtype) * weights).sum().backward()
    (torch.softmax(theirs, 1, dtype=dtype) * weights).sum().backward()
    assert ours.grad.dtype == of_x
    near = 8 * max(torch.finfo(t).eps for t in (of_x, dtype))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=near)


def test_an_unfit_dtype_is_named():
    x = tensor(2, 3)
    for dtype in (torch.int32, torch.complex64, "float32"):
        with pytest.raises(TypeError, match=r"dtype must be float32.*or None, got"):
            fastest.softmax(x, 1, dtype=dtype)
    with pytest.raises(TypeError, match=r"x must be float32.*got torch\.complex64"):
        fastest.softmax(x.to(torch.complex64), 1, dtype=torch.float32)
    with pytest.raises(
        TypeError, match=r"out must be torch\.float64 as dtype.*float32"
    ):
        fastest.softmax(x, 1, dtype=torch.float64, out=torch.empty_like(x))
    assert_right(fastest.softmax(x, 1, dtype=torch.float32), x)


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


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("shift", [-3, 0, 3])
def test_out_may_share_memory_through_dlpack(stem, shift):
    """Then its storage is another one, and may begin elsewhere, at common addresses."""
    shape = (5, 300) if stem == "online" else (2, width_for(stem))
    size = math.prod(shape)
    buffer = tensor(size + 8)
    x, alias = buffer[4:][:size], torch.from_dlpack(buffer[4 + shift :])[:size]
    assert alias.data_ptr() == x.data_ptr() + 4 * shift
    x, out = x.view(shape), alias.view(shape)
    before = x.clone()
    dim = 0 if stem == "online" else 1
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


def test_a_later_call_with_out_uses_the_compiled_kernel(launched):
    for offset in (0, 1, 0, 1):
        x, buffer = tensor(3, 64), tensor(3 * 64 + 1)
        fastest.softmax(x, out=buffer[offset:][: 3 * 64].view(3, 64))
    assert through_triton(launched) == ["tiled", "tiled"]  # the second by elements
    assert through_a_kept_kernel(launched) == ["tiled", "tiled"]


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


@pytest.mark.parametrize("kind", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(kind):
    x, z = tensor(3, 33), tensor(3, 33, seed=1)
    fastest.softmax(x)
    traced = make_fx(lambda v: fastest.softmax(v), tracing_mode=kind)(x)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.kernels.softmax.default]
    assert_right(traced(z), z)


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


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_dtensors_keep_their_shards(dtype):
    run = subprocess.run(
        [sys.executable, "-c", SHARDED, backend.DEVICE, str(dtype)],
        cwd=backend.ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["S(0)", "S(0)", "R", "R", "R", "R"]


SHARDED = """
import sys, warnings
warnings.simplefilter("ignore")
from kernels import softmax
import torch
from torch.distributed import init_process_group
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

device, dtype = sys.argv[1], {"None": None}.get(sys.argv[2], torch.float64)
init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh, x = init_device_mesh(device, (2,)), torch.randn(4, 6, device=device)
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


# ---- transforms ----------------------------------------------------------------------


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


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_as_torchs(transform, dim):
    x = tensor(3, 5, dtype=torch.float64)
    fastest.softmax(x, dim)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")  # vmap's loop
        ours = TRANSFORMS[transform](lambda v: fastest.softmax(v, dim), x)
    theirs = TRANSFORMS[transform](lambda v: torch.softmax(v, dim), x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("transform", sorted(set(TRANSFORMS) - {"functionalize"}))
def test_compiled_transforms_are_as_torchs(transform):
    torch.compiler.reset()
    x = tensor(3, 5, dtype=torch.float64)
    compiled = torch.compile(TRANSFORMS[transform], backend="aot_eager")
    ours = compiled(lambda v: fastest.softmax(v, 1), x)
    theirs = TRANSFORMS[transform](lambda v: torch.softmax(v, 1), x)
    torch.testing.assert_close(ours, theirs)


def test_vmap_makes_one_launch(launched):
    x = tensor(7, 3, 64)
    y = torch.vmap(lambda v: fastest.softmax(v, 0), in_dims=1, out_dims=1)(x)
    assert_right(y, x, 0)
    assert through_triton(launched) == ["online"]
    assert through_a_kept_kernel(launched) == []
    of_values = torch.vmap(lambda v: fastest.softmax(v, -1))(tensor(4))
    assert torch.equal(of_values, torch.ones_like(of_values))
    with pytest.raises(IndexError, match=r"from -1 to 0 for shape \(64,\), got 1"):
        torch.vmap(torch.vmap(lambda v: fastest.softmax(v, 1)))(x)


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


# ---- the rule ------------------------------------------------------------------------

MANY = 10**6


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "dtype", "stem"),
    [
        (MANY, 1, torch.float32, "unaligned"),
        (MANY, 32, torch.float32, "tiled"),
        (MANY, 781, torch.bfloat16, "unaligned"),
        (MANY, 780, torch.bfloat16, "tiled"),
        (MANY, 33, torch.float32, "unaligned"),
        (MANY, 8192, torch.float16, "tiled"),
        (1, 1024, torch.float32, "tiled"),
        (1, 2**20, torch.float32, "cooperative"),
        (1, 2**20, torch.bfloat16, "cooperative"),
        (4096, 50257, torch.float32, "cooperative"),
        (4096, 131072, torch.bfloat16, "cooperative"),
        (1, 3_000_000, torch.float32, "cooperative"),
        (64, 2**21, torch.float32, "cooperative"),
        (1, 4_000_000, torch.float32, "online"),
        (16, 2**22, torch.float32, "online"),
        (16, 2**22, torch.bfloat16, "cooperative"),
        (64, 2**23, torch.bfloat16, "online"),
        (1, 6_000_000, torch.float32, "online"),
        (4, 8_000_000, torch.float32, "online"),
        (1, 6_000_000, torch.bfloat16, "cooperative"),
        (1, 10_000_000, torch.bfloat16, "online"),
        (1, 2**27, torch.bfloat16, "online"),
        (tiled.MAX_ROWS, 2, torch.float16, "tiled"),
        (tiled.MAX_ROWS + 1, 2, torch.float16, "online"),
        (MANY, 32, torch.float64, "online"),
        (1, 2**20, torch.float64, "online"),
    ],
)
def test_known_answers(n_rows, n_cols, dtype, stem):
    assert fastest.choose(n_rows, n_cols, dtype) == stem


@pytest.mark.parametrize(("sms", "stem"), [(132, "cooperative"), (20, "tiled")])
def test_what_fills_the_gpu_depends_on_the_gpu(sms, stem, monkeypatch):
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (sms, 2048))
    assert fastest.choose(40, 2**14, torch.float32) == stem  # 2.5 MiB, rows of 64 KiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, MANY])
def test_rows_are_shared_from_some_length_on(n_rows, dtype):
    """Where rows are few, from no later one; and up to what the GPU holds of a row."""
    lengths = {max(2**power + odd, 1) for power in range(28) for odd in (-1, 0, 1)}
    lengths = sorted(n for n in lengths if n <= cooperative.MAX_COLS)
    shared = [fastest.choose(n_rows, n, dtype) == "cooperative" for n in lengths]
    seams = [is_shared for is_shared, _ in itertools.groupby(shared)]
    assert seams == [False, True, False]
    few = [fastest.choose(1, n, dtype) == "cooperative" for n in lengths]
    assert few.index(True) <= shared.index(True)


@pytest.mark.parametrize(("sms", "stem"), [(132, "cooperative"), (20, "online")])
def test_programs_wait_only_where_the_gpu_holds_a_row(sms, stem, monkeypatch):
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (sms, 2048))
    for n_rows in (1, 16, MANY):
        assert fastest.choose(n_rows, 2**20, torch.float32) == stem  # rows of 4 MiB
        assert fastest.choose(n_rows, 2**17, torch.float32) == "cooperative"


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_alignment_decides_between_the_kernels_of_whole_rows(dtype):
    for n_cols in (1, 33, 64, 1000, 1001):
        aligned = tiled.choose_vector(n_cols, dtype.itemsize, n_cols) > 1
        stem = fastest.choose(MANY, n_cols, dtype)
        assert stem == ("tiled" if aligned else "unaligned")
        widest = 16 // dtype.itemsize
        assert fastest.choose(MANY, n_cols, dtype, widest) == "tiled"
        assert fastest.choose(MANY, n_cols, dtype, 1) == "unaligned"


@pytest.mark.parametrize(
    ("n_cols", "dtype", "stem"),
    [
        (66, torch.bfloat16, "tiled"),  # 4 bytes
        (100, torch.bfloat16, "unaligned"),  # 8 bytes, and an edge is a small part
        (100, torch.float16, "unaligned"),
        (104, torch.bfloat16, "tiled"),  # 16 bytes
        (188, torch.bfloat16, "unaligned"),
        (196, torch.bfloat16, "tiled"),
        (66, torch.float32, "tiled"),
    ],
)
def test_short_rows_of_narrow_accesses(n_cols, dtype, stem):
    assert fastest.choose(MANY, n_cols, dtype) == stem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_that_the_output_places_elsewhere_take_more_programs(dtype):
    """So the GPU holds less of them."""
    lengths = range(2**15, 2**24, 2**15 + 1)
    alike, elsewhere = (
        [fastest.choose(1, n, dtype, 1, same) for n in lengths].count("cooperative")
        for same in (True, False)
    )
    assert 0 < elsewhere < 0.75 * alike


def test_few_rows_share_a_kernel_between_lengths():
    alone = fastest._config_of_few(257, 2, aligned=False, same_shift=True)
    assert (alone.rows, alone.num_warps) == (1, 1)
    assert alone == fastest._config_of_few(200, 2, aligned=False, same_shift=True)


def test_no_kernel_is_asked_for_more_than_it_takes():
    columns = [2**power + odd for power in range(28) for odd in (0, 1)]
    rows = (1, 100, 10**4, MANY, tiled.MAX_ROWS, tiled.MAX_ROWS + 1)
    for n_rows, n_cols, dtype in itertools.product(rows, columns, fastest.DTYPES):
        stem = fastest.choose(n_rows, n_cols, dtype)
        module = STEMS[stem]
        assert n_cols <= getattr(module, "MAX_COLS", INF)
        assert n_rows <= getattr(module, "MAX_ROWS", INF)
        assert stem == "online" or dtype in backend.DTYPES


@pytest.fixture
def launched(monkeypatch) -> dict[str, FakeKernel]:
    """Each chapter's kernel, which notes its launches, with nothing prepared yet."""
    fakes = {stem: FakeKernel(module.softmax_kernel) for stem, module in STEMS.items()}
    for stem, module in STEMS.items():
        monkeypatch.setattr(module, "softmax_kernel", fakes[stem])
    forget(monkeypatch)
    monkeypatch.setattr(direct, "_compiled", {})
    return fakes


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, nothing is prepared that was prepared before it."""
    monkeypatch.setattr(fastest._rules(), "launches", {})
    fastest._known.clear()


def through_triton(launched: dict[str, FakeKernel]) -> list[str]:
    """The chapters whose kernels were launched through Triton, once for each launch."""
    return [stem for stem, fake in launched.items() for _ in fake.calls]


def through_a_kept_kernel(launched: dict[str, FakeKernel]) -> list[str]:
    """The chapters whose compiled kernels were launched, once for each launch."""
    return [stem for stem, fake in launched.items() for _ in fake.compiled.calls]


@pytest.mark.parametrize("dtype", fastest.DTYPES)
def test_the_chosen_kernel_is_the_one_launched(launched, dtype, monkeypatch):
    monkeypatch.setattr(online, "choose_parts", lambda *sizes: 1)  # in one launch
    chosen = []
    for shape in ((1, 1), (3, 33), (200, 64), (1, 9000), (1, 17_000)):
        x = tensor(*shape, dtype=dtype)
        assert_right(fastest.softmax(x), x)
        chosen.append(fastest.choose(*shape, dtype))
        used = through_triton(launched) + through_a_kept_kernel(launched)
        assert sorted(used) == sorted(chosen)  # nothing is tried out


def test_few_long_rows_take_two_launches_each_of_which_is_kept(launched):
    for seed in range(3):
        x = tensor(1, 70_000, dtype=torch.float64, seed=seed)
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == ["online"] * 2
    assert through_a_kept_kernel(launched) == ["online"] * 4


def test_every_answer_is_launched_somewhere(launched):
    for stem in STEMS:
        fastest.softmax(input_of(stem, n_rows=2))
    assert through_triton(launched) == [*STEMS]


@pytest.mark.parametrize(
    ("x", "dim", "stems"),
    [
        (tensor(3, 50, 7), 1, ["online"]),  # columns do not follow each other
        (tensor(50, 3).t(), 1, ["online"]),
        (tensor(3, 100)[:, ::2], 1, ["online"]),
        (tensor(3, 1).expand(3, 50), 1, ["online"]),
        (tensor(3, 52, 1), 1, ["tiled"]),
        (tensor(3, 51, 1), 1, ["unaligned"]),
        (tensor(3, 60)[:, 5:55], 1, ["tiled"]),  # by elements: the output's rows differ
        (tensor(151)[1:].view(3, 50), 1, ["tiled"]),
        (tensor(3, 60)[:, 4:56], 1, ["tiled"]),
        (tensor(1, 52).expand(3, 52), 1, ["tiled"]),
        (tensor(1, 50).expand(3, 50), 1, ["tiled"]),
        (tensor(2, 6, 4, 5)[:, ::2, ::2], 3, ["unaligned"]),  # by way of a copy
        (tensor(3, 0), 1, []),
    ],
)
def test_strides_decide_as_well(launched, x, dim, stems):
    assert_right(fastest.softmax(x, dim), x, dim)
    assert through_triton(launched) == stems


# ---- few compilations ----------------------------------------------------------------


def test_a_new_length_of_a_known_class_uses_the_compiled_kernel(launched):
    for n_cols in (9001, 9003, 9101):
        x = tensor(2, n_cols)
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == ["cooperative"]
    assert through_a_kept_kernel(launched) == ["cooperative"] * 2


def test_another_class_has_a_kernel_of_its_own(launched):
    for n_cols, dtype in ((600, SINGLE), (601, SINGLE), (1200, SINGLE), (600, HALF)):
        x = tensor(2, n_cols, dtype=dtype)
        assert_right(fastest.softmax(x), x)
    assert len(through_triton(launched)) == 4
    assert through_a_kept_kernel(launched) == []


@pytest.mark.parametrize("n_rows", [1, 132])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_few_rows_have_a_program_each(n_rows, dtype):
    lengths = [*range(1, 200), 1000, 1001, 4097, 8191]
    shapes = [(n_rows, n_cols) for n_cols in lengths]
    for made, n_cols in zip(launches_for(shapes, dtype), lengths, strict=True):
        assert made.grid == (n_rows,)
        assert made.constants["VECTOR"] * dtype.itemsize == 16
        rest = n_cols % made.constants["VECTOR"]
        assert made.constants["BLOCK_COLS"] >= n_cols - rest
        assert made.constants["REST_COLS"] == 0
        assert made.kernel is STEMS["unaligned" if rest else "tiled"].softmax_kernel


# ---- the first call, and those after it ----------------------------------------------


def tuned(module):
    """The names of what Triton would tune at its first launch."""
    kinds = triton.runtime.Autotuner
    return [name for name, value in vars(module).items() if isinstance(value, kinds)]


def test_nothing_is_tuned():
    assert not any(tuned(module) for module in (fastest, *STEMS.values()))
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2)]
    kernel = triton.autotune(configs, key=[])(tiled.softmax_kernel)
    assert tuned(types.SimpleNamespace(kernel=kernel)) == ["kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", STEMS)
def test_later_calls_pass_to_the_compiled_kernel_what_it_takes(launched, stem, dtype):
    """By position, in the order of the kernel's parameters: a launch names nothing."""
    fake = launched[stem]
    for seed in range(2):
        x = input_of(stem, n_rows=2, seed=seed, dtype=dtype)
        y = fastest.softmax(x)
        assert_right(y, x)
    assert through_triton(launched) == through_a_kept_kernel(launched) == [stem]

    ((first_grid, args, constants),) = fake.calls
    ((grid, values),) = fake.compiled.calls
    assert grid == (*first_grid, 1, 1)[:3]
    parameters = fake.arg_names
    passed = dict(zip(parameters, values, strict=True))
    first = dict(zip(parameters, args, strict=False))
    constexprs = {name: v for name, v in constants.items() if name in parameters}
    assert [*first, *constexprs] == parameters
    assert set(constants) - set(constexprs) <= {"num_warps", "maxnreg"}

    assert passed.pop("output_ptr").data_ptr() == y.data_ptr()
    assert passed.pop("input_ptr").data_ptr() == x.data_ptr()
    if stem == "cooperative":
        n_words = 2 * fake.calls[0][0][0]
        words, tag = passed.pop("words_ptr"), passed.pop("tag")
        assert (words.dtype, words.device) == (torch.int64, x.device)
        assert len(words) >= n_words and 0 < tag < 2**31
    assert passed == {name: (first | constexprs)[name] for name in passed}
    assert passed["n_cols"] == x.shape[1]


def test_later_calls_by_way_of_a_copy_use_the_compiled_kernel(launched):
    for seed in range(2):
        x = tensor(2, 6, 4, 5, seed=seed)[:, ::2, ::2]
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == through_a_kept_kernel(launched) == ["unaligned"]


def test_later_calls_that_need_a_gradient_use_the_compiled_kernel(launched):
    for seed in range(2):
        x = tensor(3, 64, seed=seed).requires_grad_()
        fastest.softmax(x).sum().backward()
    assert through_triton(launched) == through_a_kept_kernel(launched) == ["tiled"]


def test_each_shape_dtype_stride_dim_and_alignment_has_a_launch(launched):
    square = tensor(8, 8)
    kinds = [
        *[(square, 1), (square, 0), (square.t(), 1), (square.double(), 1)],
        *[(tensor(8, 9)[:, :8], 1), (tensor(8, 9)[:, 1:], 1), (square.view(4, 16), 1)],
    ]
    for _ in range(2):
        for x, dim in kinds:
            assert_right(fastest.softmax(x, dim), x, dim)
    assert len(fastest._rules().launches) == len(kinds)
    calls = through_triton(launched) + through_a_kept_kernel(launched)
    assert len(calls) == 2 * len(kinds)
    # The two lengths that `tiled` takes share a kernel: the second needs no Triton.
    assert len(through_a_kept_kernel(launched)) == len(kinds) + 1


def test_an_empty_tensor_launches_nothing(launched):
    for _ in range(2):
        fastest.softmax(tensor(3, 0))
    assert through_triton(launched) == through_a_kept_kernel(launched) == []


@pytest.mark.parametrize("stem", STEMS)
def test_a_launch_that_is_prepared_serves_other_tensors(stem):
    for seed in range(2):
        x = input_of(stem, n_rows=2, seed=seed)
        assert_right(fastest.softmax(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_launch_is_prepared_for_one_alignment(dtype):
    for n_cols in (64, 33):
        for offset in (0, 1, 2, 3, 4, 8, 0):  # elements from an aligned address
            x = tensor(4 * n_cols + 8, dtype=dtype)[offset:][: 4 * n_cols]
            x = x.view(4, n_cols)
            assert_right(fastest.softmax(x), x)


def test_so_many_launches_are_kept_and_no_more(monkeypatch):
    forget(monkeypatch)
    monkeypatch.setattr(operator, "MOST_LAUNCHES", 3)
    for n_cols in (*range(1, 9), *range(1, 9)):
        x = tensor(2, n_cols)
        assert_right(fastest.softmax(x), x)
        assert len(fastest._rules().launches) <= 3


def test_bad_input_is_named_after_a_good_call():
    x = tensor(2, 3)
    fastest.softmax(x, 1)
    with pytest.raises(TypeError, match="must be a"):
        fastest.softmax(x.tolist(), 1)
    with pytest.raises(TypeError, match="int32"):
        fastest.softmax(x.int(), 1)
    with pytest.raises(ValueError, match="meta"):
        fastest.softmax(x.to("meta"), 1)


# ---- what the compiler makes of it ---------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    [
        *[(4096, 32), (4096, 33), (1000, 1000), (1000, 1001), (1000, 8192)],
        *[(1000, 12_345), (10_000, 50_257), (1000, 2**17), (64, 2**22), (1, 2**20)],
    ],
)
def test_registers_do_not_spill(n_rows, n_cols, dtype):
    """But Triton 3.9 spills up to 24 where their number is capped."""
    x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    stem = fastest.choose(n_rows, n_cols, dtype, *unaligned.alignment(x, x))
    view = online.as_columns(x) if stem == "online" else x
    kernel = compile.aot(STEMS[stem].launch_for(view, view), gpu="H200")
    capped = stem == "cooperative" and not OLDER_TRITON
    assert kernel.spills <= (96 if capped else 0)


# ---- what only a GPU can show --------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("with_out", [False, True])
def test_a_graph_is_captured_and_replayed(stem, with_out):
    x = input_of(stem)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    how = {"out": out} if with_out else {}
    fastest.softmax(x, **how)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fastest.softmax(x, **how)
    for seed in range(1, 5):
        x.copy_(input_of(stem, seed=seed))
        y.fill_(7)
        graph.replay()
        between = input_of(stem, seed=9)
        z = fastest.softmax(between)  # the graph has words of its own
        assert_right(z, between)
        assert_right(y, x)


@pytest.mark.gpu
def test_one_graph_of_many_calls():
    inputs = [input_of(stem, seed=seed) for stem in STEMS for seed in range(3)]
    for x in inputs:
        fastest.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [fastest.softmax(x) for x in inputs]
    for _ in range(3):
        for x in inputs:
            x.normal_()
        graph.replay()
        for y, x in zip(outputs, inputs, strict=True):
            assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize("stem", STEMS)
def test_streams_at_once(stem):
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [[input_of(stem, seed=10 * i + j) for j in range(20)] for i in range(4)]
    torch.cuda.synchronize()
    outputs = [[] for _ in streams]
    for turn in range(20):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[place].append(fastest.softmax(inputs[place][turn]))
    torch.cuda.synchronize()
    pairs = zip(itertools.chain(*inputs), itertools.chain(*outputs), strict=True)
    for x, y in pairs:
        assert_right(y, x)


@pytest.mark.gpu
def test_threads_at_once():
    def work(seed):
        inputs = [input_of(stem, seed=seed) for stem in STEMS]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pairs = [(x, fastest.softmax(x)) for _ in range(20) for x in inputs]
        stream.synchronize()
        return pairs

    with ThreadPoolExecutor(4) as pool:
        for pairs in pool.map(work, range(4)):
            for x, y in pairs:
                assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stem", "n_cols", "dtype", "dim"),
    [
        ("tiled", 1000, torch.bfloat16, 1),
        ("unaligned", 1001, torch.bfloat16, 1),
        ("cooperative", 2**17, torch.bfloat16, 1),
        ("cooperative", 2**17 + 1, torch.bfloat16, 1),
        ("online", 4096, torch.float64, 1),
        ("online", 4096, torch.bfloat16, 0),
    ],
)
def test_more_than_2_to_31_values(stem, n_cols, dtype, dim):
    n_rows = 2**31 // n_cols + 5
    needed = 3 * n_rows * n_cols * dtype.itemsize
    if gpu.free_bytes() < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")
    assert dim == 0 or fastest.choose(n_rows, n_cols, dtype) == stem
    x = torch.empty(n_rows, n_cols, dtype=dtype, device=backend.DEVICE).normal_()
    y = fastest.softmax(x, dim)
    for rows in (slice(0, 2), slice(n_rows // 2, n_rows // 2 + 2), slice(-3, None)):
        if dim == 1:
            assert_right(y[rows], x[rows])
        else:  # these rows' columns
            assert_right(y[:, rows], x[:, rows], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [2, 1000])
def test_both_sides_of_the_seam(n_rows, dtype):
    lengths = range(1, 2**18)
    seam = next(n for n in lengths if fastest.choose(n_rows, n, dtype) == "cooperative")
    for n_cols in (seam - 8, seam - 1, seam, seam + 1, seam + 7):
        x = torch.randn(n_rows, n_cols, device=backend.DEVICE).to(dtype)
        assert_right(fastest.softmax(x), x)


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for stem in STEMS:
        here = input_of(stem)
        there = here.to("cuda:1")
        for _ in range(2):
            for x in (here, there):
                y, out = fastest.softmax(x), torch.empty_like(x)
                assert y.device == x.device
                assert_right(y, x)
                assert_right(fastest.softmax(x, out=out), x)
                z = x.clone().requires_grad_()
                assert_right(fastest.softmax(z).detach(), x)
        assert torch.cuda.current_device() == 0
    x = tensor(3, 64).to("cuda:1")
    fastest.softmax(x)
    count = "allocation.all.allocated"
    before = [torch.cuda.memory_stats(index)[count] for index in range(2)]
    fastest.softmax(x)
    after = [torch.cuda.memory_stats(index)[count] for index in range(2)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]
