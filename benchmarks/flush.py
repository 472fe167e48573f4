"""Control of the clocks: do a flush and rotating inputs keep the input out of L2?

    python -m benchmarks.flush [times] [dram]

On a GPU, in about a minute. `times` writes notebooks/recorded/<gpu>/flush.csv: the
device clock's medians with four combinations of the safeguards of `kernels.lab.clock`,
for our softmax, `online` (which asks L2 to keep its lines), torch, Liger if it is here,
and the copy, at seven shapes of 0.3 to 268 MB. If a safeguard were needed for a
provider, its medians with and without it would differ.

`dram` writes flush_dram.csv. It needs the permission to read counters. Chapter `online`
empties L2 and then counts the DRAM bytes of its kernels. When that only read 1 GiB, a
kernel without hints that ran after kernels with hints read 0.88 of its matrix from
DRAM. Each row of the file is a kernel on a matrix of its own, after other kernels on
the same matrix and one kind of flush. The rows separate three explanations:

1. Lines that were loaded with `evict_last` survive reading 1 GiB of other values. Then
   `unhinted` and `sum` read less than the matrix after `hinted`, and the whole matrix
   after `unhinted`, or after a flush that loads with `evict_last` itself.
2. The flush is too small, or must write. Then another flush changes the bytes.
3. The profiler's passes find what earlier passes left. Then the rows of "ncu, replayed
   application" read more than those of "ncu, replayed kernel".
"""

import argparse
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks import peers, variants
from kernels import online, softmax
from kernels.lab import backend, clock, counters, gpu, record

# ---- times ---------------------------------------------------------------------------

SHAPES = ((72, 1024), (256, 1024), (1024, 1024), (1024, 4096), (1024, 8192))
SHAPES += ((4096, 4096), (8192, 8192))  # float32
WAYS: dict[tuple[str, bool], Callable[[], Any]] = {
    ("write", False): clock.flush_by_writing,
    ("read", False): clock.flush_by_reading,
    ("none", True): lambda: None,
    ("read", True): clock.flush_by_reading,
}
"""The flush, by its name and by whether inputs rotate beside it."""


def times() -> list[dict[str, Any]]:
    """The median of each provider at each shape in each of the WAYS, µs."""
    providers = {"copy": torch.clone, "fastest": softmax, "online": online.softmax}
    providers["torch"] = peers.native
    liger = peers.providers()["liger"]
    if liger.available():
        providers["liger"] = liger
    rows = []
    for shape, name in itertools.product(SHAPES, providers):
        x = record.random(torch.float32, *shape)
        for (flush, rotate), function in WAYS.items():
            timer = functools.partial(_timer, flush=function, rotate=rotate)
            if name == "liger":
                median = liger.times(x, lambda x=x: x, timer, None)[1]
            else:
                median = record.timed(providers[name], x, timer)[1]
            row = {"provider": name, "n_rows": shape[0], "n_cols": shape[1]}
            row |= {"megabytes": round(x.nbytes / 1e6, 1), "flush": flush}
            rows.append(row | {"rotated": rotate, "median_us": median})
    return rows


def _timer(function: Callable, *args: Any, **safeguards: Any) -> clock.Times:
    return clock.device_times(function, args, **safeguards)


# ---- DRAM bytes ----------------------------------------------------------------------

KERNELS: dict[str, Callable[[torch.Tensor], Any]] = {
    "hinted": online.softmax,
    "unhinted": lambda x: variants.changed(x, hints=False),
    "sum": lambda x: x.sum(dim=1),
}


@functools.cache
def _others(gibibytes: int) -> torch.Tensor:
    return torch.ones(gibibytes, 2**14, 2**14, device=backend.DEVICE)


def _reset() -> None:
    """Asks the driver to treat all lines of L2 alike again."""
    torch.cuda.synchronize()
    gpu.driver("cuCtxResetPersistingL2Cache")


FLUSHES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "read 1 GiB": lambda: _others(1).sum(),
    "read 2 GiB": lambda: _others(2).sum(),
    "write and read 1 GiB": lambda: _others(1).fill_(1.0).sum(),
    "reset, read 1 GiB": lambda: (_reset(), _others(1).sum()),
    "load 1 GiB with evict_last": lambda: online.softmax(_others(1)[0]),
}


