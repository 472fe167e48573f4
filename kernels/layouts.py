"""Layouts: which thread holds which element, and how elements get to other threads.

Builds on: `kernels.program`, whose softmax works on a tile of rows and columns here.
Changes: a softmax along either axis; a transposition, whose elements change threads;
    the same in Gluon, with the layouts written down; a product with a softmax behind
    it, whose buffers share the bytes of shared memory.
Costs: MN values read and MN written; a transposition also moves every value through
    shared memory.
Source: Zhou et al., Linear Layouts (https://arxiv.org/abs/2505.23819); CUDA C++
    Programming Guide, shared memory (32 banks of 4 bytes).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.lab import backend

TILE = 32  # rows and columns of a transposition's tile
MAX_COLS = 4096  # elements of one softmax


@triton.jit
def softmax_kernel(output_ptr, input_ptr, n_rows, n_cols, ROWS: tl.constexpr,
                   COLS: tl.constexpr, AXIS: tl.constexpr):  # fmt: skip
    """One program computes the softmax along AXIS of one tile of a contiguous matrix.

    The tile has ROWS × COLS elements, powers of two, and spans the matrix along AXIS.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (rows < n_rows) & (cols < n_cols)
    places = rows.to(tl.int64) * n_cols + cols
    x = tl.load(input_ptr + places, inside, float("-inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=AXIS, keep_dims=True))
    y = numerator / tl.sum(numerator, axis=AXIS, keep_dims=True)
    tl.store(output_ptr + places, y, inside)


@triton.jit
def transpose_kernel(output_ptr, input_ptr, n_rows, n_cols, SIDE: tl.constexpr):
    """One program transposes one tile of SIDE × SIDE elements.

    The input is (n_rows, n_cols), the output (n_cols, n_rows), both contiguous.
    """
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    row, col = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    source = (row + i).to(tl.int64) * n_cols + (col + j)
    target = (col + i).to(tl.int64) * n_rows + (row + j)
    x = tl.load(input_ptr + source, (row + i < n_rows) & (col + j < n_cols))
    tl.store(output_ptr + target, x.T, (col + i < n_cols) & (row + j < n_rows))


@gluon.jit
def through_shared_kernel(output_ptr, input_ptr, n_rows, n_cols, SIDE: gl.constexpr,
                          SHARED: gl.constexpr):  # fmt: skip
    """As `transpose_kernel`, but every layout is written down.

    A warp stores a row of the tile in shared memory, arranged by SHARED, and loads a
    column from there.
    """
    OWN: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    i = gl.arange(0, SIDE, gl.SliceLayout(1, OWN))[:, None]
    j = gl.arange(0, SIDE, gl.SliceLayout(0, OWN))[None, :]
    row, col = gl.program_id(0) * SIDE, gl.program_id(1) * SIDE
    source = (row + i).to(gl.int64) * n_cols + (col + j)
    target = (col + i).to(gl.int64) * n_rows + (row + j)
    x = gl.load(input_ptr + source, (row + i < n_rows) & (col + j < n_cols))
    tile = gl.allocate_shared_memory(x.dtype, [SIDE, SIDE], SHARED)
    tile.store(x)
    y = tile.permute((1, 0)).load(OWN)
    gl.store(output_ptr + target, y, (col + i < n_cols) & (row + j < n_rows))


ARRANGEMENTS = {
    "plain": gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]),
    "padded": gl.PaddedSharedLayout.with_identity_for([[TILE, 1]], 2 * [TILE], [1, 0]),
    "swizzled": gl.SwizzledSharedLayout(1, 1, TILE, order=[1, 0]),
}
"""Row after row; with a gap of one element after each row; column j at j xor row."""


