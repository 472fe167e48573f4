"""Data frames of measurements: chosen, put side by side, joined, and labelled.

These functions know the columns of `kernels.lab.record`, and neither clocks nor files.
`record` offers them under its own name, as in `record.select(df, n_cols=1024)`. What
pandas does in one call (sorting, means, merging) has no function here.

`df.attrs["source"]` says which GPU the rows are from. pandas keeps it where rows are
chosen or sorted; these functions keep it everywhere else.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch

PROVENANCE = ["gpu", "driver", "torch", "triton", "recorded_at", "commit"]
"""Columns that say what a row was measured on, with what, and when."""


def select(df: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """The rows whose columns equal the given values, as in `select(df, n_cols=1024)`.

    A list means any of its values. A dtype may be `torch.float32` or "float32".

    Raises:
        ValueError: there is no such column.
    """
    chosen = pd.Series(True, index=df.index)
    _require_columns(df, equal)
    for column, value in equal.items():
        values = value if isinstance(value, list | tuple | set) else [value]
        chosen &= df[column].isin([plain(value) for value in values])
    return with_source(df[chosen], df.attrs.get("source", ""))


def only(df: pd.DataFrame, **equal: Any) -> pd.Series:
    """The only row that `select` finds.

    Raises:
        ValueError: it finds none, or several.
    """
    rows = select(df, **equal)
    if len(rows) != 1:
        raise ValueError(f"{equal} must select exactly one row, got {len(rows)} rows")
    return rows.iloc[0]


def pivot(
    df: pd.DataFrame,
    measure: str = "share_of_copy",
    index: str | Sequence[str] = "n_cols",
) -> pd.DataFrame:
    """Providers side by side, in order of appearance; NaN where a provider is absent.

    Args:
        df: rows of a sweep.
        measure: the column that becomes the values, not rounded.
        index: the column, or columns, that tell one row of the table from another.

    Raises:
        ValueError: there is no such column, or two rows of a provider would fall into
            one row of the table.
    """
    names = [index] if isinstance(index, str) else list(index)
    _require_columns(df, [measure, *names])
    twice = df.duplicated([*names, "provider"])
    if twice.any():
        provider = df.loc[twice, "provider"].iloc[0]
        raise ValueError(
            f"index={index!r} puts two rows of {provider!r} into one row of the table: "
            "name more columns, or choose rows with record.select(…)"
        )
    rows = df[names].drop_duplicates()
    order = rows[names[0]] if len(names) == 1 else pd.MultiIndex.from_frame(rows)
    table = df.set_index([*names, "provider"])[measure].unstack("provider")
    table = table.reindex(index=order, columns=df["provider"].unique())
    table.index.names, table.columns.name = names, None
    return with_source(table, df.attrs.get("source", ""))


def concat(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The rows of several frames, one frame after the other, with a common source.

    Raises:
        ValueError: there are no frames.
    """
    frames = list(frames)
    if not frames:
        raise ValueError("frames must hold at least one data frame, got none")
    full = [frame for frame in frames if len(frame)] or frames[:1]
    df = pd.concat(full, ignore_index=True)
    sources = list(dict.fromkeys(frame.attrs.get("source", "") for frame in full))
    here = ["recorded" not in each or "measured" in each for each in sources]
    if len(sources) > 1 and not any(here) and set(PROVENANCE) <= set(df):
        sources = [label(df, measured=False)]
    kept = [pd.DataFrame(each.attrs.get("recorded", {})) for each in full]
    if any(map(len, kept)):
        df.attrs["recorded"] = pd.concat(kept).drop_duplicates().to_dict("list")
    return with_source(df, "; ".join(sources))


def label(df: pd.DataFrame, measured: bool) -> str:
    """Which GPU, with what, and when: the source that figures and tables carry."""
    if df.empty:
        return "no measurements"
    has = {name: sorted(df[name].astype(str).unique()) for name in PROVENANCE}
    parts = ["/".join(has["gpu"])]
    parts += [f"{name} {'/'.join(has[name])}" for name in ("driver", "torch", "triton")]
    days = dict.fromkeys((has["recorded_at"][0], has["recorded_at"][-1]))
    parts.append("measured here" if measured else f"recorded {' to '.join(days)}")
    return " · ".join(parts)


def _require_columns(df: pd.DataFrame, names: Iterable[str]) -> None:
    for name in names:
        if name not in df:
            raise ValueError(
                f"the table has no column {name!r}; its columns are {[*df]}"
            )


def with_source(df: pd.DataFrame, source: str) -> pd.DataFrame:
    df.attrs["source"] = source
    return df


def plain(value: Any) -> Any:
    """A dtype by the name that the record has for it; other values as they are."""
    is_dtype = isinstance(value, torch.dtype)
    return str(value).removeprefix("torch.") if is_dtype else value
