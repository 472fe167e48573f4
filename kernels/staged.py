"""Short rows through shared memory: wide accesses wherever a row starts.

Builds on: `kernels.unaligned`; shared memory and banks as in `kernels.cuda`.
Changes: adjacent rows without gaps are one span. A program moves the span of its tile
    in accesses of 16 bytes, to shared memory and back. There, each thread takes rows of
    its own. So threads exchange nothing.
Costs: MN values read and MN written; the same twice in shared memory.
Source: measured (`notebooks/recorded/`); PTX ISA, `ld.shared` and `st.shared`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import unaligned
from kernels.lab import launch, shared
from kernels.lab.launch import Launch, ceil_div, constants_of, pointer_to, power_of_2
from kernels.tiled import INTERPRETED, exp_shifted

MAX_COLS, MAX_ROWS = unaligned.MAX_COLS, unaligned.MAX_ROWS
LONGEST = 64  # columns of 16 bits, which a thread can hold; longer rows are unaligned's
WORDS_OF_A_THREAD = 8  # at least: it takes several rows of fewer words


@triton.jit
def load_values(tile, place, inside):
    """Loads values from their places in the tile, as float32; -inf where not inside.

    A tile is its address in shared memory, the pointer to its first value, and the
    number of its values.
    """
    address, ptr, n_values = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        x = tl.load(ptr + place, inside & (place < n_values), -float("inf"))
    else:
        x = shared.load(address + 2 * place, inside, 16).to(dtype, bitcast=True)
    return tl.where(inside, x.to(tl.float32), -float("inf"))


@triton.jit
def store_values(tile, place, value, inside):
    """Stores the values that are inside to their places in the tile."""
    address, ptr, n_values = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        tl.store(ptr + place, value, inside & (place < n_values))
    else:
        bits = value.to(dtype).to(tl.int16, bitcast=True)
        shared.store(address + 2 * place, bits, inside)


@triton.jit
def load_words(tile, place, inside):
    """Loads words from even places: the values there, and those that follow them."""
    address, ptr, _ = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        return load_values(tile, place, inside), load_values(tile, place + 1, inside)
    word = shared.load(address + 2 * place, inside, 32)
    low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    low = tl.where(inside, low, -float("inf"))
    return low, tl.where(inside, high, -float("inf"))


@triton.jit
def store_words(tile, place, low, high, inside):
    """Stores words of two values, as `load_words` loads them."""
    address, ptr, _ = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        store_values(tile, place, low, inside)
        store_values(tile, place + 1, high, inside)
    else:
        low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        shared.store(address + 2 * place, low | high, inside)


@triton.jit
def find_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Chunks of 16 bytes: their addresses in shared memory, pointers, and which exist.

    To Triton, a chunk is two integers of 64 bits.
    """
    address, ptr, n_values = tile
    chunk = FIRST + tl.arange(0, COUNT)
    ptr = tl.multiple_of(ptr.to(tl.pointer_type(tl.int64)), 16)
    ptrs = ptr + 2 * chunk[:, None] + tl.arange(0, 2)[None, :]
    return address + 16 * chunk, ptrs, chunk[:, None] < n_values // 8


@triton.jit
def load_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Loads chunks, as (COUNT, 2) integers; zeros where the tile has no more."""
    _, ptrs, inside = find_chunks(tile, FIRST, COUNT)
    return tl.load(ptrs, inside, 0)


@triton.jit
def stage_chunks(tile, chunks, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Writes loaded chunks to shared memory; zeros where the tile has no more."""
    places, _, _ = find_chunks(tile, FIRST, COUNT)
    one, two = tl.split(chunks)
    shared.store_chunk(places, one, two)


