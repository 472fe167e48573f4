"""Experiments of chapter `meta`: every number of warps, and rules judged by the times.

from benchmarks import rules
measured = rules.sweep("meta", rules.POWERS)
print(rules.judge(meta.pick_num_warps, measured))
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
import triton

from kernels import meta
from kernels.lab import record, verdict
from kernels.lab.record import Case

Rule = Callable[[int, int], int]
"""Returns the number of warps for n_cols columns of element_size bytes."""

GOOD = 0.95
"""The share of the best that a good rule reaches at every length."""

BYTES = 2**27  # of a matrix: 128 MiB
POWERS = record.of_size(
    BYTES, (64, 256, 1024, 2048, 4096, 8192, 16384, 32768), [torch.bfloat16]
) + record.of_size(BYTES, (512, 2048, 8192, 32768), [torch.float32])
"""Powers of two, from which `meta.pick_num_warps` was read off."""

OTHERS = record.of_size(
    BYTES,
    (1000, 1008, 1040, 1536, 4112, 5001, 6144, 12288, 24576, 32000),
    [torch.bfloat16],
) + record.of_size(BYTES, (1000, 4112, 5001, 6144, 24576), [torch.float32])
"""Lengths that had no part in it: between two powers, just above one, and odd."""

RULES: dict[str, Rule] = {
    "default": lambda n_cols, element_size: 4,
    "usual": lambda n_cols, element_size: (
        16 if n_cols >= 4096 else 8 if n_cols >= 2048 else 4
    ),
    "ours": meta.pick_num_warps,
}
"""Triton's default, the rule of many tutorials, and this course's."""


def allowed(n_cols: int) -> list[int]:
    """The numbers of warps that `meta.softmax` takes for rows of n_cols columns."""
    fewest = triton.next_power_of_2(n_cols) // (32 * meta.VALUES_PER_THREAD)
    return [warps for warps in meta.WARPS if warps >= fewest]


def sweep(stem: str, cases: Iterable[Case]) -> pd.DataFrame:
    """Times `meta.softmax` in every case with every number of warps that is allowed.

    Args:
        stem: of the record's file.
        cases: matrices, as `record.of_size` gives them.

    Returns:
        The rows of `record.sweep` without the copy's, and in each row num_warps, kib
        (of one row of the matrix), bytes_per_thread (of the block, which is as long as
        the next power of two) and share_of_best (the time with the best number of
        warps, over the row's time).
    """
    frames = []
    for case in cases:
        numbers = allowed(case.n_cols)
        tried = {f"meta.warps{n}": partial(meta.softmax, num_warps=n) for n in numbers}
        frames.append(record.sweep(stem, tried, [case]))
    df = record.concat(frames)
    df = df[df["provider"] != "copy"].reset_index(drop=True)
    df["num_warps"] = df["provider"].str.removeprefix("meta.warps").astype(int)
    sizes = df["dtype"].map(lambda name: getattr(torch, name).itemsize)
    df["kib"] = df["n_cols"] * sizes / 1024
    blocks = df["n_cols"].map(triton.next_power_of_2)
    df["bytes_per_thread"] = blocks * sizes // (32 * df["num_warps"])
    best = df.groupby(["dtype", "n_cols"])["p50_us"].transform("min")
    df["share_of_best"] = best / df["p50_us"]
    return df


def picks(rule: Rule, measured: pd.DataFrame) -> pd.DataFrame:
    """The rows of `sweep` that a rule picks, one per case, in the sweep's order.

    Raises:
        ValueError: the rule returns a number of warps that `meta.softmax` refuses, or
            that was not measured.
    """
    rows = []
    for (dtype, n_cols), case in measured.groupby(["dtype", "n_cols"], sort=False):
        size = getattr(torch, dtype).itemsize
        picked = rule(n_cols, size)
        numbers = [int(each) for each in case["num_warps"]]
        if isinstance(picked, bool) or picked not in numbers:
            raise ValueError(
                f"for {n_cols} columns of {size} bytes it returns {picked!r}, and "
                f"num_warps must be one of {numbers}"
            )
        rows.append(case[case["num_warps"] == picked].iloc[0])
    return pd.DataFrame(rows)


def judge(rule: Rule, measured: pd.DataFrame, name: str | None = None) -> str:
    """Says in a sentence or two how near a rule comes to the best number of warps.

    A rule that still has "..." in it, raises or returns no possible number of warps
    gets a sentence too.

    Args:
        rule: called with n_cols and element_size for each case of `measured`.
        measured: what `sweep` returned.
        name: of the rule; None means the function's own.
    """
    name = name or rule.__name__
    if place := verdict.unfinished(rule):
        return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
    try:
        chosen = picks(rule, measured)
    except ValueError as error:
        return f"{name} fails: {error}."
    except Exception as error:
        return f"{name} fails: {verdict.raised(error, rule)}"
    shares = chosen["share_of_best"]
    worst = chosen.loc[shares.idxmin()]
    same = measured["n_cols"].eq(worst["n_cols"]) & measured["dtype"].eq(worst["dtype"])
    best = measured[same].sort_values("share_of_best").iloc[-1]
    said = (
        f"{name} reaches {shares.min():.2f} of the best or more, {shares.mean():.2f} "
        f"on average over {len(chosen)} cases."
    )
    if shares.min() >= GOOD:
        return said
    return (
        f"{said} Its worst: {worst['dtype']}, N = {worst['n_cols']}, {_each(worst)}; "
        f"best {_each(best)}."
    )


def _each(row: pd.Series) -> str:
    warps = row["num_warps"]
    plural = "s" if warps > 1 else ""
    return f"{warps} warp{plural} ({row['bytes_per_thread']} bytes per thread)"


def compare(measured: pd.DataFrame, rules: Mapping[str, Rule] = RULES) -> pd.DataFrame:
    """Each rule's share of the best at every length, and the best's share of the copy.

    Returns:
        One row per case: dtype, n_cols, a column per rule, and "best / copy".
    """
    first: Any = measured.groupby(["dtype", "n_cols"], sort=False)
    table = first["share_of_copy"].max().rename("best / copy").reset_index()
    for place, (name, rule) in enumerate(rules.items()):
        shares = picks(rule, measured)["share_of_best"].to_numpy()
        table.insert(2 + place, name, shares)
    return table
