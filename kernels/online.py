"""Rows of any length: a loop over blocks of columns, and a running (max, sum) pair.

Builds on: `kernels.tiled`.
Changes: a program sees its rows block after block. It keeps a pair (max, sum) of what
    it has seen, merges in the pair of each block, and reads the rows a second time,
    last block first, to normalise them.
Costs: 2MN values read and MN written; what the L2 cache still holds of a row at the
    second reading does not come from memory. `three_pass` reads 3MN.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
    PTX ISA, cache eviction priority hints.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, counters

__all__ = [
    "VARIANTS",
    "Plan",
    "launch",
    "merge",
    "merge_all",
    "pair",
    "plan",
    "profile_dram",
    "run",
    "softmax",
    "softmax_kernel",
    "three_pass",
    "three_pass_kernel",
    "traffic",
]

BLOCK_BYTES = 65536  # of a row, at most: 32 warps load 64 bytes for each thread
BYTES_PER_WARP = 2048
TILE_BYTES = 4096  # shorter rows share a tile
LINE_BYTES = 128  # a cache line
VECTOR_BYTES = 16  # the widest access of a thread

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(x, top):
    """exp(x - top), and 0 rather than NaN where both are -inf."""
    finite = tl.where(top == -float("inf"), 0.0, top)
    return tl.exp2((x - finite) * LOG2E)


@triton.jit
def pair(x):
    """(max, sum of exp(x - max)) along axis 1."""
    top = tl.max(x, axis=1)
    return top, tl.sum(power(x, tl.expand_dims(top, 1)), axis=1)


@triton.jit
def merge(top, total, other_top, other_total):
    """The pair of two parts together, from the pair of each; (-inf, 0) is of none."""
    higher = tl.maximum(top, other_top)
    return higher, total * power(top, higher) + other_total * power(other_top, higher)


@triton.jit
def merge_all(top, total):
    """All pairs along axis 1, merged at once."""
    highest = tl.max(top, axis=1)
    return highest, tl.sum(total * power(top, tl.expand_dims(highest, 1)), axis=1)


@triton.jit
def first_element(row, n_inner, outer_stride, inner_stride):
    """The offset of each row's first element."""
    return row // n_inner * outer_stride + row % n_inner * inner_stride


@triton.jit
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_outer_stride,
    output_col_stride,
    output_inner_stride,
    input_outer_stride,
    input_col_stride,
    input_inner_stride,
    n_rows,
    n_cols,
    n_inner,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    LANES: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HINTS: tl.constexpr,
):
    """One program computes the softmax of ROWS rows, however long.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        output_outer_stride, output_col_stride, output_inner_stride: elements from one
            index to the next along the three dimensions of the output.
        input_outer_stride, input_col_stride, input_inner_stride: the same of the input.
        n_rows: in all. Row r is at (r // n_inner, :, r % n_inner).
        n_cols: the length of a row.
        n_inner: the size of the inner dimension; all rows, if there is no outer one.
        ROWS: computed together, a power of two.
        BLOCK_COLS: columns in registers at a time, a power of two.
        LANES: running pairs for each row, a power of two up to BLOCK_COLS. Lane i keeps
            the pair of every BLOCK_COLS // LANES neighbours.
        BACKWARDS: the second loop begins with the block that was read last.
        HINTS: L2 is told what will be read again, and what will not.
    """
    FIRST: tl.constexpr = "evict_last" if HINTS else ""
    SECOND: tl.constexpr = "evict_first" if HINTS else ""
    WIDTH: tl.constexpr = BLOCK_COLS // LANES
    DOUBLE: tl.constexpr = input_ptr.dtype.element_ty == tl.float64
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    turn = tl.arange(0, WIDTH)[None, :, None].to(tl.int64)
    col = turn * LANES + tl.arange(0, LANES)[None, None, :]
    first = first_element(row, n_inner, input_outer_stride, input_inner_stride)
    input_ptrs = input_ptr + first + col * input_col_stride
    n_blocks = (n_cols - 1) // BLOCK_COLS + 1

    top = tl.full((ROWS, LANES), -float("inf"), DTYPE)
    total = tl.zeros((ROWS, LANES), DTYPE)
    for block in range(n_blocks):
        start = tl.cast(block, tl.int64) * BLOCK_COLS
        inside = (row < n_rows) & (col < n_cols - start)
        ptrs = input_ptrs + start * input_col_stride
        x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=FIRST)
        block_top, block_total = pair(x.to(DTYPE))
        top, total = merge(top, total, block_top, block_total)
    top, total = merge_all(top, total)
    top, factor = top[:, None, None], (1 / total)[:, None, None]

    first = first_element(row, n_inner, output_outer_stride, output_inner_stride)
    output_ptrs = output_ptr + first + col * output_col_stride
    for step in range(n_blocks):
        block = n_blocks - 1 - step if BACKWARDS else step
        start = tl.cast(block, tl.int64) * BLOCK_COLS
        inside = (row < n_rows) & (col < n_cols - start)
        ptrs = input_ptrs + start * input_col_stride
        x = tl.load(ptrs, inside, other=-float("inf"), eviction_policy=SECOND)
        y = power(x.to(DTYPE), top) * factor
        ptrs = output_ptrs + start * output_col_stride
        tl.store(ptrs, y, inside, eviction_policy=SECOND)


