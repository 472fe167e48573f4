"""Rows that start anywhere: their aligned middle in wide accesses, their ends apart.

Builds on: `kernels.tiled`.
Changes: a row is split into a head before its first aligned address, a body that wide
    accesses fit, and a tail. Head and tail are shorter than one access each. They are
    loaded, reduced and stored as a small block of their own.
Costs: MN values read and MN written.
Source: measured (`notebooks/recorded/`); CUDA C++ Programming Guide, device memory
    accesses (an access of 16 bytes must start at a multiple of 16 bytes).
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels import tiled
from kernels.lab import backend
from kernels.lab.launch import SIZES, Launch, ceil_div, constants_of, pointer_to
from kernels.tiled import (
    BYTES_PER_WARP,
    MAX_COLS,
    MAX_ROWS,
    SHORT_BYTES,
    TILE_BYTES,
    block_max,
    block_sum,
    choose_vector,
    exp_shifted,
    load_or_neg_inf,
    opaque_move,
    row_shift,
    split_block,
)


@triton.jit
def split_row(row_start, n_cols, VECTOR: tl.constexpr):
    """The lengths of a row's head and body; the tail is what remains.

    `row_start` is the row's first element, counted from an aligned address.
    """
    head = tl.minimum((-row_start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head) & -VECTOR


@triton.jit
def edge_columns(edge, head, body, n_cols, VECTOR: tl.constexpr):
    """The columns of a row's head and tail, and which of them exist.

    `edge` counts from 0 to 2 * VECTOR - 1: the first half is for the head, the second
    half for the tail.
    """
    is_head = edge < VECTOR
    cols = tl.where(is_head, edge, head + body + edge - VECTOR)
    return cols, cols < tl.where(is_head, head, n_cols)


@triton.jit(do_not_specialize=SIZES)
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    input_shift,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    SAME_SHIFT: tl.constexpr,
):
    """One program computes the softmax of one tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements; columns are adjacent.
        output_row_stride, input_row_stride: elements from one row to the next.
        input_shift: elements from an aligned address to the input's first element.
        n_rows, n_cols: the tensors' shape.
        ROWS, BLOCK_COLS, REST_COLS, RECOMPUTE: as in `kernels.tiled`. The two blocks
            hold the longest body.
        VECTOR: elements that a thread moves at once in the body.
        SAME_SHIFT: whether the output has the input's row stride and starts as far from
            an aligned address. Then the bodies of its rows are aligned, too.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows
    rows = rows.to(tl.int64)
    input_row = rows * input_row_stride
    head, body = split_row(input_row + input_shift, n_cols, VECTOR)
    edge = tl.arange(0, 2 * VECTOR)[None, :]
    edge_cols, at_edge = edge_columns(edge, head, body, n_cols, VECTOR)
    at_edge = is_row & at_edge
    edges = load_or_neg_inf(input_ptr + input_row + edge_cols, at_edge)
    # Two facts tell the compiler that the body is aligned: the pointer is moved to
    # an aligned address, and VECTOR divides the distance from there to the body.
    body_start = (input_row + input_shift + head) // VECTOR * VECTOR
    input_ptrs = tl.multiple_of(input_ptr - input_shift, 16) + body_start
    # VECTOR divides the body, so an access lies inside if its first element does.
    inside = is_row & (cols // VECTOR * VECTOR < body)
    x = load_or_neg_inf(input_ptrs + cols, inside)
    row_max = block_max(x)
    if REST_COLS:
        rest_cols = BLOCK_COLS + tl.arange(0, REST_COLS)[None, :]
        rest_inside = is_row & (rest_cols // VECTOR * VECTOR < body)
        rest = load_or_neg_inf(input_ptrs + rest_cols, rest_inside)
        row_max = tl.maximum(row_max, block_max(rest))
    row_max = tl.maximum(row_max, block_max(edges))

    numerator = exp_shifted(opaque_move(x, RECOMPUTE), row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += block_sum(rest, row_max, True)
    row_sum += block_sum(edges, row_max, False)
    factor = 1 / row_sum
    if SAME_SHIFT:
        output_row = input_row
        output_ptrs = tl.multiple_of(output_ptr - input_shift, 16) + body_start
    else:
        output_row = rows * output_row_stride
        output_ptrs = output_ptr + (output_row + head)
    y = exp_shifted(edges, row_max) * factor
    tl.store(output_ptr + output_row + edge_cols, y, mask=at_edge)
    if RECOMPUTE:
        numerator = exp_shifted(opaque_move(x, True), row_max)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(opaque_move(rest, True), row_max) * factor
        tl.store(output_ptrs + rest_cols, y, mask=rest_inside)


@dataclass(frozen=True)
class Config(tiled.Config):
    """The constants of `kernels.tiled`, and this kernel's own."""

    same_shift: bool


def alignment(output: torch.Tensor, x: torch.Tensor) -> tuple[int, bool]:
    """How the rows of two matrices lie in memory.

    Returns `tiled.choose_vector` of both, which is 1 where rows start anywhere, and
    whether the output's rows start as far from aligned addresses as x's (SAME_SHIFT).
    """
    output_row, input_row = ((t.stride(0), row_shift(t)) for t in (output, x))
    starts = (*output_row, *input_row)
    vector = choose_vector(x.shape[1], x.element_size(), *starts)
    return vector, output_row == input_row


@functools.lru_cache(maxsize=4096)
def choose_config(n_cols: int, element_size: int, same_shift: bool) -> Config:
    """The configuration for rows of n_cols values of element_size bytes.

    As in `kernels.tiled`, but a tile has at most TILE_BYTES or one row. Tiles of 16 KiB
    and more have a warp for every two BYTES_PER_WARP; tiles of short rows have 2 warps.
    In short rows an access has at most 4 elements, because the block of their two ends
    is 2 * VECTOR wide.
    """
    vector = 16 // element_size
    if n_cols * element_size < SHORT_BYTES:
        vector = min(vector, 4)
    body = max(n_cols // vector * vector, 1)
    block_cols, rest_cols = split_block(body, vector)
    row_bytes = (block_cols + rest_cols) * element_size
    rows = max(1, 2 ** int(math.log2(TILE_BYTES / row_bytes)))
    tile_bytes = rows * row_bytes
    warps = tile_bytes / BYTES_PER_WARP
    if tile_bytes >= 16384:
        num_warps = 2 ** math.ceil(math.log2(warps / 2))
    elif body * element_size < SHORT_BYTES:
        num_warps = 2
    else:
        num_warps = max(1, 2 ** int(math.log2(min(warps, 8))))
    recompute = tile_bytes > BYTES_PER_WARP and element_size < 4
    return Config(rows, block_cols, rest_cols, vector, recompute, num_warps, same_shift)


@functools.lru_cache(maxsize=4096)
def config_of_few(
    n_cols: int, element_size: int, aligned: bool, same_shift: bool
) -> tiled.Config:
    """The configuration where the GPU has an SM for each row.

    A row then takes about as long as one access to memory, however full its block is.
    So all lengths up to a power of two share a kernel: that of `kernels.tiled` where
    aligned, and this one elsewhere.
    """
    vector = 16 // element_size
    block_cols = triton.next_power_of_2(n_cols // vector * vector)
    sizes = max(block_cols, 32 * vector), element_size
    if aligned:
        return replace(tiled.choose_config(*sizes, vector), rows=1)
    return replace(choose_config(*sizes, same_shift), rows=1)


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args: as for `kernels.tiled.launch_for`.
    """
    n_rows, n_cols = x.shape
    if config is None:
        _, same_shift = alignment(output, x)
        config = choose_config(n_cols, x.element_size(), same_shift)
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(n_rows, config.rows),),
        scalars=(output.stride(0), x.stride(0), row_shift(x), n_rows, n_cols),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, wherever rows start.

    Args, returns, raises: as `kernels.tiled.softmax`.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        launch_for(output, x)(output, x)
    return output
