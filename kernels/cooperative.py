"""Rows larger than a program: several programs share a row and tell each other.

Builds on: `kernels.tiled` and the (max, sum) pairs of `kernels.online`.
Changes: a program holds one part of a row. It publishes the part's (max, sum), waits
    for those of the other parts, and normalises what it still holds.
Costs: MN values read and MN written, and two 64-bit words for each part.
Source: PTX ISA, memory consistency model; Merrill and Garland, "Single-pass parallel
    prefix scan with decoupled look-back", 2016, whose programs wait for each other too.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.persistent import traffic
from kernels.tiled import accesses, again, fetch, power, shift, split

__all__ = ["MAX_COLS", "Plan", "plan", "softmax", "softmax_kernel", "traffic"]

MAX_COLS = 2**27
"""The longest row: its parts must be able to run at the same time to be quick."""

FEW_BYTES = 12 * 2**20  # of a tensor: less does not fill the GPU
MANY_BYTES = 2**27  # of a tensor: more than twice what all SMs hold
LONG_BYTES = {2: 2**22, 4: 2**20}  # of a row, by element size: fewer, larger parts
PATIENCE = tl.constexpr(1 if backend.INTERPRETED else 1000)  # polls, of about 1 µs each
ALONE_COLS = tl.constexpr(1024)


@triton.jit
def word_of(value, tag):
    """A float32 and the tag of a call, as one 64-bit word: both arrive, or neither."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag


@triton.jit
def value_of(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def of_call(word, tag):
    return (word & 0xFFFFFFFF) == tag


@triton.jit(noinline=True)
def alone(output_ptr, row_ptr, first, end, n_cols):
    """The softmax of columns first to end of a row, by a program that has no partners.

    It reads the whole row for the maximum and the sum, as chapter `online` does.
    """
    top = -float("inf")
    total = 0.0
    for start in range(0, n_cols, ALONE_COLS):
        cols = start + tl.arange(0, ALONE_COLS)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x.to(tl.float32), axis=0))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * power(top, finite) + tl.sum(power(x, finite), axis=0)
        top = higher
    for start in range(first, end, ALONE_COLS):
        cols = start + tl.arange(0, ALONE_COLS)
        x = tl.load(row_ptr + cols, mask=cols < end)
        tl.store(output_ptr + cols, power(x, top) / total, mask=cols < end)


