"""Experiments of chapter `meta`: launch options, and the first call of an autotuner.

from benchmarks import options
observed = record.observe("meta_keywords", options.keywords)
table = options.effects(observed)
observed = record.observe("meta_autotune", options.first_calls)
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from kernels import meta, program, strided
from kernels.lab import backend, clock, compile, occupancy

COOPERATIVE = {"launch_cooperative_grid": True}
NUM_WARPS = 4  # of every launch here
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 1},
    {"enable_fp_fusion": False},
    {"maxnreg": 64},
    {"maxnreg": 32},
    COOPERATIVE,
)
"""The options that `keywords` tries, beside num_warps=4."""


def keywords(
    n_rows: int = 4096, n_cols: int = 8192, n_few: int = 500
) -> Iterator[dict[str, Any]]:
    """The time of chapter `meta`'s launch under each of OPTIONS.

    A cooperative launch of n_rows programs may be refused. It is tried again with
    n_few rows.

    Yields:
        Rows of keyword, programs, us (the median time in µs; None if the launch was
        refused) and error (the reason; None if it was not).

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    tried = [(x, options) for options in OPTIONS] + [(x[:n_few], COOPERATIVE)]
    for rows, options in tried:
        row = {"keyword": _words(options) or "as it is", "programs": len(rows)}
        try:
            us = clock.device_us(
                partial(meta.launch, num_warps=NUM_WARPS, **options), rows
            )[1]
        except RuntimeError as error:
            yield {**row, "us": None, "error": str(error)}
        else:
            yield {**row, "us": us, "error": None}


# ---- what a keyword changes, and where -----------------------------------------------