@triton.jit
def product_kernel(output_ptr, left_ptr, right_ptr, n_rows, n_inner, ROWS: tl.constexpr,
                   COLS: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """One program: the softmax of ROWS rows of left @ right, stored transposed.

    All matrices are contiguous: left (n_rows, n_inner), right (n_inner, COLS), output
    (COLS, n_rows). ROWS divides n_rows, and INNER divides n_inner.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols, inner = tl.arange(0, COLS), tl.arange(0, INNER)
    x = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, n_inner, INNER):
        left = tl.load(left_ptr + rows[:, None] * n_inner + (start + inner)[None, :])
        right = tl.load(right_ptr + (start + inner)[:, None] * COLS + cols[None, :])
        x = tl.dot(left, right, x)
    numerator = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    y = numerator / tl.sum(numerator, axis=1, keep_dims=True)
    tl.store(output_ptr + cols[:, None] * n_rows + rows[None, :], y.T)


# ---- layouts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocked:
    """A `#ttg.blocked` layout; each field has a number for each axis of the tile.

    Attributes:
        size_per_thread: neighbours that a thread takes at a time.
        threads_per_warp, warps_per_cta: how lanes and warps stand side by side.
        order: the axes; lanes and warps are numbered along the first of them first.
    """

    size_per_thread: tuple[int, ...]
    threads_per_warp: tuple[int, ...]
    warps_per_cta: tuple[int, ...]
    order: tuple[int, ...]


def layouts_of(ttgir: str) -> dict[str, Blocked]:
    """The blocked layouts that a TTGIR names, such as "#blocked"."""
    fields = "sizePerThread", "threadsPerWarp", "warpsPerCTA", "order"
    found = {}
    for name, text in re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>", ttgir, re.M):
        lists = [re.search(rf"{field} = \[(.*?)\]", text)[1] for field in fields]
        found[name] = Blocked(*(tuple(map(int, each.split(","))) for each in lists))
    return found


def holders(layout: Blocked, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The warps and the lanes that hold a tile's elements; of several, the first."""
    warp, lane = np.zeros(shape, int), np.zeros(shape, int)
    warps = lanes = 1
    for axis in layout.order:
        size, threads = layout.size_per_thread[axis], layout.threads_per_warp[axis]
        place = np.arange(shape[axis]) // size  # counted in threads
        place = place.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        lane += place % threads * lanes
        warp += place // threads % layout.warps_per_cta[axis] * warps
        lanes, warps = lanes * threads, warps * layout.warps_per_cta[axis]
    return warp, lane


def judge(holder: Callable, layout: Blocked, shape: Sequence[int]) -> str:
    """Says in a sentence whether holder(row, col) is each element's (warp, lane)."""
    warps, lanes = holders(layout, shape)
    for place in np.ndindex(*shape):
        said, warp, lane = holder(*place), warps[place], lanes[place]
        if not isinstance(said, tuple) or len(said) != 2 or ... in said:
            told = str(said).replace("Ellipsis", "...")
            return f"Not yet: holder{place} gives {told} and not two numbers."
        if said != (warp, lane):
            yours = f"your function says lane {said[1]} of warp {said[0]}"
            return f"Not yet: lane {lane} of warp {warp} holds {place}, and {yours}."
    return f"Right for all {warps.size} elements."


# ---- wrappers ------------------------------------------------------------------------


def softmax(x: torch.Tensor, axis: int = 1) -> torch.Tensor:
    """The softmax of every row (axis 1) or of every column (axis 0).

    Args:
        x: (M, N), float32, float16 or bfloat16; N (for axis 0: M) at most MAX_COLS.

    Raises:
        TypeError, ValueError: x is no such matrix, axis neither 0 nor 1.
    """
    if axis not in (0, 1):
        raise ValueError(f"axis must be 0 or 1, got {axis!r}")
    most = {"max_cols": MAX_COLS} if axis else {"max_rows": MAX_COLS, "max_cols": 65535}
    backend.validate(x, **most)
    output, x = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.contiguous()
    if x.numel():
        span = triton.next_power_of_2(x.shape[axis])
        rest = max(1, 2048 // span)
        rows, cols = (rest, span) if axis else (span, rest)
        grid = triton.cdiv(x.shape[0], rows), triton.cdiv(x.shape[1], cols)
        softmax_kernel[grid](output, x, *x.shape, rows, cols, axis)
    return output


def transpose(x: torch.Tensor, arrangement: str = "") -> torch.Tensor:
    """The transposed matrix, contiguous.

    Args:
        x: a contiguous matrix.
        arrangement: one of ARRANGEMENTS, for the Gluon kernel, which needs a GPU; by
            default Triton's compiler arranges the tile.

    Raises:
        ValueError: x is no such matrix, or there is no such arrangement.
        RuntimeError: an arrangement is given where kernels are interpreted.
    """
    if x.ndim != 2 or not x.is_contiguous():
        got = f"{tuple(x.shape)} with strides {x.stride()}; x.contiguous() copies it"
        raise ValueError(f"x must be a contiguous matrix, got {got}")
    if arrangement not in ("", *ARRANGEMENTS):
        known = [*ARRANGEMENTS]
        raise ValueError(f"arrangement must be one of {known}, got {arrangement!r}")
    if arrangement and backend.INTERPRETED:
        raise RuntimeError("Gluon kernels need a GPU: the interpreter can't run them")
    output = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device)
    grid = tuple(triton.cdiv(size, TILE) for size in x.shape)
    if arrangement and x.numel():
        how = ARRANGEMENTS[arrangement]
        through_shared_kernel[grid](output, x, *x.shape, TILE, how)
    elif x.numel():
        transpose_kernel[grid](output, x, *x.shape, TILE)
    return output
