"""16-bit rows of a wider matrix: read at one distance and written at another.

Builds on: shared memory as in `kernels.staged`; parts of a row as in
    `kernels.cooperative`.
Changes: a program copies its row to shared memory in chunks of 16 bytes, aligned in the
    input. From there its threads read windows: two values that are one word of the
    output. A window may be the end of one word and the beginning of the next. Parts of
    a longer row keep their numerators, and scale them when the row's sum is known.
Costs: MN values read and MN written; in shared memory, MN written and 2MN read.
Source: measured (`notebooks/recorded/`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import online, tiled, unaligned
from kernels.cooperative import (
    PATIENCE,
    choose_task,
    in_lines,
    look,
    no_pairs,
    pack,
    tag_of,
)
from kernels.lab import launch, shared
from kernels.lab.launch import (
    SIZES,
    Launch,
    ceil_div,
    constants_of,
    pointer_to,
    power_of_2,
)
from kernels.online import merge_axis
from kernels.staged import load_values, stage_chunks, store_values
from kernels.tiled import INTERPRETED, exp_shifted, load_or_neg_inf

MAX_COLS, MAX_ROWS = 2**16, tiled.MAX_ROWS  # longer rows are for `cooperative`
LONGEST_ROW = 16384  # columns of a row that one program takes
WORDS_OF_A_THREAD = 32  # of the first block, where a row needs several warps
WORDS_OF_A_PART = 1024, 256  # of a longer row, in two blocks
# Four times -inf in 16 bits, as an integer.
BFLOAT16_NEG_INF = tl.constexpr(int.from_bytes(b"\x80\xff" * 4, "little", signed=True))
FLOAT16_NEG_INF = tl.constexpr(int.from_bytes(b"\x00\xfc" * 4, "little", signed=True))


@triton.jit
def load_chunks(tile, FIRST, COUNT, at_end):
    """Loads chunks of 16 bytes, as two integers each.

    at_end: -inf where the row does not have all values of the chunk.
    """
    _, ptr, col, n_cols = tile
    chunk = FIRST + tl.arange(0, COUNT)
    ptr = tl.multiple_of(ptr.to(tl.pointer_type(tl.int64)), 16)
    ptrs = ptr + 2 * chunk[:, None] + tl.arange(0, 2)[None, :]
    if at_end:
        dtype: tl.constexpr = tile[1].dtype.element_ty
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        other: tl.constexpr = BFLOAT16_NEG_INF if is_bfloat16 else FLOAT16_NEG_INF
        first_col = col + 8 * chunk[:, None]
        inside = (first_col >= 0) & (first_col + 8 <= n_cols)
        chunks = tl.load(ptrs, inside, other, eviction_policy="evict_last")
    else:
        chunks = tl.load(ptrs, eviction_policy="evict_last")
    return chunks


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
    held = tile[0], tile[1], 0  # as the functions of `staged` know it
    place, values, here = load_ends(tile, LAST + 1, THREADS)
    chunks = load_chunks(tile, 0, CHUNKS, at_end)
    if REST:
        rest = load_chunks(tile, CHUNKS, REST // 4, at_end)
        stage_chunks(held, rest, CHUNKS, REST // 4)
    last = load_chunks(tile, LAST, 1, at_end)
    stage_chunks(held, chunks, 0, CHUNKS)
    stage_chunks(held, last, LAST, 1)
    tl.debug_barrier()
    if at_end:
        store_values(held, place, values, here)
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
    output_ptr, input_ptr, output_stride, input_stride = matrix[:4]
    output_shift, input_shift, n_cols = matrix[4:]
    start = row * output_stride + output_shift
    begin = 2 * part * (WORDS + REST) - (start & 1).to(tl.int32)  # first word's column
    place = row * input_stride + input_shift + begin  # from an aligned address on
    chunk, shift = place >> 3, (place & 7).to(tl.int32)
    output_ptr = tl.multiple_of(output_ptr - output_shift, 16)
    output_ptr += (start + begin) // 2 * 2  # even already; so the compiler knows
    # The last chunk may have up to 8 values that the words don't need.
    at_end = (part == 0) | (begin + 2 * (WORDS + REST) + 8 > n_cols)
    ptr = tl.multiple_of(input_ptr - input_shift, 16) + 8 * chunk
    tile = address, ptr, begin - shift, n_cols
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
    return part_max, part_sum, values, output_ptr, tile, begin, at_end


@triton.jit
def store_words(ptr, low, high, col, n_cols, FIRST, THREADS, at_end):
    """Stores words of two values; at a row's end, those that it has both values of."""
    TURNS: tl.constexpr = low.shape[0]
    y = tl.reshape(tl.join(low, high), (TURNS, 2 * THREADS))
    turn, place = tl.arange(0, TURNS)[:, None], tl.arange(0, 2 * THREADS)[None, :]
    ptrs = ptr + place + (2 * FIRST + 2 * THREADS * turn)
    if at_end:
        cols = col + place // 2 * 2 + (2 * FIRST + 2 * THREADS * turn)
        tl.store(ptrs, y, mask=(cols >= 0) & (cols < n_cols - 1))
    else:
        tl.store(ptrs, y)


