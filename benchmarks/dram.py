"""Experiments with Nsight Compute: the DRAM bytes of kernels of two chapters.

A notebook observes them, so that its reader needs no profiler:

    from benchmarks import dram
    observed = record.observe("traffic_dram", dram.traffic_experiment)
    observed = record.observe("online_dram", dram.online_experiment)

An experiment starts a process under the profiler, which runs the experiment's kernels,
each once to compile and load it, and once while the profiler watches. The profiler
knows kernels only by their order. So each experiment also says which kernels should
run, in order, and refuses a result with another number of kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import passes, variants
from kernels import eager, traffic
from kernels.lab import backend, counters, record

# ---- chapter `traffic`: what each of the five lines moves ----------------------------

LARGE, SMALL = (8192, 8192), (512, 2048)
"""Shapes: many times L2, and less than L2."""

CONTROLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.amax(dim=1, keepdim=True),  # max without its indices
    "scalar": lambda x: x - 1.0,  # subtract without its column
}
"""Functions whose times are compared with those of lines."""


class Run(NamedTuple):
    """Functions whose kernels are watched on one matrix.

    Attributes:
        l2: "emptied" if L2 holds nothing of use before each function, or "as left".
        shape: of the matrix, float32.
        steps: a name for each kernel, in order.
        functions: what launches these kernels.
    """

    l2: str
    shape: tuple[int, int]
    steps: Sequence[str]
    functions: Sequence[Callable[[torch.Tensor], Any]]


LINES = traffic.LINES
ALONE = LINES | {"torch": lambda x: torch.softmax(x, dim=1)}
TRAFFIC_RUNS = (
    Run("emptied", LARGE, [*ALONE], [*ALONE.values()]),
    Run("as left", LARGE, [*LINES], [eager.five_lines]),
    Run("as left", SMALL, [*LINES], [eager.five_lines]),
)


def run_traffic() -> None:
    """Runs the functions of TRAFFIC_RUNS for `counters.profile`."""
    for run in TRAFFIC_RUNS:
        x = torch.randn(run.shape, device=backend.DEVICE)
        for function in run.functions:
            _run_watched(function, x, emptied=run.l2 == "emptied")


def traffic_experiment() -> list[dict[str, Any]]:
    """DRAM bytes and time of each kernel of TRAFFIC_RUNS.

    Returns:
        Rows of l2, n_rows, n_cols, step, kernel, read_bytes, written_bytes (both from
        and to DRAM) and duration_us.

    Raises:
        record.Unavailable: the counters cannot be read here (see `counters.profile`),
            or another number of kernels ran, as another PyTorch may run.
    """
    named = [
        {"l2": run.l2, "n_rows": run.shape[0], "n_cols": run.shape[1], "step": step}
        for run in TRAFFIC_RUNS
        for step in run.steps
    ]
    return _profiled(run_traffic, named)


# ---- chapter `online`: how often the bytes of a row come from DRAM -------------------

COUNTED_ROWS, COUNTED_COLS = 1056, (16384, 65536, 131072, 262144)
ONLINE = {name: (variants.ONLINE | passes.CONTROLS)[name] for name in passes.COUNTED}
"""The kernels whose bytes are counted, by provider."""


def run_online() -> None:
    """Runs each kernel of ONLINE, on float32, for `counters.profile`."""
    for n_cols in COUNTED_COLS:
        x = torch.randn(COUNTED_ROWS, n_cols, device=backend.DEVICE)
        for function in ONLINE.values():
            _run_watched(function, x, emptied=True)


def online_experiment() -> list[dict[str, Any]]:
    """DRAM bytes and time of each kernel of ONLINE.

    Returns:
        Rows of provider, n_rows, n_cols, kernel, read_bytes, written_bytes (both from
        and to DRAM) and duration_us.

    Raises:
        record.Unavailable: the counters cannot be read here (see `counters.profile`),
            or another number of kernels ran, as another PyTorch may run.
    """
    named = [
        {"provider": provider, "n_rows": COUNTED_ROWS, "n_cols": n_cols}
        for n_cols in COUNTED_COLS
        for provider in ONLINE
    ]
    return _profiled(run_online, named)


# ---- both ----------------------------------------------------------------------------


def _run_watched(function: Callable, x: torch.Tensor, emptied: bool) -> None:
    """Calls function(x) to compile and load its kernels, and again to count them."""
    function(x)
    with counters.watched(emptied=emptied):
        function(x)


def _profiled(
    run: Callable[[], None], named: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The counters of the kernels that a function runs, beside the kernels' names."""
    rows = counters.profile(run)
    if len(rows) != len(named):
        kernels = [row["kernel"] for row in rows]
        raise record.Unavailable(f"{len(named)} kernels should have run, got {kernels}")
    return [{**name, **row} for name, row in zip(named, rows, strict=True)]
