"""Chapter `cooperative`'s kernel on its way, and what it costs that programs wait.

from benchmarks import sharing
sharing.judge(my_write_kernel)
show.diff(sharing.waiting_kernel, sharing.helping_kernel, indentation=False)
sharing.readings(), sharing.pairs_by(row)
providers = {"cooperative.patience50": sharing.patient(50)}

The kernels of this module take contiguous float32 matrices.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl

from kernels import cooperative, unaligned
from kernels.cooperative import Config, choose_task, look, no_pairs, pack
from kernels.lab import backend, check, compile, gpu, meter, occupancy, record
from kernels.lab.launch import Launch
from kernels.lab.limited import LimitedLaunch
from kernels.online import exp_shifted_or_zero, merge_axis
from kernels.tiled import exp_shifted

Softmax = Callable[[torch.Tensor], torch.Tensor]

# ---- two launches --------------------------------------------------------------------


@triton.jit
def pair_kernel(pairs_ptr, input_ptr, n_cols, n_parts, BLOCK_COLS: tl.constexpr):
    """One program computes the (max, sum) pair of one part of a row.

    Args:
        pairs_ptr: 2 * n_parts values for each row: maxima, then sums.
        input_ptr: the first element of the matrix.
        n_cols: columns of the matrix.
        n_parts: parts of a row.
        BLOCK_COLS: columns of a part.
    """
    row, part = tl.program_id(0).to(tl.int64) // n_parts, tl.program_id(0) % n_parts
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)  # the last part may lack some
    places = row * n_cols + cols
    x = tl.load(input_ptr + places, mask=cols < n_cols, other=-float("inf"))
    part_max = tl.max(x, axis=0)
    part_sum = tl.sum(exp_shifted_or_zero(x, part_max), axis=0)
    row_ptr = pairs_ptr + row * (2 * n_parts)
    tl.store(row_ptr + part, part_max)
    tl.store(row_ptr + n_parts + part, part_sum)


@triton.jit
def write_kernel(
    out_ptr, in_ptr, pairs_ptr, n, n_parts, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """One program merges its row's pairs, and writes the results of one part.

    Args:
        out_ptr, in_ptr: first elements of the matrices.
        pairs_ptr: what `pair_kernel` wrote.
        n, n_parts, BLOCK: n_cols, n_parts and BLOCK_COLS of `pair_kernel`.
        PARTS: n_parts, rounded up to a power of two.
    """
    row, part = tl.program_id(0).to(tl.int64) // n_parts, tl.program_id(0) % n_parts
    parts = tl.arange(0, PARTS)
    ptrs = pairs_ptr + row * (2 * n_parts) + parts
    maxima = tl.load(ptrs, parts < n_parts, other=-float("inf"))
    sums = tl.load(ptrs + n_parts, parts < n_parts, other=0.0)
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(sums * tl.exp(maxima - row_max), axis=0)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row * n + cols, cols < n)
    y = tl.exp(x - row_max) / row_sum
    tl.store(out_ptr + row * n + cols, y, cols < n)


PART = 64  # columns of a part, where a few parts are to be tried


def in_two_launches(write: Any = write_kernel, block_cols: int = PART) -> Softmax:
    """A softmax by `pair_kernel` and a kernel that writes.

    Args:
        write: a kernel with the parameters of `write_kernel`.
        block_cols: columns of a part.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        if x.numel():
            n_rows, n_cols = x.shape
            n_parts = triton.cdiv(n_cols, block_cols)
            pairs = torch.empty(n_rows, 2 * n_parts, device=x.device)
            programs = (n_rows * n_parts,)
            pair_kernel[programs](pairs, x, n_cols, n_parts, block_cols)
            sizes = n_cols, n_parts, block_cols, triton.next_power_of_2(n_parts)
            write[programs](output, x, pairs, *sizes)
        return output

    softmax.__name__ = write.fn.__name__
    return softmax


def judge(write: Any) -> None:
    """Says in a sentence whether a learner's kernel merges the pairs as it should.

    Args:
        write: as for `in_two_launches`.
    """
    softmax = in_two_launches(write)
    found = check.softmax(softmax, dtypes=[torch.float32], layouts=["contiguous"])
    if found:  # else it has said what is wrong
        parts = triton.cdiv(found.most_cols, PART)
        print(f"Right in all {found.cases} cases, in up to {parts} parts of a row.")


# ---- one launch: waiting, then helping -----------------------------------------------


