"""Experiment: short rows that pass through shared memory, one thread a row.

    python -m benchmarks.staging

On a GPU, prints the times of the kernel below, of `kernels.unaligned` and of the copy,
for 256 MiB of rows of each of several lengths.

Where 16 bytes divide neither a row's start nor its length, `kernels.unaligned` moves
the row's ends element by element. On an H200, rows of 33 bfloat16 values then take 1.1
times as long as the copy (`fastest.csv`). But adjacent rows have no gaps: a tile of
rows is one aligned span. Here the threads load the span in accesses of 16 bytes,
whatever the rows' length, and write it to shared memory. Then every thread reads one
row from there, computes its softmax alone, and writes it back. So the threads of a row
exchange nothing, and no row has edges.

Triton has no operation for an address in shared memory. Three helpers say it in PTX.
"""

import argparse
import functools

import torch
import triton
import triton.language as tl

from kernels import unaligned
from kernels.lab import backend, clock, record
from kernels.lab.launch import SIZES, Launch, ceil_div, pointer_to, power_of_2
from kernels.tiled import exp_shifted

MAX_BYTES = 128  # of a row: one thread holds it
NUM_WARPS = 2, 4, 8  # that are tried
LENGTHS = {torch.bfloat16: (7, 15, 33, 47, 63), torch.float32: (3, 7, 15, 31)}


