"""Times and bandwidths, measured beside a copy; recorded ones where there is no GPU.

How a time is taken: `triton.testing.do_bench` calls the function once, estimates its
time from five calls, and warms up with as many as fill `WARMUP_MS`. Then, as often as
fills `REPEAT_MS`, it overwrites a buffer of 256 MB, which leaves nothing of the input
in the L2 cache, records a CUDA event, calls the function, and records another. The time
between the two events is the GPU's own, and the flush lies outside it. We report the
median and the 20th and 80th percentiles of these times, never a mean, never one call.

What is compared: `Measurement.effective_gbps` is the traffic of an ideal kernel, which
reads and writes every value once, over the median time. Beside every figure stands the
same of `copy`, which is `x.clone()`: it has nothing to do but to read and write.

`device_us` and `host_us` take a call apart. A call costs the host some time as well, to
check, to allocate and to launch, and where the GPU needs less than that, it waits: the
clock of `time_us` then counts waiting. `device_us` keeps the GPU busy until the host is
ahead, so that it counts the GPU's work alone, and `host_us` counts the host's.

Weighed: `torch.utils.benchmark` (adapts its repetitions well, but flushes no cache, and
its percentiles are over blocks of calls), `nvbench` (the most careful, but for C++),
`time.perf_counter` (measures the launch as well; chapter 2 shows by how much it lies),
replays of a CUDA graph (they need no host either, but not every peer can be captured,
a capture may change what is launched, and a replay adds a launch of its own).
"""

import csv
import datetime
import functools
import json
import math
import os
import re
import statistics
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

from kernels.lab import backend, plot

RECORDED = backend.ROOT / "notebooks" / "recorded"
WARMUP_MS, REPEAT_MS = 20, 60  # of each; do_bench turns them into numbers of calls
QUANTILES = (0.2, 0.5, 0.8)
DEVICE_CALLS = 100  # timed by device_us, after a tenth as many
HOST_BATCHES, HOST_CALLS = 50, 20  # in a batch: the GPU's queue must hold its launches
HOLD, LONGEST_HOLD_US = 4, 4000  # the GPU is held for 4 times the host's time of a call
SPINS_PER_US = 2000  # clock cycles: 1 µs on a GPU of 2 GHz, more on a slower one
MEASURES = {"effective_gbps": 0, "share_of_copy": 2, "p50_us": 1}  # decimals shown
PROVENANCE = ("gpu", "driver", "torch", "triton", "recorded_at", "commit")

Times = tuple[float, float, float]
Make = Callable[[torch.dtype, int, int], torch.Tensor]
Prove = Callable[[torch.Tensor, torch.Tensor], None]


class Unavailable(RuntimeError):
    """Raised by a function given to `observe` where it lacks its tool, or the right."""


@dataclass(frozen=True)
class Measurement:
    """One provider at one shape: a row of a recorded file, whose columns these are.

    Attributes:
        provider: a chapter's kernel by its stem, a peer by its package, or "copy".
        dtype: such as "bfloat16".
        n_rows, n_cols: the shape.
        p20_us, p50_us, p80_us: percentiles of the time of one call, µs.
        gpu, driver, torch, triton: what it was measured on, and with.
        recorded_at: the day (UTC), ISO.
        commit: of the course.
    """

    provider: str
    dtype: str
    n_rows: int
    n_cols: int
    p20_us: float
    p50_us: float
    p80_us: float
    gpu: str
    driver: str
    torch: str
    triton: str
    recorded_at: str
    commit: str

    @property
    def bytes(self) -> int:
        """What an ideal kernel moves: every value read once and written once, bytes."""
        return 2 * self.n_rows * self.n_cols * getattr(torch, self.dtype).itemsize

    @property
    def effective_gbps(self) -> float:
        """Those bytes over the median time, GB/s (1e9 bytes per second)."""
        return self.bytes / self.p50_us / 1e3


