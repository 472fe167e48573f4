"""Rows of any length: a loop over blocks of columns, and a running (max, sum) pair.

Builds on: `kernels.tiled`.
Changes: a program sees its rows block after block. It keeps the (max, sum) pair of what
    it has seen, and merges each block's pair into it. Then it reads the rows a second
    time, last block first, to write the results.
Costs: 2MN values read and MN written. Values that the L2 cache still holds at the
    second reading do not come from memory. `three_pass` reads 3MN.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    PTX ISA, cache eviction priority hints.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.lab.launch import Launch, ceil_div, constants_of, pointer_to

BLOCK_BYTES = 65536  # of a row, at most: 32 warps load 64 bytes in each thread
BYTES_PER_WARP = 2048
TILE_BYTES = 4096  # shorter rows share a tile
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


@triton.jit
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_outer_stride,
    output_col_stride,
    output_inner_stride,
    input_outer_stride,
    input_col_stride,
    input_inner_stride,
    n_rows,
    n_cols,
    n_inner,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ACCUMULATORS: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HINTS: tl.constexpr,
):
    """One program computes the softmax of ROWS rows, however long.

    Args:
        output_ptr, input_ptr: the first elements of tensors (outer, n_cols, n_inner).
        output_outer_stride, …, input_inner_stride: elements from one index to the next
            along each of the three dimensions.
        n_rows: outer * n_inner. Row r is [r // n_inner, :, r % n_inner].
        ROWS: rows that one program computes together, a power of two.
        BLOCK_COLS: columns in registers at a time, a power of two.
        ACCUMULATORS: running pairs of each row, a power of two, at most BLOCK_COLS.
            Pair i is that of the columns i, i + ACCUMULATORS, ….
        BACKWARDS: whether the second loop begins with the block that was read last.
        HINTS: whether L2 is told which lines will be read again, and which will not.
    """
    FIRST: tl.constexpr = "evict_last" if HINTS else ""
    SECOND: tl.constexpr = "evict_first" if HINTS else ""
    WIDTH: tl.constexpr = BLOCK_COLS // ACCUMULATORS
    # The output may have a wider dtype than the input, and has no narrower one.
    DOUBLE: tl.constexpr = output_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    # A block has the shape (ROWS, WIDTH, ACCUMULATORS). The loop reduces along WIDTH,
    # inside a thread; threads exchange values only once, after the loop.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    turn = tl.arange(0, WIDTH)[None, :, None].to(tl.int64)
    col = turn * ACCUMULATORS + tl.arange(0, ACCUMULATORS)[None, None, :]
    offset = row_offset(row, n_inner, input_outer_stride, input_inner_stride)
    input_ptrs = input_ptr + offset + col * input_col_stride
    n_blocks = (n_cols - 1) // BLOCK_COLS + 1

    row_max = tl.full((ROWS, ACCUMULATORS), -float("inf"), DTYPE)
    row_sum = tl.zeros((ROWS, ACCUMULATORS), DTYPE)
    for block in range(n_blocks):
        start = tl.cast(block, tl.int64) * BLOCK_COLS
        inside = (row < n_rows) & (col < n_cols - start)
        ptrs = input_ptrs + start * input_col_stride
        x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=FIRST)
        block_max, block_sum = max_and_sum(x.to(DTYPE))
        row_max, row_sum = merge(row_max, row_sum, block_max, block_sum)
    row_max, row_sum = merge_axis(row_max, row_sum, 1)
    row_max, factor = row_max[:, None, :], (1 / row_sum)[:, None, :]

    offset = row_offset(row, n_inner, output_outer_stride, output_inner_stride)
    output_ptrs = output_ptr + offset + col * output_col_stride
    for step in range(n_blocks):
        block = n_blocks - 1 - step if BACKWARDS else step
        start = tl.cast(block, tl.int64) * BLOCK_COLS
        inside = (row < n_rows) & (col < n_cols - start)
        ptrs = input_ptrs + start * input_col_stride
        x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=SECOND)
        y = exp_shifted_or_zero(x.to(DTYPE), row_max) * factor
        ptrs = output_ptrs + start * output_col_stride
        tl.store(ptrs, y, inside, eviction_policy=SECOND)


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
    n_rows: int, n_cols: int, element_size: int, adjacent: bool = False
) -> Config:
    """The configuration for n_rows rows of n_cols values of element_size bytes.

    A tile has BLOCK_BYTES, or a whole row if that is shorter. Rows shorter than
    TILE_BYTES share a tile. Tiles are large, so that one or two programs fill an SM.
    The fewer rows are in progress, the more of each row L2 still holds at the second
    reading. A thread has one pair for each value of a 16-byte access.

    Args:
        adjacent: whether rows, not columns, lie next to each other in memory. A tile
            then has as many rows as fill a cache line, and half the bytes, because
            reductions across it take registers.
    """
    room = BLOCK_BYTES // element_size // (2 if adjacent else 1)
    rows = LINE_BYTES // element_size if adjacent else 1
    rows = min(rows, triton.next_power_of_2(n_rows))
    block_cols = min(triton.next_power_of_2(n_cols), room // rows)
    fitting = TILE_BYTES // element_size // block_cols
    rows = max(rows, min(fitting, triton.next_power_of_2(n_rows)))
    num_warps = rows * block_cols * element_size // BYTES_PER_WARP
    num_warps = min(max(num_warps, 1), 32)
    values = 32 * num_warps * VECTOR_BYTES // element_size
    accumulators = min(block_cols, max(1, values // rows))
    return Config(rows, block_cols, accumulators, num_warps)


def as_columns(x: torch.Tensor) -> torch.Tensor:
    """A matrix as the kernel takes it: (1, n_cols, n_rows), without a copy."""
    return x.t()[None]


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the softmax of x along its middle dimension to output.

    Args:
        output, x: (outer, n_cols, inner), of one shape, not empty, any strides. float64
            is computed in float64. They are not checked, and may be on "meta".
        config: not checked; None lets `choose_config` choose.
    """
    n_rows, n_cols = x.shape[0] * x.shape[2], x.shape[1]
    if config is None:
        sides = [(view.stride(1), view.stride(2)) for view in (x, output)]
        adjacent = x.shape[2] > 1 and any(c != 1 and inner == 1 for c, inner in sides)
        config = choose_config(n_rows, n_cols, x.element_size(), adjacent)
    sizes = n_rows, n_cols, x.shape[2]
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(n_rows, config.rows),),
        scalars=(*output.stride(), *x.stride(), *sizes),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """The softmax of every row, of any length.

    Args:
        x: (M, N), float32, float16 or bfloat16, any strides.
        config: for the kernel, not checked; None lets `choose_config` choose.

    Returns:
        (M, N) in x's dtype, contiguous; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        columns = as_columns(output), as_columns(x)
        launch_for(*columns, config)(*columns)
    return output
