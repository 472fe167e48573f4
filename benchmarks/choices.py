"""A test of the rule that chooses a kernel: matrices that the rule was not read off.

`fastest.choose` was read off the matrices of `benchmarks.regions`, and off others that
`draw` had drawn with other seeds. Those here are drawn, too; no rule has seen them. The
kernels have tiles as small as `fastest`'s, so the size of tiles is not judged. Of few
rows, they have the warps that the chapters choose, and `fastest` may have more.

from benchmarks import choices
measured = choices.sweep()
print(choices.judge(fastest.choose, measured))
"""

import math
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import pandas as pd
import torch

from benchmarks import passes, peers, regions
from kernels import cooperative, fastest, tiled, unaligned, windows
from kernels.lab import record, verdict
from kernels.lab.record import Case

Rule = Callable[[int, int, torch.dtype, int, bool], str]
"""Names one of KERNELS, from n_rows, n_cols, dtype, and what `alignment` returns."""


def in_tiles(chapter: ModuleType, x: torch.Tensor) -> torch.Tensor:
    """The softmax of rows by a chapter's kernel, in tiles as small as `fastest`'s."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    fastest.in_smaller_tiles(chapter.launch_for(y, x), len(x))(y, x)
    return y


KERNELS = {
    **{"tiled": partial(in_tiles, tiled), "unaligned": partial(in_tiles, unaligned)},
    **{"online": passes.two_launches, "cooperative": cooperative.softmax},
    "windows": windows.softmax,
}
ONE_PROGRAM = ["tiled", "unaligned"]  # for each row
GOOD = 1.03
"""How many times as long as the fastest kernel a good rule's kernel takes at most."""
SEED = 18  # the rule was read off the matrices of seeds 20, 101, 102, 301, 302, 501


def draw(
    n: int, least: int, most: int, seed: int, sizes: tuple[int, int] = (2**23, 2**28)
) -> tuple[Case, ...]:
    """n matrices drawn at random, the same for the same seed.

    Rows have `least` to `most` bytes and matrices `sizes`, 8 to 256 MiB by default, all
    evenly by their logarithm. Half of the lengths are divisible by 8. A third of the
    inputs is `apart`.
    """
    generator, cases = random.Random(seed), []
    for _ in range(n):
        dtype = generator.choice((torch.float32, torch.float16, torch.bfloat16))
        row_bytes = math.exp(generator.uniform(math.log(least), math.log(most)))
        n_bytes = math.exp(generator.uniform(*map(math.log, sizes)))
        step = generator.choice((1, 8))
        n_cols = int(row_bytes / dtype.itemsize) // step * step
        n_rows = max(1, int(n_bytes / (n_cols * dtype.itemsize)))
        input = generator.choice(("contiguous", "contiguous", "apart"))
        cases.append(Case(dtype, n_rows, n_cols, input))
    return tuple(cases)


CASES = draw(16, 2**13, 2**17, SEED) + draw(16, 2**11, 2**24, SEED + 1)
"""Half of them where the choice is hard, half of all lengths."""

SMALL = draw(16, 2**7, 2**20, SEED + 3, sizes=(2**12, 2**23))
"""Matrices below 8 MiB. Many have short rows, and others have few rows."""


