"""Programs that stay: a grid sized by what fits on the GPU, and a loop over tiles.

Builds on: `kernels.meta`.
Changes: a program takes several rows at a time and goes on to further ones, a grid's
    stride away, so that the loads of the next tile can be in flight during this one.
Costs: MN values read and MN written.
Source: Gupta, Stuart and Owens, "A study of persistent threads style GPU programming",
    InPar 2012; Triton's tutorial 2; the occupancy rules of the CUDA programming guide.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, occupancy
from kernels.meta import pick_num_warps

MAX_COLS = 65536
"""The longest row: beyond it a program's registers overflow by far."""

TILE_BYTES = 4096
"""Rows shorter than this share a tile."""

PIPELINED_COLS = 32768
"""From here on a row of 2-byte values leaves room for a single program on an SM."""

PROGRAMS_PER_SLOT = 16
"""Programs for every one that fits at a time, where the grid is not resident."""

INTERPRETED_PROGRAMS = 4
"""The interpreter runs one program after another; a few show the loop."""


@triton.jit
def softmax_kernel(
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
    NUM_STAGES: tl.constexpr,
):
    """One program computes the softmax of every num_programs-th tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        output_row_stride, output_col_stride: elements from one row of the output to the
            next, and from one column to the next.
        input_row_stride, input_col_stride: the same of the input.
        n_rows, n_cols: the tensors' shape.
        ROWS_PER_TILE: rows computed together, a power of two.
        BLOCK_COLS: n_cols rounded up to a power of two.
        NUM_STAGES: how many tiles are in the software pipeline, 1 for none.
    """
    cols = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)
    n_tiles = tl.cdiv(n_rows, ROWS_PER_TILE)
    for tile in tl.range(
        tl.program_id(0), n_tiles, tl.num_programs(0), num_stages=NUM_STAGES
    ):
        rows = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)[:, None]
        rows = rows.to(tl.int64)
        inside = (rows < n_rows) & (cols < n_cols)
        input_ptrs = input_ptr + rows * input_row_stride + cols * input_col_stride
        x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        output_ptrs = output_ptr + rows * output_row_stride + cols * output_col_stride
        tl.store(output_ptrs, y, mask=inside)


def traffic(n_rows: int, n_cols: int) -> tuple[int, int]:
    """Values read and values written by one call."""
    return n_rows * n_cols, n_rows * n_cols


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out; `plan` chooses it."""

    rows_per_tile: int
    block_cols: int
    num_warps: int
    num_stages: int
    programs_per_slot: int  # 1: every program is resident from the start to the end


def plan(n_cols: int, element_size: int) -> Plan:
    """Chooses the layout of a launch from the length of a row.

    Short rows share a tile of TILE_BYTES. A grid with just one program per resident
    slot divides the work in advance, and the whole GPU waits for its slowest SM; 16
    per slot leave the division to the hardware. Only where a single program of 2-byte
    values fills an SM does the pipeline win more than that loses.

    Args:
        n_cols: the length of a row, in elements.
        element_size: bytes per element.
    """
    block_cols = triton.next_power_of_2(n_cols)
    row_bytes = block_cols * element_size
    rows_per_tile = max(1, TILE_BYTES // row_bytes)
    num_warps = pick_num_warps(rows_per_tile * block_cols, element_size)
    prefetched = min(2, gpu.here().shared_per_block // row_bytes)
    if element_size == 2 and block_cols >= PIPELINED_COLS and prefetched:
        return Plan(rows_per_tile, block_cols, num_warps, 1 + prefetched, 1)
    return Plan(rows_per_tile, block_cols, num_warps, 1, PROGRAMS_PER_SLOT)


@functools.cache
def slots(dtype: torch.dtype, layout: Plan, device: int) -> int:
    """How many programs of this layout the whole GPU holds at a time, at least 1.

    The answer sizes a grid, nothing more: the loop is right for any grid, so an answer
    for another specialisation of the kernel than the one launched does no harm.
    """
    if backend.INTERPRETED:
        return INTERPRETED_PROGRAMS
    example = torch.empty(0, dtype=dtype, device=device)
    compiled = softmax_kernel.warmup(
        *(example, example, 16, 1, 16, 1, 16, 16),
        **_options(layout),
        grid=(1,),
    )
    compiled._init_handles()  # loads the kernel, which tells its registers
    here = gpu.current()
    occupied = occupancy.resident(
        here,
        num_warps=layout.num_warps,
        registers=compiled.n_regs,
        shared=compiled.metadata.shared,
    )
    return max(1, occupied.blocks_per_sm) * here.sms


def _options(layout: Plan) -> dict[str, int]:
    return {
        "ROWS_PER_TILE": layout.rows_per_tile,
        "BLOCK_COLS": layout.block_cols,
        "NUM_STAGES": layout.num_stages,
        "num_warps": layout.num_warps,
    }


def softmax(x: torch.Tensor, *, layout: Plan | None = None) -> torch.Tensor:
    """The softmax of every row, whatever x's strides, by programs that loop over tiles.

    Args:
        x: (M, N), float32, float16 or bfloat16, N at most MAX_COLS, any strides.
        layout: how to lay out the launch; None lets `plan` choose.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix, or does not fit the layout.
    """
    backend.validate(x, max_cols=MAX_COLS)
    n_rows, n_cols = x.shape
    output = torch.empty_like(x)
    if x.numel() == 0:
        return output
    if layout is None:
        layout = plan(n_cols, x.element_size())
    if n_cols > layout.block_cols:
        raise ValueError(
            f"layout must have block_cols of at least {n_cols}, the columns of x, got "
            f"{layout.block_cols}; plan({n_cols}, {x.element_size()}) would do"
        )
    n_tiles = triton.cdiv(n_rows, layout.rows_per_tile)
    n_slots = slots(x.dtype, layout, x.get_device())
    grid = (min(n_tiles, n_slots * layout.programs_per_slot),)
    softmax_kernel[grid](
        *(output, x, *output.stride(), *x.stride(), n_rows, n_cols),
        **_options(layout),
    )
    return output
