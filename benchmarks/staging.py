"""Experiment: short rows that pass through shared memory, each row in one thread.

    python -m benchmarks.staging

On a GPU, prints the times of the kernel below, of `kernels.softmax` and of the copy,
for 256 MiB of rows of each of several lengths.

Where 16 bytes divide neither a row's start nor its length, `kernels.unaligned` moves
the row's ends element by element. On an H200, rows of 33 bfloat16 values then take 1.1
times as long as the copy (`fastest.csv`). But adjacent rows have no gaps: a tile of
rows is one aligned span. Here the threads move the span in accesses of 16 bytes,
whatever the rows' length, to shared memory and back. There, each thread takes rows of
its own, so threads exchange nothing.

Triton has no operation for an address in shared memory. Five helpers say it in PTX. The
interpreter has no shared memory: there, values are loaded from and stored to the
matrices themselves.
"""

import argparse
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import kernels
from kernels import tiled
from kernels.lab import backend, clock, record
from kernels.lab.launch import Launch, ceil_div, constants_of, pointer_to, power_of_2
from kernels.tiled import INTERPRETED, exp_shifted

MIN_COLS, MAX_COLS = 2, 64  # of 16 bits: a thread holds a row
WORDS_OF_A_THREAD = 8  # at least: it takes several rows of fewer words
LENGTHS = 3, 7, 12, 15, 23, 31, 33, 36, 47, 55, 63


@triton.jit
def reserve(BYTES: tl.constexpr):
    """Reserves shared memory for a program. Returns its address, which 16 divides."""
    code: tl.constexpr = f"{{ .shared .align 16 .b8 tile[{BYTES}]; mov.u32 $0, tile; }}"
    return tl.inline_asm_elementwise(code, "=r", [], tl.int32, False, 1)


@triton.jit
def load_shared(address, inside, BITS: tl.constexpr):
    """Reads integers of 16 or 32 bits from shared memory; 0 where not inside."""
    kinds: tl.constexpr = "=&h,r,r" if BITS == 16 else "=&r,r,r"
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"mov.b{BITS} $0, 0; @p ld.shared.b{BITS} $0, [$1]; }}"
    )
    args = [address, inside.to(tl.int32)]
    return tl.inline_asm_elementwise(
        code, kinds, args, tl.int16 if BITS == 16 else tl.int32, False, 1
    )


@triton.jit
def store_shared(address, bits, inside):
    """Writes the integers that are inside to shared memory."""
    BITS: tl.constexpr = bits.dtype.primitive_bitwidth
    kinds: tl.constexpr = "=r,r,h,r" if BITS == 16 else "=r,r,r,r"
    # PTX must return something to Triton: zeros, which nobody uses.
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; "
        f"@p st.shared.b{BITS} [$1], $2; mov.b32 $0, 0; }}"
    )
    args = [address, bits, inside.to(tl.int32)]
    tl.inline_asm_elementwise(code, kinds, args, tl.int32, False, 1)


@triton.jit
def load_chunk(address):
    """Reads chunks of 16 bytes from shared memory, as two integers each."""
    code: tl.constexpr = "ld.shared.v2.b64 {$0, $1}, [$2];"
    return tl.inline_asm_elementwise(
        code, "=l,=l,r", [address], (tl.int64, tl.int64), False, 1
    )


@triton.jit
def store_chunk(address, one, two):
    """Writes chunks of 16 bytes to shared memory."""
    code: tl.constexpr = "st.shared.v2.b64 [$1], {$2, $3}; mov.b32 $0, 0;"
    args = [address, one, two]
    tl.inline_asm_elementwise(code, "=r,r,l,l", args, tl.int32, False, 1)


@triton.jit
def load_values(tile, place, inside):
    """Loads values from their places in the tile, as float32; -inf where not inside.

    A tile is its address in shared memory, the pointer to its first value, and the
    number of its values.
    """
    shared, ptr, n_values = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        x = tl.load(ptr + place, inside & (place < n_values), -float("inf"))
    else:
        x = load_shared(shared + 2 * place, inside, 16).to(dtype, bitcast=True)
    return tl.where(inside, x.to(tl.float32), -float("inf"))


@triton.jit
def store_values(tile, place, value, inside):
    """Stores the values that are inside to their places in the tile."""
    shared, ptr, n_values = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        tl.store(ptr + place, value, inside & (place < n_values))
    else:
        bits = value.to(dtype).to(tl.int16, bitcast=True)
        store_shared(shared + 2 * place, bits, inside)


@triton.jit
def load_words(tile, place, inside):
    """Loads words of two values: those at even places, and those that follow them."""
    shared, ptr, _ = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        return load_values(tile, place, inside), load_values(tile, place + 1, inside)
    word = load_shared(shared + 2 * place, inside, 32)
    low = word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    low = tl.where(inside, low, -float("inf"))
    return low, tl.where(inside, high, -float("inf"))


