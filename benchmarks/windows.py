"""Experiment: 16-bit rows of a wider matrix, through shared memory.

The rows of x[:, :781] may lie 800 values apart, those of the output lie 781 apart. So a
row is read at one distance from an aligned address and written at another, and no split
into wide accesses fits both. `unaligned` and `cooperative` load such values one by one.

Here a program copies a row to shared memory in chunks of 16 bytes, aligned in the
input. Then each thread reads windows. A window is two values that are one word of the
output. In shared memory it may be the end of one word and the beginning of the next;
the thread reads both words, and shifts. So loads move 16 bytes, and stores 4.

`python -m benchmarks.windows` measures these kernels and the course's on a GPU.
Builds on `kernels.staged` and `kernels.cooperative`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import cooperative, tiled, unaligned
from kernels.cooperative import PATIENCE, choose_task, look, no_pairs, pack, publish
from kernels.lab import backend, clock, shared
from kernels.lab.launch import (
    SIZES,
    Launch,
    ceil_div,
    constants_of,
    pointer_to,
    power_of_2,
)
from kernels.online import merge_axis
from kernels.staged import load_values, store_values
from kernels.tiled import INTERPRETED, exp_shifted, load_or_neg_inf, row_shift

LONGEST = 8192  # columns of a row that one program takes
WORDS_OF_A_PART = 1024  # of a longer row
# Four times -inf in 16 bits, as an integer.
BFLOAT16_NEG_INF = tl.constexpr(int.from_bytes(b"\x80\xff" * 4, "little", signed=True))
FLOAT16_NEG_INF = tl.constexpr(int.from_bytes(b"\x00\xfc" * 4, "little", signed=True))


@triton.jit
def load_chunks(tile, FIRST, COUNT, masked):
    """Loads chunks of 16 bytes, as two integers each.

    masked: -inf where the row does not have all values of the chunk.
    """
    _, ptr, col, n_cols = tile
    chunk = FIRST + tl.arange(0, COUNT)
    ptr = tl.multiple_of(ptr.to(tl.pointer_type(tl.int64)), 16)
    ptrs = ptr + 2 * chunk[:, None] + tl.arange(0, 2)[None, :]
    if masked:
        dtype: tl.constexpr = tile[1].dtype.element_ty
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        other: tl.constexpr = BFLOAT16_NEG_INF if is_bfloat16 else FLOAT16_NEG_INF
        first_col = col + 8 * chunk[:, None]
        inside = (first_col >= 0) & (first_col + 8 <= n_cols)
        x = tl.load(ptrs, inside, other, eviction_policy="evict_last")
    else:
        x = tl.load(ptrs, eviction_policy="evict_last")
    return x


@triton.jit
def stage_chunks(tile, chunks, FIRST, COUNT):
    """Writes loaded chunks to shared memory."""
    one, two = tl.split(chunks)
    shared.store_chunk(tile[0] + 16 * (FIRST + tl.arange(0, COUNT)), one, two)


@triton.jit
def load_ends(tile, CHUNKS, THREADS):
    """Loads the chunks that hold a row's first and last values, value by value.

    Returns places and values, -inf where the row has none, and which places to write.
    """
    _, ptr, col, n_cols = tile
    lane = tl.arange(0, THREADS)
    first, last = -col & -8, (n_cols - 1 - col) & -8
    place = tl.where(lane < 8, first, last - 8) + lane
    here = (lane < 16) & (place >= 0) & (place < 8 * CHUNKS)
    inside = here & (col + place >= 0) & (col + place < n_cols)
    return place, load_or_neg_inf(ptr + place, inside), here


@triton.jit
def copy_in(tile, at_end, WORDS, REST, THREADS):
    """Copies a part to shared memory, in chunks of 16 bytes; -inf beyond the row.

    One chunk more than the words fill, since they may start within a chunk. All loads
    come first, so that a thread waits for them at once.
    """
    CHUNKS: tl.constexpr = WORDS // 4
    LAST: tl.constexpr = (WORDS + REST) // 4
    place, values, here = load_ends(tile, LAST + 1, THREADS)
    chunks = load_chunks(tile, 0, CHUNKS, at_end)
    if REST:
        rest = load_chunks(tile, CHUNKS, REST // 4, at_end)
        stage_chunks(tile, rest, CHUNKS, REST // 4)
    last = load_chunks(tile, LAST, 1, at_end)
    stage_chunks(tile, chunks, 0, CHUNKS)
    stage_chunks(tile, last, LAST, 1)
    tl.debug_barrier()
    if at_end:
        store_values((tile[0], tile[1], 0), place, values, here)
        tl.debug_barrier()


@triton.jit
def load_windows(tile, shift, FIRST, WORDS, THREADS):
    """Loads the first and the second values of words; -inf where the row has none.

    Shapes: (turns, THREADS).
    """
    address, ptr, first_col, n_cols = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    TURNS: tl.constexpr = WORDS // THREADS
    turn, lane = tl.arange(0, TURNS)[:, None], tl.arange(0, THREADS)[None, :]
    if INTERPRETED:
        place = shift + 2 * (FIRST + turn * THREADS + lane)
        col = first_col + place
        tile = address, ptr, 2**30
        low = load_values(tile, place, (col >= 0) & (col < n_cols))
        high = load_values(tile, place + 1, (col >= -1) & (col < n_cols - 1))
        return low, high
    # A window's first value is the first or the second of a word.
    at = address + 4 * (shift // 2) + 4 * lane + (4 * FIRST + 4 * THREADS * turn)
    inside = tl.full((TURNS, THREADS), True, tl.int1)
    one = shared.load(at, inside, 32).to(tl.uint32, bitcast=True)
    two = shared.load(at + 4, inside, 32).to(tl.uint32, bitcast=True)
    window = ((two.to(tl.uint64) << 32) | one) >> (shift % 2 * 16)
    window = window.to(tl.uint32)
    if dtype == tl.bfloat16:  # the upper half of float32
        low = (window << 16).to(tl.float32, bitcast=True)
        high = (window & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = window.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (window >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def reduce_part(row, part, address, matrix, WORDS, REST, THREADS):
    """The pair of a part of a row, and what `store_part` needs."""
    _, input_ptr, output_stride, input_stride = matrix[:4]
    output_shift, input_shift, n_cols = matrix[4:]
    start = row * output_stride + output_shift
    begin = 2 * part * WORDS - (start & 1).to(tl.int32)  # the first word's column
    value = row * input_stride + input_shift + begin  # from an aligned address on
    chunk, shift = value >> 3, (value & 7).to(tl.int32)
    # The last chunk may have up to 8 values that the words don't need.
    at_end = (part == 0) | (begin + 2 * (WORDS + REST) + 8 > n_cols)
    ptr = tl.multiple_of(input_ptr - input_shift, 16) + 8 * chunk
    tile = address, tl.multiple_of(ptr, 8), begin - shift, n_cols
    if not INTERPRETED:
        copy_in(tile, at_end, WORDS, REST, THREADS)
    low, high = load_windows(tile, shift, 0, WORDS, THREADS)
    rest_low, rest_high = 0.0, 0.0  # none
    part_max = tl.max(tl.maximum(low, high), 0)
    if REST:
        rest_low, rest_high = load_windows(tile, shift, WORDS, REST, THREADS)
        part_max = tl.maximum(part_max, tl.max(tl.maximum(rest_low, rest_high), 0))
    part_max = tl.max(part_max, 0)
    finite = tl.where(part_max == -float("inf"), 0.0, part_max)  # not -inf - -inf
    low, high = exp_shifted(low, finite), exp_shifted(high, finite)
    part_sum = tl.sum(low + high, 0)
    if REST:
        rest_low = exp_shifted(rest_low, finite)
        rest_high = exp_shifted(rest_high, finite)
        part_sum += tl.sum(rest_low + rest_high, 0)
    part_sum = tl.sum(part_sum, 0)
    values = low, high, rest_low, rest_high
    return part_max, part_sum, finite, values, tile, begin, at_end, start


@triton.jit
def store_words(ptr, low, high, col, n_cols, FIRST, WORDS, THREADS, masked):
    """Stores words of two values; masked: those that the row has both values of."""
    TURNS: tl.constexpr = WORDS // THREADS
    y = tl.reshape(tl.join(low, high), (TURNS, 2 * THREADS))
    turn, place = tl.arange(0, TURNS)[:, None], tl.arange(0, 2 * THREADS)[None, :]
    ptrs = ptr + place + (2 * FIRST + 2 * THREADS * turn)
    if masked:
        col += place // 2 * 2 + (2 * FIRST + 2 * THREADS * turn)
        tl.store(ptrs, y, mask=(col >= 0) & (col < n_cols - 1))
    else:
        tl.store(ptrs, y)


@triton.jit
def store_part(part, factor, matrix, WORDS, REST, THREADS):
    """Writes a part: its numerators times a factor."""
    _, _, finite, values, tile, begin, at_end, start = part
    low, high, rest_low, rest_high = values
    address, input_ptr, first_col, n_cols = tile
    output_ptr = tl.multiple_of(matrix[0] - matrix[4], 16)
    ptr = output_ptr + (start + begin) // 2 * 2  # an even place, and aligned to words
    low, high = low * factor, high * factor
    if at_end:
        store_words(ptr, low, high, begin, n_cols, 0, WORDS, THREADS, True)
        # The row's first and last value may share their word with another row's.
        lane = tl.arange(0, THREADS)
        col = tl.where(lane == 0, 0, n_cols - 1)
        is_here = (lane < 2) & (col >= begin) & (col < begin + 2 * (WORDS + REST))
        x = load_values((address, input_ptr, 2**30), col - first_col, is_here)
        y = exp_shifted(x, finite) * factor
        tl.store(output_ptr + start + col, y, is_here)
    else:
        store_words(ptr, low, high, begin, n_cols, 0, WORDS, THREADS, False)
    if REST:
        rest_low, rest_high = rest_low * factor, rest_high * factor
        store_words(ptr, rest_low, rest_high, begin, n_cols, WORDS, REST, THREADS, True)


@triton.jit(do_not_specialize=[*SIZES, "input_shift"])
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    output_shift,
    input_shift,
    n_cols,
    WORDS: tl.constexpr,
    REST: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One program computes the softmax of one row.

    Args: as in `kernels.unaligned`, and
        input_shift: elements from an aligned address to the input's first element.
        WORDS, REST: two powers of two, whose sum holds a row wherever it starts. REST
            may be 0.
        THREADS: of the program.
    """
    address = 0 if INTERPRETED else shared.reserve(4 * (WORDS + REST) + 16)
    matrix = output_ptr, input_ptr, output_row_stride, input_row_stride
    matrix += output_shift, input_shift, n_cols
    row = tl.program_id(0).to(tl.int64)
    part = reduce_part(row, 0, address, matrix, WORDS, REST, THREADS)
    store_part(part, 1 / part[1], matrix, WORDS, REST, THREADS)


