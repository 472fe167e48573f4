"""Rows that start anywhere: their aligned middle in wide accesses, their ends apart.

Builds on: `kernels.tiled`.
Changes: a row is split into a head before its first aligned address, a body that wide
    accesses fit, and a tail. Head and tail, the row's edges, are shorter than one
    access each. Threads move them one element at a time.
Costs: MN values read and MN written.
Source: measured (`notebooks/recorded/`); CUDA C++ Programming Guide, device memory.
"""

import functools
import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels import tiled
from kernels.lab import launch
from kernels.lab.launch import SIZES, Launch, ceil_div, constants_of, pointer_to
from kernels.tiled import SHORT_BYTES, exp_shifted, widen

MAX_COLS, MAX_ROWS = tiled.MAX_COLS, tiled.MAX_ROWS
# By an element's bytes: the longest rows by accesses of 2, by 2 threads, by 4 threads.
SHORT_ROWS = {2: (46, 22, 62), 4: (26, 13, 32)}


@triton.jit
def split_row(row_start, n_cols, VECTOR: tl.constexpr):
    """A row's lengths of head and body; row_start counts from an aligned address."""
    head = tl.minimum((-row_start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head) & -VECTOR


@triton.jit
def edge_columns(edge, head, body, n_cols, VECTOR: tl.constexpr):
    """The columns of VECTOR places of the head, then of the tail; which exist."""
    is_head = edge < VECTOR
    cols = tl.where(is_head, edge, head + body + edge - VECTOR)
    return cols, cols < tl.where(is_head, head, n_cols)


@triton.jit
def find_rows(rows, matrix, VECTOR):
    """Each row's start, from an aligned address on; lengths of head, body and row."""
    n_rows, n_cols, row_stride, shift = matrix
    start = rows.to(tl.int64) * row_stride + shift
    n_cols = tl.where(rows < n_rows, n_cols, 0)
    head, body = split_row(start, n_cols, VECTOR)
    return start, head, body, n_cols


@triton.jit
def load_block(source, first_row, matrix, FIRST, COLS, ROWS, THREADS, VECTOR):
    """Loads bodies, COLS columns from FIRST on, as (turns, ROWS, THREADS, VECTOR).

    Each thread makes an access in each turn. Also returns the values' places in the
    output, and which exist (the rest is `other`), as a line for each turn and row. The
    input's row stride is the output's plus `gap`. matrix: see `find_rows`.
    """
    ptr, gap, other = source
    SPAN: tl.constexpr = THREADS * VECTOR
    line = tl.arange(0, COLS // SPAN * ROWS)[:, None]
    rows = first_row + line % ROWS
    start, head, body, _ = find_rows(rows, matrix, VECTOR)
    cols = FIRST + line // ROWS * SPAN + tl.arange(0, SPAN)[None, :]
    # VECTOR divides where a body starts (this tells the compiler) and its length.
    places = (start + head) // VECTOR * VECTOR + cols
    inside = cols // VECTOR * VECTOR < body
    ptrs = ptr + rows.to(tl.int64) * gap + places
    x = tl.load(ptrs, inside, other, eviction_policy="evict_last")
    return tl.reshape(x, (COLS // SPAN, ROWS, THREADS, VECTOR)), places, inside


@triton.jit
def load_edges(source, first_row, matrix, ROWS, THREADS, VECTOR):
    """As `load_block`, for heads and tails: an access moves one element."""
    ptr, gap, other = source
    TURNS: tl.constexpr = (2 * VECTOR + THREADS - 1) // THREADS
    line = tl.arange(0, TURNS * ROWS)[:, None]
    rows = first_row + line % ROWS
    start, head, body, n_cols = find_rows(rows, matrix, VECTOR)
    edge = line // ROWS * THREADS + tl.arange(0, THREADS)[None, :]
    cols, inside = edge_columns(edge, head, body, n_cols, VECTOR)
    ptrs = ptr + rows.to(tl.int64) * gap + start + cols
    x = tl.load(ptrs, inside, other, eviction_policy="evict_last")
    return tl.reshape(x, (TURNS, ROWS, THREADS, 1)), start + cols, inside


@triton.jit
def own_max(x):
    """The maximum of each thread's elements (dimension 3) and turns (0) of each row."""
    return tl.max(tl.max(x.to(tl.float32), 3, keep_dims=True), 0, keep_dims=True)


@triton.jit
def own_sum(x):
    """The sum of each thread's elements and turns of each row, as in `own_max`."""
    return tl.sum(tl.sum(x, 3, keep_dims=True), 0, keep_dims=True)


@triton.jit(do_not_specialize=SIZES)
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    output_shift,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    THREADS: tl.constexpr,
    SAME: tl.constexpr,
):
    """One program computes the softmax of one tile of rows.

    A thread reduces all that it holds of a row by itself. So the threads of a row
    exchange values only once.

    Args: as in `kernels.tiled`. The two blocks hold the longest body.
        output_shift: elements from an aligned address to the output's first element.
        VECTOR: elements that a thread moves at once in the body.
        THREADS: of a row, a power of two.
        SAME: whether both tensors have one row stride and one `row_shift`. If not,
            bodies are aligned in the output, and loaded by element.
    """
    matrix = n_rows, n_cols, output_row_stride, output_shift
    # From an aligned address on, so that the compiler can tell where bodies start.
    output_ptr = tl.multiple_of(output_ptr - output_shift, 16)
    gap = input_row_stride - output_row_stride
    source = input_ptr - output_shift, gap, -float("inf")
    if SAME:
        source = tl.multiple_of(input_ptr - output_shift, 16), 0, -float("inf")
    first_row = tl.program_id(0) * ROWS
    edges, edge_places, at_edge = load_edges(
        source, first_row, matrix, ROWS, THREADS, VECTOR
    )
    x, places, inside = load_block(
        source, first_row, matrix, 0, BLOCK_COLS, ROWS, THREADS, VECTOR
    )
    if not RECOMPUTE:
        x = widen(x)
    row_max = tl.maximum(own_max(x), own_max(edges))
    if REST_COLS:
        rest, rest_places, rest_inside = load_block(
            source, first_row, matrix, BLOCK_COLS, REST_COLS, ROWS, THREADS, VECTOR
        )
        row_max = tl.maximum(row_max, own_max(rest))
    row_max = tl.max(row_max, axis=2, keep_dims=True)  # over the row's threads

    numerator = exp_shifted(widen(x), row_max)
    edge_numerator = exp_shifted(edges, row_max)
    row_sum = own_sum(numerator) + own_sum(edge_numerator)
    if REST_COLS:
        row_sum += own_sum(exp_shifted(widen(rest), row_max))
    factor = 1 / tl.sum(row_sum, axis=2, keep_dims=True)
    y = tl.reshape(edge_numerator * factor, at_edge.shape)
    tl.store(output_ptr + edge_places, y, mask=at_edge)
    if RECOMPUTE:
        numerator = exp_shifted(widen(x), row_max)
    y = tl.reshape(numerator * factor, inside.shape)
    tl.store(output_ptr + places, y, mask=inside)
    if REST_COLS:
        y = exp_shifted(widen(rest), row_max) * factor
        y = tl.reshape(y, rest_inside.shape)
        tl.store(output_ptr + rest_places, y, mask=rest_inside)


@dataclass(frozen=True)
class Config(tiled.Config):
    """The constants of `kernels.tiled`, and this kernel's own."""

    threads: int
    same: bool


def alignment(output: Tensor, x: Tensor) -> tuple[int, bool]:
    """`tiled.choose_vector` of both matrices, which is 1 where rows start anywhere.

    And where a matrix starts at no multiple of 16 bytes: Triton would move elements.
    Also whether both have one `row_shift` and, of several rows, one stride.
    """
    one, two = (((len(t) > 1) * t.stride(0), launch.row_shift(t)) for t in (output, x))
    vector = tiled.choose_vector(x.shape[1], output.element_size(), *one, *two)
    return 1 if one[1] or two[1] else vector, one == two


@functools.lru_cache(maxsize=4096)
def choose_config(
    n_cols: int, element_size: int, same_shift: bool = True, aligned: bool = False
) -> Config:
    """The configuration for rows of n_cols values of element_size bytes.

    Short rows share a tile, with fewer threads if two elements divide the rows' starts
    (`aligned`). A tile of longer rows has about TILE_BYTES (twice that at 16 bits) or
    one row. Where x is loaded by element, accesses of 4 are the fastest.
    """
    is_short, widest = n_cols * element_size < SHORT_BYTES, 16 // element_size
    vector, threads = widest if same_shift else 4, 2 * widest  # of a row in a tile
    if is_short:
        by_2_elements, *by_threads = SHORT_ROWS[element_size]
        extra = 0 if aligned or element_size == 4 else 8  # for the edges
        vector = 2 if n_cols + extra // 2 <= by_2_elements else 4
        threads = 2 ** (1 + sum(n_cols + extra > longest for longest in by_threads))
        threads = 1 if n_cols <= 6 else threads
        num_warps = 4 if n_cols * element_size < 256 else 2
        rows = 32 * num_warps // threads
    body = max(n_cols // vector * vector, 2 * vector)
    block_cols, rest_cols = tiled.split_block(body, vector)
    may_split = is_short and vector == 2 and (aligned or element_size == 4)
    if may_split and body <= block_cols * 3 // 4:
        block_cols, rest_cols = block_cols // 2, block_cols // 4
    row_bytes = (block_cols + rest_cols) * element_size
    if not is_short:
        rows = max(1, 2 ** int(math.log2(tiled.TILE_BYTES / row_bytes)))
        warps = math.log2(row_bytes / tiled.BYTES_PER_WARP)  # fewer from 16 KiB on
        warps = int(warps) if warps < 2 else math.ceil(warps - same_shift)
        num_warps = 2 ** max(0, warps)
        if rows > 1 and element_size == 2:
            rows, num_warps = 2 * rows, 2
        threads = 32 * num_warps if rows == 1 else threads
    rest_cols = max(rest_cols, threads * vector) if rest_cols else 0
    recompute = row_bytes > tiled.BYTES_PER_WARP and element_size < 4
    how = vector, recompute, num_warps, threads, same_shift
    return Config(rows, block_cols, rest_cols, *how)


def launch_for(output: Tensor, x: Tensor, config: tiled.Config | None = None) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args: as for `kernels.tiled.launch_for`. config: this module's, or one of `tiled`,
        whose launch this is then, and for aligned rows in different strides.
    """
    n_rows, n_cols = x.shape
    if config is None:
        vector, same_shift = alignment(output, x)
        if same_shift or vector * output.element_size() < 16:
            config = choose_config(n_cols, x.element_size(), same_shift, vector > 1)
    if not isinstance(config, Config):
        return tiled.launch_for(output, x, config)
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(n_rows, config.rows),),
        scalars=(output.stride(0), x.stride(0), launch.row_shift(output), *x.shape),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: Tensor) -> Tensor:
    """The softmax of every row. Args, returns, raises: as `kernels.tiled.softmax`."""
    return launch.by_rows(launch_for, x, MAX_ROWS, MAX_COLS)
