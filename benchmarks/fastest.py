"""Measures the benchmark of the course: every region, every peer, beside the copy.

    python benchmarks/fastest.py [--minutes 9] [--again] [region ...]

On a GPU, writes notebooks/recorded/<gpu>/fastest.csv, fastest_strided.csv and
fastest_host.csv, one case after the other, all providers of a case in one go. When the
minutes are over it stops, and says how many cases are left; the next run goes on with
those. Regions are `kernels.lab.regions`', and `host`; all of them if none is named.

Peers that are not requirements of the course are measured if they are found: see
`kernels.lab.peers`, and COURSE_PEERS there.
"""

import argparse
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterable

import torch
import triton

from kernels import program
from kernels.lab import bench, peers, regions

COURSE = ("program", "persistent", "tiled", "online", "cooperative", "fastest")
WHOLE_ROWS = ("program", "persistent")
LONGEST_WHOLE_ROW = 32768
"""Columns: beyond, those kernels spill, and take the compiler up to a minute each."""


def providers() -> dict[str, Callable | bench.Guest]:
    """The course's chapters, and those peers that are found here."""
    chapters = {stem: importlib.import_module(f"kernels.{stem}") for stem in COURSE}
    others = peers.providers()
    for name, peer in list(others.items()):
        if isinstance(peer, bench.Guest) and not peer.available():
            print(f"{name} is not measured: it is not found here")
            del others[name]
    ours = {name: chapter.softmax for name, chapter in chapters.items()}
    ours |= {name: functools.partial(whole_rows, ours[name]) for name in WHOLE_ROWS}
    return ours | others


def whole_rows(function: Callable, x: torch.Tensor) -> torch.Tensor:
    """The function's answer, for rows that one program holds without spilling."""
    if x.shape[1] > LONGEST_WHOLE_ROW:
        raise ValueError(f"x must have at most {LONGEST_WHOLE_ROW} columns here")
    return function(x)


def bare(x: torch.Tensor) -> torch.Tensor:
    """An output and a launch, and no question asked: what the host must do at least."""
    y = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    program.softmax_kernel[(x.shape[0],)](y, x, x.shape[1], block)
    return y


def left(stem: str, cases: Iterable[regions.Case]) -> list[regions.Case]:
    """The cases that this commit has not measured yet on this GPU."""
    try:
        done = {
            (one.dtype, one.n_rows, one.n_cols)
            for one in bench.recorded(stem).select(provider="copy")
            if one.commit == bench.commit() and one.gpu == torch.cuda.get_device_name()
        }
    except ValueError:  # nothing is recorded yet
        done = set()
    return [case for case in dict.fromkeys(cases) if regions.named(case) not in done]


def plan(wanted: Iterable[str], again: bool) -> dict[str, list[regions.Case]]:
    """The cases to measure for each file."""
    cases: dict[str, list[regions.Case]] = {}
    for region in regions.REGIONS:
        if region.name in wanted:
            cases.setdefault(region.stem, []).extend(region.cases)
    if "host" in wanted:
        cases["fastest_host"] = list(regions.HOST)
    return {
        stem: list(dict.fromkeys(some)) if again else left(stem, some)
        for stem, some in cases.items()
    }


def main() -> None:
    """Reads the command line, and measures."""
    names = [*(region.name for region in regions.REGIONS), "host"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("regions", nargs="*", metavar="region", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=1e3, help="stop after these")
    parser.add_argument("--again", action="store_true", help="measure all anew")
    asked = parser.parse_args()
    if unknown := set(asked.regions) - set(names):
        parser.error(f"region must be one of {names}, got {sorted(unknown)}")
    bench.require_gpu()
    end = time.monotonic() + 60 * asked.minutes
    os.environ["COURSE_RECORD"] = "1"
    todo, everyone = plan(asked.regions or names, asked.again), providers()
    bench.observe("fastest_peers", peers.versions)
    remaining = [(stem, case) for stem, cases in todo.items() for case in cases]
    make = {"fastest_strided": regions.sliced}
    peers.warm(
        everyone,
        [
            functools.partial(make.get(stem, bench.random), *case)
            for stem, case in remaining
        ],
    )
    print(f"{len(remaining)} cases, {end - time.monotonic():.0f} s left", flush=True)
    while remaining and time.monotonic() < end:
        stem, (dtype, *shape) = remaining.pop(0)
        host = stem == "fastest_host"
        who = {"bare": bare, **everyone} if host else everyone
        timer = bench.host_us if host else bench.device_us
        how = {"timer": timer, "make": make.get(stem), "prove": peers.prove}
        bench.sweep(stem, who, [shape], [dtype], **how)
    print(f"{len(remaining)} cases are left for another run")


if __name__ == "__main__":
    main()
