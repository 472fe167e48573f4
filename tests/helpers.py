"""What many tests need: inputs, the comparison, and wrong helpers of kernels.

Tests import it as `from tests.helpers import matrix, assert_right`.
"""

import contextlib
import functools
import gc
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels import cooperative, fastest, online, tiled, unaligned
from kernels.lab import backend, direct
from kernels.lab.compile import Compiled

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))

# ---- sizes ---------------------------------------------------------------------------


def fewer(interpreted: Any, on_gpu: Any) -> Any:
    """What a test tries: less in the interpreter, where a program takes a millisecond.

    For what shows no other fault in the interpreter than the smaller size does.
    """
    return interpreted if backend.INTERPRETED else on_gpu


GPUS = ("T4", "A100", "RTX 3090", "L4", "H100", "B200", "RTX 5090")
DTYPES = (torch.float32, torch.bfloat16)


def dtypes_for(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes to compile for one of GPUS: where there is no GPU, most have only one.

    The T4 has DTYPES because it lacks bfloat16 arithmetic. The others take turns at
    three. For the H100's kind, other tests compile most launches in all dtypes.
    """
    if name == "T4":
        return DTYPES
    turn, turns = GPUS.index(name), (*DTYPES, torch.float16)
    one, other = turns[turn % 3], turns[(turn + 1) % 3]
    return fewer((one,), (one, other))


# ---- in company ----------------------------------------------------------------------


def tries(times: int, error: type[Exception]) -> Callable[[Callable], Callable]:
    """Returns a decorator: after such an error a call is made again, `times` in all."""

    def decorator(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def again(*args: Any, **how: Any) -> Any:
            for _ in range(times - 1):
                with contextlib.suppress(error):
                    return call(*args, **how)
            return call(*args, **how)

        return again

    return decorator


in_company = tries(3, AssertionError)
"""For a test that times or counts on a GPU: other tests use the GPU and the machine
meanwhile. What is wrong fails each time."""


# ---- inputs --------------------------------------------------------------------------


def like(x: torch.Tensor) -> torch.Tensor:
    """A tensor of x's shape, dtype and device to write to. It holds no softmax."""
    return torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)


def matrix(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    scale: float = 3.0,
    stride: int | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A random matrix on the device that kernels run on; the same in every call.

    What lies before, between and after the rows is NaN: a kernel that uses it shows.

    Args:
        n_rows, n_cols: the shape. Other shapes have other values.
        dtype: of the values.
        seed: another seed makes other values.
        scale: the values' standard deviation.
        stride: elements from one row's start to the next one's; None means n_cols.
        offset: elements from an address that is a multiple of 16 bytes to the first.

    Raises:
        ValueError: stride is below n_cols, so that rows would overlap.
    """
    stride = n_cols if stride is None else stride
    if stride < n_cols:
        raise ValueError(f"stride must be at least n_cols = {n_cols}, got {stride}")
    generator = torch.Generator().manual_seed(n_rows + n_cols + seed)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    values = scale * torch.randn(n_rows, n_cols, generator=generator, dtype=drawn)
    values = values.to(backend.DEVICE, dtype)
    if stride == n_cols and offset == 0:
        return values
    length = 2 * offset + n_rows * stride
    flat = torch.full((length,), float("nan"), dtype=dtype, device=backend.DEVICE)
    view = flat.as_strided((n_rows, n_cols), (stride, 1), offset)
    return view.copy_(values)


def meta_matrix(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype = torch.float32,
    *,
    stride: int | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A matrix without memory: enough for a launch, and for compiling it for any GPU.

    Args:
        n_rows, n_cols, dtype: of the matrix.
        stride, offset: as for `matrix`.
    """
    stride = n_cols if stride is None else stride
    flat = torch.empty(offset + n_rows * stride, dtype=dtype, device="meta")
    return flat.as_strided((n_rows, n_cols), (stride, 1), offset)


# ---- tensors of any rank and layout, and inputs of one chapter's kernel -------------

STEMS = {
    **{"tiled": tiled, "unaligned": unaligned},
    **{"online": online, "cooperative": cooperative},
}

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


def contiguous_for(stem: str) -> tuple[tuple[int, int], int, torch.dtype]:
    """Shape, dim, dtype of a contiguous matrix for a chapter of STEMS, or `columns`."""
    if stem == "columns":
        return (5, 300), 0, torch.float32
    if stem == "online":  # no other chapter takes such rows of float64
        return (2, 300), 1, torch.float64
    return (2, width_for(stem)), 1, torch.float32


def input_of(stem: str, n_rows: int = 3, **how: object) -> torch.Tensor:
    """A matrix of few rows that goes to this chapter's kernel."""
    if stem == "online":
        return tensor(50, n_rows, **how).t()
    return tensor(n_rows, width_for(stem, how.get("dtype", torch.float32)), **how)


# ---- the comparison ------------------------------------------------------------------

# How far a softmax may be from the softmax in float64 that is rounded to its dtype:
# a share of the value (rtol), and the values that a kernel may flush to 0 (atol).
# float32 has 2⁻²³ between 1 and the next number, and errs by about 2⁻²⁴ |x - max|;
# in the interpreter float32 becomes bfloat16 by truncation, which errs by up to 2⁻⁷.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-13, "atol": 1e-37},
    torch.float32: {"rtol": 2.0**-16, "atol": 1e-37},
    torch.float16: {"rtol": 2.0**-8, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2.0**-5, "atol": 1e-37},
}


