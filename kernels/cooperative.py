"""Rows larger than a program: several programs share a row and exchange their results.

Builds on: `kernels.unaligned`, and the (max, sum) pairs of `kernels.online`.
Changes: a program holds one part of a row. It publishes the part's (max, sum) pair,
    waits for the other parts', merges all, and writes the softmax of what it still
    holds. If a pair does not come, it computes that pair too.
Costs: MN values read and MN written, and two 64-bit words for each part.
Source: PTX ISA, memory consistency model; Merrill and Garland, "Single-pass parallel
    prefix scan with decoupled look-back", 2016.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kernels.lab import launch
from kernels.lab.launch import SIZES, Launch, constants_of, pointer_to, row_shift
from kernels.online import merge_axis
from kernels.tiled import INTERPRETED, exp_shifted, load_or_neg_inf, widen
from kernels.unaligned import alignment, edge_columns, split_row

MAX_ROWS, MAX_COLS = 65535, 2**27  # the second axis of a grid has no more programs
FEW_BYTES = 12 * 2**20 // 132  # of a tensor, for each SM: less does not fill the GPU
LONG_BYTES = 32000  # of a row, for each SM: from here on, parts are larger
LONG_EDGES_BYTES = 15000  # the same for rows of 16 bits with edges
PATIENCE = 50  # looks for others' words, about 0.3 µs each, before a program helps


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
def tag_of(tag, count_ptr):
    """The call's tag, or, where a graph replays the call, the number of the replay."""
    if tag is None:  # another kernel: Triton compiles None as a constant
        tag = ((tl.load(count_ptr) + 1) & 0x3FFFFFFF).to(tl.int32)
        tl.debug_barrier()  # all threads have read the count
        tl.store(count_ptr, tag)
    return tag


@triton.jit
def in_lines(n_words):
    """n_words in whole lines of memory: words of two rows share no line."""
    return tl.cdiv(n_words, 16) * 16


@triton.jit
def publish(word_ptr, seen, value, tag):
    """Writes a value, unless the word has this call's tag, or is not as it was seen."""
    word = tl.where(has_tag(seen, tag), seen, pack(value, tag))
    tl.atomic_cas(word_ptr, seen, word, sem="relaxed")


@triton.jit
def no_pairs(n_parts, BLOCK_PARTS):
    """What a program knows before it looks: identity pairs, and every part missing."""
    missing = tl.arange(0, BLOCK_PARTS) < n_parts
    maxima = tl.full((BLOCK_PARTS,), -float("inf"), tl.float32)
    return maxima, tl.zeros((BLOCK_PARTS,), tl.float32), missing


@triton.jit
def look(words, maxima, sums, missing):
    """Reads the missing words: maxima, sums, which parts are missing, and how many."""
    row_ptr, tag, n_parts = words
    max_ptrs = row_ptr + tl.arange(0, missing.shape[0])
    # Volatile loads read the words from memory each time, not from a register or L1.
    max_words = tl.load(max_ptrs, mask=missing, other=0, volatile=True)
    sum_words = tl.load(max_ptrs + n_parts, mask=missing, other=0, volatile=True)
    found = missing & has_tag(max_words, tag) & has_tag(sum_words, tag)
    maxima = tl.where(found, unpack(max_words), maxima)
    sums = tl.where(found, unpack(sum_words), sums)
    missing = missing & ~found
    return maxima, sums, missing, tl.sum(missing.to(tl.int32), axis=0)


@triton.jit
def choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS):
    """The program whose part comes next: a missing one, or `own` if none is missing."""
    # Several may choose at once. If n pairs are there, each takes every n-th part from
    # its own on, so that neighbours choose different parts.
    part, parts = own % n_parts, tl.arange(0, BLOCK_PARTS)
    n_there = tl.maximum(n_parts - n_missing, 1)
    distance = (parts - part + n_parts * n_there) % n_there
    order = tl.where(missing, distance * n_parts + parts, n_parts * n_parts + part)
    return own - part + tl.min(order, axis=0) % n_parts


@triton.jit
def loads_first(n):
    """Has nearly all loads so far start before a value of one is used."""
    for _ in range(n >> 30):  # never; the compiler moves hardly anything across a loop
        tl.debug_barrier()


@triton.jit
def cut(part, start, body, n_parts, BLOCK_COLS, LINE):
    """Where a part begins and ends, counted from its row's body, which is at `start`.

    Parts end at multiples of LINE, where most lines of memory do, if the last has room.
    """
    lead = tl.where(n_parts * BLOCK_COLS - body < LINE, 0, start % LINE).to(body.dtype)
    end = tl.minimum((part + 1) * BLOCK_COLS - lead, body)
    return tl.maximum(part * BLOCK_COLS - lead, 0), end