@triton.jit
def store_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Stores chunks from shared memory."""
    places, ptrs, inside = find_chunks(tile, FIRST, COUNT)
    one, two = shared.load_chunk(places)
    tl.store(ptrs, tl.join(one, two), inside)


@triton.jit
def find_last(tile, THREADS: tl.constexpr):
    """The places of the values that fill no chunk, a thread of one, and which exist."""
    place = tile[2] // 8 * 8 + tl.arange(0, THREADS)
    return place, place < tile[2]


@triton.jit
def copy_in(tile, BLOCK: tl.constexpr, REST: tl.constexpr, THREADS: tl.constexpr):
    """Copies BLOCK and REST chunks to shared memory, and waits for all threads.

    All loads come first, so that a thread waits for them at once.
    """
    block = load_chunks(tile, 0, BLOCK)
    if REST:
        rest = load_chunks(tile, BLOCK, REST)
        stage_chunks(tile, rest, BLOCK, REST)
    stage_chunks(tile, block, 0, BLOCK)
    if tile[2] % 8 > 0:  # in the last tile only
        tl.debug_barrier()
        place, inside = find_last(tile, THREADS)
        x = tl.load(tile[1] + place, inside, 0)
        store_values(tile, place, x, inside)
    tl.debug_barrier()


@triton.jit
def copy_out(tile, BLOCK: tl.constexpr, REST: tl.constexpr, THREADS: tl.constexpr):
    """Waits for all threads, and copies BLOCK and REST chunks from shared memory."""
    tl.debug_barrier()
    store_chunks(tile, 0, BLOCK)
    if REST:
        store_chunks(tile, BLOCK, REST)
    if tile[2] % 8 > 0:
        place, inside = find_last(tile, THREADS)
        tl.store(tile[1] + place, load_values(tile, place, inside), inside)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def softmax_kernel(
    output_ptr,
    input_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    REST: tl.constexpr,
    COPIED: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One program computes the softmax of a tile of adjacent rows, each in one thread.

    A row is n_cols // 2 words of two values, and one value more if n_cols is odd: its
    first if the row starts at an odd place, and its last if not.

    Args:
        output_ptr, input_ptr: contiguous matrices of 16-bit values; 16 bytes divide
            their addresses.
        n_rows, n_cols: their shape.
        ROWS: of a tile, a power of two.
        WORDS, REST: of a row, as two powers of two: all of WORDS exist. REST may be 0.
        COPIED: room for the words and the value of a row beyond WORDS, in words; a
            power of two, or 0.
        THREADS: of the program, which ROWS is a multiple of.
    """
    first_row = tl.program_id(0) * ROWS
    start = first_row.to(tl.int64) * n_cols
    n_values = tl.minimum(n_rows - first_row, ROWS) * n_cols
    address = 0 if INTERPRETED else shared.reserve(4 * ROWS * (WORDS + COPIED))
    source = address, input_ptr + start, n_values
    target = address, output_ptr + start, n_values
    if not INTERPRETED:
        copy_in(source, ROWS * WORDS // 4, ROWS * COPIED // 4, THREADS)

    # Shapes: (words, ROWS). So a thread holds whole rows.
    begin = tl.arange(0, ROWS)[None, :] * n_cols
    odd = begin % 2
    is_one = (begin >= 0) & (n_cols % 2 == 1)  # of begin's shape
    one_place = begin + tl.where(odd > 0, 0, n_cols - 1)
    one = load_values(source, one_place, is_one)
    place = begin + odd + 2 * tl.arange(0, WORDS)[:, None]
    inside = tl.full((WORDS, ROWS), True, tl.int1)
    low, high = load_words(source, place, inside)
    row_max = tl.maximum(one, tl.max(tl.maximum(low, high), axis=0)[None, :])
    if REST:
        word = WORDS + tl.arange(0, REST)[:, None]
        rest_place = begin + odd + 2 * word
        rest_inside = (word < n_cols // 2) & (begin >= 0)
        rest_low, rest_high = load_words(source, rest_place, rest_inside)
        rest_max = tl.max(tl.maximum(rest_low, rest_high), axis=0)[None, :]
        row_max = tl.maximum(row_max, rest_max)

    one = exp_shifted(one, row_max)
    low, high = exp_shifted(low, row_max), exp_shifted(high, row_max)
    row_sum = one + tl.sum(low + high, axis=0)[None, :]
    if REST:
        rest_low = exp_shifted(rest_low, row_max)
        rest_high = exp_shifted(rest_high, row_max)
        row_sum += tl.sum(rest_low + rest_high, axis=0)[None, :]
    factor = 1 / row_sum
    store_values(target, one_place, one * factor, is_one)
    store_words(target, place, low * factor, high * factor, inside)
    if REST:
        rest_low, rest_high = rest_low * factor, rest_high * factor
        store_words(target, rest_place, rest_low, rest_high, rest_inside)

    if not INTERPRETED:
        copy_out(target, ROWS * WORDS // 4, ROWS * COPIED // 4, THREADS)


@dataclass(frozen=True)
class Config:
    """The kernel's constants, and a program's warps."""

    rows: int
    words: int
    rest: int
    copied: int
    threads: int
    num_warps: int


def choose_config(n_cols: int) -> Config:
    """The configuration for rows of n_cols values of 16 bits."""
    words = power_of_2(n_cols // 2 + 1) // 2
    num_warps = 2 if words >= 16 else 4
    threads = 32 * num_warps
    rows = threads * max(1, WORDS_OF_A_THREAD // words)
    rest, copied = n_cols // 2 - words, ceil_div(n_cols, 2) - words
    rest = power_of_2(rest) if rest else 0
    # At least a chunk for each thread. If not, several threads would copy the same one.
    copied = max(power_of_2(copied), 4 * threads // rows) if copied else 0
    return Config(rows, words, rest, copied, threads, num_warps)


def fits(output: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the kernel takes x's rows, and writes to output.

    Where 8 divides n_cols, rows are aligned, and have bank conflicts here.
    """
    n_cols = x.shape[1]
    return (
        1 < n_cols <= LONGEST
        and n_cols % 8 > 0
        and all(
            t.element_size() == 2 and t.is_contiguous() and launch.row_shift(t) == 0
            for t in (output, x)
        )
    )


def launch_for(
    output: torch.Tensor, x: torch.Tensor, config: Config | None = None
) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Where the kernel does not take the rows (`fits`), this is the launch of `unaligned`.

    Args: as for `kernels.tiled.launch_for`.
    """
    if not fits(output, x):
        return unaligned.launch_for(output, x)
    config = config or choose_config(x.shape[1])
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(x.shape[0], config.rows),),
        scalars=tuple(x.shape),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row. Args, returns, raises: as `kernels.tiled.softmax`."""
    return launch.by_rows(launch_for, x, MAX_ROWS, MAX_COLS)
