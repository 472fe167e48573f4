"""The reductions by hand: three CUDA C++ kernels, compiled while the program runs.

Builds on: `kernels.program`, whose formula this is.
Changes: CUDA C++ in place of Triton. The source says which lane holds which values, how
    lanes exchange them, and where threads wait. Three templates in `kernels/cu`: a row
    in the registers of a warp, in the shared memory of a block, and in neither.
Costs: MN values read and MN written; `uncached` reads 3MN.
Source: Zhijing Li, "How to write a fast Softmax CUDA kernel?"; CUDA C++ Programming
    Guide, warp shuffle functions; thresholds are measured (`notebooks/recorded/`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.lab import backend, gpu, nvrtc
from kernels.lab.gpu import Gpu
from kernels.lab.nvrtc import Compiled

SOURCES = Path(__file__).parent / "cu"
KERNELS = ("warp", "block", "uncached")
MAX_ROWS = MAX_COLS = 2**31 - 1
PACKS = (8, 4, 2, 1)  # values that a thread may load at once
BLOCK_SIZES = (128, 256, 512, 1024)
WARP_THREADS = 128  # of a block of `softmax_warp`: four warps
VALUES_PER_LANE = 256  # at most, in `softmax_warp`; they spill from about 200 on
UNROLL, MORE = 4, 8  # loads that a thread of `softmax_block` has under way at once
REDUCTIONS = 256  # bytes of shared memory: 32 maxima and 32 sums
LONGEST_WARP_ROW = {
    4: {1: 8192, 2: 5120, 4: 1280, 8: 2560},
    2: {1: 8192, 2: 6144, 4: 3584, 8: 2560},
}
"""Up to how many columns `softmax_warp` is mostly the faster on an H200
(`cuda_packs.csv`): bytes of a value → pack → columns."""
C_TYPES = {torch.float32: "float", torch.float16: "__half"}
C_TYPES[torch.bfloat16] = "__nv_bfloat16"


def source(file: str) -> str:
    """The text of a file of `kernels/cu`, such as "warp.cu"."""
    return (SOURCES / file).read_text()


def compile(file: str, expression: str, on: Gpu | str | None = None) -> Compiled:
    """Compiles a kernel of `kernels/cu`, on any machine; see `nvrtc.compile`."""
    return nvrtc.compile(source(file), expression, on, [SOURCES])


# ---- choosing ------------------------------------------------------------------------


def pack_fits(pack: int, *matrices: torch.Tensor) -> bool:
    """Whether packs divide the rows, the row strides and the addresses of matrices."""
    return all(
        x.shape[1] % pack == 0
        and (x.shape[0] < 2 or x.stride(0) % pack == 0)
        and x.data_ptr() % (pack * x.element_size()) == 0
        for x in matrices
    )


def largest_pack(*matrices: torch.Tensor) -> int:
    """The largest pack that fits, of at most 16 bytes: what one instruction moves."""
    bits = 16 // matrices[0].element_size()
    for x in matrices:
        stride = x.stride(0) if x.shape[0] > 1 else 0
        bits |= x.shape[1] | stride | x.data_ptr() // x.element_size()
    return bits & -bits  # the lowest bit: the largest power of two that divides all


def lanes_and_packs(n_cols: int, pack: int) -> tuple[int, int]:
    """How many lanes share a row, and how many packs of it each lane holds.

    The lanes are the least power of two that holds the row with one pack each, but at
    most 32.
    """
    n_packs = math.ceil(n_cols / pack)
    lanes = min(32, 2 ** (n_packs - 1).bit_length())
    return lanes, math.ceil(n_packs / lanes)


def choose_block(blocks: Callable[[int], int]) -> int:
    """The block size that has the most threads resident; of equals, the smallest.

    Args:
        blocks: from a block size to the blocks that are resident on an SM.
    """
    return max(BLOCK_SIZES, key=lambda threads: threads * blocks(threads))


def longest(kernel: str, element_size: int, on: Gpu) -> int:
    """The longest row that a kernel takes: what registers or shared memory hold."""
    if kernel == "warp":
        return 32 * VALUES_PER_LANE
    if kernel == "block":
        return (on.shared_per_block - REDUCTIONS) // element_size
    return MAX_COLS


def choose_kernel(n_cols: int, pack: int, element_size: int, on: Gpu) -> str:
    """The kernel for rows of n_cols values of element_size bytes."""
    if n_cols <= LONGEST_WARP_ROW[element_size][pack]:
        return "warp"
    return "block" if n_cols <= longest("block", element_size, on) else "uncached"


@dataclass(frozen=True)
class Config:
    """A launch, but for its tensors; `choose_config` chooses it.

    Attributes:
        kernel: "warp", "block" or "uncached".
        compiled: the instance of its template.
        grid: blocks.
        block: threads of a block; (lanes, rows) for "warp".
        shared: bytes of shared memory of a block, for the row.
    """

    kernel: str
    compiled: Compiled
    grid: int
    block: int | tuple[int, int]
    shared: int = 0


@functools.lru_cache(maxsize=4096)
def choose_config(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype,
    pack: int,
    kernel: str | None = None,
    block: int | None = None,
    on: Gpu | None = None,
) -> Config:
    """Chooses the launch for a matrix and compiles its kernel, on any machine.

    Args:
        n_rows, n_cols, dtype: of the matrix.
        pack: one of PACKS.
        kernel: one of KERNELS; None chooses.
        block: threads of a block, a multiple of 32; None chooses.
        on: the GPU; None means this machine's, or the H200 if there is none.
    """
    on = on or gpu.here()
    kernel = kernel or choose_kernel(n_cols, pack, dtype.itemsize, on)

    def build(*constants: int) -> Compiled:
        arguments = ", ".join(map(str, (C_TYPES[dtype], *constants)))
        return compile(f"{kernel}.cu", f"softmax_{kernel}<{arguments}>", on)

    if kernel == "warp":
        lanes, packs = lanes_and_packs(n_cols, pack)
        rows = (block or WARP_THREADS) // lanes
        grid = math.ceil(n_rows / rows)
        return Config(kernel, build(pack, lanes, packs), grid, (lanes, rows))
    compiled = build(pack, UNROLL)
    shared = n_cols * dtype.itemsize if kernel == "block" else 0
    resident = functools.partial(nvrtc.blocks_per_sm, compiled, shared=shared)
    block = block or choose_block(resident)
    if n_cols > UNROLL * pack * block and not build(pack, MORE).spills:
        compiled = build(pack, MORE)  # a thread has more packs than UNROLL
    return Config(kernel, compiled, n_rows, block, shared)


def softmax(
    x: torch.Tensor,
    *,
    kernel: str | None = None,
    pack: int | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """The softmax of every row, by one of the three kernels.

    Args:
        x: (M, N), float32, float16 or bfloat16, any strides.
        kernel: one of KERNELS; None lets `choose_kernel` choose.
        pack: one of PACKS that fits x (`pack_fits`); None takes the largest.
        block: threads of a block, a multiple of 32 up to 1024; None chooses.

    Returns: (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is no such matrix, or an argument does not fit it.
        RuntimeError: there is no GPU, or cuda-core is not installed.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    if kernel not in (None, *KERNELS):
        raise ValueError(f"kernel must be one of {KERNELS} or None, got {kernel!r}")
    if block is not None and block not in range(32, 1025, 32):
        raise ValueError(
            f"block must be a multiple of 32 from 32 to 1024, or None, got {block!r}"
        )
    n_rows, n_cols = x.shape
    x = x if n_cols == 0 or x.stride(1) == 1 else x.contiguous()
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if pack is not None and not (pack in PACKS and pack_fits(pack, output, x)):
        raise ValueError(
            f"pack must be one of {PACKS} that divides rows, strides and addresses; "
            f"got {pack!r} for shape {tuple(x.shape)} and strides {x.stride()}"
        )
    if x.numel() == 0:
        return output
    most = longest(kernel, x.element_size(), gpu.here()) if kernel else n_cols
    if n_cols > most:
        raise ValueError(
            f"kernel {kernel!r} takes at most {most} columns, got {n_cols}"
        )
    pack = pack or largest_pack(output, x)
    nvrtc.require_gpu()
    with torch.cuda.device_of(x):
        config = choose_config(n_rows, n_cols, x.dtype, pack, kernel, block)
        values = output, x, n_cols, x.stride(0), n_rows, n_cols
        run = config.compiled, config.grid, config.block
        nvrtc.run(*run, *values, shared=config.shared)
    return output