class Experiment(NamedTuple):
    """A kernel that is watched, and what ran before it on its matrix.

    Attributes:
        before: the kernels, of KERNELS.
        flush: one of FLUSHES.
        watched: the kernel, of KERNELS.
    """

    before: tuple[str, ...]
    flush: str
    watched: str


READ = "read 1 GiB"
EXPERIMENTS = (
    Experiment((), READ, "unhinted"),  # x is new
    Experiment((), READ, "sum"),
    Experiment(("unhinted",), READ, "unhinted"),
    Experiment(("unhinted",), READ, "sum"),
    Experiment(("hinted",), READ, "hinted"),
    Experiment(("hinted",), READ, "unhinted"),
    Experiment(("hinted",), READ, "sum"),
    Experiment(("hinted", "unhinted"), READ, "unhinted"),  # as in chapter `online`
    *(Experiment(("hinted",), flush, "unhinted") for flush in FLUSHES if flush != READ),
)
MATRICES = ((1056, 16384), (128, 16384))  # 69 MB as in chapter `online`, and 8 MB
L2_METRICS = {
    "lts__t_sectors_op_read.sum": "l2_sectors_read",
    "lts__t_sectors_op_read_lookup_hit.sum": "l2_sectors_hit",
    "lts__t_sector_op_read_hit_rate.pct": "l2_hit_percent",
}
PROFILERS: dict[str, dict[str, Any]] = {
    "ncu, replayed kernel": {},  # as in chapter `online`
    "ncu, replayed application": {"replay": "application"},
    "ncu's own flush": {"flush": True},
}


def run() -> None:
    """Runs the EXPERIMENTS for `counters.profile`; each matrix is memory of its own."""
    kept = []
    for shape in MATRICES:
        for function in KERNELS.values():  # compiles
            function(torch.randn(shape, device=backend.DEVICE))
        for experiment in EXPERIMENTS:
            FLUSHES["reset, read 1 GiB"]()
            x = torch.randn(shape, device=backend.DEVICE)
            kept.append(x)
            for name in experiment.before:
                KERNELS[name](x)
            FLUSHES[experiment.flush]()
            with counters.watched():
                KERNELS[experiment.watched](x)


def dram() -> list[dict[str, Any]]:
    """Bytes and time of each of the EXPERIMENTS, by each of the PROFILERS.

    Returns:
        Rows of profiler, n_rows, n_cols, before, flush, watched, kernel, matrices_read
        (bytes from DRAM over bytes of the matrix), read_bytes, written_bytes,
        duration_us, and L2's counters, which are None where they were not asked for.

    Raises:
        record.Unavailable: the counters cannot be read here.
        RuntimeError: another number of kernels ran.
    """
    rows = []
    for profiler, how in PROFILERS.items():
        more = L2_METRICS if how.get("replay") == "application" else {}
        found = counters.profile(run, {**counters.METRICS, **more}, **how)
        wanted = list(itertools.product(MATRICES, EXPERIMENTS))
        if len(found) != len(wanted):
            got = [row["kernel"] for row in found]
            raise RuntimeError(f"{len(wanted)} kernels should have run, got {got}")
        for (shape, (before, flush, watched)), row in zip(wanted, found, strict=True):
            named = {"profiler": profiler, "n_rows": shape[0], "n_cols": shape[1]}
            named |= {"before": " ".join(before) or "none", "flush": flush}
            share = row["read_bytes"] / (4 * shape[0] * shape[1])
            named |= {"watched": watched, "matrices_read": round(share, 3)}
            rows.append(named | dict.fromkeys(L2_METRICS.values()) | row)
    return rows


def main() -> None:
    """Reads the command line, measures, records and prints."""
    parts = {"times": ("flush", times), "dram": ("flush_dram", dram)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    wanted = parser.parse_args().parts or list(parts)
    if unknown := set(wanted) - set(parts):
        parser.error(f"part must be one of {[*parts]}, got {sorted(unknown)}")
    clock.require_gpu()
    os.environ["COURSE_RECORD"] = "1"
    for part in wanted:
        try:
            df = record.observe(*parts[part])
        except ValueError as error:  # counters cannot be read, and never were
            print(error)
            continue
        print(df.drop(columns=record.PROVENANCE).to_string())
        print(df.attrs["source"])


if __name__ == "__main__":
    from benchmarks import flush  # the profiler imports the experiments by this name

    flush.main()
