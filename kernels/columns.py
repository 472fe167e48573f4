"""Softmax down the columns of matrices: tiles whose neighbours are columns.

Builds on: `kernels.online`.
Changes: columns are adjacent in memory, and the values of one column are not. So
    neighbouring threads take neighbouring columns first. A column that one block holds
    is read once. Small blocks leave room for many programs on an SM.
Costs: MN values read and MN written; 2MN read where columns have several blocks.
Source: measured (`notebooks/recorded/`); CUDA C++ Programming Guide, device memory.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import online
from kernels.lab import backend, launch
from kernels.lab.launch import Launch, Pointer, ceil_div, constants_of, pointer_to
from kernels.online import exp_shifted_or_zero, max_and_sum, merge, merge_axis

TILE_VALUES = 2048  # of a block, for all columns of a program; half as many in float64
MERGED = 8  # pairs of a column that a program of many columns loads at once
ENOUGH_PER_SM, FEW = 2, 8  # tiles for each SM, and for all of them
LEAST_BLOCKS, MANY_BLOCKS = 4, 24  # of a part


@triton.jit
def offset_of(place, strides, VECTOR: tl.constexpr):
    """How many elements places lie after the tensor's first: (matrix, row, column)."""
    matrix, row, col = place
    matrix_stride, row_stride, col_stride = strides
    # As in `tiled`: this changes no number, but tells the compiler what divides it.
    matrix_stride = matrix_stride // VECTOR * VECTOR
    row_stride = row_stride // VECTOR * VECTOR
    return matrix * matrix_stride + row * row_stride + col * col_stride