@triton.jit
def three_pass_kernel(
    output_ptr,
    input_ptr,
    output_outer_stride,
    output_col_stride,
    output_inner_stride,
    input_outer_stride,
    input_col_stride,
    input_inner_stride,
    n_rows,
    n_cols,
    n_inner,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes the softmax of one row: its maximum, its sum, its values.

    Args: as those of `softmax_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK_COLS).to(tl.int64)
    input_ptr += first_element(row, n_inner, input_outer_stride, input_inner_stride)
    output_ptr += first_element(row, n_inner, output_outer_stride, output_inner_stride)
    n_blocks = (n_cols - 1) // BLOCK_COLS + 1

    tops = tl.full((BLOCK_COLS,), -float("inf"), tl.float32)
    for block in range(n_blocks):
        cols = tl.cast(block, tl.int64) * BLOCK_COLS + col
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        tops = tl.maximum(tops, x.to(tl.float32))
    top = tl.max(tops, axis=0)

    totals = tl.zeros((BLOCK_COLS,), tl.float32)
    for block in range(n_blocks):
        cols = tl.cast(block, tl.int64) * BLOCK_COLS + col
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        totals += power(x.to(tl.float32), top)
    factor = 1 / tl.sum(totals, axis=0)

    for block in range(n_blocks):
        cols = tl.cast(block, tl.int64) * BLOCK_COLS + col
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        y = power(x.to(tl.float32), top) * factor
        tl.store(output_ptr + cols * output_col_stride, y, cols < n_cols)


def traffic(n_rows: int, n_cols: int, passes: int = 2) -> tuple[int, int]:
    """Values read and values written by one call that reads so many times."""
    return passes * n_rows * n_cols, n_rows * n_cols


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out; `plan` chooses it."""

    rows: int
    block_cols: int
    lanes: int
    num_warps: int
    backwards: bool = True
    hints: bool = True

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {
            "ROWS": self.rows,
            "BLOCK_COLS": self.block_cols,
            "LANES": self.lanes,
            "BACKWARDS": self.backwards,
            "HINTS": self.hints,
            "num_warps": self.num_warps,
        }


@functools.lru_cache(maxsize=4096)
def plan(n_rows: int, n_cols: int, element_size: int, adjacent: bool = False) -> Plan:
    """The layout for n_rows rows of n_cols values of element_size bytes each.

    A tile has BLOCK_BYTES, or a whole row if that is shorter; where a row is shorter
    than TILE_BYTES, several share a tile. Tiles are large, so that one or two programs
    fill an SM: the fewer rows are under way, the more of each L2 still holds at the
    second reading. A thread has one pair for each value of a 16-byte access.

    Args:
        adjacent: rows, not columns, follow each other in memory: a tile then is a cache
            line wide along the rows, so that accesses use all that memory sends. It is
            half as large, as reductions across it take registers.
    """
    room = BLOCK_BYTES // element_size // (2 if adjacent else 1)
    rows = LINE_BYTES // element_size if adjacent else 1
    rows = min(rows, triton.next_power_of_2(n_rows))
    block_cols = min(triton.next_power_of_2(n_cols), room // rows)
    fitting = TILE_BYTES // element_size // block_cols
    rows = max(rows, min(fitting, triton.next_power_of_2(n_rows)))
    warps = rows * block_cols * element_size // BYTES_PER_WARP
    num_warps = min(max(warps, 1), 32)
    places = 32 * num_warps * VECTOR_BYTES // element_size
    return Plan(rows, block_cols, min(block_cols, max(1, places // rows)), num_warps)


def launch(output: torch.Tensor, x: torch.Tensor, **changes: int) -> None:
    """The softmax of x along its middle dimension, by one launch.

    Args:
        output, x: (outer, n_cols, inner), of one shape, not empty, any strides;
            float64 too, which is then computed in float64. Not validated.
        changes: of the `Plan`, by its fields; none is validated.
    """
    sides = [(view.stride(1), view.stride(2)) for view in (x, output)]
    adjacent = x.shape[2] > 1 and any(col != 1 and inner == 1 for col, inner in sides)
    n_rows = x.shape[0] * x.shape[2]
    layout = plan(n_rows, x.shape[1], x.element_size(), adjacent)
    if changes:
        layout = replace(layout, **changes)
    _run(softmax_kernel, output, x, layout.rows, layout.constants)


def _run(
    kernel: Any, output: torch.Tensor, x: torch.Tensor, rows: int, options: dict
) -> None:
    n_outer, n_cols, n_inner = x.shape
    n_rows = n_outer * n_inner
    args = (output, x, *output.stride(), *x.stride(), n_rows, n_cols, n_inner)
    kernel[(triton.cdiv(n_rows, rows),)](*args, **options)


def softmax(x: torch.Tensor, **changes: int) -> torch.Tensor:
    """The softmax of every row, of any length.

    Args:
        x: (M, N), float32, float16 or bfloat16, any strides.
        changes: of the `Plan` that `plan` chooses, by its fields, such as lanes=1:
            powers of two, and lanes at most block_cols.

    Returns:
        (M, N) in x's dtype, contiguous; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix, or the plan has no such field.
    """
    backend.validate(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(output.t()[None], x.t()[None], **changes)
    return output


def three_pass(x: torch.Tensor) -> torch.Tensor:
    """As `softmax`, by a kernel that reads each row three times.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        layout = plan(1, x.shape[1], x.element_size())
        options = {"BLOCK_COLS": layout.block_cols, "num_warps": layout.num_warps}
        _run(three_pass_kernel, output.t()[None], x.t()[None], 1, options)
    return output


VARIANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "online.three_pass": three_pass,
    "online.per_block": lambda x: softmax(x, lanes=1),
    "online.forwards": lambda x: softmax(x, backwards=False),
    "online.unhinted": lambda x: softmax(x, hints=False),
    "online": softmax,
}
"""What this chapter measures: `online`, and itself with one thing changed."""

# ---- what the GPU's counters say -----------------------------------------------------

COUNTED_ROWS, COUNTED_COLS = 1056, (16384, 65536, 131072, 262144)


def run() -> None:
    """Runs each variant in float32, once unseen, to compile it, and once watched."""
    for n_cols in COUNTED_COLS:
        x = torch.randn(COUNTED_ROWS, n_cols, device=backend.DEVICE)
        for function in VARIANTS.values():
            function(x)
            with counters.watched(emptied=True):
                function(x)


def profile_dram() -> list[dict[str, Any]]:
    """DRAM bytes and time of each variant, by the counters of the GPU.

    Returns:
        Rows of provider, n_rows, n_cols, kernel, read_bytes, written_bytes (both from
        and to DRAM) and duration_us.

    Raises:
        bench.Unavailable: the counters cannot be read here; see `counters.profile`.
        RuntimeError: another number of kernels ran.
    """
    named = [
        {"provider": provider, "n_rows": COUNTED_ROWS, "n_cols": n_cols}
        for n_cols in COUNTED_COLS
        for provider in VARIANTS
    ]
    rows = counters.profile(run)
    if len(rows) != len(named):
        kernels = [row["kernel"] for row in rows]
        raise RuntimeError(f"{len(named)} kernels should have run, got {kernels}")
    return [name | row for name, row in zip(named, rows, strict=True)]
