"""Measures the benchmark of the course: every region, every peer, beside the copy.

    python -m benchmarks.fastest [--short] [--minutes 9] [--again] [region ...]
    python -m benchmarks.fastest --report

On a GPU, writes notebooks/recorded/<gpu>/fastest.csv, and why a provider has no time in
a case that fits the GPU (it refused, or was wrong) to fastest_absent.csv. All providers
of a case are measured in one go, and the files are written after each case. When the
minutes are over, the command stops and says how many cases are left; the next run goes
on with those. A case is done if this commit has measured it on this GPU. Regions are
those of `benchmarks.regions`, and `host`, the host's time of a call; all of them if
none is named. With --short, about 40 cases stand for all regions: for a look at another
GPU. With --report, nothing is measured: the record's standings and all cases below a
bar are printed, on any machine.

Before anything is timed, all providers compile for all cases, several processes at a
time. That takes at most half of the minutes. What is not compiled by then compiles when
it is measured.

Peers that the course does not require are measured if they are found: see
`benchmarks.peers`, and COURSE_PEERS there.
"""

import argparse
import contextlib
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import torch
import triton

from benchmarks import peers, regions
from kernels import program
from kernels.lab import clock, record
from kernels.lab.record import Case, OptionalProvider

STEM, ABSENT = "fastest", "fastest_absent"
COURSE = (
    *("program", "persistent", "tiled", "unaligned", "online", "cooperative"),
    "fastest",
)
WHOLE_ROWS = ("program", "persistent")
LONGEST_WHOLE_ROW = 32768
"""Columns. In longer rows these kernels spill, and compile for up to a minute each."""
INPUTS = {"sliced": regions.sliced}

Providers = dict[str, Callable[[torch.Tensor], torch.Tensor] | OptionalProvider]
Task = tuple[str, tuple[Case, ...]]
"""A clock, and cases of one dtype and shape: they share a copy."""


def providers() -> Providers:
    """The course's chapters, and those peers that are found here."""
    chapters = {stem: importlib.import_module(f"kernels.{stem}") for stem in COURSE}
    ours = {name: chapter.softmax for name, chapter in chapters.items()}
    ours |= {name: functools.partial(whole_rows, ours[name]) for name in WHOLE_ROWS}
    others = peers.providers()
    with ThreadPoolExecutor() as pool:  # importing a peer takes up to half a minute
        here = list(pool.map(_is_here, others.values()))
    for name, found in zip(list(others), here, strict=True):
        if not found:
            print(f"{name} is not measured: it is not found here")
            del others[name]
    return ours | others


def _is_here(provider: Callable | OptionalProvider) -> bool:
    return not isinstance(provider, OptionalProvider) or provider.available()


def whole_rows(function: Callable, x: torch.Tensor) -> torch.Tensor:
    """The function's result, for rows that a program holds without spilling.

    Raises:
        ValueError: x has more than LONGEST_WHOLE_ROW columns.
    """
    if x.shape[1] > LONGEST_WHOLE_ROW:
        raise ValueError(f"x must have at most {LONGEST_WHOLE_ROW} columns here")
    return function(x)


def bare(x: torch.Tensor) -> torch.Tensor:
    """An output and a launch, nothing checked: the least that the host has to do."""
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    program.softmax_kernel[(x.shape[0],)](y, x, x.shape[1], block)
    return y


def plan(names: Iterable[str], *, short: bool = False) -> list[Task]:
    """What there is to measure in these regions.

    Cases that differ only in how the input lies in memory are one task, since they are
    compared with the same copy, which a task measures once. So a task also has those
    cases of its matrix that are in other regions.
    """
    names = set(names)
    tasks: dict[tuple, list[Case]] = {}
    every = regions.SHORT if short else regions.REGIONS
    wanted = {case[:3] for r in every if r.name in names for case in r.cases}
    for case in (case for region in every for case in region.cases):
        if case[:3] in wanted:
            tasks.setdefault(("device", *case[:3]), []).append(case)
    for case in regions.HOST if "host" in names else ():
        tasks.setdefault(("host", *case[:3]), []).append(case)
    return [(name, tuple(dict.fromkeys(rows))) for (name, *_), rows in tasks.items()]


