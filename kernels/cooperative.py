"""Rows larger than a program: several programs share a row and exchange their results.

Builds on: `kernels.unaligned`, and the (max, sum) pairs of `kernels.online`.
Changes: a program holds one part of a row. It publishes the part's (max, sum) pair,
    waits for the pairs of the row's other parts, merges all pairs, and writes the
    softmax of what it still holds.
Costs: MN values read and MN written, and two 64-bit words for each part.
Source: PTX ISA, memory consistency model; Merrill and Garland, "Single-pass parallel
    prefix scan with decoupled look-back", 2016, whose programs wait for each other too.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.lab.launch import Launch, Workspace, constants_of, pointer_to
from kernels.online import exp_shifted_or_zero, merge, merge_axis
from kernels.tiled import exp_shifted, load_or_neg_inf, opaque_move, row_shift
from kernels.unaligned import alignment, edge_columns, split_row

MAX_COLS = 2**27  # a row is only fast if all its parts fit the GPU at once
FEW_BYTES = 12 * 2**20  # of a tensor: less does not fill the GPU
MANY_BYTES = 2**27  # of a tensor: more than twice what all SMs hold
LONG_BYTES = {2: 2**22, 4: 2**20}  # of a row, by element size: fewer, larger parts

# How often a program looks for the other parts' words; a look takes about 1 µs.
MAX_POLLS = tl.constexpr(1 if backend.INTERPRETED else 1000)
UNASSISTED_COLS = tl.constexpr(1024)


@triton.jit
def pack(value, tag):
    """A float32 and a call's tag as one 64-bit word: they arrive together."""
    return (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag


@triton.jit
def unpack(word):
    """The float32 of a word."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def has_tag(word, tag):
    """Whether a word was written by the call with this tag."""
    return (word & 0xFFFFFFFF) == tag


@triton.jit
def n_missing(max_words, sum_words, is_part, tag):
    """How many parts have not published both of their words yet."""
    arrived = has_tag(max_words, tag) & has_tag(sum_words, tag)
    return tl.sum((is_part & ~arrived).to(tl.int32), axis=0)


@triton.jit
def exchange(words_ptr, part, part_max, part_sum, tag, N_PARTS, BLOCK_PARTS):
    """Publishes a part's pair and waits for the pairs of all parts of its row.

    Returns the parts' maxima, their sums, and the number of polls. After MAX_POLLS
    polls some of the pairs may be missing.
    """
    tl.atomic_xchg(words_ptr + part, pack(part_max, tag), sem="relaxed")
    tl.atomic_xchg(words_ptr + N_PARTS + part, pack(part_sum, tag), sem="relaxed")
    parts = tl.arange(0, BLOCK_PARTS)
    is_part = parts < N_PARTS
    # Volatile loads read the words from memory each time, not from a register or L1.
    max_ptrs, sum_ptrs = words_ptr + parts, words_ptr + N_PARTS + parts
    max_words = tl.load(max_ptrs, mask=is_part, other=0, volatile=True)
    sum_words = tl.load(sum_ptrs, mask=is_part, other=0, volatile=True)
    polls = 0
    while (polls < MAX_POLLS) & (n_missing(max_words, sum_words, is_part, tag) > 0):
        max_words = tl.load(max_ptrs, mask=is_part, other=0, volatile=True)
        sum_words = tl.load(sum_ptrs, mask=is_part, other=0, volatile=True)
        polls += 1
    # Where there is no part, the words are 0: as a sum that is the identity already.
    maxima = tl.where(is_part, unpack(max_words), -float("inf"))
    return maxima, unpack(sum_words), polls


@triton.jit(noinline=True)
def softmax_part_unassisted(output_ptr, row_ptr, first, end, n_cols):
    """Computes columns first to end of a row's softmax without the other programs.

    It reads the whole row for its (max, sum) pair, as chapter `online` does.
    """
    row_max = -float("inf")
    row_sum = 0.0
    for start in range(0, n_cols, UNASSISTED_COLS):
        cols = start + tl.arange(0, UNASSISTED_COLS)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        block_max = tl.max(x.to(tl.float32), axis=0)
        block_sum = tl.sum(exp_shifted_or_zero(x.to(tl.float32), block_max), axis=0)
        row_max, row_sum = merge(row_max, row_sum, block_max, block_sum)
    for start in range(first, end, UNASSISTED_COLS):
        cols = start + tl.arange(0, UNASSISTED_COLS)
        x = tl.load(row_ptr + cols, mask=cols < end)
        tl.store(output_ptr + cols, exp_shifted(x, row_max) / row_sum, mask=cols < end)


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
    SAME_SHIFT: tl.constexpr,
):
    """One program computes one part of the softmax of one row.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        words_ptr: 2 * N_PARTS words (int64) for each row: maxima, then sums.
        tag: this call's; no earlier call's word has it.
        output_row_stride, input_row_stride, input_shift, n_cols: as in
            `kernels.unaligned`.
        N_PARTS: parts of a row. Neighbouring programs take neighbouring parts.
        BLOCK_COLS: columns of a part.
        BLOCK_PARTS: a power of two, at least N_PARTS.
        VECTOR: elements that a thread moves at once.
        EDGES: whether rows start anywhere. Then the first part has the row's head, and
            the last part its tail. SAME_SHIFT: as in `kernels.unaligned`.
    """
    row = (tl.program_id(0) // N_PARTS).to(tl.int64)
    part = tl.program_id(0) % N_PARTS
    cols = tl.arange(0, BLOCK_COLS)
    input_row = row * input_row_stride
    row_ptr = input_ptr + input_row
    if EDGES:
        head, body = split_row(input_row + input_shift, n_cols, VECTOR)
        edge = tl.arange(0, 2 * VECTOR)
        edge_cols, at_edge = edge_columns(edge, head, body, n_cols, VECTOR)
        edge_part = tl.where(edge < VECTOR, 0, N_PARTS - 1)
        at_edge = at_edge & (edge_part == part)
        edges = load_or_neg_inf(row_ptr + edge_cols, at_edge)
        start = (input_row + input_shift + head) // VECTOR * VECTOR + part * BLOCK_COLS
        input_ptrs = tl.multiple_of(input_ptr - input_shift, 16) + start + cols
        inside = cols // VECTOR * VECTOR < body - part * BLOCK_COLS
    else:
        head = 0
        start = row * (input_row_stride // VECTOR * VECTOR) + part * BLOCK_COLS
        input_ptrs = input_ptr + start + cols
        inside = cols < n_cols // VECTOR * VECTOR - part * BLOCK_COLS
    x = load_or_neg_inf(input_ptrs, inside)
    part_max = tl.max(x.to(tl.float32), axis=0)
    if EDGES:
        part_max = tl.maximum(part_max, tl.max(edges.to(tl.float32), axis=0))
    finite = tl.where(part_max == -float("inf"), 0.0, part_max)  # -inf - -inf is NaN
    part_sum = tl.sum(exp_shifted(opaque_move(x, True), finite), axis=0)
    if EDGES:
        part_sum += tl.sum(exp_shifted(edges, finite), axis=0)

    words_ptr += row * (2 * N_PARTS)
    maxima, sums, polls = exchange(
        words_ptr, part, part_max, part_sum, tag, N_PARTS, BLOCK_PARTS
    )
    output_row_ptr = output_ptr + row * output_row_stride
    if polls == MAX_POLLS:
        first = tl.where(part == 0, 0, head + part * BLOCK_COLS)
        end = tl.where(part == N_PARTS - 1, n_cols, head + (part + 1) * BLOCK_COLS)
        softmax_part_unassisted(output_row_ptr, row_ptr, first, end, n_cols)
    else:
        row_max, row_sum = merge_axis(maxima, sums, 0)
        factor = 1 / row_sum
        if EDGES:
            y = exp_shifted(edges, row_max) * factor
            tl.store(output_row_ptr + edge_cols, y, mask=at_edge)
            if SAME_SHIFT:
                output_ptrs = tl.multiple_of(output_ptr - input_shift, 16) + start
            else:
                output_ptrs = output_row_ptr + (head + part * BLOCK_COLS)
        else:
            start = row * (output_row_stride // VECTOR * VECTOR) + part * BLOCK_COLS
            output_ptrs = output_ptr + start
        y = exp_shifted(opaque_move(x, True), row_max) * factor
        tl.store(output_ptrs + cols, y, mask=inside)


@dataclass(frozen=True)
class Config:
    """The kernel's constants and launch options; `choose_config` chooses them."""

    n_parts: int
    block_cols: int
    block_parts: int
    vector: int
    edges: bool
    same_shift: bool
    num_warps: int
    maxnreg: int | None = None


@functools.lru_cache(maxsize=4096)
def choose_config(
    n_rows: int, n_cols: int, element_size: int, vector: int, same_shift: bool
) -> Config:
    """The configuration for n_rows rows of n_cols values of element_size bytes.

    While a program waits, only other programs load. So parts are large, and a thread's
    registers are capped, to keep as much of the matrix as possible in each SM. A tensor
    of less than FEW_BYTES has small parts instead, so that many SMs get one.

    `unaligned.alignment` returns `vector` and `same_shift`.
    """
    row_bytes = n_cols * element_size
    if n_rows * row_bytes < FEW_BYTES:
        part_bytes = min(max(8192, triton.next_power_of_2(row_bytes) // 64), 32768)
        num_warps, maxnreg = part_bytes // 2048, None
    elif row_bytes < LONG_BYTES[element_size] or n_rows * row_bytes < MANY_BYTES:
        part_bytes, num_warps, maxnreg = 32768, 4, 96 if element_size == 2 else 88
    else:
        part_bytes, num_warps, maxnreg = 65536, 4, 168
    edges = vector == 1
    vector = 16 // element_size if edges else vector
    block_cols = part_bytes // element_size
    body = max(n_cols // vector * vector, 1) if edges else n_cols
    n_parts = triton.cdiv(body, block_cols)
    block_parts = max(32 * num_warps, triton.next_power_of_2(n_parts))
    shape = n_parts, block_cols, block_parts
    return Config(*shape, vector, edges, same_shift, num_warps, maxnreg)


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args:
        output, x: as for `kernels.tiled.launch_for`, and without common memory, because
            a program that has waited in vain reads the input again.
        config: for the kernel, not checked; None lets `choose_config` choose.
    """
    n_rows, n_cols = x.shape
    if config is None:
        config = choose_config(n_rows, n_cols, x.element_size(), *alignment(output, x))
    n_programs = n_rows * config.n_parts
    return Launch(
        kernel=softmax_kernel,
        grid=(n_programs,),
        scalars=(output.stride(0), x.stride(0), row_shift(x), n_cols),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
        workspace=Workspace(2 * n_programs),
    )


def softmax(x: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """The softmax of every row, each by several programs.

    Args, returns, raises: as `kernels.tiled.softmax`, with N at most MAX_COLS. `config`
    is for the kernel and not checked; None lets `choose_config` choose.
    """
    backend.validate(x, max_cols=MAX_COLS)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        launch_for(output, x, config)(output, x)
    return output
