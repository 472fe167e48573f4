"""The bytes that softmax's five lines move: predicted, counted by the GPU, and timed.

Builds on: `kernels.eager`.
Changes: nothing that is computed. It predicts what each line moves and how long that
    must take, reads the GPU's own counters, and times with one precaution left out.
Costs: 5MN + 2M values read and 3MN + 2M written, and M indices, in five lines; an ideal
    softmax reads MN and writes MN.
Source: Triton's tutorial 2 for the values; the Nsight Compute CLI's documentation;
    Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton

from kernels import eager
from kernels.lab import backend, bench, counters, meter

# ---- what each line moves ------------------------------------------------------------


class Line(NamedTuple):
    """What one of the five lines moves: values, and the indices that `max` adds."""

    name: str
    read: int
    written: int
    indices: int = 0  # int64, written

    def read_bytes(self, itemsize: int) -> int:
        """Bytes read, for values of `itemsize` bytes."""
        return self.read * itemsize

    def written_bytes(self, itemsize: int) -> int:
        """Bytes written, the indices included."""
        return self.written * itemsize + 8 * self.indices

    def bytes(self, itemsize: int) -> int:
        """Bytes read and written."""
        return self.read_bytes(itemsize) + self.written_bytes(itemsize)


def predicted(n_rows: int, n_cols: int) -> list[Line]:
    """What each of the five lines reads and writes; `meter.naive` is their sum.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    meter.naive(n_rows, n_cols)  # refuses what is no shape
    size = n_rows * n_cols
    return [
        Line("max", size, n_rows, n_rows),
        Line("subtract", size + n_rows, size),
        Line("exp", size, size),
        Line("sum", size, n_rows),
        Line("divide", size + n_rows, size),
    ]


def predicted_us(n_bytes: float, gbps: float) -> float:
    """The time in µs that moving `n_bytes` takes at `gbps` (1e9 bytes per second).

    Raises:
        ValueError: gbps is not positive.
    """
    if not gbps > 0:
        raise ValueError(f"gbps must be a positive bandwidth, got {gbps!r}")
    return n_bytes / gbps / 1e3


def operations(n_rows: int, n_cols: int) -> int:
    """Arithmetic operations of one softmax, however many kernels compute it.

    For each row: N − 1 comparisons, N subtractions, N exponentials, N − 1 additions and
    N divisions. An exponential and a division count as one each, although the GPU
    spends several instructions on either.
    """
    return n_rows * max(5 * n_cols - 2, 0)


@functools.cache
def _column(n_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(n_rows, 1, dtype=dtype, device=device)


def _column_for(x: torch.Tensor) -> torch.Tensor:
    """Something for x to be combined with as it is with its rows' maxima, or sums."""
    return _column(x.shape[0], x.dtype, x.device)


LINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: x.max(dim=1, keepdim=True),
    "subtract": lambda x: x - _column_for(x),
    "exp": torch.exp,
    "sum": lambda x: x.sum(dim=1, keepdim=True),
    "divide": lambda x: x / _column_for(x),
}
"""Each of the five lines alone, on a matrix x of any values."""

# ---- what the GPU's counters say -----------------------------------------------------

LARGE, SHORT, SMALL = (8192, 8192), (65536, 1024), (512, 2048)
OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "amax": lambda x: x.amax(dim=1, keepdim=True),  # max without its indices
    "scalar": lambda x: x - 1.0,  # subtract without its column
    "fill": lambda x: torch.full_like(x, 1.0),  # writes only
    "torch": lambda x: torch.softmax(x, dim=1),
}
"""What the five lines are compared with."""

RUNS = (  # what the L2 cache holds before, the shape, the kernels' names, the calls
    ("emptied", LARGE, [*LINES, *OTHERS], [*LINES.values(), *OTHERS.values()]),
    ("emptied", SHORT, ["torch"], [OTHERS["torch"]]),
    ("as left", LARGE, [*LINES], [eager.five_lines]),
    ("as left", SMALL, [*LINES], [eager.five_lines]),
)