def unfinished(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of which this commit has not measured every case on this GPU."""
    try:
        df = record.recorded(STEM)
    except ValueError:  # nothing is recorded yet
        return list(tasks)
    here = {"commit": record.commit(), "gpu": torch.cuda.get_device_name()}
    rows = record.select(df[df["provider"] != "copy"], **here)
    done = set(rows[["clock", *regions.CASE]].itertuples(index=False, name=None))
    return [
        (name, cases)
        for name, cases in tasks
        if not all((name, *regions.key(case)) in done for case in cases)
    ]


def main() -> None:
    """Reads the command line, and measures."""
    names = [*(region.name for region in regions.REGIONS), "host"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("regions", nargs="*", metavar="region", help=", ".join(names))
    parser.add_argument("--short", action="store_true", help="a few cases of each")
    parser.add_argument("--minutes", type=float, default=1e3, help="stop after these")
    parser.add_argument("--again", action="store_true", help="measure all anew")
    parser.add_argument("--report", action="store_true", help="how the record stands")
    args = parser.parse_args()
    if args.report:
        print(report(record.recorded(STEM)))
        return
    if unknown := set(args.regions) - set(names):
        parser.error(f"region must be one of {names}, got {sorted(unknown)}")
    try:
        clock.require_gpu()
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    start = time.monotonic()
    end = start + 60 * args.minutes
    os.environ["COURSE_RECORD"] = "1"
    tasks = plan(args.regions or names, short=args.short)
    remaining = tasks if args.again else unfinished(tasks)
    everyone = providers()
    record.observe("fastest_peers", peers.versions)
    print(f"{len(remaining)} of {len(tasks)} tasks are to be measured", flush=True)
    half = start + 30 * args.minutes
    cases = [case for _, cases in remaining for case in cases]
    peers.precompile(everyone, cases, INPUTS, until=half)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    measured = 0
    while measured < len(remaining) and time.monotonic() < end:
        absent = measure(everyone, *remaining[measured])
        why = functools.partial(reasons, absent, *remaining[measured])
        record.observe(ABSENT, why)
        measured += 1
        words = _words(*remaining[measured - 1])
        print(f"{time.monotonic() - start:.0f} s: {words}", flush=True)
    print(f"{len(remaining) - measured} tasks are left for another run")


def report(df: pd.DataFrame) -> str:
    """How each region that a benchmark covers stands, and what misses its bar."""
    covered = regions.covered_by(df)
    tables = regions.standings(df, covered), regions.shortfalls(df, covered)
    shown = (table.round(3).to_string(index=False, na_rep="") for table in tables)
    return "{}\n\nBelow a bar, the worst first:\n{}".format(*shown)


def measure(
    everyone: Providers, name: str, cases: Sequence[Case]
) -> dict[record.Key, str]:
    """Measures a task by the clock of that name, and writes its rows.

    Returns:
        Why a provider has no time, by the row's `record.KEY`.
    """
    who = {"bare": bare, **everyone} if name == "host" else everyone
    how = {"clock": name, "inputs": INPUTS, "verify": peers.verify}
    return record.sweep(STEM, who, cases, **how).attrs["absent"]


def reasons(
    absent: Mapping[record.Key, str], name: str, cases: Sequence[Case]
) -> list[dict[str, str]]:
    """Why providers have no times, at this commit: in a task, and in others before it.

    Args:
        absent: what `measure` returned for the task.
        name, cases: the task. What was recorded for it is dropped.

    Returns:
        Rows of provider, case and why (its error and the first line of its message).
    """
    anew = {record.words(("", *regions.key(case), name)) for case in cases}
    found: dict[tuple[str, str], str] = {}
    with contextlib.suppress(ValueError):  # nothing is recorded yet
        for row in record.recorded(ABSENT).itertuples():
            if str(row.commit) == record.commit() and row.case not in anew:
                found[row.provider, row.case] = row.why
    found |= {(key[0], record.words(key)): why for key, why in absent.items()}
    names = "provider", "case", "why"
    return [dict(zip(names, (*key, why), strict=True)) for key, why in found.items()]


def _words(name: str, cases: Sequence[Case]) -> str:
    """The task for a line of the log."""
    dtype, n_rows, n_cols, _ = regions.key(cases[0])
    inputs = ", ".join(case.input for case in cases)
    return f"{dtype} {n_rows} × {n_cols}, {inputs}, by the clock {name!r}"


if __name__ == "__main__":
    main()
