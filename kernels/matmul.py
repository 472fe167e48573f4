"""Matmul: a tile of the product per program, and what is fused behind it.

Builds on: `kernels.strided` (masks and strides), in two dimensions and along a loop.
Changes: a program walks along K. In each step it multiplies a block of A by a block of
    B on the tensor cores and adds the product to a tile of C in float32.
Costs: 2MNK operations. The programs load MNK / BLOCK_N + MNK / BLOCK_M values, most of
    them from L2: the order of the programs decides how many. MN values are written.
Source: Tillet, "Introducing Triton", 2021, and Triton's tutorials 3 and 9; the sizes
    of the tiles are measured (`notebooks/recorded/`).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.lab import backend, gpu, products
from kernels.lab.descriptors import DescriptorLaunch, described, fits
from kernels.lab.gpu import Gpu
from kernels.lab.launch import Launch, constants_of, pointer_to

ACTIVATIONS = (None, "leaky_relu", "softmax")
MAX_SOFTMAX_COLS = 256  # one tile must hold a row
SLOPE = tl.constexpr(0.01)  # of the leaky ReLU below 0, as in PyTorch
GROUP_M = 8  # rows of tiles in a group
TENSOR_CORES, TMA = 80, 90  # the compute capability from which Triton uses each
TILES = (  # BLOCK_M, BLOCK_N, BLOCK_K, warps, stages: swept on an H200
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 3),
)
TILES_WITHOUT = ((64, 64, 16, 4, 2),)  # larger ones spill registers


@triton.jit
def tile_of(program, m, n, BLOCK_M, BLOCK_N, GROUP_M):
    """The tile of C that a program computes, as its row and its column of tiles.

    The programs go down GROUP_M rows of tiles, then on to the next column.
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    place = program % (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP_M)  # the last may be lower
    return first + place % height, place // height


@triton.jit
def activate(acc, cols, n, ACTIVATION: tl.constexpr):
    """What is done to a tile of the product, in registers, before it is stored."""
    if ACTIVATION == "leaky_relu":
        acc = tl.where(acc > 0, acc, SLOPE * acc)
    if ACTIVATION == "softmax":
        x = tl.where(cols < n, acc, -float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        acc = numerator / tl.sum(numerator, axis=1)[:, None]
    return acc


@triton.jit
def matmul_kernel(
    output_ptr,
    a_ptr,
    b_ptr,
    output_row_stride,
    a_row_stride,
    a_col_stride,
    b_row_stride,
    b_col_stride,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program computes one tile of C, the activation of A · B.

    Args:
        output_ptr, a_ptr, b_ptr: the first elements of C (m, n), A (m, k) and B (k, n).
        *_row_stride, *_col_stride: elements from one row, or column, to the next. C's
            columns are adjacent.
        m, n, k: the sizes.
        ACTIVATION: one of ACTIVATIONS; "softmax" needs n <= BLOCK_N.
        BLOCK_M, BLOCK_N: the shape of the tile.
        BLOCK_K: columns of A, and rows of B, in one step along K.
        GROUP_M: see `tile_of`.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    cols = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows * a_row_stride + inner[None, :] * a_col_stride
    b_ptrs = b_ptr + inner[:, None] * b_row_stride + cols * b_col_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        inside = inner < k - start
        # A product with 0 adds nothing: 0 is the identity of this sum.
        a = tl.load(a_ptrs, mask=(rows < m) & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (cols < n), other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BLOCK_K * a_col_stride
        b_ptrs += BLOCK_K * b_row_stride
    c = activate(acc, cols, n, ACTIVATION)
    output_ptrs = output_ptr + rows * output_row_stride + cols
    tl.store(output_ptrs, c, mask=(rows < m) & (cols < n))


@triton.jit
def descriptor_kernel(
    output_desc,
    a_desc,
    b_desc,
    m,
    n,
    k,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """As `matmul_kernel`, with a descriptor of each matrix in place of its pointers.

    A block that reaches over a matrix's edge is loaded as zeros there, and not stored.
    """
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    cols = col + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        a = a_desc.load([row, start])
        b = b_desc.load([start, col])
        acc = tl.dot(a, b, acc)
    c = activate(acc, cols, n, ACTIVATION)
    output_desc.store([row, col], c.to(output_desc.dtype))


@dataclass(frozen=True)
class Config:
    """The constants of a launch; see `matmul_kernel`."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def choose_config(m: int, n: int, gpu: Gpu, softmax: bool = False) -> Config:
    """The configuration for a product of m rows and n columns on a GPU.

    Large tiles load least, but a small product has few of them. So this takes the first
    of TILES (from large to small) that has room for two stages and leaves at most a
    quarter of the SMs without a tile. A tile for a softmax is as wide as the product.
    """
    high, wide = (max(16, triton.next_power_of_2(size)) for size in (m, n))
    tiles = TILES if gpu.compute_capability >= TENSOR_CORES else TILES_WITHOUT
    if softmax:
        tiles = [(t[0], wide, min(t[2], 64), 8 if wide > 128 else 4, 2) for t in tiles]
    for block_m, block_n, block_k, warps, stages in tiles:
        room = gpu.shared_per_block // (2 * (block_m + block_n) * block_k)
        programs = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        config = Config(block_m, block_n, block_k, GROUP_M, warps, min(stages, room))
        if room >= 2 and programs >= 3 * gpu.sms / 4:
            break
    return replace(config, block_m=min(block_m, high), block_n=min(block_n, wide))


def launch_for(
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    activation: str | None = None,
    with_descriptors: bool = True,
    on: Gpu | None = None,
) -> Launch:
    """The launch that writes activation(a · b) to output.

    Args:
        output, a, b: (m, n), (m, k) and (k, n), on any device, "meta" included.
            Output's columns are adjacent.
        activation: one of ACTIVATIONS.
        with_descriptors: whether to use descriptors where they fit all three tensors
            and the GPU copies by them.
        on: the GPU that the launch is for; None means the one here.
    """
    (m, k), n, tensors = a.shape, b.shape[1], (output, a, b)
    on = on or gpu.here()
    c = choose_config(m, n, on, activation == "softmax")
    grid = (triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n),)
    constants = {"ACTIVATION": activation, **constants_of(c)}
    if with_descriptors and on.compute_capability >= TMA and fits(*tensors):
        blocks = (c.block_m, c.block_n), (c.block_m, c.block_k), (c.block_k, c.block_n)
        forms = described(tensors, blocks)
        return DescriptorLaunch(descriptor_kernel, grid, (m, n, k), constants, forms)
    scalars = (output.stride(0), *a.stride(), *b.stride(), m, n, k)
    pointers = tuple(map(pointer_to, tensors))
    return Launch(matmul_kernel, grid, scalars, constants, pointers)


def matmul(
    a: torch.Tensor, b: torch.Tensor, activation: str | None = None
) -> torch.Tensor:
    """Computes activation(a · b), summed in float32 and rounded once.

    Args:
        a, b: (M, K) and (K, N), float16 or bfloat16, of any strides.
        activation: None, "leaky_relu" (slope 0.01), or "softmax" of every row, for
            which N is at most MAX_SOFTMAX_COLS.

    Returns:
        (M, N) in a's dtype, contiguous; the product is 0 where K is 0.

    Raises:
        TypeError, ValueError: no such operands or activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    products.validate(a, b, MAX_SOFTMAX_COLS if activation == "softmax" else None)
    output = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    if backend.INTERPRETED:  # its tl.dot takes the bits of a bfloat16 for an integer
        a, b = a.float(), b.float()
    if output.numel():
        launch_for(output, a, b, activation)(output, a, b)
    return output
