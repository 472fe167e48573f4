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

Weighed: `torch.utils.benchmark` (adapts its repetitions well, but flushes no cache, and
its percentiles are over blocks of calls), `nvbench` (the most careful, but for C++),
`time.perf_counter` (measures the launch as well; chapter 2 shows by how much it lies).
"""

import csv
import datetime
import functools
import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
MEASURES = {"effective_gbps": 0, "share_of_copy": 2, "p50_us": 1}  # decimals shown
PROVENANCE = ("gpu", "driver", "torch", "triton", "recorded_at", "commit")

Times = tuple[float, float, float]


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


def measure(
    function: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    provider: str,
    *,
    timer: Callable[..., Times] = time_us,
) -> Measurement:
    """One provider timed on one matrix, after one call that compiles what it compiles.

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
    function(x)
    times = timer(function, x)
    return Measurement(
        provider, _dtype_name(x.dtype), *x.shape, *times, **_provenance()
    )


def sweep(
    stem: str,
    providers: Mapping[str, Callable[[torch.Tensor], Any]],
    shapes: Iterable[tuple[int, int]],
    dtypes: Iterable[torch.dtype] = (torch.float32,),
    *,
    timer: Callable[..., Times] = time_us,
) -> Results:
    """Every provider, and the copy, at every shape in every dtype.

    On a GPU they are measured, on `torch.randn` of a fixed seed; with COURSE_RECORD=1
    in the environment the rows also go into `notebooks/recorded/<gpu>/<stem>.csv`, in
    the place of the rows of the same provider, dtype and shape. Without a GPU that file
    is read: of the GPU that COURSE_RECORDED_GPU names, such as "nvidia-h200".

    A provider that raises at a shape is absent there, and a shape that does not fit the
    GPU's memory is left out; a printed line says so.

    Args:
        stem: of the file, the chapter's own.
        providers: name → function of x; "copy" is added.
        shapes: (n_rows, n_cols) of each matrix.
        dtypes: of the matrices.
        timer: what takes the times.

    Raises:
        ValueError: a provider is called "copy", or rows that were asked for are not in
            the record; the message names them.
    """
    if "copy" in providers:
        raise ValueError("providers must not name 'copy': it is always measured")
    names = ["copy", *providers]
    shapes = [(int(n_rows), int(n_cols)) for n_rows, n_cols in shapes]
    cases = [(dtype, *shape) for dtype in dtypes for shape in shapes]
    measured = _can_measure()
    path = _path(_slug(_gpu()["gpu"]) if measured else _recorded_gpu(), stem)
    if measured:
        rows = [row for case in cases for row in _measure_case(providers, *case, timer)]
        if _recording():
            kept = _read(path) if path.exists() else {}
            kept |= {_key(row): row for row in rows}
            _write(path, COLUMNS, [astuple(kept[key]) for key in sorted(kept)])
    else:
        keys = [
            (name, _dtype_name(dtype), *shape)
            for dtype, *shape in cases
            for name in names
        ]
        rows = _find(path, keys)
    present = [row for row in rows if not math.isnan(row.p50_us)]
    return Results(present, _label([vars(row) for row in rows], measured))


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
    providers: Mapping[str, Callable],
    dtype: torch.dtype,
    n_rows: int,
    n_cols: int,
    timer: Callable[..., Times],
) -> Iterator[Measurement]:
    """The copy and all providers at one shape; one that is absent has NaN for times."""
    case = _dtype_name(dtype), n_rows, n_cols
    absent = {"p20_us": math.nan, "p50_us": math.nan, "p80_us": math.nan}
    try:
        x = _random(dtype, n_rows, n_cols)
        yield measure(torch.clone, x, "copy", timer=timer)
    except torch.OutOfMemoryError:
        print(_left_out(*case))
        for name in ("copy", *providers):
            yield Measurement(name, *case, **absent, **_provenance())
        return
    for name, function in providers.items():
        try:
            yield measure(function, x, name, timer=timer)
        except Exception as error:
            if x.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost
            reason = (str(error).splitlines() or [""])[0]
            print(f"{_refused(name, *case)}: {type(error).__name__}: {reason}")
            yield Measurement(name, *case, **absent, **_provenance())


def _random(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
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
        "commit": os.environ.get("COURSE_COMMIT") or _head(),
    }


def _head() -> str:
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


def _find(path: Path, keys: Sequence[Key]) -> list[Measurement]:
    """The recorded rows of these keys; says which of them are absent."""
    if not path.exists():
        raise ValueError(f"{_absence(path)}; `make record` on a GPU writes it")
    kept = _read(path)
    missing = [f"{p} {d} {m} × {n}" for p, d, m, n in keys if (p, d, m, n) not in kept]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(
            f"{path.parent.name}/{path.name} lacks {len(missing)} of the {len(keys)} "
            f"rows asked for: {', '.join(missing[:8])}{more}; `make record` on a GPU "
            "adds them"
        )
    rows = [kept[key] for key in keys]
    for row in rows:
        _, *case = _key(row)
        if math.isnan(row.p50_us):
            if row.provider == "copy":
                print(_left_out(*case))
            elif not math.isnan(kept["copy", *case].p50_us):
                print(_refused(*_key(row)))
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
