"""One softmax for every shape: the kernel that measurement says is the fastest.

Builds on: `kernels.tiled`, `kernels.online` and `kernels.cooperative`.
Changes: nothing in the kernels. A rule chooses among them from a tensor's shape and
    strides, and PyTorch's own signature stands before them.
Costs: MN values read and MN written; 2MN read where columns do not follow each other.
Source: measured (`notebooks/recorded/`); PyTorch's documentation of
    `torch.nn.functional.softmax` and of custom operators.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kernels import cooperative, online, tiled
from kernels.lab import backend
from kernels.persistent import traffic

__all__ = ["DTYPES", "choose", "softmax", "traffic"]

DTYPES = (*backend.DTYPES, torch.float64)

LONGEST_TILE = 65536
"""Bytes of the longest row that one program holds, where rows fill the GPU."""

SHARED_ROW = 32768
"""Bytes from which programs share a row where there are few rows."""


@functools.lru_cache(maxsize=4096)
def choose(n_rows: int, n_cols: int, dtype: torch.dtype) -> str:
    """The chapter whose kernel takes a matrix with contiguous columns.

    The rule is read off the measurements of this chapter: a row is one program's up to
    LONGEST_TILE bytes, or SHARED_ROW where the matrix is too small to fill the GPU; a
    longer one is shared. What those kernels do not take goes to the loop over blocks.

    Args:
        n_rows, n_cols: the shape.
        dtype: one of DTYPES.
    """
    row_bytes = n_cols * dtype.itemsize
    if dtype == torch.float64 or n_rows > tiled.MAX_ROWS:
        return "online"
    few = n_rows * row_bytes < cooperative.FEW_BYTES
    if row_bytes <= (SHARED_ROW if few else LONGEST_TILE):
        return "tiled"
    return "cooperative" if n_cols <= cooperative.MAX_COLS else "online"


def softmax(
    x: torch.Tensor, dim: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The softmax of x along a dimension.

    Works under `torch.compile`, which sees one operator, in CUDA graphs, and on several
    streams at once. Nothing is tuned at the first call; each combination of dtype and
    layout is compiled once.

    Args:
        x: of any shape and strides, float16, bfloat16, float32 or float64; computed in
            float32, or in float64 if x is. May require a gradient.
        dim: the dimension along which values sum to 1.
        out: where to write, of x's shape, dtype and device; may be x itself.

    Returns:
        out, or a new contiguous tensor of x's shape and dtype; empty if x is.

    Raises:
        TypeError: x or out is not a tensor, or of another dtype.
        ValueError: x or out is not on a GPU (on the CPU in the interpreter), or out is
            not like x.
        IndexError: x has no such dimension.
        RuntimeError: out is given where a gradient is needed.
    """
    if torch.compiler.is_compiling() or out is not None:
        return _unusual(x, dim, out)
    try:
        key = (x.shape, x.stride(), x.dtype, x.device, dim, x.data_ptr() % 16)
        launch = _launches.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or without data
        return _unusual(x, dim, None)
    if launch is None:
        _validate(x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        return _operator(x, dim)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return softmax(x, dim)
    if launch is None:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        launch = _launches[key] = _prepare(output, x, dim)
    launch(output, x)
    return output


def _unusual(x: torch.Tensor, dim: int, out: torch.Tensor | None) -> torch.Tensor:
    """While `torch.compile` looks on, or into a tensor that is there already."""
    _validate(x, dim)
    if out is None:
        return _operator(x, dim)
    _validate_out(out, x)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "out must be None where x requires a gradient, got a tensor; call "
            "softmax(x, dim), or use torch.no_grad()"
        )
    if torch.compiler.is_compiling() or not _separate(out, x):
        return out.copy_(_operator(x, dim))
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        _prepare(out, x, dim)(out, x)
    return out