def apart(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """A matrix whose rows lie 3 elements apart, so that they start anywhere."""
    return record.random(dtype, n_rows, n_cols + 3)[:, :n_cols]


def sweep(cases: Sequence[Case] = CASES) -> pd.DataFrame:
    """Times each of KERNELS at each of the matrices that it takes."""
    how = {"inputs": {"apart": apart}, "verify": peers.verify}
    takers = [tuple(name for name in KERNELS if takes(name, case)) for case in cases]
    frames = []
    for names in dict.fromkeys(takers):
        pairs = zip(cases, takers, strict=True)
        its_cases = [case for case, its in pairs if its == names]
        providers = {name: KERNELS[name] for name in names}
        frames.append(record.sweep("fastest_choices", providers, its_cases, **how))
    return record.concat(frames)


def takes(name: str, case: Case) -> bool:
    """Whether one of KERNELS takes such a matrix by a kernel of its own."""
    if name == "windows":
        lengths = range(1, windows.MAX_COLS + 1)
        is_half = case.dtype.itemsize == 2
        return is_half and case.input == "apart" and case.n_cols in lengths
    return name not in ONE_PROGRAM or case.n_cols <= tiled.MAX_COLS


def alignment(n_cols: int, dtype: torch.dtype, input: str) -> tuple[int, bool]:
    """What `unaligned.alignment` returns for such a matrix and a contiguous output."""
    like = {"dtype": dtype, "device": "meta"}
    width = n_cols + 3 if input == "apart" else n_cols
    x = torch.empty(2, width, **like)[:, :n_cols]
    return unaligned.alignment(torch.empty(2, n_cols, **like), x)


def picks(rule: Rule, measured: pd.DataFrame) -> pd.DataFrame:
    """What a rule chooses, and what that costs.

    Args:
        rule: called once for each matrix.
        measured: what `sweep` returned.

    Returns:
        A row for each matrix, which is the index (dtype, n_rows, n_cols, input). The
        columns are chosen, us (the chosen kernel's time), fastest, fastest_us, and
        times_as_long (us over fastest_us).

    Raises:
        ValueError: the rule names no kernel, or one that refuses the matrix.
    """
    best = regions.quickest(measured, [*KERNELS])
    times = measured.set_index([*regions.CASE, "provider"])["p50_us"]
    rows = []
    for case, (name, us) in zip(best.index, best.to_numpy(), strict=True):
        dtype, n_rows, n_cols, input = getattr(torch, case[0]), *case[1:]
        chosen = rule(n_rows, n_cols, dtype, *alignment(n_cols, dtype, input))
        if chosen not in KERNELS:
            raise ValueError(
                f"for {_words(case)} it returns {chosen!r}, and must return one of "
                f"{[*KERNELS]}"
            )
        if (*case, chosen) not in times.index:
            raise ValueError(f"{chosen} does not take {_words(case)}")
        rows.append([chosen, times[(*case, chosen)], name, us])
    columns = ["chosen", "us", "fastest", "fastest_us"]
    table = pd.DataFrame(rows, index=best.index, columns=columns)
    table["times_as_long"] = table["us"] / table["fastest_us"]
    return table


def judge(rule: Rule, measured: pd.DataFrame, name: str | None = None) -> str:
    """Says in a sentence or two how much longer a rule's kernels take than need be.

    A rule that still has "..." in it, raises, or names no kernel that takes a matrix
    gets a sentence too. Lines have at most 80 characters.

    Args:
        rule: called once for each matrix.
        measured: what `sweep` returned.
        name: of the rule; None means the function's own.
    """
    return textwrap.fill(_judgement(rule, measured, name or rule.__name__), 80)


def _judgement(rule: Rule, measured: pd.DataFrame, name: str) -> str:
    if place := verdict.unfinished(rule):
        return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
    try:
        table = picks(rule, measured)
    except ValueError as error:
        return f"{name} fails: {error}."
    except Exception as error:
        return f"{name} fails: {verdict.raised(error, rule)}"
    longer = table["times_as_long"]
    said = (
        f"{name}: at most {longer.max():.2f} times the fastest kernel's time, "
        f"{longer.mean():.2f} on average, at {len(table)} matrices."
    )
    if round(longer.max(), 2) <= GOOD:
        return said
    case, worst = longer.idxmax(), table.loc[longer.idxmax()]
    return (
        f"{said} The worst: {_words(case)}; {worst['chosen']} {worst['us']:.1f} µs, "
        f"{worst['fastest']} {worst['fastest_us']:.1f} µs."
    )


def _words(case: tuple[str, int, int, str]) -> str:
    dtype, n_rows, n_cols, input = case
    size = n_cols * getattr(torch, dtype).itemsize
    length = f"{size / 1024:.0f} KiB" if size >= 4096 else f"{size} bytes"
    rows = f"{n_rows} rows of {length}"
    return f"{rows} ({dtype}{', apart' if input == 'apart' else ''})"


def crossing(df: pd.DataFrame) -> dict[str, dict[float, float]]:
    """Where sharing a row begins to pay, in the benchmark's measurements.

    Args:
        df: the benchmark, with the regions `large`, `any` and `middle`.

    Returns:
        For each dtype and size of the matrix: KiB of a row → the time of one program
        for each row (the faster of ONE_PROGRAM) over the time of `cooperative`. Rows
        from 8 KiB on.
    """
    sizes = {"256 MiB": ("large", "any"), "8 MB": ("middle",)}
    series: dict[str, dict[float, float]] = {}
    for title, names in sizes.items():
        rows = [regions.of(regions.BY_NAME[name], df) for name in names]
        rows = pd.concat(rows, ignore_index=True)
        size = rows["dtype"].map(lambda name: getattr(torch, name).itemsize)
        kib = rows["n_cols"] * size / 1024
        least = regions.LARGE // 2 if title == "256 MiB" else 0
        most = 1.01 * regions.LARGE // 2 if title == "256 MiB" else 9 * regions.MEGA
        rows = rows[(kib * rows["n_rows"] * 1024).between(least, most) & (kib >= 8)]
        one = regions.quickest(rows, ONE_PROGRAM)["p50_us"]
        shared = regions.quickest(rows, ["cooperative"])["p50_us"]
        for (dtype, _, n_cols, _), ratio in (one / shared).dropna().items():
            if dtype in ("float32", "bfloat16"):
                place = n_cols * getattr(torch, dtype).itemsize / 1024
                series.setdefault(f"{dtype}, {title}", {})[place] = ratio
    return series