@triton.jit
def sum_rows_kernel(
    output_ptr, input_ptr, n_rows, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """One program adds up all rows: a loop, which may have stages of its own.

    Args:
        output_ptr: COLS sums.
        input_ptr: n_rows rows of COLS values.
        n_rows: the number of rows.
        COLS: the length of a row, a power of two.
        STAGES: how many iterations are under way at a time; None leaves it to the
            launch's num_stages.
    """
    cols = tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for row in tl.range(n_rows, num_stages=STAGES):
        total += tl.load(input_ptr + row * COLS + cols)
    tl.store(output_ptr + cols, total)


@triton.jit
def multiply_add_kernel(output_ptr, a, b, c):
    """One program stores a * b + c."""
    tl.store(output_ptr, a * b + c)


def effects(observed: pd.DataFrame, n_cols: int = 8192) -> pd.DataFrame:
    """What each keyword changes in the softmax, its time, and where it takes effect.

    Args:
        observed: the rows of `keywords`.
        n_cols: the length of the softmax's rows.

    Returns:
        One row per keyword: keyword (the index), "our machine code", programs, "µs" and
        "takes effect in".
    """
    table = observed[["keyword", "programs", "us"]].astype(object)
    table["us"] = [f"{us:.0f}" if us == us else "refused" for us in observed["us"]]
    table.loc[len(table)] = ["num_ctas=2", None, None]  # nothing to be timed
    x = torch.empty(2, n_cols, device="meta")
    arguments, places = meta.arguments(x, x), _places()
    plain = compile.aot(strided.softmax_kernel, *arguments, num_warps=NUM_WARPS)
    found = {"as it is": "–"}
    for given in (*OPTIONS[1:], {"num_ctas": 2}):
        found[_words(given)] = _code(plain, arguments, given)
    table.insert(1, "our machine code", table["keyword"].map(found))
    names = table["keyword"].str.partition("=")[0]
    table["takes effect in"] = names.map(places).fillna("–")
    return table.set_index("keyword").rename(columns={"us": "µs"})


def _words(options: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def _code(plain: compile.Compiled, arguments: tuple, given: dict[str, Any]) -> str:
    """What becomes of the softmax's machine code with these options."""
    options = {"num_warps": NUM_WARPS, **given}
    try:
        made = compile.aot(strided.softmax_kernel, *arguments, **options)
    except RuntimeError:
        return "does not compile"
    if made.sass == plain.sass:
        return "same"
    fit = occupancy.of(made).blocks_per_sm
    return f"new: {made.spills} bytes spilled, {fit} programs per SM"


def _places() -> dict[str, str]:
    """Where each keyword takes effect, with what the compiler made of it there."""
    f32 = compile.pointer(torch.float32)
    copies = [
        compile.aot(sum_rows_kernel, f32, f32, 512, 1024, loops, num_stages=launched)
        for launched, loops in ((4, None), (3, 4))
    ]
    by_launch, by_loop = (made.count(r"cp\.async\.c[ag]") for made in copies)
    fused, apart = (
        compile.aot(multiply_add_kernel, f32, 1.5, 2.5, 3.5, enable_fp_fusion=fuse)
        for fuse in (True, False)
    )
    words = [
        ", ".join(
            line.split(".")[0] for line in made.lines(r"^\s*(fma|mul|add)\S*\.f32")
        )
        for made in (fused, apart)
    ]
    add = compile.aot(program.add_kernel, f32, f32, f32, 4096, BLOCK=1024, num_ctas=2)
    (cluster,) = add.lines("reqnctapercluster")
    return {
        "num_stages": f"a loop with tl.range(…, num_stages=4): {by_loop} asynchronous "
        f"copies; with the launch's 4 only: {by_launch}",
        "enable_fp_fusion": f"a * b + c: {words[0]}; without fusion: {words[1]}",
        "maxnreg": "kernels that want more registers than that",
        "launch_cooperative_grid": "programs that wait for each other",
        "num_ctas": f"vector addition on a GPU with clusters: {cluster}",
    }


# ---- the autotuner -------------------------------------------------------------------


def first_calls(
    columns: Sequence[int] = (256, 1024, 4096), few: int = 64, tries: int = 3
) -> Iterator[dict[str, Any]]:
    """What an autotuner chooses for few rows and for many, and how long it takes.

    Yields:
        Rows of n_cols, n_rows (few, and those of 128 MiB of bfloat16), first_s (the
        first call of the first autotuner, in seconds; nothing is on disk, but kernels
        of the same n_cols are in memory from few rows on) and chosen, the num_warps
        that `tries` new autotuners chose, as text.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    for n_cols, many in itertools.product(columns, (False, True)):
        n_rows = 2**26 // n_cols if many else few
        x = torch.randn(n_rows, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
        tuners = [meta.autotuned() for _ in range(tries)]
        seconds = [_first_call_s(x, tuned) for tuned in tuners]
        chosen = [str(tuned.best_config.num_warps) for tuned in tuners]
        row = {"n_cols": n_cols, "n_rows": n_rows, "first_s": round(seconds[0], 2)}
        yield {**row, "chosen": ", ".join(chosen)}


def _first_call_s(x: torch.Tensor, tuned: Autotuner) -> float:
    """The time of `meta.launch` with a cache on disk that is empty, in seconds."""
    empty = tempfile.TemporaryDirectory()
    with clock.alone(), triton.knobs.cache.scope(), empty as folder:
        triton.knobs.cache.dir = folder
        return clock.call_us(meta.launch, x, tuned) / 1e6


def worst_choices(observed: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """What the autotuners' choices are worth for many rows.

    Args:
        observed: the rows of `first_calls`.
        measured: what `rules.sweep` returned, with bfloat16 rows of the same lengths.

    Returns:
        The columns n_cols, n_rows, first_s and chosen, and worst: the lowest
        share_of_best, for 128 MiB, among the numbers of warps that were chosen.
    """
    table = observed[["n_cols", "n_rows", "first_s", "chosen"]].copy()
    rows = measured[measured["dtype"] == "bfloat16"]
    shares = rows.set_index(["n_cols", "num_warps"])["share_of_best"]
    table["worst"] = [
        min(shares[row.n_cols, int(warps)] for warps in row.chosen.split(", "))
        for row in table.itertuples()
    ]
    return table