class Guest(ABC):
    """A provider that a machine may lack: measured where it is, else read if recorded.

    How and where it is measured is its own affair; `kernels.lab.peers` has those of the
    course.
    """

    @abstractmethod
    def available(self) -> bool:
        """Whether it can be measured here."""

    @abstractmethod
    def times(
        self, x: torch.Tensor, remake: Callable, timer: Callable, prove: Prove | None
    ) -> Times:
        """As `timed` on x, or on `remake()`, which makes the same in any process."""


COLUMNS = tuple(field.name for field in fields(Measurement))
Key = tuple[str, str, int, int]  # provider, dtype, n_rows, n_cols: one row of a file


class Results(Sequence[Measurement]):
    """Measurements of one sweep, with the copies that their shares are taken of."""

    def __init__(
        self,
        measurements: Iterable[Measurement],
        source: str,
        copies: Mapping[tuple, float] | None = None,
    ) -> None:
        self._all = tuple(measurements)
        self.source = source
        self._copies = copies or {
            (one.dtype, one.n_rows, one.n_cols): one.p50_us
            for one in self._all
            if one.provider == "copy"
        }

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: Any) -> Any:
        return self._all[index]

    def __repr__(self) -> str:
        return f"<{len(self)} measurements: {self.source}>"

    def select(self, **equal: Any) -> "Results":
        """Those whose attributes equal the given ones, as in `select(n_cols=1024)`.

        A dtype may be given as `torch.float32` or as "float32".
        """
        wanted = {
            name: _dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in equal.items()
        }
        for name in wanted:
            if name not in COLUMNS:
                raise ValueError(f"no such column: {name!r}; there are {COLUMNS}")
        some = [
            one
            for one in self._all
            if all(getattr(one, name) == value for name, value in wanted.items())
        ]
        return Results(some, self.source, self._copies)

    def one(self, **equal: Any) -> Measurement:
        """The only measurement that `select` finds.

        Raises:
            ValueError: it finds none, or several.
        """
        some = self.select(**equal)
        if len(some) != 1:
            raise ValueError(f"{equal} must select one measurement, got {len(some)}")
        return some[0]

    def measure(self, one: Measurement, measure: str = "effective_gbps") -> float:
        """A measurement as "effective_gbps" (GB/s), "share_of_copy" or "p50_us" (µs).

        Raises:
            ValueError: an unknown measure.
        """
        if measure not in MEASURES:
            raise ValueError(
                f"measure must be one of {list(MEASURES)}, got {measure!r}"
            )
        if measure == "share_of_copy":
            return self._copies[one.dtype, one.n_rows, one.n_cols] / one.p50_us
        return getattr(one, measure)

    def value(self, measure: str = "effective_gbps", **equal: Any) -> float:
        """`measure` of `one`: `value("p50_us", provider="copy", n_cols=1024)`."""
        return self.measure(self.one(**equal), measure)

    def table(
        self, measure: str = "effective_gbps", rows: str | Sequence[str] = "n_cols"
    ) -> plot.Table:
        """Providers side by side; a dash where one refused the shape.

        Args:
            measure: as in `measure`.
            rows: the column, or columns, that tell one row of the table from another.

        Raises:
            ValueError: two measurements of a provider fall into one row.
        """
        names = [rows] if isinstance(rows, str) else list(rows)
        providers = list(dict.fromkeys(one.provider for one in self._all))
        lines: dict[tuple, dict[str, float]] = {}
        for one in self._all:
            line = lines.setdefault(tuple(getattr(one, name) for name in names), {})
            if one.provider in line:
                raise ValueError(
                    f"rows={rows!r} puts two measurements of {one.provider!r} into one "
                    "row: name more columns, or choose with select(…)"
                )
            line[one.provider] = self.measure(one, measure)
        cells = [
            [*key, *(line.get(name) for name in providers)]
            for key, line in lines.items()
        ]
        return plot.table(cells, [*names, *providers], digits=MEASURES[measure])


class Observed(list[dict[str, Any]]):
    """Rows that only a GPU can tell, and in `source` which one told them."""

    def __init__(self, rows: Iterable[dict[str, Any]], source: str) -> None:
        super().__init__(rows)
        self.source = source


# ---- measuring -----------------------------------------------------------------------