def expected(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The softmax of x, computed in float64 and rounded to x's dtype."""
    return torch.softmax(x.detach().double(), dim).to(x.dtype)


def assert_right(y: torch.Tensor, x: torch.Tensor, dim: int = -1) -> None:
    """Asserts that y is the softmax of x along dim, within `TOLERANCES` of x's dtype.

    The shape, the dtype and the device must be x's. NaN is right where PyTorch has it.
    """
    wanted = expected(x, dim)
    torch.testing.assert_close(y, wanted, equal_nan=True, **TOLERANCES[x.dtype])


# How far a gradient may be off, as a share of |y| (|g| + sum |g y|): the terms that are
# added may cancel. float16 also flushes what is far below its smallest number.
GRADIENT_TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 2.0**-19, "atol": 1e-37},
    torch.float16: {"rtol": 2.0**-9, "atol": 1e-7},
    torch.bfloat16: {"rtol": 2.0**-6, "atol": 1e-37},
}


def assert_is_gradient(
    x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, dim: int = -1
) -> None:
    """Asserts that x is a softmax's gradient, made of y and of g, the gradient for y.

    It must be contiguous, of y's shape and on its device. NaN is right where float64
    has it.
    """
    assert (x.shape, x.device, x.is_contiguous()) == (y.shape, y.device, True)
    g64, y64 = g.double(), y.double()
    products = g64 * y64
    expected = products - y64 * products.sum(dim, keepdim=True)
    scale = y64 * (g64.abs() + products.abs().sum(dim, keepdim=True))
    off = GRADIENT_TOLERANCES[x.dtype]
    near = (x.double() - expected).abs() <= off["rtol"] * scale + off["atol"]
    assert (near | (x.isnan() & expected.isnan())).all()


# ---- wrong kernels -------------------------------------------------------------------


def without_rescaling_an_axis(maxima, sums, AXIS: tl.constexpr):
    row_max = tl.max(maxima, axis=AXIS, keep_dims=True)
    return row_max, tl.sum(sums, axis=AXIS, keep_dims=True)


def tail_that_starts_late(edge, head, body, n_cols, VECTOR: tl.constexpr):
    is_head = edge < VECTOR
    cols = tl.where(is_head, edge, head + body + edge - VECTOR + 1)
    return cols, cols < tl.where(is_head, head, n_cols)


@contextlib.contextmanager
def patched(module: ModuleType, name: str, wrong: Any) -> Iterator[None]:
    """While active, the kernels of a module call `wrong` in place of a helper function.

    A kernel looks its helpers up by name in the module that it is defined in. So
    `module` is that of the kernel that calls the helper, which may have imported it.

    On a GPU, Triton remembers what it has compiled, and never asks again whether a
    helper is the same. So all kernels forget what they are for as long as this lasts,
    and have it back afterwards. So do the launches that keep a compiled kernel.
    Processes of `process.call_in` do not notice: `compile.aot` and, on a GPU,
    `meter.count` see the right helper. In the interpreter nothing was compiled.

    Args:
        module: in which a `@triton.jit` function is replaced.
        name: of the function.
        wrong: a Python function of the same parameters, or a `@triton.jit` function.
    """
    right = getattr(module, name)
    if not isinstance(wrong, triton.runtime.KernelInterface):
        noinline = getattr(right, "noinline", None)  # interpreted functions lack it
        wrong = triton.jit(noinline=noinline)(wrong)
    forgotten = contextlib.nullcontext() if backend.INTERPRETED else _forgotten()
    with patch.object(module, name, wrong), forgotten:
        yield


_REMEMBERED = ("hash", "used_global_vals", "device_caches")


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """While active, nothing that was compiled before is used; afterwards only that."""
    kernels = _all_of(JITFunction)
    kept = [{key: getattr(kernel, key) for key in _REMEMBERED} for kernel in kernels]
    for kernel in kernels:
        kernel.hash = None
        kernel.used_global_vals = {}
        kernel.device_caches = defaultdict(kernel.create_binder)
    direct._compiled.clear()
    fastest.known.clear()
    for cached in _all_of(direct.CachedLaunch):
        cached.compiled = None
    try:
        yield
    finally:
        direct._compiled.clear()
        fastest.known.clear()
        for kernel, memory in zip(kernels, kept, strict=True):
            vars(kernel).update(memory)
        for cached in _all_of(direct.CachedLaunch):
            cached.compiled = None


def _all_of(kind: type) -> list[Any]:
    return [thing for thing in gc.get_objects() if type(thing) is kind]


# ---- what is compiled ----------------------------------------------------------------


def wide_accesses(kernel: Compiled) -> list[int]:
    """How many loads, and how many stores, move 16 bytes of a thread."""
    return [kernel.count(rf"{kind}\.global\S*\.v4\.b32") for kind in ("ld", "st")]


def assert_parts_are_read_twice(counted, n_values: int, n_sums: int, n_parts: int):
    """Asserts what two launches move: values twice, and each part's pairs.

    Args:
        counted: by the meter.
        n_values, n_sums: of the tensor; along which dimension they sum does not matter.
        n_parts: of each sum.
    """
    n_words = 2 * n_sums * n_parts
    first, second = (op for op in counted.rows if op.grid)
    assert (first.read_values, first.written_values) == (n_values, n_words)
    assert second.read_values == n_values + n_parts * n_words
    assert second.written_values == n_values


# ---- scripts of the course -----------------------------------------------------------


def loaded(path: Path) -> ModuleType:
    """A file of Python that no package holds, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