@triton.jit
def reduce_part(row, part, matrix, BLOCK_COLS, VECTOR, EDGES, SAME):
    """The pair of a part of a row, and what `store_part` needs."""
    output_ptr, input_ptr, output_stride, input_stride, shift, n_cols, n_parts = matrix
    cols, first = tl.arange(0, BLOCK_COLS), part * BLOCK_COLS
    input_row, output_row = row * input_stride, row * output_stride
    if EDGES:
        head, body = split_row(output_row + shift, n_cols, VECTOR)
        edge = tl.arange(0, 2 * VECTOR)
        edge_cols, at_edge = edge_columns(edge, head, body, n_cols, VECTOR)
        at_edge = at_edge & (part == tl.where(edge < VECTOR, 0, n_parts - 1))
        edges = load_or_neg_inf(input_ptr + input_row + edge_cols, at_edge)
        edge_ptrs = output_ptr + output_row + edge_cols
        start = output_row + shift + head
        first, end = cut(part, start, body, n_parts, BLOCK_COLS, 8 * VECTOR)
        start = (start + first) // VECTOR * VECTOR
        input_ptrs = input_ptr + input_row + head + first + cols
        if SAME:
            input_ptrs = tl.multiple_of(input_ptr - shift, 16) + start + cols
        output_ptrs = tl.multiple_of(output_ptr - shift, 16) + start + cols
        inside = cols // VECTOR * VECTOR < end - first
    else:
        edges, edge_ptrs, at_edge = 0, 0, 0  # none
        start = row * (input_stride // VECTOR * VECTOR) + first
        input_ptrs = input_ptr + start + cols
        start = row * (output_stride // VECTOR * VECTOR) + first
        output_ptrs = output_ptr + start + cols
        inside = cols < n_cols // VECTOR * VECTOR - first
    x = load_or_neg_inf(input_ptrs, inside)
    if EDGES:
        loads_first(n_parts)
    part_max = tl.max(x.to(tl.float32), axis=0)
    if EDGES:
        part_max = tl.maximum(part_max, tl.max(edges.to(tl.float32), axis=0))
    finite = tl.where(part_max == -float("inf"), 0.0, part_max)  # not -inf - -inf
    part_sum = tl.sum(exp_shifted(widen(x), finite), axis=0)
    if EDGES:
        part_sum += tl.sum(exp_shifted(edges, finite), axis=0)
    return part_max, part_sum, x, output_ptrs, inside, edges, edge_ptrs, at_edge


@triton.jit
def store_part(part, maxima, sums, EDGES):
    """Merges the row's pairs, and writes the softmax of a part."""
    _, _, x, output_ptrs, inside, edges, edge_ptrs, at_edge = part
    row_max, row_sum = merge_axis(maxima, sums, 0)
    factor = 1 / row_sum
    if EDGES:
        tl.store(edge_ptrs, exp_shifted(edges, row_max) * factor, mask=at_edge)
    tl.store(output_ptrs, exp_shifted(widen(x), row_max) * factor, mask=inside)


@triton.jit(noinline=True)
def help_row(row, own, words, matrix, BLOCK_COLS, BLOCK_PARTS, VECTOR, EDGES, SAME):
    """Computes a row's missing pairs, and then writes the softmax of the part `own`.

    Not inlined: its code would cost registers where no program helps.
    """
    row_ptr, tag, n_parts = words
    maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
    n_missing = n_parts
    while n_missing >= 0:
        maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
        task = choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS)
        # In place, x may be results already; then the words are not those `seen`.
        word_ptr = row_ptr + task
        seen_max = tl.load(word_ptr, volatile=True)
        seen_sum = tl.load(word_ptr + n_parts, volatile=True)
        part = reduce_part(row, task, matrix, BLOCK_COLS, VECTOR, EDGES, SAME)
        if n_missing > 0:
            publish(word_ptr, seen_max, part[0], tag)
            publish(word_ptr + n_parts, seen_sum, part[1], tag)
        else:
            store_part(part, maxima, sums, EDGES)
            n_missing = -1  # done


@triton.jit(do_not_specialize=SIZES)
def softmax_kernel(
    output_ptr,
    input_ptr,
    words_ptr,
    tag,
    output_row_stride,
    input_row_stride,
    output_shift,
    n_cols,
    n_parts,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
    SAME: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """One program computes one part of the softmax of one row.

    It waits for the pairs of the other parts. When its patience ends, it helps: it
    computes missing pairs, and then its own part once more. A pair is the same, bit by
    bit, whichever program computes it.

    Args: as in `kernels.unaligned`, and the output may be the input.
        words_ptr: words (int64), `in_lines(2 * n_parts)` for each row: maxima, then
            sums. Then one for each program, in which it counts replays.
        tag: no earlier call's word has it. None where a graph replays the call.
        n_parts: parts of a row, and programs along the grid's first axis.
        BLOCK_COLS, BLOCK_PARTS: at least the columns of a part, the parts of a row.
        EDGES: whether rows start anywhere. Then the first part has the row's head, and
            the last part its tail. SAME is not used without it.
        PATIENCE: how often a program looks for the other parts before it helps.
    """
    LOOKS: tl.constexpr = 1 if INTERPRETED else PATIENCE  # there, nobody else runs
    own, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    matrix = output_ptr, input_ptr, output_row_stride, input_row_stride, output_shift
    matrix += n_cols, n_parts
    part = reduce_part(row, own, matrix, BLOCK_COLS, VECTOR, EDGES, SAME)
    count_ptr = words_ptr + tl.num_programs(1) * in_lines(2 * n_parts)
    tag = tag_of(tag, count_ptr + row * n_parts + own)
    row_ptr = words_ptr + row * in_lines(2 * n_parts)
    words, word_ptr = (row_ptr, tag, n_parts), row_ptr + own
    tl.atomic_xchg(word_ptr, pack(part[0], tag), sem="relaxed")
    tl.atomic_xchg(word_ptr + n_parts, pack(part[1], tag), sem="relaxed")
    maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
    maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
    looks = 1
    while (n_missing > 0) & (looks < LOOKS):
        maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
        looks += 1
    if n_missing == 0:
        store_part(part, maxima, sums, EDGES)
    else:
        help_row(row, own, words, matrix, BLOCK_COLS, BLOCK_PARTS, VECTOR, EDGES, SAME)


@dataclass(frozen=True)
class Config:
    """The kernel's constants and launch options; `choose_config` chooses them."""

    block_cols: int
    block_parts: int
    vector: int
    edges: bool
    same: bool
    patience: int
    num_warps: int
    maxnreg: int | None = None
    enable_fp_fusion: bool = False  # with it, `help_row` might round differently


def choose_config(
    n_rows: int, n_cols: int, element_size: int, vector: int, same_shift: bool
) -> Config:
    """The configuration for n_rows rows of n_cols values, on the current GPU.

    While a program waits, only others load. So parts are large, and registers capped,
    to hold much of the matrix in each SM: 192 KiB with 80 registers. A small tensor has
    small parts, for many SMs. vector, same_shift: `unaligned.alignment`'s.
    """
    (sms, threads), row_bytes = launch.sms_and_threads(), n_cols * element_size
    fit = row_bytes < (32 if same_shift else 4 * element_size) * threads * sms
    few = fit and n_rows * row_bytes < FEW_BYTES * sms  # few bytes, in parts that fit
    if few and vector * element_size < 16:
        vector = 1  # narrower accesses would need a kernel of their own
    edges = vector == 1 and (same_shift or element_size == 2)  # 32-bit: by elements
    part_bytes, num_warps, maxnreg = 32768, 4, 96 if edges else 80
    if few:
        length = launch.power_of_2(row_bytes)
        part_bytes = min(max(4096, length // 64), max(16384, length // 256), 32768)
        num_warps, maxnreg = part_bytes // 2048, 40 if same_shift else 64
    elif vector == 1 and not same_shift:
        part_bytes, maxnreg = 8192 * element_size, 80 if edges else 96
    elif edges and element_size == 2 and row_bytes >= LONG_EDGES_BYTES * sms:
        part_bytes, maxnreg = 65536, 160
    elif row_bytes >= LONG_BYTES * sms:
        part_bytes, num_warps, maxnreg = 65536, 8, 80
    if edges:
        vector = 16 // element_size if same_shift else 4
    block_cols = part_bytes // element_size
    n_parts = count_parts(n_cols, block_cols, vector)
    block_parts = max(32 * num_warps, launch.power_of_2(n_parts))
    how = edges, same_shift or not edges, PATIENCE, num_warps, maxnreg
    return Config(block_cols, block_parts, vector, *how)


def are_resident(
    n_rows: int, n_cols: int, element_size: int, vector: int, same_shift: bool
) -> bool:
    """Whether the current GPU runs all programs of a row at once, beside other calls'.

    A third of the slots stays free, or more. Args: see `choose_config`.
    """
    config = choose_config(n_rows, n_cols, element_size, vector, same_shift)
    n_parts = count_parts(n_cols, config.block_cols, config.vector)
    slots = launch.programs_at_once(config.num_warps, config.maxnreg)
    least = 1.5 if same_shift or vector > 1 else 2 if element_size == 4 else 3
    return n_parts * least <= slots


def count_parts(n_cols: int, block_cols: int, vector: int) -> int:
    """The parts of a row. Its last n_cols % vector values make no part of their own."""
    return max(1, launch.ceil_div(n_cols // vector * vector, block_cols))


def launch_for(output: Tensor, x: Tensor, config: Config | None = None) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args: as for `kernels.tiled.launch_for`; output is x, or shares no memory with it.
    """
    n_rows, n_cols = x.shape
    if config is None:
        form = n_rows, n_cols, output.element_size(), *alignment(output, x)
        config = choose_config(*form)
    n_parts = count_parts(n_cols, config.block_cols, config.vector)
    return Launch(
        kernel=softmax_kernel,
        grid=(n_parts, n_rows),
        scalars=(output.stride(0), x.stride(0), row_shift(output), n_cols, n_parts),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
        n_words=n_rows * (launch.ceil_div(n_parts, 8) * 16 + n_parts),
    )


def softmax(x: Tensor) -> Tensor:
    """The softmax of every row. Args, returns, raises: as `kernels.tiled.softmax`."""
    return launch.by_rows(launch_for, x, MAX_ROWS, MAX_COLS)
