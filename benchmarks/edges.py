"""Chapter `unaligned`'s kernel on its way: the ends of a row in a block of their own.

from benchmarks import edges
show.diff(tiled.softmax_kernel, edges.tail_kernel)
show.diff(edges.tail_kernel, edges.head_kernel)
show.diff(edges.head_kernel, edges.beside_kernel)
show.diff(edges.beside_kernel, edges.turns_kernel)
show.diff(edges.turns_kernel, unaligned.softmax_kernel)
providers = {"unaligned.beside": edges.beside}
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks import parts
from benchmarks.tiles import widest
from kernels import tiled, unaligned
from kernels.lab import compile, gpu, occupancy
from kernels.lab.launch import SIZES, Launch, ceil_div, constants_of, row_shift
from kernels.layouts import Blocked, layouts_of
from kernels.tiled import (
    BYTES_PER_WARP,
    SHORT_BYTES,
    TILE_BYTES,
    block_max,
    block_sum,
    exp_shifted,
    load_or_neg_inf,
    widen,
)
from kernels.unaligned import (
    edge_columns,
    find_rows,
    load_edges,
    own_max,
    own_sum,
)


@triton.jit(do_not_specialize=SIZES)
def tail_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):
    """As `kernels.tiled.softmax_kernel`, for rows that end anywhere.

    Args:
        As for `kernels.tiled.softmax_kernel`, but VECTOR need not divide n_cols.
    """
    # The program's number decides its rows. Shapes: (ROWS, 1) and (1, BLOCK_COLS).
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    rows = rows.to(tl.int64)  # row × stride may exceed 2^31
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    body = n_cols // VECTOR * VECTOR
    input_ptrs = input_ptr + rows * (input_row_stride // VECTOR * VECTOR)
    # The edges are a small block of their own.
    edge_cols = body + tl.arange(0, VECTOR)[None, :]
    at_edge = is_row & (edge_cols < n_cols)
    edges = load_or_neg_inf(input_ptrs + edge_cols, at_edge)

    inside = is_row & (cols < body)
    x = load_or_neg_inf(input_ptrs + cols, inside)
    if not RECOMPUTE:
        x = widen(x)
    row_max = tl.maximum(block_max(x), block_max(edges))
    if REST_COLS:
        rest_cols = BLOCK_COLS + tl.arange(0, REST_COLS)[None, :]
        rest_inside = is_row & (rest_cols < body)
        rest = load_or_neg_inf(input_ptrs + rest_cols, rest_inside)
        row_max = tl.maximum(row_max, block_max(rest))

    numerator = exp_shifted(widen(x), row_max)
    edge_numerator = exp_shifted(edges, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    row_sum += tl.sum(edge_numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += block_sum(rest, row_max)
    factor = 1 / row_sum  # one division a row, then one product a value
    output_ptrs = output_ptr + rows * (output_row_stride // VECTOR * VECTOR)
    tl.store(output_ptrs + edge_cols, edge_numerator * factor, mask=at_edge)
    if RECOMPUTE:
        numerator = exp_shifted(widen(x), row_max)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(widen(rest), row_max) * factor
        tl.store(output_ptrs + rest_cols, y, mask=rest_inside)


@triton.jit
def load_narrow(ptr, first_row, matrix, FIRST, COLS, ROWS, VECTOR):
    """Loads bodies, COLS columns from FIRST on, as (ROWS, COLS).

    Also returns where the values are, and which of them exist.
    """
    row = tl.arange(0, ROWS)[:, None]
    start, head, body, _ = find_rows(first_row + row, matrix, VECTOR)
    cols = FIRST + tl.arange(0, COLS)[None, :]
    places = start + head + cols
    inside = cols < body
    return load_or_neg_inf(ptr + places, inside), places, inside


@triton.jit(do_not_specialize=SIZES)
def head_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_shift,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):
    """As `tail_kernel`, for rows that start anywhere.

    Args:
        As for `tail_kernel`, but both tensors have output_row_stride.
        output_shift: elements from an aligned address to either's first element.
    """
    matrix = n_rows, n_cols, output_row_stride, output_shift
    input_ptr, output_ptr = input_ptr - output_shift, output_ptr - output_shift
    first_row = tl.program_id(0) * ROWS
    rows, edge = tl.arange(0, ROWS)[:, None], tl.arange(0, 2 * VECTOR)[None, :]
    start, head, body, length = find_rows(first_row + rows, matrix, VECTOR)
    # The edges are a small block of their own.
    edge_cols, at_edge = edge_columns(edge, head, body, length, VECTOR)
    edges = load_or_neg_inf(input_ptr + start + edge_cols, at_edge)

    x, places, inside = load_narrow(
        input_ptr, first_row, matrix, 0, BLOCK_COLS, ROWS, VECTOR
    )
    if not RECOMPUTE:
        x = widen(x)
    row_max = tl.maximum(block_max(x), block_max(edges))
    if REST_COLS:
        rest, rest_places, rest_inside = load_narrow(
            input_ptr, first_row, matrix, BLOCK_COLS, REST_COLS, ROWS, VECTOR
        )
        row_max = tl.maximum(row_max, block_max(rest))

    numerator = exp_shifted(widen(x), row_max)
    edge_numerator = exp_shifted(edges, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    row_sum += tl.sum(edge_numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += block_sum(rest, row_max)
    factor = 1 / row_sum  # one division a row, then one product a value
    tl.store(output_ptr + start + edge_cols, edge_numerator * factor, mask=at_edge)
    if RECOMPUTE:
        numerator = exp_shifted(widen(x), row_max)
    tl.store(output_ptr + places, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(widen(rest), row_max) * factor
        tl.store(output_ptr + rest_places, y, mask=rest_inside)


@triton.jit
def load_wide(ptr, first_row, matrix, FIRST, COLS, ROWS, VECTOR):
    """As `load_narrow`, in accesses of VECTOR elements."""
    row = tl.arange(0, ROWS)[:, None]
    start, head, body, _ = find_rows(first_row + row, matrix, VECTOR)
    cols = FIRST + tl.arange(0, COLS)[None, :]
    # VECTOR divides where a body starts (this tells the compiler) and its length.
    places = (start + head) // VECTOR * VECTOR + cols
    inside = cols // VECTOR * VECTOR < body
    return load_or_neg_inf(ptr + places, inside), places, inside


@triton.jit(do_not_specialize=SIZES)
def beside_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_shift,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):
    """As `head_kernel`, in accesses of VECTOR elements.

    Args:
        As for `head_kernel`.
    """
    matrix = n_rows, n_cols, output_row_stride, output_shift
    input_ptr = tl.multiple_of(input_ptr - output_shift, 16)
    output_ptr = tl.multiple_of(output_ptr - output_shift, 16)
    first_row = tl.program_id(0) * ROWS
    rows, edge = tl.arange(0, ROWS)[:, None], tl.arange(0, 2 * VECTOR)[None, :]
    start, head, body, length = find_rows(first_row + rows, matrix, VECTOR)
    # The edges are a small block of their own.
    edge_cols, at_edge = edge_columns(edge, head, body, length, VECTOR)
    edges = load_or_neg_inf(input_ptr + start + edge_cols, at_edge)

    x, places, inside = load_wide(
        input_ptr, first_row, matrix, 0, BLOCK_COLS, ROWS, VECTOR
    )
    if not RECOMPUTE:
        x = widen(x)
    row_max = tl.maximum(block_max(x), block_max(edges))
    if REST_COLS:
        rest, rest_places, rest_inside = load_wide(
            input_ptr, first_row, matrix, BLOCK_COLS, REST_COLS, ROWS, VECTOR
        )
        row_max = tl.maximum(row_max, block_max(rest))

    numerator = exp_shifted(widen(x), row_max)
    edge_numerator = exp_shifted(edges, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    row_sum += tl.sum(edge_numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += block_sum(rest, row_max)
    factor = 1 / row_sum  # one division a row, then one product a value
    tl.store(output_ptr + start + edge_cols, edge_numerator * factor, mask=at_edge)
    if RECOMPUTE:
        numerator = exp_shifted(widen(x), row_max)
    tl.store(output_ptr + places, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(widen(rest), row_max) * factor
        tl.store(output_ptr + rest_places, y, mask=rest_inside)


@triton.jit
def load_turns(ptr, first_row, matrix, FIRST, COLS, ROWS, THREADS, VECTOR):
    """As `load_wide`, as (turns, ROWS, THREADS, VECTOR): a thread's access in a turn.

    Places, and which of them exist, are a line of adjacent columns for each turn and
    row. `unaligned.load_block` is this for outputs whose rows start elsewhere, too.
    """
    SPAN: tl.constexpr = THREADS * VECTOR
    line = tl.arange(0, COLS // SPAN * ROWS)[:, None]
    start, head, body, _ = find_rows(first_row + line % ROWS, matrix, VECTOR)
    cols = FIRST + line // ROWS * SPAN + tl.arange(0, SPAN)[None, :]
    # VECTOR divides where a body starts (this tells the compiler) and its length.
    places = (start + head) // VECTOR * VECTOR + cols
    inside = cols // VECTOR * VECTOR < body
    x = load_or_neg_inf(ptr + places, inside)
    return tl.reshape(x, (COLS // SPAN, ROWS, THREADS, VECTOR)), places, inside


@triton.jit
def row_max_of(x):
    """The maximum of each row of a block with the shape of `load_turns`'s."""
    return tl.max(own_max(x), axis=2, keep_dims=True)


