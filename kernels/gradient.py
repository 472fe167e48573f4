"""The way back: the gradient for x, from y = softmax(x) and the gradient for y.

Builds on: `tiled`, `unaligned` and `cooperative`; one kernel does here what theirs do.
Changes: a program holds two inputs, y and the gradient, and reduces them to one number
    for each row, the sum of their products. In the block of a tile's edges, a column is
    a row of the tile, so that no thread computes what another thread computes too.
Costs: 2MN values read and MN written, and a 64-bit word for each part of a long row.
Source: y * (gradient - sum(gradient * y)), from softmax's Jacobian diag(y) - y yᵀ.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cooperative
from kernels.cooperative import INTERPRETED, choose_task, count_parts, pack
from kernels.lab import launch
from kernels.lab.backward import Backward
from kernels.lab.launch import Launch, Workspace, constants_of, pointer_to
from kernels.tiled import SHORT_BYTES, opaque_move
from kernels.unaligned import edge_columns, split_row

TILE_BYTES = 2048  # of y: shorter rows share a tile
BYTES_PER_WARP = 4096  # of y, and as many of the gradient: 256 bytes in each thread
LONGEST_TILE = 32768  # bytes of the longest row of y that a program takes by itself


@triton.jit
def load_both(gradient_ptr, y_ptr, offsets, inside):
    """Loads what is inside of both, 0 elsewhere, and asks L2 to keep the lines."""
    kept: tl.constexpr = "evict_last"
    g = tl.load(gradient_ptr + offsets, inside, other=0.0, eviction_policy=kept)
    y = tl.load(y_ptr + offsets, inside, other=0.0, eviction_policy=kept)
    return g, y


@triton.jit
def dot(g, y, AXIS: tl.constexpr):
    """The sum of the products along an axis, in float32."""
    return tl.sum(g.to(tl.float32) * y.to(tl.float32), axis=AXIS)


@triton.jit
def combine(g, y, row_dot):
    """y * (g - row_dot), in float32; 16-bit values are not kept as float32 for it."""
    g, y = opaque_move(g, True), opaque_move(y, True)
    return y.to(tl.float32) * (g.to(tl.float32) - row_dot)


@triton.jit
def look(words_ptr, tag, n_parts, BLOCK_PARTS):
    """Reads a row's words: the parts' sums, which parts are missing, and how many."""
    parts = tl.arange(0, BLOCK_PARTS)
    is_part = parts < n_parts
    words = tl.load(words_ptr + parts, mask=is_part, other=0, volatile=True)
    missing = is_part & ~cooperative.has_tag(words, tag)
    return cooperative.unpack(words), missing, tl.sum(missing.to(tl.int32), axis=0)


# Only n_parts = 1 is compiled for itself. Then no program divides by it.
@triton.jit(
    do_not_specialize=["tag", "n_rows", "n_cols"],
    do_not_specialize_on_alignment=["n_parts"],
)
def gradient_kernel(
    output_ptr,
    gradient_ptr,
    y_ptr,
    words_ptr,
    tag,
    n_rows,
    n_cols,
    n_parts,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """One program computes one tile of rows, or one part of one row.

    Args:
        output_ptr, gradient_ptr, y_ptr: contiguous tensors that start at multiples of
            16 bytes, so that all three are aligned in the same places.
        words_ptr: n_parts words (int64) for each row: the parts' sums of products.
        tag: this call's. Neither is used where BLOCK_PARTS is 1.
        n_rows, n_cols: the tensors' shape.
        n_parts: of a row; 1 where a row is not shared.
        ROWS, BLOCK_COLS: of a tile or a part, powers of two. A part has one row.
        BLOCK_PARTS: a power of two, at least n_parts; 1 where a row is not shared.
        PATIENCE: as in `kernels.cooperative`.
        VECTOR: elements that a thread moves at once.
        EDGES: whether rows start anywhere; if not, VECTOR divides n_cols.
    """
    LOOKS: tl.constexpr = 1 if INTERPRETED else PATIENCE  # there, nobody else runs
    own = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    task = own  # the program whose part this program computes; -1 at the end
    while task >= 0:
        rows = task // n_parts * ROWS + tl.arange(0, ROWS)
        part = task % n_parts
        first = part * BLOCK_COLS
        is_row = rows < n_rows
        start = rows.to(tl.int64) * n_cols
        if EDGES:
            head, body = split_row(start, n_cols, VECTOR)
            edge = tl.arange(0, 2 * VECTOR)[:, None]
            edge_cols, at_edge = edge_columns(
                edge, head[None, :], body[None, :], n_cols, VECTOR
            )
            is_there = part == tl.where(edge < VECTOR, 0, n_parts - 1)
            at_edge &= is_row[None, :] & is_there
            edges = start[None, :] + edge_cols
            edge_g, edge_y = load_both(gradient_ptr, y_ptr, edges, at_edge)
            start += head
            inside = is_row[:, None] & (cols // VECTOR * VECTOR < body[:, None] - first)
        else:
            inside = is_row[:, None] & (cols < n_cols // VECTOR * VECTOR - first)
        offsets = (start // VECTOR * VECTOR + first)[:, None] + cols
        g, y = load_both(gradient_ptr, y_ptr, offsets, inside)
        row_dot = dot(g, y, 1)
        if EDGES:
            row_dot += dot(edge_g, edge_y, 0)

        next_task = -1
        if BLOCK_PARTS > 1:
            part_dot = tl.sum(row_dot, axis=0)  # of the only row
            row_ptr = words_ptr + (task // n_parts).to(tl.int64) * n_parts
            tl.atomic_xchg(row_ptr + part, pack(part_dot, tag), sem="relaxed")
            dots, _, n_missing = look(row_ptr, tag, n_parts, BLOCK_PARTS)
            looks = 1
            while (n_missing > 0) & (task == own) & (looks < LOOKS):
                dots, _, n_missing = look(row_ptr, tag, n_parts, BLOCK_PARTS)
                looks += 1
            row_dot = tl.full((ROWS,), tl.sum(dots, axis=0), tl.float32)
            if (n_missing > 0) | (task != own):
                dots, missing, n = look(row_ptr, tag, n_parts, BLOCK_PARTS)
                next_task = choose_task(missing, n, own, n_parts, BLOCK_PARTS)
        if next_task < 0:
            if EDGES:
                edge_x = combine(edge_g, edge_y, row_dot[None, :])
                tl.store(output_ptr + edges, edge_x, mask=at_edge)
            x = combine(g, y, row_dot[:, None])
            tl.store(output_ptr + offsets, x, mask=inside)
        task = next_task


@dataclass(frozen=True)
class Config:
    """The kernel's constants and launch options; `choose_config` chooses them."""

    rows: int
    block_cols: int
    block_parts: int
    vector: int
    edges: bool
    patience: int
    num_warps: int
    maxnreg: int | None = None


