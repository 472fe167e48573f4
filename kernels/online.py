"""Rows of any length: a loop over blocks of columns, and a running (max, sum) pair.

Builds on: `kernels.tiled`.
Changes: a program sees its rows block after block, and merges each block's (max, sum)
    pair into that of all before. Then it reads the rows again, last block first, to
    write the results. For few rows, `prepare` makes two launches: pairs, then results.
Costs: 2MN values read and MN written. Values that the L2 cache still holds at the
    second reading do not come from memory.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    PTX ISA, cache eviction priority hints.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, launch
from kernels.lab.launch import Launch, Pointer, ceil_div, constants_of, pointer_to

BLOCK_BYTES = 65536  # of a row, at most: 32 warps load 64 bytes in each thread
SHARED_VALUES, PROGRAMS_PER_SM = 8192, 8  # of a block, where programs share rows
LONG_BLOCKS = 256  # of a row: the L2 cache holds next to nothing of so many rows
BYTES_PER_WARP, TILE_BYTES = 2048, 4096  # shorter rows share a tile
SHORT_COLS, MANY_ROWS = 64, 16384  # of a matrix of which only rows are adjacent
LINE_BYTES, VECTOR_BYTES = 128, 16  # of a cache line, and of a thread's widest access
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp_shifted_or_zero(x, row_max):
    """exp(x - row_max), and 0 instead of NaN where both are -inf."""
    finite = tl.where(row_max == -float("inf"), 0.0, row_max)
    return tl.exp2((x - finite) * LOG2E)


@triton.jit
def max_and_sum(x):
    """The pair (max, sum of exp(x - max)) along axis 1."""
    x_max = tl.max(x, axis=1)
    return x_max, tl.sum(exp_shifted_or_zero(x, tl.expand_dims(x_max, 1)), axis=1)


@triton.jit
def merge(max_a, sum_a, max_b, sum_b):
    """Merges the (max, sum) pairs of two parts of a row. The identity is (-inf, 0)."""
    both = tl.maximum(max_a, max_b)
    scaled_a = sum_a * exp_shifted_or_zero(max_a, both)
    return both, scaled_a + sum_b * exp_shifted_or_zero(max_b, both)


@triton.jit
def merge_axis(maxima, sums, AXIS: tl.constexpr):
    """Merges all pairs along an axis at once; the axis is kept, with length 1."""
    row_max = tl.max(maxima, axis=AXIS, keep_dims=True)
    scaled = sums * exp_shifted_or_zero(maxima, row_max)
    return row_max, tl.sum(scaled, axis=AXIS, keep_dims=True)


@triton.jit
def row_offset(row, n_inner, outer_stride, inner_stride):
    """How many elements the first element of each row lies after the tensor's."""
    return row // n_inner * outer_stride + row % n_inner * inner_stride