@triton.jit
def shared_buffer(BYTES: tl.constexpr):
    """Reserves so many bytes of shared memory, and returns their address."""
    code: tl.constexpr = (
        f"{{ .shared .align 16 .b8 stage[{BYTES}]; mov.u32 $0, stage; }}"
    )
    return tl.inline_asm_elementwise(
        code, "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_shared(address, value, inside):
    """Writes the integers that are inside to their addresses in shared memory."""
    BITS: tl.constexpr = value.dtype.primitive_bitwidth
    kind: tl.constexpr = "h" if BITS == 16 else "l" if BITS == 64 else "r"
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; "
        f"@p st.shared.b{BITS} [$1], $2; mov.b32 $0, 0; }}"
    )
    # PTX must return something, and Triton must not drop it: nobody uses the zeros.
    tl.inline_asm_elementwise(
        code,
        f"=r,r,{kind},r",
        [address, value, inside.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_shared(address, inside, BITS: tl.constexpr):
    """Reads integers from their addresses in shared memory; 0 where not inside."""
    kind: tl.constexpr = "h" if BITS == 16 else "l" if BITS == 64 else "r"
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"mov.b{BITS} $0, 0; @p ld.shared.b{BITS} $0, [$1]; }}"
    )
    return tl.inline_asm_elementwise(
        code,
        f"=&{kind},r,r",
        [address, inside.to(tl.int32)],
        dtype=tl.int16 if BITS == 16 else tl.int64 if BITS == 64 else tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=SIZES)
def staged_kernel(
    output_ptr,
    input_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    REST: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program computes the softmax of a tile of adjacent rows, a thread of one row.

    Args:
        output_ptr, input_ptr: contiguous, and 16 bytes divide their addresses.
        n_rows, n_cols: the matrix's shape.
        ROWS: of a tile: as many as the program has threads.
        COLS: the largest power of two that is at most n_cols.
        REST: a power of two; no more columns follow. 0 if none does.
        WORDS: a power of two; a tile has no more words of 8 bytes.
    """
    dtype: tl.constexpr = input_ptr.dtype.element_ty
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    INTEGER: tl.constexpr = tl.int16 if SIZE == 2 else tl.int32
    BYTES: tl.constexpr = ROWS * (COLS + REST) * SIZE
    first_row = tl.program_id(0) * ROWS
    n_bytes = tl.minimum(n_rows - first_row, ROWS) * n_cols * SIZE  # of this tile
    start = first_row.to(tl.int64) * n_cols
    shared = shared_buffer(BYTES)

    # 16 bytes divide where a tile starts. Its last bytes move one value at a time.
    x_ptr = tl.multiple_of((input_ptr + start).to(tl.pointer_type(tl.int64)), 16)
    y_ptr = tl.multiple_of((output_ptr + start).to(tl.pointer_type(tl.int64)), 16)
    word = tl.arange(0, WORDS)
    whole = word // 2 * 16 < n_bytes // 16 * 16
    last = n_bytes // 16 * 16 // SIZE + tl.arange(0, 16 // SIZE)
    is_last = last * SIZE < n_bytes
    words = tl.load(x_ptr + word, mask=whole, other=0)
    ends = tl.load(input_ptr + start + last, mask=is_last, other=0)
    store_shared(shared + 8 * word, words, whole)
    store_shared(shared + SIZE * last, ends.to(INTEGER, bitcast=True), is_last)
    tl.debug_barrier()  # other threads have loaded this thread's row

    # With columns along the first axis, Triton 3.7 gives each thread a row. (3.9 does
    # not; the values are right wherever they are.)
    row = shared + tl.arange(0, ROWS)[None, :] * n_cols * SIZE
    at = row + tl.arange(0, COLS)[:, None] * SIZE
    there = tl.full((COLS, ROWS), True, tl.int1)
    x = load_shared(at, there, 8 * SIZE).to(dtype, bitcast=True).to(tl.float32)
    row_max = tl.max(x, axis=0)[None, :]
    if REST:
        rest_col = COLS + tl.arange(0, REST)[:, None]
        rest_at = row + rest_col * SIZE
        rest_there = (rest_col < n_cols) & tl.full((REST, ROWS), True, tl.int1)
        rest = load_shared(rest_at, rest_there, 8 * SIZE).to(dtype, bitcast=True)
        rest = tl.where(rest_there, rest.to(tl.float32), -float("inf"))
        row_max = tl.maximum(row_max, tl.max(rest, axis=0)[None, :])
    numerator = exp_shifted(x, row_max)
    row_sum = tl.sum(numerator, axis=0)[None, :]
    if REST:
        rest_numerator = exp_shifted(rest, row_max)
        row_sum += tl.sum(rest_numerator, axis=0)[None, :]
    factor = 1 / row_sum
    y = (numerator * factor).to(dtype)
    store_shared(at, y.to(INTEGER, bitcast=True), there)
    if REST:
        y = (rest_numerator * factor).to(dtype)
        store_shared(rest_at, y.to(INTEGER, bitcast=True), rest_there)
    tl.debug_barrier()  # all rows of the tile are there

    tl.store(y_ptr + word, load_shared(shared + 8 * word, whole, 64), mask=whole)
    ends = load_shared(shared + SIZE * last, is_last, 8 * SIZE).to(dtype, bitcast=True)
    tl.store(output_ptr + start + last, ends, mask=is_last)


def launch_for(output: torch.Tensor, x: torch.Tensor, num_warps: int = 4) -> Launch:
    """The launch that writes the softmax of x's rows to output.

    Args:
        output, x: (n_rows, n_cols) of one float dtype of 16 or 32 bits, contiguous,
            their addresses divisible by 16, with rows of at most MAX_BYTES bytes.
        num_warps: of a program; it has a thread for each row of its tile.
    """
    (n_rows, n_cols), size = x.shape, x.element_size()
    rows, cols = 32 * num_warps, power_of_2(n_cols + 1) // 2
    constants = {"ROWS": rows, "COLS": cols}
    constants["REST"] = power_of_2(n_cols - cols) if n_cols > cols else 0
    constants["WORDS"] = power_of_2(ceil_div(rows * n_cols * size, 8))
    return Launch(
        kernel=staged_kernel,
        grid=(ceil_div(n_rows, rows),),
        scalars=(n_rows, n_cols),
        constants=constants | {"num_warps": num_warps},
        pointers=(pointer_to(output), pointer_to(x)),
    )


def softmax(x: torch.Tensor, num_warps: int = 4) -> torch.Tensor:
    """The softmax of every row of a matrix that `launch_for` takes.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_cols=MAX_BYTES // x.element_size(), contiguous=True)
    if x.data_ptr() % 16:
        raise ValueError(
            f"x must start at an address that 16 divides, got {x.data_ptr()}; "
            "x.clone() starts at one"
        )
    output = torch.empty_like(x)
    if x.numel():
        launch_for(output, x, num_warps)(output, x)
    return output


def cases() -> list[record.Case]:
    """Rows of every length of LENGTHS: 256 MiB of each."""
    return [
        record.Case(dtype, 2**28 // (n_cols * dtype.itemsize), n_cols)
        for dtype, lengths in LENGTHS.items()
        for n_cols in lengths
    ]


def main() -> None:
    """Measures, and prints the medians."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    clock.require_gpu()
    providers = {
        f"staged.{warps}": functools.partial(softmax, num_warps=warps)
        for warps in NUM_WARPS
    }
    providers["unaligned"] = unaligned.softmax
    df = record.sweep("staging", providers, cases(), clock="device")
    print(df.pivot(index=["dtype", "n_cols"], columns="provider", values="p50_us"))


if __name__ == "__main__":
    main()
