"""Programs that stay: a grid sized by what the GPU holds, and a loop over tiles.

Builds on: `kernels.meta`.
Changes: a program takes tile after tile of rows, and can load tiles ahead.
Costs: reads MN values and writes MN.
Source: Gupta, Stuart and Owens, InPar 2012; Triton's tutorial 2, fused softmax.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, occupancy
from kernels.meta import MAX_COLS, pick_num_warps

MAX_ROWS = 2**30  # a tile's number plus the loop's step must fit into 32 bits
TILE_BYTES = 4096  # rows shorter than this share a tile
ONE_PER_SM_COLS = 32768  # from here on a program takes most of an SM's registers


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
    """One program computes tiles p, p + num_programs, … of rows; p is its number.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        *_row_stride, *_col_stride: elements from one row, or column, to the next.
        n_rows, n_cols: the tensors' shape.
        ROWS_PER_TILE: rows computed together, a power of two.
        BLOCK_COLS: n_cols rounded up to a power of two.
        NUM_STAGES: of the loop's pipeline: loads run NUM_STAGES - 1 tiles ahead.
    """
    # Both offsets are 64 bits wide: index × stride may exceed 2^31 along either axis.
    cols = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)
    n_tiles = tl.cdiv(n_rows, ROWS_PER_TILE)
    # The step is the number of programs: any grid computes each tile exactly once.
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, n_tiles, step, num_stages=NUM_STAGES):
        rows = tile * ROWS_PER_TILE + tl.arange(0, ROWS_PER_TILE)[:, None]
        rows = rows.to(tl.int64)
        inside = (rows < n_rows) & (cols < n_cols)  # the last tile may lack rows
        input_ptrs = input_ptr + rows * input_row_stride + cols * input_col_stride
        # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
        x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        # The output has strides of its own.
        output_ptrs = output_ptr + rows * output_row_stride + cols * output_col_stride
        tl.store(output_ptrs, y, mask=inside)


@dataclass(frozen=True)
class Config:
    """How `softmax_kernel` is compiled and launched; `choose_config` chooses it."""

    rows_per_tile: int
    block_cols: int
    num_warps: int
    num_stages: int = 1  # 1 loads nothing ahead
    programs_per_slot: int = 16  # a slot is room for one program; 1: programs stay

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with: its constants, and num_warps."""
        fields = ("rows_per_tile", "block_cols", "num_stages")
        constants = {name.upper(): getattr(self, name) for name in fields}
        return constants | {"num_warps": self.num_warps}


@functools.cache
def choose_config(n_cols: int, element_size: int, aligned: bool = True) -> Config:
    """Chooses the config for rows of n_cols values of element_size bytes each.

    Several programs take turns in a slot, so a fast SM computes more tiles. From
    ONE_PER_SM_COLS on an SM has one slot, and nothing loads while its program computes.
    There a program stays and loads two rows ahead, if they fit and `starts_aligned`.
    """
    block_cols, here = triton.next_power_of_2(n_cols), gpu.here()
    row_bytes = block_cols * element_size
    rows_per_tile = max(1, TILE_BYTES // row_bytes)
    num_warps = pick_num_warps(rows_per_tile * block_cols, element_size)
    gpu_can = here.compute_capability >= 80 and 2 * row_bytes < here.shared_per_block
    if block_cols >= ONE_PER_SM_COLS and aligned and n_cols % 16 == 0 and gpu_can:
        return Config(1, block_cols, num_warps, num_stages=3, programs_per_slot=1)
    return Config(rows_per_tile, block_cols, num_warps)


def starts_aligned(x: torch.Tensor) -> bool:
    """Whether the compiler can know that each row starts at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.stride(1) == 1


@functools.cache
def resident_programs(dtype: torch.dtype, config: Config) -> int:
    """Returns how many programs of a config the GPU holds at a time."""
    if backend.INTERPRETED:
        return 4  # the interpreter runs one after another: a few show the loop
    args = (dtype, dtype, 16, 1, 16, 1, 16, 16)  # aligned rows answer for all rows
    kernel = softmax_kernel.warmup(*args, **config.constants, grid=(1,))
    kernel._init_handles()  # loads the machine code, after which n_regs is known
    needs = {"registers": kernel.n_regs, "shared": kernel.metadata.shared}
    per_sm = occupancy.resident(gpu.here(), num_warps=config.num_warps, **needs)
    return per_sm.blocks_per_sm * gpu.here().sms


def softmax(x: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """Computes the softmax of every row, in programs that loop over tiles.

    Args:
        x: at most (MAX_ROWS, MAX_COLS), float32, float16 or bfloat16, any strides.
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
    config = config or choose_config(n_cols, x.element_size(), starts_aligned(x))
    if n_cols > config.block_cols:
        raise ValueError(
            f"config must have block_cols of at least {n_cols}, got {config.block_cols}"
            f"; choose_config({n_cols}, {x.element_size()}) would do"
        )
    n_tiles = triton.cdiv(n_rows, config.rows_per_tile)
    n_programs = resident_programs(x.dtype, config) * config.programs_per_slot
    grid = (max(1, min(n_programs, n_tiles)),)  # a launch with a grid of 0 is skipped
    strides = (*output.stride(), *x.stride())
    softmax_kernel[grid](output, x, *strides, n_rows, n_cols, **config.constants)
    return output
