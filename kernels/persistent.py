"""Programs that stay: a grid sized by what the GPU holds, and a loop over tiles.

Builds on: `kernels.meta`.
Changes: a program computes one tile of rows after another, and can load tiles ahead.
Costs: reads MN values and writes MN.
Source: Gupta, Stuart and Owens, "A study of persistent threads style GPU programming
    for GPGPU workloads", InPar 2012; Triton's tutorial 2, fused softmax.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, occupancy
from kernels.meta import MAX_COLS, pick_num_warps

MAX_ROWS = 2**30  # a tile's number plus the loop's step must fit 32 bits
TILE_BYTES = 4096  # rows shorter than this share a tile
ONE_PER_SM_COLS = 32768  # from this length on a program takes most of an SM's registers


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
        *_row_stride, *_col_stride: elements from one row, or column, to the next.
        n_rows, n_cols: the tensors' shape.
        ROWS_PER_TILE: rows computed together, a power of two.
        BLOCK_COLS: n_cols rounded up to a power of two.
        NUM_STAGES: of the loop's pipeline: loads run NUM_STAGES - 1 tiles ahead.
    """
    cols = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)
    n_tiles = tl.cdiv(n_rows, ROWS_PER_TILE)
    # A step is as large as the grid: in any grid, each tile is computed exactly once.
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, n_tiles, step, num_stages=NUM_STAGES):
        rows = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)[:, None]
        rows = rows.to(tl.int64)
        inside = (rows < n_rows) & (cols < n_cols)  # the last tile may lack rows
        input_ptrs = input_ptr + rows * input_row_stride + cols * input_col_stride
        # A masked lane holds -inf: it changes neither the maximum nor, as 0, the sum.
        x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        output_ptrs = output_ptr + rows * output_row_stride + cols * output_col_stride
        tl.store(output_ptrs, y, mask=inside)


@dataclass(frozen=True)
class Config:
    """How `softmax_kernel` is compiled and launched; `choose_config` chooses it."""

    rows_per_tile: int
    block_cols: int
    num_warps: int
    num_stages: int = 1  # 1 loads nothing ahead
    programs_per_slot: int = 16  # for each program that can be resident; 1: all stay

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with: its constants, and num_warps."""
        fields = ("rows_per_tile", "block_cols", "num_stages")
        constants = {name.upper(): getattr(self, name) for name in fields}
        return constants | {"num_warps": self.num_warps}


@functools.cache
def choose_config(n_cols: int, element_size: int) -> Config:
    """Chooses the config for rows of n_cols values of element_size bytes each.

    Short rows share a tile. A slot is room for one program; several follow each other
    in it, so a fast SM computes more tiles than a slow SM. At ONE_PER_SM_COLS an SM has
    a single slot: while its program computes, nothing is on its way to the SM. There a
    program that stays and loads two rows ahead is faster. It needs `cp.async` (below
    compute capability 8.0 no config loads ahead), shared memory for two more rows, and
    aligned rows, because an asynchronous load moves 4 bytes or more.
    """
    block_cols = triton.next_power_of_2(n_cols)
    row_bytes = block_cols * element_size
    rows_per_tile = max(1, TILE_BYTES // row_bytes)
    num_warps = pick_num_warps(rows_per_tile * block_cols, element_size)
    has_cp_async = gpu.here().compute_capability >= 80
    has_room = 2 * row_bytes < gpu.here().shared_per_block
    if block_cols >= ONE_PER_SM_COLS and n_cols % 16 == 0 and has_cp_async and has_room:
        return Config(1, block_cols, num_warps, num_stages=3, programs_per_slot=1)
    return Config(rows_per_tile, block_cols, num_warps)


@functools.cache
def resident_programs(dtype: torch.dtype, config: Config) -> int:
    """Returns how many programs of a config the GPU holds at a time."""
    if backend.INTERPRETED:
        return 4  # the interpreter runs one after another: a few show the loop
    # Aligned rows answer for all rows: the loop is right for a grid of any size.
    aligned = (dtype, dtype, 16, 1, 16, 1, 16, 16)  # a dtype stands for a tensor
    kernel = softmax_kernel.warmup(*aligned, **config.constants, grid=(1,))
    kernel._init_handles()  # loads the machine code, after which n_regs is known
    needs = {"registers": kernel.n_regs, "shared": kernel.metadata.shared}
    per_sm = occupancy.resident(gpu.here(), num_warps=config.num_warps, **needs)
    return per_sm.blocks_per_sm * gpu.here().sms


def softmax(x: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """Computes the softmax of every row, in programs that loop over tiles.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides.
        config: how to launch the kernel; None lets `choose_config` choose.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix, or its rows exceed the config's.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty_like(x)
    if x.numel() == 0:
        return output
    n_rows, n_cols = x.shape
    config = config or choose_config(n_cols, x.element_size())
    if n_cols > config.block_cols:
        raise ValueError(
            f"config must have block_cols of at least {n_cols}, the columns of x, got "
            f"{config.block_cols}; choose_config({n_cols}, {x.element_size()}) would do"
        )
    n_tiles = triton.cdiv(n_rows, config.rows_per_tile)
    n_programs = resident_programs(x.dtype, config) * config.programs_per_slot
    grid = (max(1, min(n_programs, n_tiles)),)  # a launch with a grid of 0 is skipped
    args = (output, x, *output.stride(), *x.stride(), n_rows, n_cols)
    softmax_kernel[grid](*args, **config.constants)
    return output
