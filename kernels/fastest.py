"""One softmax for every shape: the kernel that measurement says is the fastest.

Builds on: `tiled`, `unaligned`, `online` and `cooperative`, the chapters before.
Changes: nothing in the kernels. A rule chooses a kernel from a tensor's shape and
    strides, behind PyTorch's own signature.
Costs: MN values read and MN written; 2MN read where columns are not adjacent.
Source: measured (`notebooks/recorded/`); PyTorch's documentation of
    `torch.nn.functional.softmax` and of custom operators.
"""

import contextlib
import functools
import math
from collections.abc import Callable

import torch

from kernels import cooperative, online, tiled, unaligned
from kernels.lab import backend
from kernels.lab.launch import CachedLaunch

DTYPES = (*backend.DTYPES, torch.float64)

LONGEST_TILE = 65536  # bytes of the longest row that a program takes by itself
SHARED_ROW = 32768  # the same where there are too few rows to fill the GPU
ROW_KERNELS = {"tiled": tiled, "unaligned": unaligned, "cooperative": cooperative}


@functools.lru_cache(maxsize=4096)
def choose(
    n_rows: int, n_cols: int, dtype: torch.dtype, aligned: bool | None = None
) -> str:
    """The chapter whose kernel takes a matrix with adjacent columns.

    The rule is read off the measurements of this chapter. Up to LONGEST_TILE bytes one
    program takes a whole row; if the matrix is too small to fill the GPU, only up to
    SHARED_ROW bytes. Programs share longer rows. `online` takes what the other kernels
    do not take.

    Args:
        n_rows, n_cols: the shape.
        dtype: one of DTYPES.
        aligned: whether `tiled.choose_vector` found wide accesses for the rows; None
            stands for the rows of a contiguous matrix.
    """
    row_bytes = n_cols * dtype.itemsize
    if dtype == torch.float64 or n_rows > tiled.MAX_ROWS:
        return "online"
    few = n_rows * row_bytes < cooperative.FEW_BYTES
    if row_bytes <= (SHARED_ROW if few else LONGEST_TILE):
        if aligned is None:
            aligned = tiled.choose_vector(n_cols, dtype.itemsize, n_cols) > 1
        return "tiled" if aligned else "unaligned"
    return "cooperative" if n_cols <= cooperative.MAX_COLS else "online"


def softmax(
    x: torch.Tensor, dim: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The softmax of x along a dimension.

    Works under `torch.compile`, which sees one operator, in CUDA graphs, and on several
    streams at once. Shapes that need another configuration are compiled at first use.

    Args:
        x: of any shape and strides, float16, bfloat16, float32 or float64; computed in
            float32, or in float64 if x is. May require a gradient.
        dim: the dimension along which values sum to 1.
        out: where to write, of x's shape, dtype and device; may be x itself.

    Returns:
        out, or a new contiguous tensor of x's shape and dtype; empty if x is.

    Raises:
        TypeError, ValueError: x or out is not such a tensor, or not where kernels run.
        IndexError: x has no such dimension.
        RuntimeError: out is given where a gradient is needed.
    """
    if torch.compiler.is_compiling() or out is not None:
        return _traced_or_out(x, dim, out)
    try:
        key = (x.shape, x.stride(), x.dtype, x.device, dim, x.data_ptr() % 16)
        launch = _launches.get(key)
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or without data
        return _traced_or_out(x, dim, None)
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


def _traced_or_out(x: torch.Tensor, dim: int, out: torch.Tensor | None) -> torch.Tensor:
    """The path for `torch.compile` tracing and for `out=`."""
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
    """Whether a kernel can write to out and read x: contiguous, and apart."""
    shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return out.is_contiguous() and not shared


MOST_LAUNCHES = 4096
_launches: dict[tuple, Callable[[torch.Tensor, torch.Tensor], None]] = {}
"""The prepared launch for each shape, strides, dtype, device, dim and alignment."""


def _prepare(
    output: torch.Tensor, x: torch.Tensor, dim: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Chooses a kernel for tensors like these, and prepares its launch.

    The launch takes the tensors as they are: a kernel is passed only their addresses.
    """
    if x.numel() == 0:
        return lambda output, x: None
    sizes = x.shape or (1,)
    dim = dim % len(sizes)
    n_cols, n_inner = sizes[dim], math.prod(sizes[dim + 1 :])
    try:
        blocks = x.view(-1, n_cols, n_inner)
    except RuntimeError:  # no strides describe these rows
        like_copy = torch.empty(x.shape, dtype=x.dtype, device="meta")
        launch = _prepare(output, like_copy, dim)
        return lambda output, x: launch(output, x.contiguous())
    output = output.view(-1, n_cols, n_inner)
    if n_inner > 1:
        return CachedLaunch(online.launch_for(output, blocks))
    output, matrix = output[:, :, 0], blocks[:, :, 0]
    vector, _ = unaligned.alignment(output, matrix)
    stem = choose(*matrix.shape, x.dtype, aligned=vector > 1)
    if stem == "online" or (matrix.stride(1) != 1 and n_cols > 1):
        columns = online.as_columns(output), online.as_columns(matrix)
        return CachedLaunch(online.launch_for(*columns))
    return CachedLaunch(ROW_KERNELS[stem].launch_for(output, matrix))


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
    """`softmax` as `torch.compile` and autograd see it: one operator."""
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
