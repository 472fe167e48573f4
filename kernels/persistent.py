"""Programs that stay: a grid sized by what the GPU holds, and a loop over tiles.

Builds on: `kernels.meta`.
Changes: a program takes a tile of rows, then the tile a grid's stride away, and so on;
    the loads of later tiles can be on their way while it computes this one.
Costs: MN values read and MN written.
Source: Gupta, Stuart and Owens, "A study of persistent threads style GPU programming
    for GPGPU workloads", InPar 2012; Triton's tutorial 2, fused softmax.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, occupancy
from kernels.meta import MAX_COLS, pick_num_warps, traffic

__all__ = ["MAX_COLS", "MAX_ROWS", "Plan", "plan", "slots", "softmax", "traffic"]

MAX_ROWS = 2**30
"""The number of a tile, one step of the loop further, must fit 32 bits."""

TILE_BYTES = 4096  # rows shorter than this share a tile
PROGRAMS_PER_SLOT = 16  # for each that fits at a time: fewer divide the work coarsely
LONELY_COLS = 32768  # from here on a program fills an SM: 32 warps, most registers
INTERPRETED_SLOTS = 4  # one program runs after the other there: a few show the loop


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
        NUM_STAGES: of the pipeline: loads run NUM_STAGES - 1 tiles ahead.
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


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out; `plan` chooses it."""

    rows_per_tile: int
    block_cols: int
    num_warps: int
    num_stages: int = 1
    programs_per_slot: int = PROGRAMS_PER_SLOT  # 1: each stays to the end

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {
            "ROWS_PER_TILE": self.rows_per_tile,
            "BLOCK_COLS": self.block_cols,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
        }


@functools.cache
def plan(n_cols: int, element_size: int) -> Plan:
    """The layout for rows of n_cols values of element_size bytes each.

    Short rows share a tile. There are several programs per slot, for the GPU to deal
    out: with one per slot the work is divided in advance, and all wait for the slowest.
    But while a lonely program computes, nothing is on its way to its SM. If two more of
    its rows fit shared memory, one program that stays, and loads them ahead, is better.
    (An asynchronous load moves 4 bytes or more, so that rows must be aligned.)
    """
    block_cols = triton.next_power_of_2(n_cols)
    row_bytes = block_cols * element_size
    rows_per_tile = max(1, TILE_BYTES // row_bytes)
    num_warps = pick_num_warps(rows_per_tile * block_cols, element_size)
    room = 2 * row_bytes < gpu.here().shared_per_block
    if block_cols >= LONELY_COLS and room and n_cols % 16 == 0:
        return Plan(1, block_cols, num_warps, num_stages=3, programs_per_slot=1)
    return Plan(rows_per_tile, block_cols, num_warps)


@functools.cache
def slots(dtype: torch.dtype, layout: Plan) -> int:
    """How many programs of a layout the GPU holds at a time.

    This sizes the grid and nothing else, and the loop is right for any grid: so the
    answer for aligned rows serves all others too, and no compiled kernel is kept.
    """
    if backend.INTERPRETED:
        return INTERPRETED_SLOTS
    aligned = (dtype, dtype, 16, 1, 16, 1, 16, 16)  # a dtype stands for a tensor
    kernel = softmax_kernel.warmup(*aligned, **layout.constants, grid=(1,))
    kernel._init_handles()  # loads it, which tells its registers
    needs = {"registers": kernel.n_regs, "shared": kernel.metadata.shared}
    here = gpu.here()
    resident = occupancy.resident(here, num_warps=layout.num_warps, **needs)
    return resident.blocks_per_sm * here.sms


def softmax(x: torch.Tensor, *, layout: Plan | None = None) -> torch.Tensor:
    """The softmax of every row, whatever x's strides, by programs that loop over tiles.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides.
        layout: of the launch; None lets `plan` choose.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix, or does not fit the layout.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty_like(x)
    if x.numel() == 0:
        return output
    n_rows, n_cols = x.shape
    layout = layout or plan(n_cols, x.element_size())
    if n_cols > layout.block_cols:
        raise ValueError(
            f"layout must have block_cols of at least {n_cols}, the columns of x, got "
            f"{layout.block_cols}; plan({n_cols}, {x.element_size()}) would do"
        )
    n_tiles = triton.cdiv(n_rows, layout.rows_per_tile)
    n_programs = slots(x.dtype, layout) * layout.programs_per_slot
    grid = (max(1, min(n_programs, n_tiles)),)  # a grid of 0 would be skipped
    args = (output, x, *output.stride(), *x.stride(), n_rows, n_cols)
    softmax_kernel[grid](*args, **layout.constants)
    return output