@triton.jit
def store_words(tile, place, low, high, inside):
    """Stores words of two values, as `load_words` loads them."""
    shared, ptr, _ = tile
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERPRETED:
        store_values(tile, place, low, inside)
        store_values(tile, place + 1, high, inside)
    else:
        low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        store_shared(shared + 2 * place, low | high, inside)


@triton.jit
def find_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Chunks of 16 bytes: their addresses in shared memory, pointers, and which exist.

    To Triton, a chunk is two integers of 64 bits.
    """
    shared, ptr, n_values = tile
    chunk = FIRST + tl.arange(0, COUNT)
    ptr = tl.multiple_of(ptr.to(tl.pointer_type(tl.int64)), 16)
    ptrs = ptr + 2 * chunk[:, None] + tl.arange(0, 2)[None, :]
    return shared + 16 * chunk, ptrs, chunk[:, None] < n_values // 8


@triton.jit
def load_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Loads chunks."""
    _, ptrs, inside = find_chunks(tile, FIRST, COUNT)
    return tl.load(ptrs, inside, 0)


@triton.jit
def stage_chunks(tile, chunks, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Writes loaded chunks to shared memory; zeros where the tile has no more."""
    address, _, _ = find_chunks(tile, FIRST, COUNT)
    one, two = tl.split(chunks)
    store_chunk(address, one, two)


@triton.jit
def store_chunks(tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Stores chunks from shared memory."""
    address, ptrs, inside = find_chunks(tile, FIRST, COUNT)
    one, two = load_chunk(address)
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
        WORDS, REST: of a row, as two powers of two: all of WORDS exist. REST may be 0,
            and counts the value more as a word.
        THREADS: of the program, which ROWS is a multiple of.
    """
    first_row = tl.program_id(0) * ROWS
    start = first_row.to(tl.int64) * n_cols
    n_values = tl.minimum(n_rows - first_row, ROWS) * n_cols
    # At least a chunk for each thread. If not, several threads would copy the same one.
    enough: tl.constexpr = REST == 0 or ROWS * REST >= 4 * THREADS
    STAGED: tl.constexpr = REST if enough else 4 * THREADS // ROWS
    shared = 0 if INTERPRETED else reserve(4 * ROWS * (WORDS + STAGED))
    source = shared, input_ptr + start, n_values
    target = shared, output_ptr + start, n_values
    if not INTERPRETED:
        copy_in(source, ROWS * WORDS // 4, ROWS * STAGED // 4, THREADS)

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
        copy_out(target, ROWS * WORDS // 4, ROWS * STAGED // 4, THREADS)


@dataclass(frozen=True)
class Config:
    """The kernel's constants, and a program's warps."""

    rows: int
    words: int
    rest: int
    threads: int
    num_warps: int


def choose_config(n_cols: int) -> Config:
    """The configuration for rows of n_cols values of 16 bits."""
    words = power_of_2(n_cols // 2 + 1) // 2
    rest = ceil_div(n_cols, 2) - words
    num_warps = 2 if words >= 16 else 4
    rows = 32 * num_warps * max(1, WORDS_OF_A_THREAD // words)
    rest = power_of_2(rest) if rest else 0
    return Config(rows, words, rest, 32 * num_warps, num_warps)


def launch_for(output: torch.Tensor, x: torch.Tensor) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args:
        output, x: (n_rows, n_cols), of one float dtype of 16 bits and of MIN_COLS to
            MAX_COLS columns, contiguous, their addresses divisible by 16.
    """
    config = choose_config(x.shape[1])
    return Launch(
        kernel=softmax_kernel,
        grid=(ceil_div(x.shape[0], config.rows),),
        scalars=tuple(x.shape),
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row of a matrix that `launch_for` takes.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_cols=MAX_COLS, contiguous=True)
    if x.element_size() != 2 or x.shape[1] < MIN_COLS:
        raise ValueError(
            f"x must have {MIN_COLS} columns or more of 16 bits, got {x.shape[1]} of "
            f"{x.dtype}; kernels.softmax takes any"
        )
    if tiled.row_shift(x):
        raise ValueError(
            f"x must start at an address that 16 divides, got {x.data_ptr()}; "
            "x.clone() starts at one"
        )
    output = torch.empty_like(x)
    if x.numel():
        launch_for(output, x)(output, x)
    return output


def main() -> None:
    """Measures, and prints the medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    clock.require_gpu()
    providers = {"staged": softmax, "softmax": kernels.softmax}
    cases = record.of_size(2**28, LENGTHS, [torch.bfloat16])
    df = record.sweep("staging", providers, cases, clock="device")
    print(df.pivot(index=["dtype", "n_cols"], columns="provider", values="p50_us"))


if __name__ == "__main__":
    main()