def choose_config(n_rows: int, n_cols: int, element_size: int) -> Config:
    """The configuration for n_rows rows of n_cols values, on the current GPU.

    As in `tiled` and `unaligned` up to LONGEST_TILE bytes of a row, and in
    `cooperative` beyond that, with half of the bytes in a part, because a thread holds
    as many of the gradient. A value has element_size bytes.
    """
    vector = 16 // element_size
    if n_cols % vector and n_cols * element_size < SHORT_BYTES:
        vector = 4
    edges = n_cols % vector > 0
    body = max(n_cols // vector, 1) * vector
    row_bytes = body * element_size
    if row_bytes <= LONGEST_TILE:
        block_cols = launch.power_of_2(body)
        rows = max(1, TILE_BYTES // (block_cols * element_size))
        warps = rows * block_cols * element_size // BYTES_PER_WARP
        return Config(rows, block_cols, 1, vector, edges, 1, max(1, warps))
    sms = launch.n_sms()
    if n_rows * row_bytes < cooperative.FEW_BYTES * sms:
        part_bytes, num_warps, maxnreg = 8192, 4, 64
    elif row_bytes > cooperative.HELD_BYTES * sms // 2:
        part_bytes, num_warps, maxnreg = 32768, 4, 168
    else:
        part_bytes, num_warps, maxnreg = 16384, 4, 96
    block_cols = part_bytes // element_size
    n_parts = count_parts(n_cols, block_cols, vector)
    block_parts = max(32 * num_warps, launch.power_of_2(n_parts))
    n_held = launch.programs_at_once(num_warps, maxnreg)
    patience = cooperative.PATIENCE if n_parts <= n_held else 1
    shape = 1, block_cols, block_parts
    return Config(*shape, vector, edges, patience, num_warps, maxnreg)


def launch_for(
    output: Tensor, gradient: Tensor, y: Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the gradient for x to output.

    Args:
        output, gradient, y: contiguous matrices of one shape, not empty, that start at
            multiples of 16 bytes; the last two of one dtype, not float64. Not checked.
        config: for the kernel, not checked; None lets `choose_config` choose.
    """
    n_rows, n_cols = y.shape
    if config is None:
        config = choose_config(n_rows, n_cols, y.element_size())
    n_parts = count_parts(n_cols, config.block_cols, config.vector)
    shared = n_parts > 1
    return Launch(
        kernel=gradient_kernel,
        grid=(launch.ceil_div(n_rows, config.rows) * n_parts,),
        scalars=(*(() if shared else (0, 0)), n_rows, n_cols, n_parts),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(gradient), pointer_to(y)),
        workspace=Workspace(n_rows * n_parts) if shared else None,
    )


_backward = Backward("softmax_backward", launch_for)


def softmax_backward(
    gradient: Tensor, y: Tensor, dim: int = -1, dtype: torch.dtype | None = None
) -> Tensor:
    """The gradient for x, from the gradient for y = softmax(x, dim).

    Args, returns, raises: as `kernels.lab.backward.Backward.__call__`.
    """
    return _backward(gradient, y, dim, dtype)
