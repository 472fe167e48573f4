"""Measurements as data frames: taken here, or recorded on a GPU and found again.

`sweep` gives one row per measurement, with the columns of `COLUMNS`, which are those of
`notebooks/recorded/<gpu>/<stem>.csv`, and two that follow from them:

- `effective_gbps`: the bytes of an ideal kernel, which reads and writes every value
  once, over the median time, in GB/s (1e9 bytes per second).
- `share_of_copy`: that bandwidth as a share of the copy's: of `torch.clone` of a
  contiguous tensor. (A strided `clone` is a far slower kernel, and no yardstick.)

`observe` is for everything else that only a GPU can tell. On a GPU both measure. With
COURSE_RECORD=1 they also write what they measured. Without a GPU, and with
COURSE_MEASURE=recorded, both read the record of the GPU that COURSE_RECORDED_GPU names,
such as "nvidia-h200". `df.attrs["source"]` says which GPU it was, for figures. Beside a
sweep's measurements, `df.attrs["recorded"]` has what the record has of the same rows.

Weighed: a data frame of our own (pandas does the same in less), polars (fewer learners
know it), xarray (measurements are no grid), SQLite (no diff can show its files).
"""

import datetime
import functools
import io
import itertools
import math
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import triton

from kernels.lab import backend, description, gpu
from kernels.lab import clock as clocks
from kernels.lab.clock import Times
from kernels.lab.frames import (
    PROVENANCE,
    concat,
    label,
    only,
    pivot,
    plain,
    select,
    with_source,
)

__all__ = [
    "COLUMNS",
    "KEY",
    "PROVENANCE",
    "Case",
    "OptionalProvider",
    "Unavailable",
    "cases",
    "commit",
    "concat",
    "label",
    "observe",
    "of_size",
    "only",
    "pivot",
    "random",
    "recorded",
    "select",
    "sweep",
    "timed",
    "words",
]

RECORDED = backend.ROOT / "notebooks" / "recorded"
CASE = ["dtype", "n_rows", "n_cols"]
KEY = ["provider", *CASE, "input", "clock"]  # tells a row of a file from the others
TIMES = ["p20_us", "p50_us", "p80_us"]
COLUMNS = [*KEY, *TIMES, *PROVENANCE]
MATRICES = 3  # that a case must have room for: its input, the output, and a spare
CONTIGUOUS = "contiguous"
ABSENT = math.nan, math.nan, math.nan  # times of what was tried in vain

Key = tuple[str, str, int, int, str, str]  # the values of KEY
MakeInput = Callable[[torch.dtype, int, int], torch.Tensor]
Verify = Callable[[torch.Tensor, Any], None]


class Unavailable(RuntimeError):
    """Raised by a function given to `observe` where it lacks its tool, or the right."""


class OptionalProvider(ABC):
    """A provider that a machine may lack: measured where it is, else read if recorded.

    It decides itself in which process it is measured, as `benchmarks.peers` shows.
    """

    @abstractmethod
    def available(self) -> bool:
        """Whether it can be measured here."""

    @abstractmethod
    def times(
        self,
        x: torch.Tensor,
        make_input: Callable[[], torch.Tensor],
        timer: Callable[..., Times],
        verify: Verify | None,
    ) -> Times:
        """As `timed` on x, or on `make_input()`, which makes x again in any process."""


# ---- what is measured ----------------------------------------------------------------


class Case(NamedTuple):
    """A matrix to measure on.

    Attributes:
        dtype: of its values.
        n_rows, n_cols: its shape.
        input: how it lies in memory: "contiguous", or a name among the sweep's inputs.
    """

    dtype: torch.dtype
    n_rows: int
    n_cols: int
    input: str = CONTIGUOUS


def cases(
    shapes: Iterable[tuple[int, int]], dtypes: Iterable[torch.dtype] = (torch.float32,)
) -> list[Case]:
    """Every shape (n_rows, n_cols) in every dtype."""
    shapes = list(shapes)
    return [Case(dtype, int(m), int(n)) for dtype in dtypes for m, n in shapes]