@triton.jit
def store_part(part, row_max, row_sum, WORDS, REST, THREADS):
    """Writes the softmax of a part."""
    part_max, _, values, output_ptr, tile, begin, at_end = part
    low, high, rest_low, rest_high = values
    address, input_ptr, first_col, n_cols = tile
    factor = exp_shifted(part_max, row_max) / row_sum  # of the part's numerators
    low, high = low * factor, high * factor
    store_words(output_ptr, low, high, begin, n_cols, 0, THREADS, at_end)
    if REST:
        low, high = rest_low * factor, rest_high * factor
        store_words(output_ptr, low, high, begin, n_cols, WORDS, THREADS, at_end)
    if at_end:  # an end whose word isn't whole: its other value may be another row's
        lane = tl.arange(0, THREADS)
        place = tl.where(lane == 0, 0, n_cols - 1) - begin
        # Alone: the row's first value at an odd place, its last one at an even place.
        alone = (place ^ lane) % 2 == 1
        is_here = (lane < 2) & alone & (place >= 0) & (place < 2 * (WORDS + REST))
        x = load_values((address, input_ptr, 2**30), begin - first_col + place, is_here)
        tl.store(output_ptr + place, exp_shifted(x, row_max) / row_sum, is_here)


# Only n_parts = 1 is compiled for itself. Then no program divides by it.
@triton.jit(
    do_not_specialize=[*(name for name in SIZES if name != "n_parts"), "input_shift"],
    do_not_specialize_on_alignment=["n_parts"],
)
def softmax_kernel(
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
    REST: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """One program computes the softmax of one row, or of one part of a row.

    If the pairs of other parts do not come, the loop computes missing parts, and at
    last its own once more. A pair is the same, bit by bit, whichever program computes
    it, so a helper may overwrite it.

    Args: as in `kernels.cooperative`, but the output shares no memory with the input,
        and
        input_shift: elements from an aligned address to the input's first element.
        n_parts: of a row; 1 where a row is not shared. Then words_ptr is not used.
        WORDS, REST: of a part, two powers of two; REST may be 0. A row that is not
            shared fits into them, wherever it starts.
        THREADS: of the program.
        BLOCK_PARTS: a power of two, at least n_parts; 1 where a row is not shared.
    """
    LOOKS: tl.constexpr = 1 if INTERPRETED else PATIENCE  # there, nobody else runs
    address = 0 if INTERPRETED else shared.reserve(4 * (WORDS + REST) + 16)
    matrix = output_ptr, input_ptr, output_row_stride, input_row_stride
    matrix += output_shift, input_shift, n_cols
    own = tl.program_id(0)
    if BLOCK_PARTS > 1:
        n_rows, row_words = tl.num_programs(0) // n_parts, in_lines(2 * n_parts)
        tag = tag_of(tag, words_ptr + (n_rows * row_words + own))
    task = own  # the program whose part this program computes; -1 at the end
    while task >= 0:
        row = (task // n_parts).to(tl.int64)
        part = reduce_part(row, task % n_parts, address, matrix, WORDS, REST, THREADS)
        if BLOCK_PARTS == 1:
            store_part(part, part[0], part[1], WORDS, REST, THREADS)
            task = -1
        else:
            row_ptr = words_ptr + row * row_words
            words, word_ptr = (row_ptr, tag, n_parts), row_ptr + task % n_parts
            tl.atomic_xchg(word_ptr, pack(part[0], tag), sem="relaxed")
            tl.atomic_xchg(word_ptr + n_parts, pack(part[1], tag), sem="relaxed")
            maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
            maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
            looks = 1
            while (n_missing > 0) & (task == own) & (looks < LOOKS):
                maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
                looks += 1
            if (n_missing == 0) & (task == own):
                row_max, row_sum = merge_axis(maxima, sums, 0)
                row_max, row_sum = tl.max(row_max, 0), tl.max(row_sum, 0)
                store_part(part, row_max, row_sum, WORDS, REST, THREADS)
                task = -1
            else:
                task = choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS)
                tl.debug_barrier()  # all have read what the next part overwrites


@dataclass(frozen=True)
class Config:
    """The kernel's constants and launch options; `choose_config` chooses them."""

    words: int
    rest: int
    threads: int
    block_parts: int
    patience: int
    num_warps: int
    maxnreg: int | None = None
    enable_fp_fusion: bool = False  # with it, a helper might round differently


def split_words(n_words: int) -> tuple[int, int]:
    """Powers of two that hold n_words: two where a quarter of one would be empty."""
    words = power_of_2(n_words)
    if n_words > words * 3 // 4:
        return words, 0
    half = words // 2
    return half, max(power_of_2(n_words - half), half // WORDS_OF_A_THREAD, 32)


def choose_config(n_cols: int) -> Config:
    """The configuration for rows of n_cols values of 16 bits.

    A thread takes up to WORDS_OF_A_THREAD words of the first block, so that short rows
    have one warp. If several programs share a row, each has one warp, and a capped
    number of registers, so that waiting programs hold as much as possible.
    """
    n_words = max(n_cols // 2 + 1, 64)
    words, rest = split_words(n_words)
    is_loose = words == 8192 and n_words < 6600  # a fifth of the block would be empty
    if n_cols > LONGEST_ROW or is_loose:
        words, rest = WORDS_OF_A_PART
        block_parts = max(32, power_of_2(ceil_div(n_words, words + rest)))
        return Config(words, rest, 32, block_parts, PATIENCE, 1, maxnreg=96)
    num_warps = max(1, words // (32 * WORDS_OF_A_THREAD))
    return Config(words, rest, 32 * num_warps, 1, PATIENCE, num_warps)


def fits(output: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the kernel takes x's rows, and writes to output."""
    return x.dtype == output.dtype and x.element_size() == 2 and output is not x


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Where the kernel does not take the rows (`fits`), this is the launch of `unaligned`
    or, for longer rows, of `online`.

    Args: as for `kernels.tiled.launch_for`; output shares no memory with x.
    """
    n_rows, n_cols = x.shape
    if not fits(output, x):
        chapter = unaligned if n_cols <= unaligned.MAX_COLS else online
        return chapter.launch_for(output, x)
    config = config or choose_config(n_cols)
    in_parts = config.block_parts > 1
    n_parts = ceil_div(n_cols // 2 + 1, config.words + config.rest) if in_parts else 1
    scalars = output.stride(0), x.stride(0), *map(launch.row_shift, (output, x)), n_cols
    scalars = scalars if in_parts else (0, 0, *scalars)  # no words, no tag
    return Launch(
        kernel=softmax_kernel,
        grid=(n_rows * n_parts,),
        scalars=(*scalars, n_parts),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
        n_words=n_rows * (ceil_div(n_parts, 8) * 16 + n_parts) if in_parts else 0,
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row. Args, returns, raises: as `kernels.tiled.softmax`."""
    return launch.by_rows(launch_for, x, MAX_ROWS, MAX_COLS)
