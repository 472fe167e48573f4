"""One softmax for every shape: the kernel that measurement says is the fastest.

Builds on: `kernels.tiled`, `kernels.online` and `kernels.cooperative`.
Changes: nothing in the kernels. A rule chooses among them from a tensor's shape and
    strides, and PyTorch's own signature stands before them.
Costs: MN values read and MN written; 2MN read where columns do not follow each other.
Source: measured (`notebooks/recorded/`); PyTorch's documentation of
    `torch.nn.functional.softmax` and of custom operators.
"""

import functools
import math

import torch

from kernels import cooperative, online, tiled
from kernels.lab import backend
from kernels.persistent import traffic

__all__ = ["DTYPES", "choose", "softmax", "traffic"]

DTYPES = (*backend.DTYPES, torch.float64)

LONGEST_TILE = 65536
"""Bytes of the longest row that one program holds: from there on programs share it."""


@functools.lru_cache(maxsize=4096)
def choose(n_rows: int, n_cols: int, dtype: torch.dtype) -> str:
    """The chapter whose kernel takes a matrix with contiguous columns.

    The rule is read off the measurements of this chapter: a row of up to LONGEST_TILE
    bytes is one program's, a longer one is shared. What the kernels do not take (rows
    beyond all limits, float64) goes to the loop over blocks.

    Args:
        n_rows, n_cols: the shape.
        dtype: one of DTYPES.
    """
    if dtype == torch.float64 or n_rows > tiled.MAX_ROWS:
        return "online"
    if n_cols * dtype.itemsize <= LONGEST_TILE:
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
    _validate(x, dim)
    recorded = x.requires_grad and torch.is_grad_enabled()
    if out is not None:
        _validate_out(out, x)
        if recorded:
            raise RuntimeError(
                "out must be None where x requires a gradient, got a tensor; call "
                "softmax(x, dim), or use torch.no_grad()"
            )
        if torch.compiler.is_compiling() or not _separate(out, x):
            return out.copy_(softmax(x, dim))
    elif recorded or torch.compiler.is_compiling():
        return _operator(x, dim)
    else:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(out, x, dim)
    return out


def _run(output: torch.Tensor, x: torch.Tensor, dim: int) -> None:
    """Chooses a kernel and launches it on x's device."""
    if x.numel() == 0:
        return
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return _run(output, x, dim)
    dim = dim % x.ndim if x.ndim else 0
    if x.ndim != 2 or dim == 0:
        sizes = x.shape or (1,)
        inner = math.prod(sizes[dim + 1 :])
        if inner > 1:
            view = (-1, sizes[dim], inner)
            return online.launch(output.view(view), x.reshape(view))
        output, x = output.view(-1, sizes[dim]), x.reshape(-1, sizes[dim])
    n_rows, n_cols = x.shape
    kernel = choose(n_rows, n_cols, x.dtype)
    if kernel == "online" or (x.stride(1) != 1 and n_cols > 1):
        online.launch(output.t()[None], x.t()[None])
    elif kernel == "tiled":
        tiled.launch(output, x)
    else:
        cooperative.launch(output, x)


def _validate(x: torch.Tensor, dim: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(
            "x must be float32, float16, bfloat16 or float64, got "
            f"{x.dtype}; convert it with x.float()"
        )
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


def _separate(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a kernel may write to out while it reads x."""
    shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return out.is_contiguous() and not shared


@torch.library.custom_op("kernels::softmax", mutates_args=())
def _operator(x: torch.Tensor, dim: int) -> torch.Tensor:
    """What `torch.compile` and the gradient see of `softmax`."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(output, x, dim)
    return output


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