@triton.jit
def publish_pair(words, part, x):
    """Publishes the pair of a part x. Atomic operations write to L2, for all SMs."""
    row_ptr, tag, n_parts = words
    part_max = tl.max(x, axis=0)
    part_sum = tl.sum(exp_shifted_or_zero(x, part_max), axis=0)
    tl.atomic_xchg(row_ptr + part, pack(part_max, tag), sem="relaxed")
    tl.atomic_xchg(row_ptr + n_parts + part, pack(part_sum, tag), sem="relaxed")


@triton.jit
def waiting_kernel(
    output_ptr,
    input_ptr,
    words_ptr,
    tag,
    n_cols,
    n_parts,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One program computes one part of the softmax of one row. It may wait for ever.

    Args:
        output_ptr, input_ptr: first elements of the matrices.
        words_ptr, tag, n_parts, BLOCK_COLS, BLOCK_PARTS: as in `kernels.cooperative`.
        n_cols: columns of the matrices.
    """
    own = tl.program_id(0)
    row, part = own.to(tl.int64) // n_parts, own % n_parts
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_start, inside = row * n_cols, cols < n_cols
    # Loaded once: x stays in registers until the results are stored.
    x = tl.load(input_ptr + row_start + cols, mask=inside, other=-float("inf"))
    words = words_ptr + row * (2 * n_parts), tag, n_parts
    publish_pair(words, part, x)
    maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
    n_missing = n_parts
    while n_missing > 0:
        maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
    row_max, row_sum = merge_axis(maxima, sums, 0)
    y = exp_shifted(x, row_max) / row_sum
    tl.store(output_ptr + row_start + cols, y, mask=inside)


@triton.jit
def helping_kernel(
    output_ptr,
    input_ptr,
    words_ptr,
    tag,
    n_cols,
    n_parts,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PATIENCE: tl.constexpr,
):
    """As `waiting_kernel`, but a program that has looked PATIENCE times helps.

    Args:
        As for `waiting_kernel`.
    """
    own = tl.program_id(0)
    row, part = own.to(tl.int64) // n_parts, own % n_parts
    cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row_start, inside = row * n_cols, cols < n_cols
    # Loaded once: x stays in registers until the results are stored.
    x = tl.load(input_ptr + row_start + cols, mask=inside, other=-float("inf"))
    words = words_ptr + row * (2 * n_parts), tag, n_parts
    publish_pair(words, part, x)
    maxima, sums, missing = no_pairs(n_parts, BLOCK_PARTS)
    n_missing = n_parts
    looks = 0
    while n_missing > 0:
        maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
        looks += 1
        if (n_missing > 0) & (looks >= PATIENCE):  # help
            task = choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS) % n_parts
            places = task * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            ptrs = input_ptr + row_start + places
            other = tl.load(ptrs, mask=places < n_cols, other=-float("inf"))
            publish_pair(words, task, other)
    row_max, row_sum = merge_axis(maxima, sums, 0)
    y = exp_shifted(x, row_max) / row_sum
    tl.store(output_ptr + row_start + cols, y, mask=inside)


def registers() -> list[tuple]:
    """What the kernels need of an SM, with parts of 32 KiB and 4 warps.

    Returns:
        Rows of a kernel's name, the registers of a thread without a limit, and the
        bytes that a thread spills with the chapter's limit. The kernels are compiled
        for the GPU here, or for an H200.
    """
    usual = launch_for(*MANY)
    limit = usual.constants["maxnreg"]
    x, words = compile.pointer(torch.float32), compile.pointer(torch.int64)
    sizes = MANY[1], usual.scalars[-1], usual.constants["BLOCK_COLS"], 128
    how = {waiting_kernel: {}, helping_kernel: {"PATIENCE": cooperative.PATIENCE}}
    made = [(kernel, (x, x, words, 1, *sizes), how[kernel]) for kernel in how]
    made.append(compile.bare(usual))
    free = compile.aot_all([(*two, more | {"maxnreg": None}) for *two, more in made])
    tight = compile.aot_all([(*two, more | {"maxnreg": limit}) for *two, more in made])
    return [(a.name, a.registers, b.spills) for a, b in zip(free, tight, strict=True)]


# ---- who is there --------------------------------------------------------------------


def chosen(output: torch.Tensor, x: torch.Tensor, **changes: int) -> Config:
    """The chapter's configuration for matrices, with some fields changed."""
    lie = unaligned.alignment(output, x)
    usual = cooperative.choose_config(*x.shape, x.element_size(), *lie)
    return dataclasses.replace(usual, **changes)


def changed(x: torch.Tensor, missing: int = 0, **changes: int) -> torch.Tensor:
    """The chapter's softmax of contiguous rows, with some fields of its config changed.

    Args:
        missing: how many of each row's last parts have no program.
        changes: fields of `cooperative.Config`.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        how = cooperative.launch_for(output, x, chosen(output, x, **changes))
        grid = how.grid[0] - missing, *how.grid[1:]
        dataclasses.replace(how, grid=grid)(output, x)
    return output


def in_parts(x: torch.Tensor) -> torch.Tensor:
    """The chapter's softmax of contiguous rows, in parts of PART values."""
    return changed(x, block_cols=PART)


class Call:
    """A call in parts of PART values, with words of its own, launched in pieces."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.output = x, torch.empty_like(x)
        config = chosen(self.output, x, block_cols=PART, patience=1)
        self.prepared = cooperative.launch_for(self.output, x, config)
        n_words = self.prepared.n_words
        self.words = torch.zeros(n_words, dtype=torch.int64, device=x.device)

    def launch(self, n_parts: int | None = None) -> torch.Tensor:
        """Launches each row's first n_parts programs, or all; returns the output."""
        how, tag = self.prepared, 1
        args = self.output, self.x, self.words, tag, *how.scalars
        grid = n_parts or how.grid[0], *how.grid[1:]
        how.kernel[grid](*args, **how.constants)
        return self.output


def together(x: torch.Tensor) -> None:
    """Launches a call again: every program finds the words of all its partners."""
    call = Call(x)
    call.launch()
    call.launch()


def alone(x: torch.Tensor) -> None:
    """The first programs of the rows find nobody: the interpreter runs one by one."""
    Call(x).launch()


def readings(n_rows: int = 2, n_parts: int = 16) -> pd.DataFrame:
    """How often a matrix is read and written, counted by the meter in the interpreter.

    Returns:
        For each way, the values read and written, over the values of the matrix.
    """
    x = torch.randn(n_rows, n_parts * PART, device=backend.DEVICE)
    ways = {
        "two launches": in_two_launches(),
        "one launch, the other pairs are there": together,
        "one launch, nobody else is there": alone,
    }
    n_programs, rows = n_rows * n_parts, []
    for way, function in ways.items():
        launches = [op for op in meter.count(function, x).rows if op.grid]
        launches = launches[-1:] if function is together else launches
        read = sum(op.read_values for op in launches)
        written = sum(op.written_values for op in launches)
        if len(launches) == 2:  # its pairs are values: every program reads its row's
            read -= n_programs * 2 * n_parts
            written -= n_programs * 2
        rows.append((way, read / x.numel(), written / x.numel()))
    columns = ["way", "read, MN", "written, MN"]
    return pd.DataFrame(rows, columns=columns).set_index("way")


def pairs_by(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The softmax of one row (1, n_cols), where different programs compute its pairs.

    Returns:
        Who computes the pairs → the result, (1, n_cols).
    """
    first, again = Call(x), Call(x)
    first.launch(n_parts=1)  # nobody comes: it computes all pairs of the row
    again.launch()
    again.output = torch.empty_like(x)
    return {
        "every program its own": in_parts(x),
        "the first program all": first.launch(),
        "an earlier launch": again.launch(),
    }


# ---- how many are there at once ------------------------------------------------------


def launch_for(n_rows: int, n_cols: int) -> Launch:
    """The chapter's launch for a contiguous float32 matrix, without its memory."""
    x = torch.empty(n_rows, n_cols, device="meta")
    return cooperative.launch_for(x, x)


def residents(
    names: Iterable[str] = ("H200", "T4"),
    columns: Iterable[int] = (65536, 131072, 1048576, 4194304),
    n_bytes: int = 2**29,
) -> list[tuple]:
    """How many parts and rows of a matrix of n_bytes a GPU holds at once.

    Args:
        names: of the GPUs. The launch is the one for the GPU here, or for an H200.
        columns: of the float32 matrices.

    Returns:
        Rows of GPU, columns, KiB of a part, parts of a row, parts and rows at once.
    """
    rows = []
    for name in names:
        for n_cols in columns:
            launch = launch_for(n_bytes // (4 * n_cols), n_cols)
            made = compile.aot(launch, gpu=name)
            fit = gpu.named(name).sms * occupancy.of(made).blocks_per_sm
            n_parts, kib = launch.scalars[-1], launch.constants["BLOCK_COLS"] // 256
            rows.append((name, n_cols, kib, n_parts, fit, round(fit / n_parts, 1)))
    return rows


# ---- what a wait costs ---------------------------------------------------------------

MANY, ONE_ROW, ONE_PART = (1024, 131072), (1, 1048576), (16384, 8192)  # float32
PATIENCES = sorted({1, 5, 500, 5000, cooperative.PATIENCE})
RESIDENT = (1, 2, 3, 4, 5, 6)


def patient(patience: int, missing: int = 0) -> Softmax:
    """The chapter's softmax, with programs that look so many times before they help.

    Args:
        patience: how many times.
        missing: how many of each row's last parts have no program. They stay
            unwritten.
    """
    return functools.partial(changed, patience=patience, missing=missing)


def waits(patiences: Iterable[int] = PATIENCES) -> pd.DataFrame:
    """The times of calls by patience, in µs, measured or recorded.

    Returns:
        For each patience, the times of many rows with all programs, of one row with all
        programs, and of one row whose last program is missing.
    """
    patiences = list(patiences)
    there = {f"cooperative.patience{n}": patient(n) for n in patiences}
    missing = {f"cooperative.missing{n}": patient(n, missing=1) for n in patiences}
    cases = [record.Case(torch.float32, *shape) for shape in (MANY, ONE_ROW)]
    all_there = record.sweep("cooperative", there, cases)
    not_all = record.sweep("cooperative", missing, cases[1:])
    many, one = (
        record.select(all_there, n_rows=n_rows).set_index("provider")["p50_us"]
        for n_rows in (MANY[0], ONE_ROW[0])
    )
    without = not_all.set_index("provider")["p50_us"]
    table = pd.DataFrame(
        {
            f"{MANY[0]} rows of {MANY[1]}": many[[*there]].to_list(),
            f"one row of {ONE_ROW[1]}": one[[*there]].to_list(),
            "the same, a program missing": without[[*missing]].to_list(),
        },
        index=pd.Index(patiences, name="patience"),
    )
    return record.with_source(table, all_there.attrs["source"])


def limited(programs_per_sm: int) -> Softmax:
    """The chapter's softmax, with at most so many programs on an SM at once."""

    @functools.cache  # loading machine code takes long, so each launch is kept
    def launch_of(shape: tuple[int, int], dtype: torch.dtype) -> LimitedLaunch:
        x = torch.empty(shape, dtype=dtype, device="meta")
        return LimitedLaunch(cooperative.launch_for(x, x), programs_per_sm)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch_of(tuple(x.shape), x.dtype)(y, x)
        return y

    return softmax


def held() -> tuple[dict[str, dict[int, float]], str]:
    """The share of the copy's bandwidth, by the KiB of parts that an SM holds.

    Both lines come from one compiled kernel, in grids of one size. Rows of one part
    wait for nobody.

    Returns:
        For each length of the rows, KiB → share; and where the times are from.
    """
    providers = {f"cooperative.resident{n}": limited(n) for n in RESIDENT}
    cases = [record.Case(torch.float32, *shape) for shape in (ONE_PART, MANY)]
    measured = record.sweep("cooperative", providers, cases)
    lines = {}
    for shape, name in ((ONE_PART, "1 part"), (MANY, "16 parts")):
        rows = record.select(measured, n_cols=shape[1]).set_index("provider")
        shares = rows.loc[[*providers], "share_of_copy"]
        lines[f"rows of {name}"] = dict(
            zip((32 * n for n in RESIDENT), shares, strict=True)
        )
    return lines, measured.attrs["source"]


def halves(whole: pd.DataFrame, columns: Iterable[int]) -> pd.DataFrame:
    """What the second half of a float32 matrix costs, and what a launch costs besides.

    Args:
        whole: a sweep of `cooperative.softmax` over matrices of 512 MiB.
        columns: lengths of rows. Matrices of 256 MiB are measured, or recorded.

    Returns:
        For each length: µs of the second half and of what is left, for both providers.
        Left of a time is what would remain without any row: two halves less the whole.
    """
    columns = list(columns)
    providers = {"cooperative": cooperative.softmax}
    cases = record.of_size(2**28, columns)
    half = record.sweep("cooperative", providers, cases)
    rows = []
    for n_cols in columns:
        row: dict[str, float] = {"columns": n_cols}
        for name in ("copy", "cooperative"):
            first, both = (
                record.only(df, provider=name, n_cols=n_cols, dtype="float32")["p50_us"]
                for df in (half, whole)
            )
            row |= {f"{name}: second half": both - first}
            row |= {f"{name}: left": 2 * first - both}
        rows.append(row)
    return pd.DataFrame(rows).set_index("columns")