@triton.jit(noinline=True)
def help_row(row, own, words, address, matrix, WORDS, THREADS, BLOCK_PARTS):
    """As in `kernels.cooperative`: computes missing pairs, and then its own part."""
    row_ptr, tag, n_parts = words
    maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
    n_missing = n_parts
    while n_missing >= 0:
        maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
        task = choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS)
        word_ptr = row_ptr + task
        seen_max = tl.load(word_ptr, volatile=True)
        seen_sum = tl.load(word_ptr + n_parts, volatile=True)
        tl.debug_barrier()  # all threads have read the last part
        part = reduce_part(row, task, address, matrix, WORDS, 0, THREADS)
        if n_missing > 0:
            publish(word_ptr, seen_max, part[0], tag)
            publish(word_ptr + n_parts, seen_sum, part[1], tag)
        else:
            store_part(part, merged(part, maxima, sums), matrix, WORDS, 0, THREADS)
            n_missing = -1  # done


@triton.jit
def merged(part, maxima, sums):
    """The factor of a part's numerators, from the pairs of all parts."""
    row_max, row_sum = merge_axis(maxima, sums, 0)
    row_max, row_sum = tl.max(row_max, 0), tl.max(row_sum, 0)
    return exp_shifted(part[0], row_max) / row_sum