def time_us(function: Callable, *args: Any) -> Times:
    """The 20th, 50th and 80th percentile of the time of `function(*args)`, µs.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    require_gpu()
    milliseconds = triton.testing.do_bench(
        lambda: function(*args),
        warmup=WARMUP_MS,
        rep=REPEAT_MS,
        quantiles=list(QUANTILES),
    )
    p20, p50, p80 = (round(1e3 * time, 3) for time in milliseconds)
    return p20, p50, p80


def device_us(function: Callable, *args: Any) -> Times:
    """The same of the GPU's work for `function(*args)`, however slow the host is, µs.

    The GPU overwrites its L2 cache, as in `time_us`, and then spins for `HOLD` times as
    long as the host needs for a call. By the end of that the call and both events are
    in its queue, so that nothing but the call's own kernels is between the events.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    require_gpu()
    driver = triton.runtime.driver.active
    device, cache = (
        driver.get_device_interface(),
        driver.get_empty_cache_for_benchmark(),
    )
    function(*args)  # compiles
    hold_us = min(HOLD * _batch_us(function, args, DEVICE_CALLS // 10), LONGEST_HOLD_US)
    device.synchronize()
    pairs = []
    for _ in range(DEVICE_CALLS):
        start, end = (device.Event(enable_timing=True) for _ in range(2))
        driver.clear_cache(cache)
        torch.cuda._sleep(int(hold_us * SPINS_PER_US))
        start.record()
        function(*args)
        end.record()
        pairs.append((start, end))
    device.synchronize()
    return _percentiles([1e3 * start.elapsed_time(end) for start, end in pairs])


def host_us(function: Callable, *args: Any) -> Times:
    """The same of the host's time until `function(*args)` returns, µs.

    Calls follow each other in batches, and nobody waits for the GPU within a batch:
    its work must be short, or a full queue makes the host wait after all.

    Raises:
        RuntimeError: there is no GPU to launch on.
    """
    require_gpu()
    device = triton.runtime.driver.active.get_device_interface()
    _batch_us(function, args, HOST_CALLS)
    times = []
    for _ in range(HOST_BATCHES):
        device.synchronize()
        times.append(_batch_us(function, args, HOST_CALLS))
    device.synchronize()
    return _percentiles(times)


def _batch_us(function: Callable, args: tuple, calls: int) -> float:
    """The host's time for one of so many calls in a row, µs."""
    begin = time.perf_counter()
    for _ in range(calls):
        function(*args)
    return 1e6 * (time.perf_counter() - begin) / calls


def _percentiles(times: Sequence[float]) -> Times:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return tuple(round(cuts[round(10 * part) - 1], 3) for part in QUANTILES)


def timed(
    function: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    timer: Callable[..., Times] = time_us,
    prove: Prove | None = None,
) -> Times:
    """The times of one provider, after one call that compiles what it compiles.

    Args:
        function: takes x.
        x: its input.
        timer: what takes the times.
        prove: called with x and the first result; raises if it is wrong.
    """
    result = function(x)
    if prove:
        prove(x, result)
    del result
    return timer(function, x)


def measure(
    function: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    provider: str,
    *,
    timer: Callable[..., Times] = time_us,
) -> Measurement:
    """One provider `timed` on one matrix, with where and when.

    Args:
        function: takes x.
        x: (n_rows, n_cols), on the GPU.
        provider: the name for the record.
        timer: what takes the times.

    Raises:
        TypeError: x is not a tensor.
        ValueError: x is not a matrix, or empty.
        RuntimeError: there is no GPU to time on.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(f"x must be a matrix with values, got shape {tuple(x.shape)}")
    require_gpu()
    times = timed(function, x, timer)
    return Measurement(
        provider, _dtype_name(x.dtype), *x.shape, *times, **_provenance()
    )


def sweep(
    stem: str,
    providers: Mapping[str, Callable[[torch.Tensor], Any] | Guest],
    shapes: Iterable[tuple[int, int]],
    dtypes: Iterable[torch.dtype] = (torch.float32,),
    *,
    timer: Callable[..., Times] = time_us,
    make: Make | None = None,
    prove: Prove | None = None,
) -> Results:
    """Every provider, and the copy, at every shape in every dtype.

    On a GPU they are measured, on `torch.randn` of a fixed seed; with COURSE_RECORD=1
    in the environment the rows also go into `notebooks/recorded/<gpu>/<stem>.csv`, in
    the place of the rows of the same provider, dtype and shape. Without a GPU that file
    is read: of the GPU that COURSE_RECORDED_GPU names, such as "nvidia-h200".

    A provider that raises at a shape is absent there, and a shape that does not fit the
    GPU's memory is left out; a printed line says so. A `Guest` that a machine lacks has
    its recorded rows, which stay as they are, and is left out where there are none.

    Args:
        stem: of the file, the chapter's own.
        providers: name → function of x, or guest; "copy" is added.
        shapes: (n_rows, n_cols) of each matrix.
        dtypes: of the matrices.
        timer: what takes the times.
        make: makes the matrix of a dtype, n_rows and n_cols, the same each time; None
            is the one said above. It must be the same for all rows of a file.
        prove: called with x and a provider's result before it is timed; raises if that
            is wrong, and the provider is absent there.

    Raises:
        ValueError: a provider is called "copy", or rows that were asked for are not in
            the record; the message names them.
    """
    if "copy" in providers:
        raise ValueError("providers must not name 'copy': it is always measured")
    shapes = [(int(n_rows), int(n_cols)) for n_rows, n_cols in shapes]
    cases = [(dtype, *shape) for dtype in dtypes for shape in shapes]
    measured = _can_measure()
    path = _path(_slug(_gpu()["gpu"]) if measured else _recorded_gpu(), stem)
    guests = {name for name, one in providers.items() if isinstance(one, Guest)}
    here, rows = dict(providers), {}
    if measured:
        here = {
            name: one
            for name, one in providers.items()
            if name not in guests or one.available()
        }
        how = make or random, timer, prove
        rows = {
            _key(row): row for case in cases for row in _measure_case(here, case, *how)
        }
        if _recording():
            kept = (_read(path) if path.exists() else {}) | rows
            _write(path, COLUMNS, [astuple(kept[key]) for key in sorted(kept)])
    keys = [
        (name, _dtype_name(dtype), *shape)
        for dtype, *shape in cases
        for name in ("copy", *providers)
    ]
    absent = set(providers) - set(here) if measured else guests
    rows |= _find(path, [key for key in keys if key not in rows], absent)
    found = [rows[key] for key in keys if key in rows]
    present = [row for row in found if not math.isnan(row.p50_us)]
    return Results(present, _source(found, here if measured else None))


def recorded(stem: str) -> Results:
    """All that is recorded under a stem, on a machine with a GPU as on one without.

    On a GPU that has a record of its own it is that one.

    Raises:
        ValueError: there is no such file.
    """
    path = _path(_recorded_gpu(), stem)
    if _can_measure() and (own := _path(_slug(_gpu()["gpu"]), stem)).exists():
        path = own
    if not path.exists():
        raise ValueError(f"{_absence(path)}; `make record` on a GPU writes it")
    rows = [row for row in _read(path).values() if not math.isnan(row.p50_us)]
    return Results(rows, _label([vars(row) for row in rows], measured=False))


def observe(name: str, function: Callable[[], Iterable[Mapping[str, Any]]]) -> Observed:
    """What only a GPU can tell, in rows: told here, or recorded.

    On a GPU this calls the function; with COURSE_RECORD=1 its rows become the file
    `notebooks/recorded/<gpu>/<name>.csv`. Without one, or where the function raises
    `Unavailable`, the recorded rows are returned. Either way each row also has the
    columns of `PROVENANCE`, and values have the types that their text spells.

    Args:
        name: of the file.
        function: returns rows of the same keys, with numbers, bools, text or None.

    Raises:
        ValueError: the rows' keys differ, or nothing is recorded.
    """
    path = _path(_recorded_gpu(), name)
    if _can_measure():
        try:
            rows = [{**row, **_provenance()} for row in function()]
        except Unavailable:
            pass
        else:
            columns = list(rows[0]) if rows else []
            if any(list(row) != columns for row in rows):
                raise ValueError(f"{name}: all rows must have the keys {columns}")
            if _recording():
                path = _path(_slug(_gpu()["gpu"]), name)
                _write(path, columns, [row.values() for row in rows])
            return Observed(map(_parsed, rows), _label(rows, measured=True))
    if not path.exists():
        raise ValueError(f"{_absence(path)}; `make record` on a GPU writes it")
    with path.open(newline="") as file:
        rows = [_parsed(row) for row in csv.DictReader(file)]
    return Observed(rows, _label(rows, measured=False))


def launched(function: Callable, *args: Any) -> list[str]:
    """The names of the kernels that one call of `function(*args)` launches, in order.

    The GPU's own record, through `torch.profiler`. Three calls go before the recorded
    one: by then whatever compiles has compiled.

    Raises:
        RuntimeError: there is no GPU to launch on.
        Unavailable: the profiler saw no kernel.
    """
    require_gpu()
    for _ in range(3):
        function(*args)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        function(*args)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        names = _kernels_of(json.loads(path.read_text()))
    if not names:
        raise Unavailable("torch.profiler saw no kernel: is CUPTI usable here?")
    return names


def _kernels_of(trace: Mapping[str, Any]) -> list[str]:
    """The kernels of a profiler's trace, in the order in which they started."""
    kernels = [one for one in trace["traceEvents"] if one.get("cat") == "kernel"]
    return [one["name"] for one in sorted(kernels, key=lambda one: one["ts"])]


def _measure_case(
    providers: Mapping[str, Callable | Guest],
    case: tuple[torch.dtype, int, int],
    make: Make,
    timer: Callable[..., Times],
    prove: Prove | None,
) -> Iterator[Measurement]:
    """The copy and all providers at one shape; one that is absent has NaN for times."""
    name_of_case = _dtype_name(case[0]), *case[1:]
    absent = math.nan, math.nan, math.nan
    try:
        x = make(*case)
        copy = timed(torch.clone, x, timer)
    except torch.OutOfMemoryError:
        print(_left_out(*name_of_case))
        for name in ("copy", *providers):
            yield Measurement(name, *name_of_case, *absent, **_provenance())
        return
    yield Measurement("copy", *name_of_case, *copy, **_provenance())
    for name, provider in providers.items():
        try:
            if isinstance(provider, Guest):
                remake = functools.partial(make, *case)
                times = provider.times(x, remake, timer, prove)
            else:
                times = timed(provider, x, timer, prove)
        except Exception as error:
            if x.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost
            reason = (str(error).splitlines() or [""])[0]
            print(f"{_refused(name, *name_of_case)}: {type(error).__name__}: {reason}")
            times = absent
        yield Measurement(name, *name_of_case, *times, **_provenance())


def random(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """A matrix of normal values, the same each time, where kernels run."""
    generator = torch.Generator(backend.DEVICE).manual_seed(0)
    return torch.randn(
        n_rows, n_cols, dtype=dtype, device=backend.DEVICE, generator=generator
    )


def _refused(provider: str, dtype: str, n_rows: int, n_cols: int) -> str:
    return f"{provider} is absent at {dtype} {n_rows} × {n_cols}"


def _left_out(dtype: str, n_rows: int, n_cols: int) -> str:
    return f"{dtype} {n_rows} × {n_cols} is left out: it does not fit the GPU's memory"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the world -----------------------------------------------------------------------


def _can_measure() -> bool:
    return not backend.INTERPRETED


def require_gpu() -> None:
    """Refuses to go on where there is no GPU to time on.

    Raises:
        RuntimeError: kernels are interpreted here.
    """
    if not _can_measure():
        raise RuntimeError(
            "nothing can be timed here: kernels run in Triton's interpreter, whose "
            "speed says nothing about a GPU; bench.sweep and bench.observe read what "
            "was recorded on one"
        )


@functools.cache
def _gpu() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "driver": backend.driver_version()}


@functools.cache
def _provenance() -> dict[str, str]:
    """The columns of PROVENANCE for what is measured now."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        **_gpu(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "recorded_at": today,
        "commit": commit(),
    }


def commit() -> str:
    """The course's commit: of COURSE_COMMIT in the environment, or of git."""
    if told := os.environ.get("COURSE_COMMIT"):
        return told
    command = ["git", "-C", str(backend.ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _label(rows: Sequence[Mapping[str, Any]], measured: bool) -> str:
    """Which GPU, with what, and when: the source that figures and tables carry."""
    if not rows:
        return "no measurements"
    has = {name: sorted({str(row[name]) for row in rows}) for name in PROVENANCE}
    parts = ["/".join(has["gpu"])]
    parts += [f"{name} {'/'.join(has[name])}" for name in ("driver", "torch", "triton")]
    days = dict.fromkeys((has["recorded_at"][0], has["recorded_at"][-1]))
    parts.append("measured here" if measured else f"recorded {' to '.join(days)}")
    return " · ".join(parts)


def _source(rows: Sequence[Measurement], here: Collection[str] | None) -> str:
    """The label of a sweep that measured those, or None; others' rows were recorded."""
    if here is None:
        return _label([vars(row) for row in rows], measured=False)
    others = [row for row in rows if row.provider not in ("copy", *here)]
    label = _label([vars(row) for row in rows if row not in others], measured=True)
    names = ", ".join(dict.fromkeys(row.provider for row in others))
    days = sorted({row.recorded_at for row in others})
    return f"{label} · {names} recorded {days[0]}" if others else label


# ---- the record ----------------------------------------------------------------------


def _recording() -> bool:
    return os.environ.get("COURSE_RECORD") == "1"


def _recorded_gpu() -> str:
    """The folder that is read where there is no GPU."""
    return os.environ.get("COURSE_RECORDED_GPU") or "nvidia-h200"


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _path(folder: str, name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name must be of letters, digits and '_.-', got {name!r}")
    return RECORDED / folder / f"{name}.csv"


def _absence(path: Path) -> str:
    there = sorted(path.name for path in RECORDED.glob("*") if path.is_dir())
    return (
        f"there is no {path.parent.name}/{path.name} in {RECORDED}, which has {there}"
    )


def _key(row: Measurement) -> Key:
    return row.provider, row.dtype, row.n_rows, row.n_cols


def _find(
    path: Path, keys: Sequence[Key], guests: Collection[str] = ()
) -> dict[Key, Measurement]:
    """The recorded rows of these keys; says which are absent, and which guests'."""
    if not keys:
        return {}
    if not path.exists() and any(key[0] not in guests for key in keys):
        raise ValueError(f"{_absence(path)}; `make record` on a GPU writes it")
    kept = _read(path) if path.exists() else {}
    lacking = [key for key in keys if key not in kept]
    missing = [f"{p} {d} {m} × {n}" for p, d, m, n in lacking if p not in guests]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"{path.parent.name}/{path.name} lacks {len(missing)} of the {len(keys)} "
            f"rows asked for: {', '.join(missing[:8])}{more}; `make record` on a GPU "
            "adds them"
        )
    for guest, lacks in Counter(key[0] for key in lacking).items():
        asked = sum(key[0] == guest for key in keys)
        print(f"{guest} is left out at {lacks} of {asked} shapes: not here, no record")
    rows = {key: kept[key] for key in keys if key in kept}
    for (provider, *case), row in rows.items():
        if math.isnan(row.p50_us):
            if provider == "copy":
                print(_left_out(*case))
            elif not math.isnan(kept["copy", *case].p50_us):
                print(_refused(provider, *case))
    return rows


def _read(path: Path) -> dict[Key, Measurement]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} must have the columns {COLUMNS}")
        types = {field.name: field.type for field in fields(Measurement)}
        rows = [
            Measurement(**{name: types[name](text) for name, text in row.items()})
            for row in reader
        ]
    return {_key(row): row for row in rows}


def _write(path: Path, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Writes the whole file, or leaves it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with draft.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    draft.replace(path)


def _parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is read back from a file; versions and the like stay text."""
    return {
        name: value if name in PROVENANCE else _value(value)
        for name, value in row.items()
    }


def _value(cell: Any) -> Any:
    """The int, float, bool or None that a cell's text spells, or else the text."""
    text = "" if cell is None else str(cell)
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