def _separate(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a kernel may write to out, in rows that follow each other, and read x."""
    shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return out.is_contiguous() and not shared


Launch = Callable[[torch.Tensor, torch.Tensor], None]

MOST_LAUNCHES = 4096
_launches: dict[tuple, Launch] = {}
"""How to compute the softmax of a tensor of a shape, strides, dtype, and so on."""


class _Repeated:
    """A kernel's launch that is bound to its constants once.

    Triton looks at every argument of every launch to find the compiled kernel. Here all
    calls have numbers of one kind, so that what the first one found serves the others.
    """

    def __init__(self, kernel: Any, n_programs: int, constants: dict) -> None:
        self.kernel, self.constants = kernel, constants
        self.grid = (n_programs, 1, 1)
        names = [name for name in constants if name.isupper()]  # others are options
        self.values = tuple(constants[name] for name in names)
        self.compiled = None

    def __call__(self, *args: Any) -> None:
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](*args, **self.constants)
        else:
            self.compiled[self.grid](*args, *self.values)


def _prepare(output: torch.Tensor, x: torch.Tensor, dim: int) -> Launch:
    """Chooses a kernel for tensors like these, and says how to launch it."""
    if x.numel() == 0:
        return lambda output, x: None
    dim = dim % x.ndim if x.ndim else 0
    sizes = x.shape or (1,)
    n_cols, n_inner = sizes[dim], math.prod(sizes[dim + 1 :])
    view = (-1, n_cols, n_inner)
    if n_inner > 1:
        return lambda output, x: online.launch(output.view(view), x.reshape(view))
    try:
        matrix = x.view(-1, n_cols)
    except RuntimeError:  # no strides describe these rows
        return lambda output, x: _launch_copy(output, x.contiguous(), dim)
    kernel = choose(*matrix.shape, x.dtype)
    if kernel == "online" or (matrix.stride(1) != 1 and n_cols > 1):
        return lambda output, x: online.launch(
            output.view(-1, n_cols).t()[None], x.view(-1, n_cols).t()[None]
        )
    output = output.view(-1, n_cols)
    if kernel == "tiled":
        n_programs, numbers, constants = tiled.arguments(output, matrix)
        repeated = _Repeated(tiled.softmax_kernel, n_programs, constants)
        return lambda output, x: repeated(output, x, *numbers)
    n_programs, n_words, numbers, constants = cooperative.arguments(output, matrix)
    repeated = _Repeated(cooperative.softmax_kernel, n_programs, constants)
    scratch = cooperative.scratch
    return lambda output, x: repeated(output, x, *scratch(n_words, x.device), *numbers)


def _launch_copy(output: torch.Tensor, x: torch.Tensor, dim: int) -> None:
    _prepare(output, x, dim)(output, x)


def _validate(x: torch.Tensor, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(
            "x must be float32, float16, bfloat16 or float64, got "
            f"{x.dtype}; convert it with x.float()"
        )
    if x.layout != torch.strided:
        raise ValueError(f"x must be strided, got {x.layout}; x.to_dense() would do")
    if x.device.type != backend.DEVICE:
        raise ValueError(
            f"x must be on {backend.DEVICE!r}, where kernels run here, got a tensor on "
            f"{str(x.device)!r}; move it with x.to({backend.DEVICE!r})"
        )
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    n_dims = max(x.ndim, 1)
    if not -n_dims <= dim < n_dims:
        raise IndexError(
            f"dim must be from {-n_dims} to {n_dims - 1} for shape {tuple(x.shape)}, "
            f"got {dim}"
        )


def _validate_out(out: torch.Tensor, x: torch.Tensor) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as x is, got {out.dtype}")
    if out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out must be like x, {tuple(x.shape)} on {str(x.device)!r}, got "
            f"{tuple(out.shape)} on {str(out.device)!r}; torch.empty_like(x) would do"
        )


@torch.library.custom_op("kernels::softmax", mutates_args=())
def _operator(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What `torch.compile` and the gradient see of `softmax`."""
    return softmax(x.detach(), dim)


@_operator.register_fake
def _(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep_output(ctx, inputs, output) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    (y,) = ctx.saved_tensors
    backward = torch.ops.aten._softmax_backward_data
    return backward(gradient, y, ctx.dim, y.dtype), None


_operator.register_autograd(_backward, setup_context=_keep_output)
