"""Rows are chosen and joined, and keep where they are from."""

import pandas as pd
import pytest
import torch

from kernels.lab import frames, record

SOURCE = "NVIDIA Test 100 · driver 1.2 · torch 2.0 · triton 3.0 · recorded 2026-01-02"


def row(provider, n_rows, n_cols, us, share):
    made = {"provider": provider, "dtype": "float32", "n_rows": n_rows}
    made |= {"n_cols": n_cols, "p50_us": us, "share_of_copy": share}
    made |= {"gpu": "NVIDIA Test 100", "driver": "1.2", "torch": "2.0", "triton": "3.0"}
    return made | {"recorded_at": "2026-01-02", "commit": "abc1234"}


@pytest.fixture
def df():
    rows = [row("copy", 64, 128, 8.0, 1.0), row("torch", 64, 128, 16.0, 0.5)]
    rows += [row("copy", 8, 1000, 7.0, 1.0), row("torch", 8, 1000, 14.0, 0.5)]
    df = pd.DataFrame(rows)
    df.attrs["source"] = SOURCE
    return df


def test_rows_are_selected_by_the_values_of_columns(df):
    assert len(frames.select(df, provider="torch", dtype=torch.float32)) == 2
    assert len(frames.select(df, provider=["torch", "copy"], n_cols=128)) == 2
    assert len(frames.select(df)) == 4
    assert frames.only(df, provider="copy", n_cols=128).p50_us == 8.0
    torch_rows = frames.select(df, provider="torch")
    assert frames.only(torch_rows, n_cols=128).share_of_copy == 0.5
    with pytest.raises(
        ValueError, match=r"'copy'.* must select exactly one row, got 2"
    ):
        frames.only(df, provider="copy")
    with pytest.raises(ValueError, match=r"must select exactly one row, got 0"):
        frames.only(df, provider="nobody")
    with pytest.raises(ValueError, match="no column 'columns'"):
        frames.select(df, columns=128)


def test_providers_side_by_side(df):
    table = frames.pivot(df, "p50_us")
    assert [*table] == ["copy", "torch"]
    assert table.to_dict("index") == {
        128: {"copy": 8.0, "torch": 16.0},
        1000: {"copy": 7.0, "torch": 14.0},
    }
    assert table.index.name == "n_cols" and table.columns.name is None
    shares = frames.pivot(df, index=["dtype", "n_rows", "n_cols"])
    assert shares.index.names == ["dtype", "n_rows", "n_cols"]
    assert shares.loc[("float32", 8, 1000)].tolist() == [1.0, 0.5]
    turned = frames.pivot(df[::-1], "p50_us")
    assert [*turned] == ["torch", "copy"] and turned.index.tolist() == [1000, 128]
    absent = frames.pivot(df[:3])
    assert pd.isna(absent.loc[1000, "torch"])
    with pytest.raises(ValueError, match="two rows of 'copy' into one row"):
        frames.pivot(df, index="dtype")
    with pytest.raises(ValueError, match="no column 'speed'"):
        frames.pivot(df, "speed")


def test_a_frame_keeps_its_source(df):
    for derived in (
        frames.select(df, n_cols=128),
        frames.pivot(df),
        frames.concat([df, df]),
        df.query("n_cols == 128"),
        df.sort_values("p50_us"),
        df[df["n_cols"] == 128],
    ):
        assert derived.attrs["source"] == SOURCE


def test_frames_together_have_a_common_source(df):
    later = df.assign(recorded_at="2999-01-01")
    later.attrs["source"] = frames.label(later, measured=False)
    both = frames.concat(iter([df, later]))
    assert len(both) == 8 and both.index.tolist() == [*range(8)]
    assert both.attrs["source"].endswith("recorded 2026-01-02 to 2999-01-01")
    here = df.copy()
    here.attrs["source"] = frames.label(here, measured=True)
    mixed = frames.concat([here, later]).attrs["source"]
    assert mixed == f"{here.attrs['source']}; {later.attrs['source']}"
    assert frames.concat([df, df[:0]]).attrs["source"] == SOURCE
    narrow = frames.concat([df[["n_cols"]], later[["n_cols"]]])
    assert narrow.attrs["source"] == f"{SOURCE}; {later.attrs['source']}"
    with pytest.raises(ValueError, match="frames must hold at least one data frame"):
        frames.concat([])


def test_the_source_names_all_days_and_versions(df):
    rows = df[:2].assign(recorded_at=["2026-02-03", "2026-01-02"])
    rows.loc[0, "triton"] = "9.9"
    assert frames.label(rows, measured=False) == (
        "NVIDIA Test 100 · driver 1.2 · torch 2.0 · triton 3.0/9.9 · "
        "recorded 2026-01-02 to 2026-02-03"
    )
    assert frames.label(df, measured=True).endswith("triton 3.0 · measured here")
    assert frames.label(df[:0], measured=True) == "no measurements"


def test_record_offers_these_functions():
    for name in ("concat", "label", "only", "pivot", "select"):
        assert getattr(record, name) is getattr(frames, name)