@triton.jit(do_not_specialize=["part_blocks"])
def softmax_kernel(
    output_ptr,
    input_ptr,
    pairs_ptr,
    output_matrix_stride,
    output_row_stride,
    output_col_stride,
    input_matrix_stride,
    input_row_stride,
    input_col_stride,
    n_matrices,
    n_rows,
    n_cols,
    part_blocks,
    COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
    MATRICES: tl.constexpr,
    VECTOR: tl.constexpr,
    HELD: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program computes the softmax of a tile of columns, or of one part of it.

    Args:
        output_ptr, input_ptr: the first elements of (n_matrices, n_rows, n_cols).
        pairs_ptr: (2, n_matrices * n_cols, parts): maxima, then sums. Not used in
            step 0.
        output_matrix_stride, …, input_col_stride: of the three dimensions.
        part_blocks: blocks of a part. The last part may have fewer.
        COLS, MATRICES: the tile's columns, and how many matrices these are of.
        BLOCK_ROWS: rows of a block, which is in registers at a time.
        ACCUMULATORS: running pairs of each column, as in `kernels.online`.
        VECTOR: divides n_cols and the strides of matrices and rows.
        HELD: whether a block holds whole columns, so that they are read once.
        STEP: 0 for whole columns in one launch; 1 for parts' pairs; 2 for the results.
    """
    # The output may have a wider dtype than the input, and has no narrower one.
    DOUBLE: tl.constexpr = output_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    WIDTH: tl.constexpr = BLOCK_ROWS // ACCUMULATORS
    NEIGHBOURS: tl.constexpr = COLS // MATRICES
    # Columns are numbered within a matrix. Blocks are (COLS, WIDTH, ACCUMULATORS).
    n_cols = n_cols // VECTOR * VECTOR
    n_tiles = (n_cols - 1) // NEIGHBOURS + 1  # side by side in a matrix
    tile, i = tl.program_id(0), tl.arange(0, COLS)[:, None]
    matrix = (tile // n_tiles).to(tl.int64) * MATRICES + i // NEIGHBOURS
    col = (tile % n_tiles).to(tl.int64) * NEIGHBOURS + i % NEIGHBOURS
    is_col = (matrix < n_matrices) & (col < n_cols)
    turn = tl.arange(0, WIDTH)[None, :, None].to(tl.int64)
    row = turn * ACCUMULATORS + tl.arange(0, ACCUMULATORS)[None, None, :]
    place = matrix[:, :, None], row, col[:, :, None]
    strides = input_matrix_stride, input_row_stride, input_col_stride
    input_ptrs = input_ptr + offset_of(place, strides, VECTOR)

    begin, end = 0, (n_rows - 1) // BLOCK_ROWS + 1  # of this program's blocks
    if STEP > 0:
        n_parts, part = tl.num_programs(1), tl.program_id(1)
        # The parts that the first launch has read last come first in the second.
        part = n_parts - 1 - part if STEP == 2 else part
        begin = part * part_blocks
        end = tl.minimum(begin + part_blocks, end)
        max_ptrs = pairs_ptr + (matrix * n_cols + col) * n_parts
        sum_ptrs = max_ptrs + n_matrices * n_cols * n_parts

    col_max = tl.full((COLS, ACCUMULATORS), -float("inf"), DTYPE)
    col_sum = tl.zeros((COLS, ACCUMULATORS), DTYPE)
    if STEP == 2:
        for first in range(0, n_parts, ACCUMULATORS):
            parts = first + tl.arange(0, ACCUMULATORS)[None, :]
            is_pair = is_col & (parts < n_parts)
            part_max = tl.load(max_ptrs + parts, is_pair, other=-float("inf"))
            part_sum = tl.load(sum_ptrs + parts, is_pair, other=0.0)
            col_max, col_sum = merge(col_max, col_sum, part_max, part_sum)
    elif HELD:
        inside = is_col[:, :, None] & (row < n_rows)
        x = tl.load(input_ptrs, inside, -float("inf"), eviction_policy="evict_first")
        col_max, col_sum = max_and_sum(x.to(DTYPE))
    else:
        for block in range(begin, end):
            start = tl.cast(block, tl.int64) * BLOCK_ROWS
            inside = is_col[:, :, None] & (row < n_rows - start)
            ptrs = input_ptrs + start * input_row_stride
            x = tl.load(ptrs, inside, -float("inf"), eviction_policy="evict_last")
            block_max, block_sum = max_and_sum(x.to(DTYPE))
            col_max, col_sum = merge(col_max, col_sum, block_max, block_sum)
    col_max, col_sum = merge_axis(col_max, col_sum, 1)

    if STEP == 1:
        tl.store(max_ptrs + part, col_max, is_col)
        tl.store(sum_ptrs + part, col_sum, is_col)
    else:
        col_max, factor = col_max[:, None, :], (1 / col_sum)[:, None, :]
        strides = output_matrix_stride, output_row_stride, output_col_stride
        output_ptrs = output_ptr + offset_of(place, strides, VECTOR)
        for step in range(begin, end):
            start = tl.cast(begin + end - 1 - step, tl.int64) * BLOCK_ROWS  # backwards
            inside = is_col[:, :, None] & (row < n_rows - start)
            if not HELD:
                ptrs = input_ptrs + start * input_row_stride
                x = tl.load(ptrs, inside, -float("inf"), eviction_policy="evict_first")
            y = exp_shifted_or_zero(x.to(DTYPE), col_max) * factor
            ptrs = output_ptrs + start * output_row_stride
            tl.store(ptrs, y, inside, eviction_policy="evict_first")


@dataclass(frozen=True)
class Config:
    """The kernel's constants and its number of warps; `choose_config` chooses them."""

    cols: int
    block_rows: int
    accumulators: int
    num_warps: int
    matrices: int = 1
    vector: int = 1
    held: bool = False


@functools.lru_cache(maxsize=4096)
def choose_config(
    shape: tuple[int, int, int], element_size: int, vector: int, step: int = 0
) -> Config:
    """The configuration for a stack of matrices.

    A block has TILE_VALUES or fewer: first neighbouring columns, then rows, then
    columns of other matrices. Each value has a running pair; but where accesses move
    one element, and the block has as many columns as it may, each thread has about one.

    Args:
        shape: (n_matrices, n_rows, n_cols).
        element_size: bytes of the output's elements.
        vector, step: elements that a thread moves at once; the kernel's step.
    """
    n_matrices, n_rows, n_cols = shape
    values = TILE_VALUES // max(1, element_size // 4)
    rows = launch.power_of_2(n_rows)
    most = values // 64 if rows == 64 else max(values // 32, values // 2 // rows)
    neighbours = min(launch.power_of_2(n_cols), most)
    block_rows = min(rows, values // neighbours)
    matrices = min(most, values // block_rows) // neighbours
    matrices = min(launch.power_of_2(n_matrices), matrices)
    held = step == 0 and n_rows <= block_rows
    num_warps = 2 if held else 4
    pairs, cols = block_rows, neighbours * matrices
    if vector == 1 and cols == most:
        pairs = min(block_rows, max(1, 32 * num_warps // most))
    if step == 2 and cols == most:
        pairs = min(pairs, MERGED)
    return Config(cols, block_rows, pairs, num_warps, matrices, vector, held)


def choose_parts(n_tiles: int, n_blocks: int, width: int) -> int:
    """How many programs share each of n_tiles tiles of n_blocks blocks.

    PROGRAMS_PER_SM of `online` for each SM, in parts of LEAST_BLOCKS or more; one, if
    there are ENOUGH_PER_SM tiles for each SM. But if a tile's row (width, bytes) is a
    cache line or longer, half as many share fewer than FEW tiles, whose columns have
    many pairs to merge, and twice as many where a program would have MANY_BLOCKS.
    """
    sms, _ = launch.sms_and_threads()
    n_programs = online.PROGRAMS_PER_SM * sms
    is_wide = width >= online.LINE_BYTES
    is_long = n_tiles * n_blocks >= MANY_BLOCKS * n_programs
    if is_wide and n_tiles < FEW:
        n_programs //= 2
    elif is_wide and is_long and n_tiles < n_programs:
        n_programs *= 2
    elif n_tiles >= ENOUGH_PER_SM * sms:
        return 1
    n_parts = min(ceil_div(n_programs, n_tiles), max(1, n_blocks // LEAST_BLOCKS))
    return ceil_div(n_blocks, ceil_div(n_blocks, n_parts))


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None, step: int = 0
) -> Launch:
    """The launch that writes the softmax of x's columns to output.

    Args:
        output, x: (n_matrices, n_rows, n_cols), or matrices, whose rows are columns
            here; of one shape, not empty, of any strides; the same tensor, or without
            shared memory. May be float64.
        config: None lets `choose_config` choose. Nothing is checked.
        step: the kernel's. In steps 1 and 2 the launch takes the pairs as well.
    """
    output, x = online.as_columns(output), online.as_columns(x)
    n_matrices, n_rows, n_cols = shape = tuple(x.shape)
    if config is None:
        strides = *x.stride()[:2], *output.stride()[:2]
        vector = math.gcd(online.VECTOR_BYTES // x.element_size(), n_cols, *strides)
        if not any(pointer_to(tensor).aligned for tensor in (output, x)):
            vector = 1  # Triton will move single elements
        config = choose_config(shape, output.element_size(), vector, step)
    side = config.cols // config.matrices
    n_tiles = ceil_div(n_cols, side) * ceil_div(n_matrices, config.matrices)
    n_blocks = ceil_div(n_rows, config.block_rows)
    n_parts = choose_parts(n_tiles, n_blocks, side * x.element_size()) if step else 1
    no_pairs = [] if step else [0]
    sizes = *shape, ceil_div(n_blocks, n_parts)
    pairs = [Pointer(torch.promote_types(output.dtype, torch.float32))][:step]
    return Launch(
        kernel=softmax_kernel,
        grid=(n_tiles, n_parts),
        scalars=(*no_pairs, *output.stride(), *x.stride(), *sizes),
        constants=constants_of(config) | {"STEP": step},
        pointers=(pointer_to(output), pointer_to(x), *pairs),
    )


def prepare(
    output: torch.Tensor, x: torch.Tensor, keep: Callable[[Launch], Any]
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """As `kernels.online.prepare`, for stacks of matrices: one launch, or two."""
    return online.prepare(output, x, keep, launch_for)


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The softmax of every row of a matrix, or of every column (dim=0).

    Made for dim=0. Args, returns, raises: as `kernels.online.softmax`; IndexError if a
    matrix has no such dimension.
    """
    backend.validate(x)
    if not -2 <= dim < 2:
        raise IndexError(f"dim must be from -2 to 1 for a matrix, got {dim}")
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tensors = (output[None], x[None]) if dim % 2 == 0 else (output, x)
        prepare(*tensors, lambda made: made)(*tensors)
    return output