def of_size(
    n_bytes: int,
    columns: Iterable[int],
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> list[Case]:
    """Cases with so many columns, and as many rows (1 at least) as make x n_bytes."""
    pairs = itertools.product(dtypes, list(columns))
    return [Case(d, max(1, n_bytes // (n * d.itemsize)), n) for d, n in pairs]


def random(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """A contiguous matrix of normal values, the same each time, where kernels run."""
    generator = torch.Generator(backend.DEVICE).manual_seed(0)
    return torch.randn(
        n_rows, n_cols, dtype=dtype, device=backend.DEVICE, generator=generator
    )


def sweep(
    stem: str,
    providers: Mapping[str, Callable[[torch.Tensor], Any] | OptionalProvider],
    cases: Iterable[Case],
    *,
    clock: str = "device",
    inputs: Mapping[str, MakeInput] | None = None,
    verify: Verify | None = None,
) -> pd.DataFrame:
    """Times every provider, and the copy, in every case.

    Where nothing is measured (see the module's description) the rows are read from
    `notebooks/recorded/<gpu>/<stem>.csv`; with COURSE_RECORD=1 they are written there,
    in the place of rows with the same `KEY`.

    By the clock "host", providers take turns, and a row has the medians over turns.

    These are absent from the result, and a printed line says so: a provider that raises
    in a case; a case that does not fit the GPU's memory; an `OptionalProvider` that is
    neither here nor recorded.

    Args:
        stem: of the file, usually the chapter's.
        providers: name → function of x, or optional provider; "copy" is added.
        cases: the matrices.
        clock: one of `clock.CLOCKS`.
        inputs: name → maker of x from (dtype, n_rows, n_cols), for the cases whose
            input is that name. It must make the same x each time.
        verify: called with x and a provider's result before the provider is timed;
            raises if the result is wrong.

    Returns:
        One row per measurement, case by case, the copy first. Where they are measured
        here, `attrs["absent"]` has, by `KEY`, why a provider is absent.

    Raises:
        ValueError: a provider is called "copy", a clock or an input is unknown, or the
            record lacks rows; the message names them.
    """
    wanted = list(dict.fromkeys(Case(*case) for case in cases))
    makers = {**(inputs or {}), CONTIGUOUS: random}
    _refuse_bad_names(providers, wanted, clock, makers)
    asked = _asked(providers, wanted, clock)
    measuring = clocks.can_measure()
    here = {
        name: provider
        for name, provider in providers.items()
        if not isinstance(provider, OptionalProvider)
        or (measuring and provider.available())
    }
    path, rows, absent = _readable(stem), _frame([]), {}
    if measuring:
        path, turns = _own(stem), [{} for _ in range(clocks.turns(clock))]
        for case, measured in itertools.product(wanted, turns):
            _measure_case(here, case, clock, makers, verify, measured, absent)
        times = {key: clocks.medians(turn[key] for turn in turns) for key in turns[0]}
        rows = _frame((*key, *us, *_provenance().values()) for key, us in times.items())
        if _recording():
            _merge_into(path, rows)
    df, found = _beside_recorded(asked, rows, path, set(providers) - set(here))
    if not measuring:
        return _present(df, label(df, measured=False))
    source = label(rows, measured=True)
    if len(found):
        names = ", ".join(found["provider"].unique())
        source += f" · {names} recorded {found['recorded_at'].min()}"
    df = _present(df, source)
    df.attrs["absent"] = absent
    if not _recording() and (path := _readable(stem)).exists():
        kept = asked.merge(_read(path), on=KEY)
        df.attrs["recorded"] = _present(kept, "").to_dict("list")
    return df


def timed(
    function: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    timer: Callable[..., Times] = clocks.device_us,
    verify: Verify | None = None,
) -> Times:
    """The times of function(x), after a call that compiles and is verified.

    `timer` is one of the functions in `clock.CLOCKS`; `verify` is as in `sweep`.
    """
    result = function(x)
    if verify:
        verify(x, result)
    del result
    return timer(function, x)


def recorded(stem: str, folder: str | None = None) -> pd.DataFrame:
    """All rows of a sweep or an observation that are recorded under a stem.

    Args:
        stem: of the file.
        folder: the GPU's, such as "nvidia-h200". None means the folder of the GPU here
            if it has such a file, unless COURSE_RECORDED_GPU names another.

    Raises:
        ValueError: there is no such file.
    """
    path = _found(_path(folder, stem) if folder else _readable(stem))
    if not {*TIMES} <= {*pd.read_csv(path, nrows=0)}:  # no sweep
        df = _observed(path)
        return with_source(df, label(df, measured=False))
    df = _read(path)
    return _present(df, label(df, measured=False))


def observe(
    name: str, function: Callable[[], Iterable[Mapping[str, Any]]]
) -> pd.DataFrame:
    """What only a GPU can tell and is no sweep: observed here, or recorded.

    On a GPU this calls the function; with COURSE_RECORD=1 its rows become the file
    `notebooks/recorded/<gpu>/<name>.csv`. Without a GPU, or where the function raises
    `Unavailable`, the recorded rows are returned; in the second case printed lines say
    why, and of which GPU they are.

    Args:
        name: of the file.
        function: returns rows of the same keys, with numbers, bools, text or None.

    Returns:
        The rows, and in each the columns of `PROVENANCE`. A column has the type that
        its text in the file spells; None becomes NaN.

    Raises:
        ValueError: the rows' keys differ, or nothing is recorded.
    """
    unavailable = False
    if clocks.can_measure():
        try:
            rows = [{**row, **_provenance()} for row in function()]
        except Unavailable as error:
            why = (str(error).splitlines() or ["its tool is not here"])[0]
            print(f"{name} is not observed here: {why}.")
            unavailable = True
        else:
            columns = list(rows[0]) if rows else PROVENANCE
            if odd := [list(row) for row in rows if list(row) != columns]:
                raise ValueError(
                    f"{name}: all rows must have the keys {columns}, got {odd[0]}"
                )
            df = pd.DataFrame(rows, columns=columns, dtype=object)
            text = df.to_csv(index=False, lineterminator="\n")
            if _recording():
                _write(_own(name), text)
            df = _observed(io.StringIO(text))
            return with_source(df, label(df, measured=True))
    df = _observed(_found(_readable(name)))
    if unavailable:
        print(f"It was recorded on {'/'.join(df['gpu'].unique())}.")
    return with_source(df, label(df, measured=False))


# ---- measuring -----------------------------------------------------------------------


def _present(df: pd.DataFrame, source: str) -> pd.DataFrame:
    """The rows that have times, with the columns that follow from them."""
    df = df[df["p50_us"].notna()].reset_index(drop=True)
    sizes = df["dtype"].map(lambda name: getattr(torch, name).itemsize)
    n_bytes = 2.0 * df["n_rows"] * df["n_cols"] * sizes.astype(float)
    df["effective_gbps"] = n_bytes / df["p50_us"] / 1e3
    beside = [*CASE, "clock"]
    copies = df[(df["provider"] == "copy") & (df["input"] == CONTIGUOUS)]
    copy_us = copies.drop_duplicates(beside).set_index(beside)["p50_us"]
    copy_us = copy_us.reindex(pd.MultiIndex.from_frame(df[beside]))
    df["share_of_copy"] = copy_us.to_numpy() / df["p50_us"]
    return with_source(df, source)


def _refuse_bad_names(
    providers: Iterable[str], cases: Iterable[Case], clock: str, inputs: Iterable[str]
) -> None:
    if "copy" in providers:
        raise ValueError("providers must not name 'copy': it is always measured")
    if clock not in clocks.CLOCKS:
        raise ValueError(f"clock must be one of {[*clocks.CLOCKS]}, got {clock!r}")
    for case in cases:
        if case.input not in inputs:
            raise ValueError(
                f"input of a case must be one of {[*inputs]}, got {case.input!r}; pass "
                "inputs={name: function} to the sweep to add one"
            )


def _key(provider: str, case: Case, clock: str) -> Key:
    how = CONTIGUOUS if provider == "copy" else case.input
    return provider, plain(case.dtype), case.n_rows, case.n_cols, how, clock


def _asked(providers: Iterable[str], cases: Iterable[Case], clock: str) -> pd.DataFrame:
    """The keys of a sweep's rows, in their order."""
    names = ["copy", *providers]
    keys = [_key(name, case, clock) for case in cases for name in names]
    return _frame((*key, *ABSENT, *PROVENANCE) for key in keys)[KEY].drop_duplicates()


def _measure_case(
    providers: Mapping[str, Callable | OptionalProvider],
    case: Case,
    clock: str,
    makers: Mapping[str, MakeInput],
    verify: Verify | None,
    measured: dict[Key, Times],
    absent: dict[Key, str],
) -> None:
    """Adds the times, the copy's if they lack, and why a provider is absent."""
    timer, copied = clocks.CLOCKS[clock], _key("copy", case, clock)
    make_input = functools.partial(makers[case.input], *case[:3])
    try:
        if MATRICES * math.prod(case[1:3]) * case.dtype.itemsize > gpu.free_bytes():
            raise torch.OutOfMemoryError
        if copied not in measured:
            measured[copied] = timed(torch.clone, random(*case[:3]), timer)
        x = make_input()
    except torch.OutOfMemoryError:
        print(f"{words(copied)} is left out: it does not fit the GPU's memory")
        for name in ("copy", *providers):
            measured.setdefault(_key(name, case, clock), ABSENT)
        return
    for name, provider in providers.items():
        key = _key(name, case, clock)
        try:
            if isinstance(provider, OptionalProvider):
                measured[key] = provider.times(x, make_input, timer, verify)
            else:
                measured[key] = timed(provider, x, timer, verify)
        except Exception as error:
            if x.is_cuda:
                torch.cuda.synchronize()  # raises if the GPU's context is lost
            reason = (str(error).splitlines() or [""])[0]
            measured[key], absent[key] = ABSENT, f"{type(error).__name__}: {reason}"
            print(f"{name} is absent at {words(key)}: {absent[key]}")


def words(key: Sequence[Any]) -> str:
    """The case of a row's KEY, for messages; what is usual is not said."""
    _, dtype, n_rows, n_cols, how, clock = key
    words = [dtype, f"{n_rows} × {n_cols}", *([how] if how != CONTIGUOUS else [])]
    return " ".join(words + ([f"({clock})"] if clock != "device" else []))


@functools.cache
def _gpu() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(), "driver": description.driver_version()}


@functools.cache
def _provenance() -> dict[str, str]:
    """The columns of PROVENANCE for what is measured now."""
    return {
        **_gpu(),
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "recorded_at": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """The course's commit: COURSE_COMMIT of the environment, or what git says."""
    if given := os.environ.get("COURSE_COMMIT"):
        return given
    command = ["git", "-C", str(backend.ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


# ---- files ---------------------------------------------------------------------------


def _recording() -> bool:
    wanted = os.environ.get("COURSE_RECORD") == "1"
    if wanted and clocks.BRIEFLY:
        raise ValueError(
            "COURSE_MEASURE must be unset where COURSE_RECORD=1 is set, got 'briefly': "
            "a record is of whole measurements"
        )
    return wanted


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _path(folder: str, name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name must be of letters, digits and '_.-', got {name!r}")
    return RECORDED / folder / f"{name}.csv"


def folder() -> Path:
    """The folder of this machine's GPU; `make record` empties it."""
    return RECORDED / _slug(_gpu()["gpu"])


def _own(name: str) -> Path:
    """The file of this machine's GPU."""
    return _path(folder().name, name)


def _readable(name: str) -> Path:
    """The file that is read: of the GPU that is named, of the GPU here, or the H200."""
    if named := os.environ.get("COURSE_RECORDED_GPU"):
        return _path(named, name)
    if not backend.INTERPRETED and _own(name).exists():
        return _own(name)
    return _path("nvidia-h200", name)


def _found(path: Path) -> Path:
    if not path.exists():
        there = sorted(path.name for path in RECORDED.glob("*") if path.is_dir())
        raise ValueError(
            f"there is no {path.parent.name}/{path.name} in {RECORDED}, which has "
            f"{there}; `make record` on a GPU writes it"
        )
    return path


def _beside_recorded(
    asked: pd.DataFrame, rows: pd.DataFrame, path: Path, optional: set[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All rows that were asked for, and those of them that come from the record.

    Prints which rows are absent, and why. `asked` has the keys, `rows` what was
    measured; the file at `path` may lack the rows of `optional` providers.
    """
    lacking = asked[~_keys(asked).isin(_keys(rows))]
    needs = not lacking["provider"].isin(optional).all()
    kept = _read(_found(path)) if needs or path.exists() else _frame([])
    missing = lacking[~_keys(lacking).isin(_keys(kept))]
    needed = missing[~missing["provider"].isin(optional)]
    if len(needed):
        named = [f"{key[0]} {words(key)}" for key in _keys(needed[:8])]
        more = f" and {len(needed) - 8} more" if len(needed) > 8 else ""
        raise ValueError(
            f"{path.parent.name}/{path.name} lacks {len(needed)} of the {len(asked)} "
            f"rows asked for: {', '.join(named)}{more}; `make record` on a GPU adds "
            "them"
        )
    for name, lacks in missing["provider"].value_counts(sort=False).items():
        of = (asked["provider"] == name).sum()
        print(f"{name} is left out at {lacks} of {of} shapes: not here, no record")
    found = lacking.merge(kept, on=KEY)
    absent = [*_keys(found[found["p50_us"].isna()])]
    copies = {key[1:4] for key in absent if key[0] == "copy"}
    for key in absent:
        if key[0] == "copy":
            print(f"{words(key)} is left out: it does not fit the GPU's memory")
        elif key[1:4] not in copies:
            print(f"{key[0]} is absent at {words(key)}")
    full = [frame for frame in (rows, found) if len(frame)] or [rows]
    return asked.merge(pd.concat(full), on=KEY), found


def _keys(rows: pd.DataFrame) -> pd.MultiIndex:
    return pd.MultiIndex.from_frame(rows[KEY])


_TYPES: dict[str, type] = dict.fromkeys((*KEY, *PROVENANCE), str)
_TYPES |= {"n_rows": int, "n_cols": int} | dict.fromkeys(TIMES, float)


def _frame(rows: Iterable[tuple]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=COLUMNS).astype(_TYPES)


def _read(path: Path) -> pd.DataFrame:
    """The rows of a sweep's file."""
    if (columns := [*pd.read_csv(path, nrows=0)]) != COLUMNS:
        raise ValueError(f"{path} must have the columns {COLUMNS}, got {columns}")
    blank = {column: ["nan", ""] for column in TIMES}
    df = pd.read_csv(path, dtype=_TYPES, na_values=blank, keep_default_na=False)
    return df.round(3)  # as the clocks do: some versions of pandas read 1 bit beside


def _observed(source: Path | io.StringIO) -> pd.DataFrame:
    """The rows of an observation's file; versions and the like stay text."""
    texts = dict.fromkeys(PROVENANCE, str)
    return pd.read_csv(source, dtype=texts, na_values=[""], keep_default_na=False)


def _merge_into(path: Path, rows: pd.DataFrame) -> None:
    """Adds rows to a sweep's file, in the place of rows with the same key."""
    both = [_read(path), rows] if path.exists() else [rows]
    df = pd.concat(both).drop_duplicates(KEY, keep="last").sort_values(KEY)
    _write(path, df.to_csv(index=False, lineterminator="\n", na_rep="nan"))


def _write(path: Path, text: str) -> None:
    """Writes the whole file, or leaves it as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(text, encoding="utf-8", newline="")
    draft.replace(path)