@triton.jit(do_not_specialize=["part_blocks"])
def softmax_kernel(
    output_ptr,
    input_ptr,
    pairs_ptr,
    output_outer_stride,
    output_col_stride,
    output_inner_stride,
    input_outer_stride,
    input_col_stride,
    input_inner_stride,
    n_rows,
    n_cols,
    n_inner,
    part_blocks,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HINTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program computes the softmax of ROWS rows, however long, or of one part.

    Args:
        output_ptr, input_ptr: the first elements of tensors (outer, n_cols, n_inner).
        pairs_ptr: (2, n_rows, parts): maxima, then sums. Not used in step 0.
        output_outer_stride, …, input_inner_stride: of the three dimensions.
        n_rows: outer * n_inner. Row r is [r // n_inner, :, r % n_inner].
        part_blocks: blocks of a part. The last part may have fewer.
        ROWS, BLOCK_COLS: rows and columns in registers at a time, powers of two.
        ACCUMULATORS: running pairs of each row, a power of two, at most BLOCK_COLS.
            Pair i is that of the columns i, i + ACCUMULATORS, ….
        BACKWARDS: whether the second loop begins with the block that was read last.
        HINTS: whether L2 is told which lines will be read again, and which will not.
        STEP: 0 for whole rows in one launch; 1 for the parts' pairs; 2 for the results.
    """
    FIRST: tl.constexpr = "evict_last" if HINTS else ""
    LAST: tl.constexpr = "evict_first" if HINTS else ""
    WIDTH: tl.constexpr = BLOCK_COLS // ACCUMULATORS
    # The output may have a wider dtype than the input, and has no narrower one.
    DOUBLE: tl.constexpr = output_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    # Blocks are (ROWS, WIDTH, ACCUMULATORS). The loop reduces along WIDTH, in a thread.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, turn = rows[:, None, None], tl.arange(0, WIDTH)[None, :, None].to(tl.int64)
    col = turn * ACCUMULATORS + tl.arange(0, ACCUMULATORS)[None, None, :]
    offset = row_offset(row, n_inner, input_outer_stride, input_inner_stride)
    input_ptrs = input_ptr + offset + col * input_col_stride
    begin, end = 0, (n_cols - 1) // BLOCK_COLS + 1  # of this program's blocks
    if STEP > 0:
        n_parts, part = tl.num_programs(1), tl.program_id(1)
        # The parts that the first launch has read last come first in the second.
        part = n_parts - 1 - part if STEP == 2 else part
        begin = part * part_blocks
        end = tl.minimum(begin + part_blocks, end)
        max_ptrs = pairs_ptr + rows[:, None] * n_parts
        sum_ptrs = max_ptrs + n_rows * n_parts

    row_max = tl.full((ROWS, ACCUMULATORS), -float("inf"), DTYPE)
    row_sum = tl.zeros((ROWS, ACCUMULATORS), DTYPE)
    if STEP == 2:
        for first in range(0, n_parts, ACCUMULATORS):
            parts = first + tl.arange(0, ACCUMULATORS)[None, :]
            is_pair = (rows[:, None] < n_rows) & (parts < n_parts)
            part_max = tl.load(max_ptrs + parts, is_pair, other=-float("inf"))
            part_sum = tl.load(sum_ptrs + parts, is_pair, other=0.0)
            row_max, row_sum = merge(row_max, row_sum, part_max, part_sum)
    else:
        for block in range(begin, end):
            start = tl.cast(block, tl.int64) * BLOCK_COLS
            inside = (row < n_rows) & (col < n_cols - start)
            ptrs = input_ptrs + start * input_col_stride
            x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=FIRST)
            block_max, block_sum = max_and_sum(x.to(DTYPE))
            row_max, row_sum = merge(row_max, row_sum, block_max, block_sum)
    row_max, row_sum = merge_axis(row_max, row_sum, 1)
    if STEP == 1:
        tl.store(max_ptrs + part, row_max, rows[:, None] < n_rows)
        tl.store(sum_ptrs + part, row_sum, rows[:, None] < n_rows)
    else:
        row_max, factor = row_max[:, None, :], (1 / row_sum)[:, None, :]
        offset = row_offset(row, n_inner, output_outer_stride, output_inner_stride)
        output_ptrs = output_ptr + offset + col * output_col_stride
        for step in range(begin, end):
            block = begin + end - 1 - step if BACKWARDS else step
            start = tl.cast(block, tl.int64) * BLOCK_COLS
            inside = (row < n_rows) & (col < n_cols - start)
            ptrs = input_ptrs + start * input_col_stride
            x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=LAST)
            y = exp_shifted_or_zero(x.to(DTYPE), row_max) * factor
            ptrs = output_ptrs + start * output_col_stride
            tl.store(ptrs, y, inside, eviction_policy=LAST)


@dataclass(frozen=True)
class Config:
    """The kernel's constants and its number of warps; `choose_config` chooses them."""

    rows: int
    block_cols: int
    accumulators: int
    num_warps: int
    backwards: bool = True
    hints: bool = True


@functools.lru_cache(maxsize=4096)
def choose_config(
    n_rows: int, n_cols: int, size: int, step: int = 0, adjacent: tuple = (False, False)
) -> Config:
    """The configuration for n_rows rows of n_cols values of size bytes.

    A tile has BLOCK_BYTES, or SHARED_VALUES (half in float64) where programs share
    rows, in steps 1 and 2; or a whole row, if that is shorter. Rows shorter than
    TILE_BYTES share a tile. Tiles are large: the fewer rows are in progress, the more
    of each L2 still holds at the second reading. A thread has a pair for each value of
    a 16-byte access. `adjacent`: whether only rows are adjacent in memory, in the input
    and in the output. If so, a tile has the rows of a cache line, and half the bytes.
    But adjacent rows of the input that are longer than SHORT_COLS take registers for
    each value's address: a thread has 8 values, 4 in float64, with a pair each.
    """
    values = SHARED_VALUES // max(1, size // 4)
    rows, room = 1, values if step else BLOCK_BYTES // size
    in_warp, pairs = BYTES_PER_WARP // size, VECTOR_BYTES // size
    if adjacent[0] and n_cols > SHORT_COLS:
        rows = 32 if step or n_rows >= MANY_ROWS else 16  # of 64 columns; of 256
        room, in_warp, pairs = 8 * values // rows, values // 32, values // 1024
    elif any(adjacent):
        rows, room = LINE_BYTES // size, room // 2
    rows = min(rows, triton.next_power_of_2(n_rows))
    block_cols = min(triton.next_power_of_2(n_cols), room // rows)
    fitting = TILE_BYTES // size // block_cols
    rows = max(rows, min(fitting, triton.next_power_of_2(n_rows)))
    num_warps = min(max(rows * block_cols // in_warp, 1), 32)
    accumulators = min(block_cols, max(1, 32 * num_warps * pairs // rows))
    return Config(rows, block_cols, accumulators, num_warps)


def choose_parts(n_tiles: int, n_blocks: int) -> int:
    """How many programs share each of n_tiles tiles, whose rows have n_blocks blocks.

    PROGRAMS_PER_SM for each SM, in parts of two blocks or more. If the tiles alone
    occupy most SMs, only rows of LONG_BLOCKS are shared.
    """
    sms, _ = launch.sms_and_threads()
    if 4 * n_tiles >= 3 * sms and n_blocks < LONG_BLOCKS:
        return 1
    n_parts = min(ceil_div(PROGRAMS_PER_SM * sms, n_tiles), max(1, n_blocks // 2))
    return ceil_div(n_blocks, ceil_div(n_blocks, n_parts))


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """A matrix as (1, n_cols, n_rows), without a copy. Others are as they should be."""
    return x.t()[None] if x.ndim == 2 else x


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None, step: int = 0
) -> Launch:
    """The launch that writes the softmax of x's rows, or middle dimension, to output.

    Args:
        output, x: matrices, or (outer, n_cols, inner); of one shape, not empty, of any
            strides; the same tensor, or without shared memory. May be float64.
        config: None lets `choose_config` choose. Nothing is checked.
        step: the kernel's. In steps 1 and 2 the launch takes the pairs as well.
    """
    output, x = as_columns(output), as_columns(x)
    n_rows, n_cols, n_inner = x.shape[0] * x.shape[2], x.shape[1], x.shape[2]
    adjacent = [n_inner > 1 and t.stride(1) != 1 == t.stride(2) for t in (x, output)]
    if config is None:
        config = choose_config(n_rows, n_cols, x.element_size(), step, tuple(adjacent))
    n_tiles = ceil_div(n_rows, config.rows)
    n_blocks = ceil_div(n_cols, config.block_cols)
    n_parts = choose_parts(n_tiles, n_blocks) if step else 1
    sizes = n_rows, n_cols, n_inner, ceil_div(n_blocks, n_parts)
    pairs = [Pointer(torch.promote_types(output.dtype, torch.float32))][:step]
    return Launch(
        kernel=softmax_kernel,
        grid=(n_tiles, n_parts),
        scalars=(*([] if step else [0]), *output.stride(), *x.stride(), *sizes),
        constants=constants_of(config) | {"STEP": step},
        pointers=(pointer_to(output), pointer_to(x), *pairs),
    )


def prepare(
    output: torch.Tensor, x: torch.Tensor, keep: Callable, make: Callable = launch_for
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Returns what computes tensors like these: one launch, or two that share rows.

    `make` makes the launches. `keep` makes of each what is called: a `CachedLaunch`.
    """
    output, x = as_columns(output), as_columns(x)
    find, write = (make(output, x, step=step) for step in (1, 2))
    shape, dtype = (2, x.shape[0] * x.shape[2], find.grid[1]), find.pointers[2].dtype
    if find.grid[1] == 1:
        return keep(make(output, x))
    find, write = keep(find), keep(write)

    def both(output: torch.Tensor, x: torch.Tensor) -> None:
        pairs = torch.empty(shape, dtype=dtype, device=x.device)
        find(output, x, pairs)
        write(output, x, pairs)

    return both


def softmax(x: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """The softmax of rows of any length: as `tiled.softmax`, without a copy of x."""
    backend.validate(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch_for(output, x, config)(output, x)
    return output