def run() -> None:
    """Runs the kernels of RUNS, each once unseen, which loads it, and once watched."""
    for l2, shape, _, functions in RUNS:
        x = torch.randn(shape, device=backend.DEVICE)
        for function in functions:
            function(x)
            with counters.watched(emptied=l2 == "emptied"):
                function(x)


def profile_dram() -> list[dict[str, Any]]:
    """DRAM bytes and time of each kernel of RUNS, by the counters of the GPU.

    Returns:
        Rows of l2, n_rows, n_cols, step, kernel, read_bytes, written_bytes (both from
        and to DRAM) and duration_us.

    Raises:
        bench.Unavailable: the counters cannot be read here; see `counters.profile`.
        RuntimeError: as many kernels as RUNS names did not run.
    """
    named = [
        {"l2": l2, "n_rows": shape[0], "n_cols": shape[1], "step": step}
        for l2, shape, steps, _ in RUNS
        for step in steps
    ]
    rows = counters.profile(run)
    if len(rows) != len(named):
        kernels = [row["kernel"] for row in rows]
        raise RuntimeError(f"{len(named)} kernels should have run, got {kernels}")
    return [name | row for name, row in zip(named, rows, strict=True)]


# ---- timing with one precaution left out ---------------------------------------------

CALLS = 30
WAIT_CYCLES = 200_000  # about 0.1 ms: the time that flushing takes


def without_flush(function: Callable, *args: Any) -> bench.Times:
    """As `bench.time_us`, but the L2 cache keeps what the last call left in it.

    In place of the flush the GPU waits, so that the host is ahead of it all the same.
    """
    return _with_flush(lambda _: torch.cuda._sleep(WAIT_CYCLES), function, args)


def flushed_by_reading(function: Callable, *args: Any) -> bench.Times:
    """As `bench.time_us`, but the L2 cache is flushed by reading instead of writing."""
    return _with_flush(torch.sum, function, args)


def _with_flush(flush: Callable, function: Callable, args: tuple) -> bench.Times:
    bench.require_gpu()
    with patch.object(triton.runtime.driver.active, "clear_cache", flush):
        return bench.time_us(function, *args)


def without_synchronize(function: Callable, *args: Any) -> bench.Times:
    """The host's clock around a call, not waiting for the GPU: the launch alone."""
    return _by_host_clock(function, args, wait=False)


def by_wall_clock(function: Callable, *args: Any) -> bench.Times:
    """The host's clock around a call and the wait for its end: launch and all."""
    return _by_host_clock(function, args, wait=True)


def _by_host_clock(function: Callable, args: tuple, wait: bool) -> bench.Times:
    bench.require_gpu()
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    times = []
    for _ in range(CALLS):
        driver.clear_cache(cache)
        torch.cuda.synchronize()
        times.append(_call_us(function, args, wait))
        torch.cuda.synchronize()
    cuts = torch.tensor(times).quantile(torch.tensor(bench.QUANTILES)).tolist()
    p20, p50, p80 = (round(cut, 3) for cut in cuts)
    return p20, p50, p80


def _call_us(function: Callable, args: tuple, wait: bool = True) -> float:
    start = time.perf_counter()
    function(*args)
    if wait:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def first_calls() -> list[dict[str, Any]]:
    """The first calls of functions in a new process, by the wall clock.

    Returns:
        Rows of provider, n_rows, n_cols, first_us, second_us, and later_us, which is
        the median of the calls from the fifth on, all in µs.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    bench.require_gpu()
    return backend.call_apart(_first_calls)


def _first_calls(n_rows: int = 2048, n_cols: int = 2048) -> list[dict[str, Any]]:
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    functions = {
        "torch": OTHERS["torch"],
        "eager": eager.five_lines,
        "matmul": lambda x: x @ x.T,
        "torch.compile": eager.compiled(eager.five_lines),
    }
    rows = []
    for name, function in functions.items():
        times = [_call_us(function, (x,)) for _ in range(CALLS)]
        chosen = {"first_us": times[0], "second_us": times[1]}
        chosen["later_us"] = statistics.median(times[4:])
        shape = {"provider": name, "n_rows": n_rows, "n_cols": n_cols}
        rows.append(shape | {key: round(us, 1) for key, us in chosen.items()})
    return rows