@triton.jit
def row_sum_of(x):
    """The sum of each row of a block with the shape of `load_turns`'s."""
    return tl.sum(own_sum(x), axis=2, keep_dims=True)


@triton.jit(do_not_specialize=SIZES)
def turns_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_shift,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """As `beside_kernel`, with each row's edges in THREADS threads, and no copies.

    Args:
        As for `beside_kernel`, and THREADS as for `kernels.unaligned.softmax_kernel`.
    """
    matrix = n_rows, n_cols, output_row_stride, output_shift
    input_ptr = tl.multiple_of(input_ptr - output_shift, 16)
    output_ptr = tl.multiple_of(output_ptr - output_shift, 16)
    first_row = tl.program_id(0) * ROWS
    source = input_ptr, 0, -float("inf")
    edges, edge_places, at_edge = load_edges(
        source, first_row, matrix, ROWS, THREADS, VECTOR
    )
    x, places, inside = load_turns(
        input_ptr, first_row, matrix, 0, BLOCK_COLS, ROWS, THREADS, VECTOR
    )
    if not RECOMPUTE:
        x = widen(x)
    row_max = tl.maximum(row_max_of(x), row_max_of(edges))
    if REST_COLS:
        rest, rest_places, rest_inside = load_turns(
            input_ptr, first_row, matrix, BLOCK_COLS, REST_COLS, ROWS, THREADS, VECTOR
        )
        row_max = tl.maximum(row_max, row_max_of(rest))

    numerator = exp_shifted(widen(x), row_max)
    edge_numerator = exp_shifted(edges, row_max)
    row_sum = row_sum_of(numerator) + row_sum_of(edge_numerator)
    if REST_COLS:
        row_sum += row_sum_of(exp_shifted(widen(rest), row_max))
    factor = 1 / row_sum
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


