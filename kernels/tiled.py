"""Tiles of short rows, loaded in the widest accesses that the rows' alignment allows.

Builds on: `kernels.persistent`.
Changes: a program takes one tile and ends, so the GPU hands the tiles out. The compiler
    is told which power of two divides the rows' starts, so that threads move up to 16
    bytes at once. L2 is asked to keep lines. Registers hold 16-bit values as they are.
Costs: MN values read and MN written.
Source: measured (`notebooks/recorded/`); PTX ISA, cache eviction priority hints.
"""

import functools
import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.lab import backend, launch
from kernels.lab.launch import SIZES, Launch, ceil_div, constants_of, pointer_to

MAX_COLS = 32768  # 64 float32 values in each thread, or 128 values of 16 bits
MAX_ROWS = 2**31 - 1  # the most programs of a grid; a tile has at least one row
TILE_BYTES = 2048  # shorter rows share a tile
BYTES_PER_WARP = 4096  # 128 bytes in each thread
SHORT_BYTES = 384  # rows shorter than this may use accesses of two elements
INTERPRETED = tl.constexpr(backend.INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
# PTX: two float32 of one register. bfloat16 is the upper half of float32.
FROM_BFLOAT16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
FROM_FLOAT16 = tl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
)


@triton.jit
def exp_shifted(x, row_max):
    """exp(x - row_max), in float32."""
    return tl.exp2((x.to(tl.float32) - row_max) * LOG2E)


@triton.jit
def load_or_neg_inf(ptrs, inside):
    """Loads what is inside, -inf elsewhere, and asks L2 to keep the lines."""
    return tl.load(ptrs, mask=inside, other=-float("inf"), eviction_policy="evict_last")


@triton.jit
def widen(x):
    """The float32 values of x, converted anew at every call.

    The compiler cannot see that, so it keeps no float32 of one pass for the next.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth == 32:
        return x.to(tl.float32)
    code: tl.constexpr = FROM_BFLOAT16 if x.dtype == tl.bfloat16 else FROM_FLOAT16
    return tl.inline_asm_elementwise(
        code, "=&r,=&r,r", [x], dtype=tl.float32, is_pure=False, pack=2
    )


@triton.jit
def block_max(x):
    """The maximum of each row of a block, as a column."""
    return tl.max(x.to(tl.float32), axis=1)[:, None]


@triton.jit
def block_sum(x, row_max):
    """The sum of exp(x - row_max) over each row of a block, as a column."""
    return tl.sum(exp_shifted(widen(x), row_max), axis=1)[:, None]


@triton.jit(do_not_specialize=SIZES)
def softmax_kernel(
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
    """One program computes the softmax of one tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements; columns are adjacent.
        output_row_stride, input_row_stride: elements from one row to the next.
        n_rows, n_cols: the tensors' shape.
        ROWS: rows of the tile, a power of two.
        BLOCK_COLS, REST_COLS: the tile's columns, as two powers of two whose sum is at
            least n_cols. REST_COLS is 0 where one block is enough.
        VECTOR: elements that a thread moves at once; divides n_cols and rows' starts.
        RECOMPUTE: whether the first block, too, is converted anew for every pass.
    """
    # Shapes: (ROWS, 1) and (1, BLOCK_COLS).
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    rows = rows.to(tl.int64)  # row × stride may exceed 2^31
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    n_cols = n_cols // VECTOR * VECTOR
    input_ptrs = input_ptr + rows * (input_row_stride // VECTOR * VECTOR)

    inside = is_row & (cols < n_cols)
    x = load_or_neg_inf(input_ptrs + cols, inside)
    if not RECOMPUTE:
        x = widen(x)
    row_max = block_max(x)
    if REST_COLS:
        rest_cols = BLOCK_COLS + tl.arange(0, REST_COLS)[None, :]
        rest_inside = is_row & (rest_cols < n_cols)
        rest = load_or_neg_inf(input_ptrs + rest_cols, rest_inside)
        row_max = tl.maximum(row_max, block_max(rest))

    numerator = exp_shifted(widen(x), row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += block_sum(rest, row_max)
    factor = 1 / row_sum  # one division a row, then one product a value
    output_ptrs = output_ptr + rows * (output_row_stride // VECTOR * VECTOR)
    if RECOMPUTE:
        numerator = exp_shifted(widen(x), row_max)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(widen(rest), row_max) * factor
        tl.store(output_ptrs + rest_cols, y, mask=rest_inside)


@dataclass(frozen=True)
class Config:
    """The kernel's constants and its number of warps; `choose_config` chooses them."""

    rows: int
    block_cols: int
    rest_cols: int
    vector: int
    recompute: bool
    num_warps: int


@functools.lru_cache(maxsize=4096)
def choose_vector(n_cols: int, element_size: int, *starts: int) -> int:
    """The elements that a thread moves at once: they divide n_cols and rows' starts.

    16 bytes, or 8, or 2 elements of rows shorter than SHORT_BYTES, or 1. `starts` are
    the strides of rows and the tensors' `row_shift`, in elements.
    """
    short = 2 if n_cols * element_size < SHORT_BYTES else 1
    vectors = 16 // element_size, 8 // element_size, short, 1
    return next(n for n in vectors if math.gcd(n_cols, *starts) % n == 0)


@functools.lru_cache(maxsize=4096)
def choose_config(n_cols: int, element_size: int, vector: int) -> Config:
    """The configuration for rows of n_cols values of element_size bytes.

    A tile has about TILE_BYTES or one row, and a warp for every BYTES_PER_WARP, up to 8
    (16 for 128 KiB). Tiles of 16-bit values and several warps recompute.
    """
    block_cols, rest_cols = split_block(n_cols, vector)
    fitting = math.log2(TILE_BYTES / (n_cols * element_size))
    widest = vector * element_size == 16
    rows = max(1, 2 ** (round(fitting) if widest else math.ceil(fitting)))
    warps = rows * (block_cols + rest_cols) * element_size / BYTES_PER_WARP
    num_warps = max(1, 2 ** int(math.log2(min(warps, 8 if warps < 32 else 16))))
    recompute = warps > 1 and element_size < 4
    return Config(rows, block_cols, rest_cols, vector, recompute, num_warps)


def split_block(n_cols: int, vector: int) -> tuple[int, int]:
    """The powers of two that hold n_cols: two where 3/8 of one would be empty."""
    block_cols = launch.power_of_2(n_cols)
    if block_cols <= 4 * vector or n_cols > block_cols * 5 // 8:
        return block_cols, 0
    half = block_cols // 2
    # A block smaller than an eighth of the first would need as many accesses.
    return half, max(launch.power_of_2(n_cols - half), half // 8, vector, 2)


def launch_for(output: Tensor, x: Tensor, config: Config | None = None) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args:
        output, x: matrices of one shape and dtype, not empty, with adjacent columns.
        config: None lets `choose_config` choose. Nothing is checked.
    """
    n_rows, n_cols = x.shape
    if config is None:
        starts = output.stride(0), x.stride(0), *map(launch.row_shift, (output, x))
        vector = choose_vector(n_cols, x.element_size(), *starts)
        config = choose_config(n_cols, x.element_size(), vector)
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(n_rows, config.rows),),
        scalars=(output.stride(0), x.stride(0), n_rows, n_cols),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: Tensor) -> Tensor:
    """The softmax of every row, by tiles of rows.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides. Columns that are not adjacent are copied first.

    Returns: (M, N) in x's dtype, contiguous; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    return launch.by_rows(launch_for, x, MAX_ROWS, MAX_COLS)