@triton.jit(do_not_specialize=[*SIZES, "input_shift"])
def parts_kernel(
    output_ptr,
    input_ptr,
    words_ptr,
    tag,
    output_row_stride,
    input_row_stride,
    output_shift,
    input_shift,
    n_cols,
    n_parts,
    WORDS: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """One program computes one part of the softmax of one row.

    Args: as above and in `kernels.cooperative`. The input is not the output.
    """
    LOOKS: tl.constexpr = 1 if INTERPRETED else PATIENCE  # there, nobody else runs
    address = 0 if INTERPRETED else shared.reserve(4 * WORDS + 16)
    own, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    matrix = output_ptr, input_ptr, output_row_stride, input_row_stride
    matrix += output_shift, input_shift, n_cols
    part = reduce_part(row, own, address, matrix, WORDS, 0, THREADS)
    row_ptr = words_ptr + row * (2 * n_parts)
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
        store_part(part, merged(part, maxima, sums), matrix, WORDS, 0, THREADS)
    else:
        help_row(row, own, words, address, matrix, WORDS, THREADS, BLOCK_PARTS)


@dataclass(frozen=True)
class Config:
    """The constants of `softmax_kernel`, and a program's warps."""

    words: int
    rest: int
    threads: int
    num_warps: int


@dataclass(frozen=True)
class PartsConfig:
    """The constants of `parts_kernel`, and launch options."""

    words: int
    threads: int
    num_warps: int
    block_parts: int
    patience: int = PATIENCE
    maxnreg: int = 80
    enable_fp_fusion: bool = False  # with it, `help_row` might round differently


def choose_config(n_cols: int) -> Config | PartsConfig:
    """The configuration for rows of n_cols values: up to 32 words in each thread."""
    n_words = n_cols // 2 + 1
    if n_cols > LONGEST:
        block_parts = max(32, power_of_2(ceil_div(n_words, WORDS_OF_A_PART)))
        return PartsConfig(WORDS_OF_A_PART, 32, 1, block_parts)
    words, rest = tiled.split_block(max(n_words, 32), 32)
    num_warps = max(1, words // WORDS_OF_A_PART)
    return Config(words, rest, 32 * num_warps, num_warps)


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | PartsConfig | None = None
) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args: as for `kernels.tiled.launch_for`, but 16-bit values, and output is not x.
    """
    n_rows, n_cols = x.shape
    config = config or choose_config(n_cols)
    scalars = output.stride(0), x.stride(0), row_shift(output), row_shift(x), n_cols
    how = {"constants": constants_of(config)}
    how["pointers"] = pointer_to(output), pointer_to(x)
    if not isinstance(config, PartsConfig):
        return Launch(softmax_kernel, (n_rows,), scalars, **how)
    n_parts = ceil_div(n_cols // 2 + 1, config.words)
    scalars, n_words = (*scalars, n_parts), 2 * n_rows * n_parts
    return Launch(parts_kernel, (n_parts, n_rows), scalars, n_words=n_words, **how)


def softmax(
    x: torch.Tensor, config: Config | PartsConfig | None = None
) -> torch.Tensor:
    """The softmax of every row of a matrix of 16-bit values with adjacent columns."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_for(output, x, config)(output, x)
    return output


def measure(n_cols: int, width: int, dtype: torch.dtype) -> None:
    """Prints times of 256 MiB of a slice, µs, and shares of a copy's speed."""
    n_rows = 2**28 // (2 * n_cols)
    wide = torch.randn(n_rows, width, device=backend.DEVICE, dtype=dtype)
    x = wide[:, :n_cols]
    whole = x.contiguous()
    y = torch.empty_like(whole)
    before = unaligned if n_cols <= 20480 else cooperative
    calls = {"copy": (lambda y, x: y.copy_(x), whole)}
    calls |= {"before": (before.launch_for(y, x), x), "windows": (launch_for(y, x), x)}
    times = {
        name: clock.events_us(lambda y, x, call=call: call(y, x), y, source)[1]
        for name, (call, source) in calls.items()
    }
    shares = {name: f"{times['copy'] / us:.3f}" for name, us in times.items()}
    print(n_cols, width, dtype, times, shares, flush=True)


if __name__ == "__main__":
    clock.require_gpu()
    for columns in (300, 520, 640, 781, 1000, 2049, 4097, 12345, 50257):
        for half in (torch.bfloat16, torch.float16):
            measure(columns, columns + (-columns % 8 or 1), half)
