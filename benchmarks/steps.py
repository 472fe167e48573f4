"""Chapter `persistent`'s kernel on its way: a tile of rows, then a loop over tiles.

from benchmarks import steps
show.diff(strided.softmax_kernel, steps.tile_kernel)
show.diff(steps.tile_kernel, steps.loop_kernel, indentation=False)
steps.judge(my_kernel)
"""

import textwrap
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, check, meter

PROGRAMS, ROWS = 5, 4  # of a learner's launch: programs, and rows of a tile


@triton.jit
def tile_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_rows,
    n_cols,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes the softmax of one tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        *_row_stride, *_col_stride: elements from one row, or column, to the next.
        n_rows, n_cols: the tensors' shape.
        ROWS_PER_TILE: rows computed together, a power of two.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    # Both offsets are 64 bits wide: index × stride may exceed 2^31 along either axis.
    cols = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    rows = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)[:, None]
    inside = (rows < n_rows) & (cols < n_cols)  # the last tile may lack rows
    input_ptrs = input_ptr + rows * input_row_stride + cols * input_col_stride
    # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
    x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = numerator / tl.sum(numerator, axis=1)[:, None]
    # The output has strides of its own.
    output_ptrs = output_ptr + rows * output_row_stride + cols * output_col_stride
    tl.store(output_ptrs, y, mask=inside)


@triton.jit
def loop_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_rows,
    n_cols,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes tiles p, p + num_programs, … of rows; p is its number.

    Args:
        As for `tile_kernel`.
    """
    # Both offsets are 64 bits wide: index × stride may exceed 2^31 along either axis.
    cols = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)
    n_tiles = tl.cdiv(n_rows, ROWS_PER_TILE)
    # The step is the number of programs: any grid computes each tile exactly once.
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in range(first, n_tiles, step):
        rows = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)[:, None]
        rows = rows.to(tl.int64)
        inside = (rows < n_rows) & (cols < n_cols)  # the last tile may lack rows
        input_ptrs = input_ptr + rows * input_row_stride + cols * input_col_stride
        # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
        x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        # The output has strides of its own.
        output_ptrs = output_ptr + rows * output_row_stride + cols * output_col_stride
        tl.store(output_ptrs, y, mask=inside)


# ---- the learner's loop --------------------------------------------------------------


def launched(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A softmax by a learner's kernel, in PROGRAMS programs and tiles of ROWS rows.

    Args:
        kernel: takes (output_ptr, input_ptr, n_rows, n_cols, ROWS, BLOCK), for
            contiguous float32 tensors.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        block = triton.next_power_of_2(max(x.shape[1], 1))
        kernel[(PROGRAMS,)](output, x, *x.shape, ROWS, block)
        return output

    softmax.__name__ = kernel.fn.__name__
    return softmax


def judge(kernel: Any) -> None:
    """Says in a sentence whether a learner's loop is right and moves each value once.

    Args:
        kernel: as for `launched`.
    """
    softmax = launched(kernel)
    how = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 33}
    found = check.softmax(softmax, **how)  # says itself what is wrong
    if not found:
        return
    x = torch.randn(37, 65, device=backend.DEVICE)
    times = meter.count(softmax, x).values.read / x.numel()
    said = f"Right in all {found.cases} cases, and each value is read once."
    if times > 1:
        said = (
            f"Not yet: the values are right, and each was read {times:.3g} times. Does "
            "every program take tiles that another program takes, too?"
        )
    print(textwrap.fill(said, 80))