# ---- launches ------------------------------------------------------------------------


def choose_config(n_cols: int, element_size: int) -> tiled.Config:
    """The configuration of `head_kernel` and `beside_kernel`.

    As that of `kernels.tiled`, but a tile has at most TILE_BYTES or one row, and tiles
    of short rows have two warps. In short rows an access has at most 4 elements,
    because the block of their edges is 2 * VECTOR wide.
    """
    vector, is_short = 16 // element_size, n_cols * element_size < SHORT_BYTES
    vector = min(vector, 4) if is_short else vector
    block_cols, rest_cols = tiled.split_block(max(n_cols // vector, 1) * vector, vector)
    row_bytes = (block_cols + rest_cols) * element_size
    rows = max(1, 2 ** int(math.log2(TILE_BYTES / row_bytes)))
    tile_bytes = rows * row_bytes
    warps = tile_bytes / BYTES_PER_WARP
    if tile_bytes >= 16384:
        num_warps = 2 ** math.ceil(math.log2(warps / 2))
    else:
        num_warps = 2 if is_short else max(1, 2 ** int(math.log2(min(warps, 8))))
    recompute = tile_bytes > BYTES_PER_WARP and element_size < 4
    return tiled.Config(rows, block_cols, rest_cols, vector, recompute, num_warps)


def launch_for(kernel: Any, x: torch.Tensor) -> Launch:
    """The launch of a kernel, for an output whose rows lie as x's.

    Args:
        kernel: one of this module but `tail_kernel`, or `unaligned.softmax_kernel`.
        x: as for `unaligned.launch_for`.
    """
    launch = unaligned.launch_for(x, x)
    if kernel is launch.kernel:
        return launch
    if kernel is turns_kernel:
        grid, constants = launch.grid, dict(launch.constants)
        del constants["SAME"]
    else:
        config = choose_config(x.shape[1], x.element_size())
        grid, constants = (ceil_div(len(x), config.rows),), constants_of(config)
    scalars = x.stride(0), row_shift(x), *x.shape
    return Launch(kernel, grid, scalars, constants, launch.pointers)


def softmax_by(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The softmax of every row of contiguous matrices, by a kernel of `launch_for`."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        output = torch.empty_like(x)
        if x.numel() and x.data_ptr() % 16 == output.data_ptr() % 16:
            launch_for(kernel, x)(output, x)
        elif x.numel():  # the output lies elsewhere: no kernel of this module
            unaligned.launch_for(output, x)(output, x)
        return output

    return softmax


beside = softmax_by(beside_kernel)
"""The softmax of every row: step three of the chapter."""


# ---- what the compiler makes of it ---------------------------------------------------


def widths(launch: Launch) -> tuple[int, int]:
    """The bytes of a thread's widest load and of its widest store."""
    made = compile.aot(launch)
    return widest(made, "ld"), widest(made, "st")


def budget(itemsize: int) -> float:
    """The instructions that an H200 issues while it moves a value there and back.

    Its datasheet says 67 TFLOP/s in float32, where an instruction counts as two.
    """
    per_byte = 67e12 / 2 / (gpu.named("H200").peak_bandwidth_gbps * 1e9)
    return per_byte * 2 * itemsize


def counts(launch: Launch, n_cols: int) -> dict[str, float]:
    """Counts in the code of a launch on rows of one program, compiled for an H200.

    Returns:
        "shuffles": of a thread.
        "instructions": of all threads, for each value.
    """
    made, rows = compile.aot(launch), launch.constants.get("ROWS", 1)
    instructions = 32 * made.num_warps * made.count(r"^    (?!NOP)", "sass")
    return {
        "shuffles": made.count(r"shfl\.sync"),
        "instructions": instructions / (rows * n_cols),
    }


@functools.cache
def work(kernel: Any, n_cols: int) -> dict[str, float]:
    """What a kernel does, compiled for contiguous bfloat16 rows on an H200.

    Args:
        kernel: that `launch_for` knows, or `tiled.softmax_kernel`.
        n_cols: of the rows.

    Returns:
        "edges": the mean share of a row that lies in its edges, in percent.
        "body exp", "edge exp": the exponentials that a thread computes for each.
        "shuffles", "instructions": as in `counts`.
        "KiB": of rows that an SM holds at a time.
    """
    x = torch.empty(4096, n_cols, dtype=torch.bfloat16, device="meta")
    if kernel is tiled.softmax_kernel:
        launch = tiled.launch_for(x, x)
    else:
        launch = launch_for(kernel, x)
    made, chosen = compile.aot(launch), launch.constants
    vector, threads = chosen["VECTOR"], 32 * made.num_warps
    starts = range(0, vector * n_cols, n_cols)
    edges = [n_cols - parts.lengths(start, n_cols, vector)[1] for start in starts]
    twice = 1 + chosen["RECOMPUTE"]
    body = chosen["ROWS"] * chosen["BLOCK_COLS"] * twice // threads
    body += chosen["ROWS"] * chosen["REST_COLS"] * 2 // threads
    held = occupancy.of(made).blocks_per_sm * chosen["ROWS"] * n_cols * x.itemsize
    return {
        "edges": 100 * sum(edges) / len(edges) / n_cols,
        "body exp": body,
        "edge exp": made.count(r"ex2\.") - body,
        **counts(launch, n_cols),
        "KiB": held // 1024,
    }


def held(kernel: Any, n_cols: int) -> tuple[int, dict[str, list[list[int]]]]:
    """What the threads of a program's first warp hold of its first row.

    Args:
        kernel: `beside_kernel`, or a later step's.
        n_cols: of contiguous bfloat16 rows whose exponentials are computed once.

    Returns:
        The rows of which the first thread holds as many values; for "body" and "edges"
        the elements of each thread that holds some: the body's columns, and the places
        among the edges. Both are counted from the row's first.
    """
    x = torch.empty(4096, n_cols, dtype=torch.bfloat16, device="meta")
    text = compile.aot(launch_for(kernel, x)).ttgir
    powers = re.findall(r"math\.exp2 .* : tensor<([\dx]+)xf32, (#\w+)>", text)
    (n_rows, body), (_, edges) = (
        _first_row(layouts_of(text)[name], [*map(int, shape.split("x"))])
        for shape, name in powers
    )
    return n_rows, {"body": body, "edges": edges}


def _first_row(layout: Blocked, shape: list[int]) -> tuple[int, list[list[int]]]:
    """The rows of lane 0, and the elements of each lane in row 0.

    Args:
        layout: of a block, for one warp or for several whose first holds row 0.
        shape: (rows, columns), or (turns, rows, threads, elements).
    """
    axis = len(shape) - 3 if len(shape) > 2 else 0
    per_row = np.arange(math.prod(shape) // shape[axis])
    per_row = np.expand_dims(per_row.reshape([*shape[:axis], *shape[axis + 1 :]]), axis)
    lanes, n_rows = [], 0
    for lane in range(32):
        taken, rest = [np.array([0])] * len(shape), lane
        for dim in layout.order:
            rest, place = divmod(rest, layout.threads_per_warp[dim])
            size, lanes_of = layout.size_per_thread[dim], layout.threads_per_warp[dim]
            step = size * lanes_of * layout.warps_per_cta[dim]
            first = np.arange(0, max(shape[dim], 1), step) + place * size
            numbers = (first[:, None] + np.arange(size)).ravel()
            taken[dim] = np.unique(numbers % shape[dim])  # what is too much are copies
        n_rows = n_rows or len(taken[axis])
        if 0 in taken[axis]:
            taken[axis] = np.array([0])
            lanes.append(sorted(per_row[np.ix_(*taken)].ravel().tolist()))
    return n_rows, lanes
