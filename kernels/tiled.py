"""Tiles of rows, in wide accesses whatever the length of a row.

Builds on: `kernels.persistent`.
Changes: a program takes one tile and ends, so that the GPU deals the tiles out; a row
    that starts anywhere is moved in accesses of up to 16 bytes, its few elements before
    and after them apart; loads ask L2 to keep their lines; 16-bit values stay 16 bits
    wide between the passes over them.
Costs: MN values read and MN written.
Source: measured (`notebooks/recorded/`); PTX ISA, cache eviction priority hints.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.persistent import traffic

__all__ = [
    "MAX_COLS",
    "Plan",
    "accesses",
    "pieces",
    "plan",
    "softmax",
    "softmax_kernel",
    "traffic",
]

MAX_COLS = 32768
"""The longest row: 32 warps hold it with 32 values for each thread."""

MAX_ROWS = 2**31 - 1
"""The most programs along a grid's first axis; a tile has a row at least."""

TILE_BYTES = 2048  # shorter rows share a tile
BYTES_PER_WARP = 4096  # 128 bytes for each thread
SHORT_BYTES = 384  # of a row that has edges: most of its work is at them

INTERPRETED = tl.constexpr(backend.INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def again(x):
    """x, to be converted from 16 bits anew where it is used, not kept in 32.

    A move that the compiler may not look into: without it the float32 values of one
    pass are kept for the next, in twice the registers.
    """
    if INTERPRETED or x.dtype.primitive_bitwidth == 32:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def power(x, top):
    """exp(x - top), in float32."""
    return tl.exp2((x.to(tl.float32) - top) * LOG2E)


@triton.jit
def fetch(ptrs, inside):
    """Loads, with -inf for what is not inside; L2 keeps the lines as long as it can."""
    return tl.load(ptrs, mask=inside, other=-float("inf"), eviction_policy="evict_last")


@triton.jit
def split(start, n_cols, VECTOR: tl.constexpr):
    """How many elements of a row come before its first aligned one, and in its body.

    Args:
        start: of the row, in elements from an aligned address.
        n_cols: the length of the row.
        VECTOR: elements of an aligned access, a power of two.
    """
    head = tl.minimum((-start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head) & -VECTOR


@triton.jit
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
    EDGES: tl.constexpr,
    SAME: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One program computes the softmax of one tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        output_row_stride, input_row_stride: elements from one row to the next; columns
            follow each other.
        input_shift: elements from an aligned address to the input's first.
        n_rows, n_cols: the tensors' shape.
        ROWS: of a tile, a power of two.
        BLOCK_COLS, REST_COLS: columns of the tile, in two powers of two, or one and 0.
        VECTOR: elements of an access. Without EDGES all rows start at multiples of it.
        EDGES: rows start anywhere: what lies around the aligned accesses goes apart.
        SAME: output rows lie as far from an aligned address as the input's do.
        KEEP: numerators are kept for the store, not computed again.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    real = rows < n_rows
    rows = rows.to(tl.int64)
    if EDGES:
        row = rows * input_row_stride
        head, body = split(row + input_shift, n_cols, VECTOR)
        first = (row + input_shift + head) // VECTOR * VECTOR  # so the compiler knows
        edge = tl.arange(0, 2 * VECTOR)[None, :]
        is_head = edge < VECTOR
        at = tl.where(is_head, edge, head + body + edge - VECTOR)
        at_edge = real & (at < tl.where(is_head, head, n_cols))
        z = fetch(input_ptr + row + at, at_edge)
        input_ptr = tl.multiple_of(input_ptr - input_shift, 16)
        inside = real & (cols // VECTOR * VECTOR < body)
    else:
        first = rows * (input_row_stride // VECTOR * VECTOR)
        body = n_cols // VECTOR * VECTOR
        inside = real & (cols < body)
    input_ptrs = input_ptr + first
    x = fetch(input_ptrs + cols, inside)
    top = tl.max(x.to(tl.float32), axis=1)[:, None]
    if REST_COLS:
        rest_cols = BLOCK_COLS + tl.arange(0, REST_COLS)[None, :]
        if EDGES:
            rest_inside = real & (rest_cols // VECTOR * VECTOR < body)
        else:
            rest_inside = real & (rest_cols < body)
        rest = fetch(input_ptrs + rest_cols, rest_inside)
        top = tl.maximum(top, tl.max(rest.to(tl.float32), axis=1)[:, None])
    if EDGES:
        top = tl.maximum(top, tl.max(z.to(tl.float32), axis=1)[:, None])

    numerator = power(x if KEEP else again(x), top)
    total = tl.sum(numerator, axis=1)[:, None]
    if REST_COLS:
        total += tl.sum(power(again(rest), top), axis=1)[:, None]
    if EDGES:
        total += tl.sum(power(z, top), axis=1)[:, None]
    factor = 1 / total

    if EDGES:
        if SAME:
            tl.store(output_ptr + row + at, power(z, top) * factor, mask=at_edge)
            output_ptrs = tl.multiple_of(output_ptr - input_shift, 16) + first
        else:
            row = rows * output_row_stride
            tl.store(output_ptr + row + at, power(z, top) * factor, mask=at_edge)
            output_ptrs = output_ptr + (row + head)
    else:
        output_ptrs = output_ptr + rows * (output_row_stride // VECTOR * VECTOR)
    if not KEEP:
        numerator = power(again(x), top)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)
    if REST_COLS:
        numerator = power(again(rest), top)
        tl.store(output_ptrs + rest_cols, numerator * factor, mask=rest_inside)


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out; `plan` chooses it."""

    rows: int
    block_cols: int
    rest_cols: int
    vector: int
    edges: bool
    same: bool
    keep: bool
    num_warps: int
    maxnreg: int | None = None

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {
            "ROWS": self.rows,
            "BLOCK_COLS": self.block_cols,
            "REST_COLS": self.rest_cols,
            "VECTOR": self.vector,
            "EDGES": self.edges,
            "SAME": self.same,
            "KEEP": self.keep,
            "num_warps": self.num_warps,
            "maxnreg": self.maxnreg,
        }


def shift(x: torch.Tensor) -> int:
    """How many elements x's first one lies after an address that 16 divides."""
    return x.data_ptr() % 16 // x.element_size()


@functools.lru_cache(maxsize=4096)
def accesses(
    n_cols: int,
    element_size: int,
    output_row: tuple[int, int],
    input_row: tuple[int, int],
) -> tuple[int, bool, bool]:
    """The widest accesses that rows allow: VECTOR, EDGES and SAME of the kernel.

    Args:
        n_cols: the length of a row, in elements.
        element_size: bytes per element.
        output_row, input_row: the stride of rows and the `shift` of the first.
    """
    widest = 16 // element_size
    narrower = [2] if n_cols * element_size < SHORT_BYTES else []
    for vector in (widest, widest // 2, *narrower):
        if all(n % vector == 0 for n in (n_cols, *output_row, *input_row)):
            return vector, False, True
    if n_cols * element_size < SHORT_BYTES:
        widest = min(widest, 4)
    return widest, True, output_row == input_row


@functools.lru_cache(maxsize=4096)
def plan(n_cols: int, element_size: int, vector: int, edges: bool, same: bool) -> Plan:
    """The layout for rows of n_cols values of element_size bytes each.

    A tile has TILE_BYTES at least, and a warp for every BYTES_PER_WARP.
    """
    body = max(n_cols // vector * vector, 1) if edges else n_cols
    block_cols, rest_cols = pieces(body, vector)
    row_bytes = (block_cols + rest_cols) * element_size
    fitting = math.log2(TILE_BYTES / (body * element_size))
    wide = vector * element_size == 16
    rows = max(1, 2 ** (round(fitting) if wide else math.ceil(fitting)))
    if edges:
        rows = max(1, 2 ** int(math.log2(TILE_BYTES / row_bytes)))
    tile_bytes = rows * row_bytes
    warps = tile_bytes / BYTES_PER_WARP
    if edges and tile_bytes >= 16384:
        num_warps = 2 ** math.ceil(math.log2(warps / 2))
    elif edges and body * element_size < SHORT_BYTES:
        num_warps = 2
    else:
        num_warps = max(1, 2 ** int(math.log2(min(warps, 8 if warps < 32 else 16))))
    keep = tile_bytes <= BYTES_PER_WARP or element_size == 4
    return Plan(rows, block_cols, rest_cols, vector, edges, same, keep, num_warps)


def pieces(n_cols: int, vector: int) -> tuple[int, int]:
    """The powers of two that hold n_cols: one, or two where one would be half empty."""
    block_cols = triton.next_power_of_2(n_cols)
    if block_cols <= 4 * vector or n_cols > block_cols * 5 // 8:
        return block_cols, 0
    half = block_cols // 2
    return half, max(triton.next_power_of_2(n_cols - half), vector)


def arguments(
    output: torch.Tensor, x: torch.Tensor
) -> tuple[int, tuple[int, ...], dict[str, int]]:
    """The grid, the numbers after the two pointers, and the constants of a launch.

    Args:
        output, x: matrices of one shape, not empty, with contiguous columns.
    """
    n_rows, n_cols = x.shape
    output_row, input_row = (output.stride(0), shift(output)), (x.stride(0), shift(x))
    wide = accesses(n_cols, x.element_size(), output_row, input_row)
    layout = plan(n_cols, x.element_size(), *wide)
    numbers = (output_row[0], *input_row, n_rows, n_cols)
    return triton.cdiv(n_rows, layout.rows), numbers, layout.constants


def launch(output: torch.Tensor, x: torch.Tensor) -> None:
    """One launch on such matrices."""
    n_programs, numbers, constants = arguments(output, x)
    softmax_kernel[(n_programs,)](output, x, *numbers, **constants)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, by tiles of rows.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides; columns that do not follow each other in memory are
            copied first.

    Returns:
        (M, N) in x's dtype, contiguous; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(output, x if x.stride(1) == 1 else x.contiguous())
    return output