@triton.jit(do_not_specialize=["tag"])
def softmax_kernel(
    output_ptr,
    input_ptr,
    words_ptr,
    tag,
    output_row_stride,
    input_row_stride,
    input_shift,
    n_cols,
    N_PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
    SAME: tl.constexpr,
):
    """One program computes one part of the softmax of one row.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        words_ptr: 2 * N_PARTS words (int64) for each row: maxima, then sums.
        tag: of this call, 32 bits; no word that an earlier one left has it.
        output_row_stride, input_row_stride: elements from one row to the next; columns
            follow each other.
        input_shift: elements from an aligned address to the input's first.
        n_cols: the length of a row.
        N_PARTS: of a row; neighbouring programs take neighbouring parts.
        BLOCK_COLS: columns of a part.
        BLOCK_PARTS: N_PARTS or more, a power of two.
        VECTOR, EDGES, SAME: as in `kernels.tiled`.
    """
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    cols = tl.arange(0, BLOCK_COLS)
    start = row * input_row_stride
    row_ptr = input_ptr + start
    if EDGES:
        head, body = split(start + input_shift, n_cols, VECTOR)
        edge = tl.arange(0, 2 * VECTOR)
        is_head = edge < VECTOR
        at = tl.where(is_head, edge, head + body + edge - VECTOR)
        at_edge = is_head & (at < head) & (part == 0)
        at_edge |= ~is_head & (at < n_cols) & (part == N_PARTS - 1)
        z = fetch(row_ptr + at, at_edge)
        first = (start + input_shift + head) // VECTOR * VECTOR + part * BLOCK_COLS
        input_ptrs = tl.multiple_of(input_ptr - input_shift, 16) + first + cols
        inside = cols // VECTOR * VECTOR < body - part * BLOCK_COLS
    else:
        head = 0
        first = row * (input_row_stride // VECTOR * VECTOR) + part * BLOCK_COLS
        input_ptrs = input_ptr + first + cols
        inside = cols < n_cols // VECTOR * VECTOR - part * BLOCK_COLS
    x = fetch(input_ptrs, inside)
    top = tl.max(x.to(tl.float32), axis=0)
    if EDGES:
        top = tl.maximum(top, tl.max(z.to(tl.float32), axis=0))
    finite = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(power(again(x), finite), axis=0)
    if EDGES:
        total += tl.sum(power(z, finite), axis=0)

    top_ptr = words_ptr + row * (2 * N_PARTS)
    total_ptr = top_ptr + N_PARTS
    tl.atomic_xchg(top_ptr + part, word_of(top, tag), sem="relaxed")
    tl.atomic_xchg(total_ptr + part, word_of(total, tag), sem="relaxed")
    parts = tl.arange(0, BLOCK_PARTS)
    real = parts < N_PARTS
    tops = tl.load(top_ptr + parts, mask=real, other=0, volatile=True)
    totals = tl.load(total_ptr + parts, mask=real, other=0, volatile=True)
    polls = 0
    while (polls < PATIENCE) & (
        tl.sum((real & ~(of_call(tops, tag) & of_call(totals, tag))).to(tl.int32), 0)
        > 0
    ):
        tops = tl.load(top_ptr + parts, mask=real, other=0, volatile=True)
        totals = tl.load(total_ptr + parts, mask=real, other=0, volatile=True)
        polls += 1
    output_row_ptr = output_ptr + row * output_row_stride
    if polls == PATIENCE:
        begin = tl.where(part == 0, 0, head + part * BLOCK_COLS)
        end = tl.where(part == N_PARTS - 1, n_cols, head + (part + 1) * BLOCK_COLS)
        alone(output_row_ptr, row_ptr, begin, end, n_cols)
    else:
        part_tops = tl.where(real, value_of(tops), -float("inf"))
        top = tl.max(part_tops, axis=0)
        shares = tl.where(real, value_of(totals) * power(part_tops, top), 0.0)
        factor = 1 / tl.sum(shares, axis=0)
        if EDGES:
            tl.store(output_row_ptr + at, power(z, top) * factor, mask=at_edge)
            if SAME:
                output_ptrs = tl.multiple_of(output_ptr - input_shift, 16) + first
            else:
                output_ptrs = output_row_ptr + (head + part * BLOCK_COLS)
        else:
            first = row * (output_row_stride // VECTOR * VECTOR) + part * BLOCK_COLS
            output_ptrs = output_ptr + first
        tl.store(output_ptrs + cols, power(again(x), top) * factor, mask=inside)


@dataclass(frozen=True)
class Plan:
    """How a launch is laid out; `plan` chooses it."""

    block_cols: int
    n_parts: int
    vector: int
    edges: bool
    same: bool
    num_warps: int
    maxnreg: int | None

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel is compiled with."""
        return {
            "N_PARTS": self.n_parts,
            "BLOCK_COLS": self.block_cols,
            "BLOCK_PARTS": max(
                32 * self.num_warps, triton.next_power_of_2(self.n_parts)
            ),
            "VECTOR": self.vector,
            "EDGES": self.edges,
            "SAME": self.same,
            "num_warps": self.num_warps,
            "maxnreg": self.maxnreg,
        }


@functools.lru_cache(maxsize=4096)
def plan(
    n_rows: int, n_cols: int, element_size: int, vector: int, edges: bool, same: bool
) -> Plan:
    """The layout for so many rows of n_cols values of element_size bytes each.

    Many bytes for each thread, and its registers capped, keep the most of a row on its
    way in an SM: that is what hides the wait. Where there is little work to share, each
    thread gets little of it, and the parts are small, so that many SMs have one.
    """
    row_bytes = n_cols * element_size
    if n_rows * row_bytes < FEW_BYTES:
        part_bytes = min(max(8192, triton.next_power_of_2(row_bytes) // 64), 32768)
        num_warps, maxnreg = part_bytes // 2048, None
    elif row_bytes < LONG_BYTES[element_size] or n_rows * row_bytes < MANY_BYTES:
        part_bytes, num_warps, maxnreg = 32768, 4, 96 if element_size == 2 else 88
    else:
        part_bytes, num_warps, maxnreg = 65536, 4, 168
    block_cols = part_bytes // element_size
    body = max(n_cols // vector * vector, 1) if edges else n_cols
    n_parts = triton.cdiv(body, block_cols)
    return Plan(block_cols, n_parts, vector, edges, same, num_warps, maxnreg)


class Scratch:
    """The words of one stream's calls.

    Calls on a stream follow each other. What an earlier one left is told from this
    one's words by the tag, so that nothing need be cleared.
    """

    def __init__(self) -> None:
        self.words = torch.empty(0, dtype=torch.int64)
        self.tags = itertools.count()

    def take(self, n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """At least n_words words, and the tag of the call that will use them."""
        if len(self.words) < n_words:
            size = triton.next_power_of_2(n_words)
            self.words = torch.zeros(size, dtype=torch.int64, device=device)
        return self.words, next(self.tags) % (2**31 - 1) + 1


@functools.cache
def scratch_of(device_index: int, stream: int) -> Scratch:
    return Scratch()


def scratch(n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """At least n_words words for a call on the current stream, and its tag.

    A call that a CUDA graph captures gets words of its own, which live as long as the
    graph, and which each replay clears.
    """
    if backend.INTERPRETED or torch.cuda.is_current_stream_capturing():
        return torch.zeros(n_words, dtype=torch.int64, device=device), 1
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    return scratch_of(device.index, stream).take(n_words, device)


def arguments(
    output: torch.Tensor, x: torch.Tensor, layout: Plan | None = None
) -> tuple[int, int, tuple[int, ...], dict[str, int]]:
    """The grid, the words it needs, and the last numbers and constants of a launch.

    Args:
        output, x: matrices of one shape, not empty, with contiguous columns.
        layout: None lets `plan` choose.
    """
    n_rows, n_cols = x.shape
    output_row, input_row = (output.stride(0), shift(output)), (x.stride(0), shift(x))
    if layout is None:
        wide = accesses(n_cols, x.element_size(), output_row, input_row)
        layout = plan(n_rows, n_cols, x.element_size(), *wide)
    n_programs = n_rows * layout.n_parts
    numbers = (output_row[0], *input_row, n_cols)
    return n_programs, 2 * n_programs, numbers, layout.constants


def launch(output: torch.Tensor, x: torch.Tensor, layout: Plan | None = None) -> None:
    """One launch on such matrices."""
    n_programs, n_words, numbers, constants = arguments(output, x, layout)
    words, tag = scratch(n_words, x.device)
    softmax_kernel[(n_programs,)](output, x, words, tag, *numbers, **constants)


def softmax(x: torch.Tensor, *, layout: Plan | None = None) -> torch.Tensor:
    """The softmax of every row, each by several programs.

    Args:
        x: (M, N), float32, float16 or bfloat16, N at most MAX_COLS, any strides;
            columns that do not follow each other in memory are copied first.
        layout: of the launch; None lets `plan` choose.

    Returns:
        (M, N) in x's dtype, contiguous; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_cols=MAX_COLS)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(output, x if x.stride(1) == 1 else x.contiguous(), layout)
    return output
