"""Regions hold the matrices that they say, and every shortfall in them is found."""

import re

import pandas as pd
import pytest
import torch

from benchmarks import regions
from kernels.lab import gpu, record
from kernels.lab.record import Case

F32 = torch.float32
FIRST, SECOND = Case(F32, 8, 16), Case(F32, 4, 32)
HERE = regions.Region(
    "here", "Here", (FIRST, SECOND), share=0.9, mean=0.95, best=0.99, short=(SECOND,)
)
TIMES = {
    **{("copy", 8, 16): 95.0, ("torch", 8, 16): 120.0, ("liger", 8, 16): 110.0},
    **{("copy", 4, 32): 96.0, ("torch", 4, 32): 150.0},
    **{("fastest", 8, 16): 100.0, ("fastest", 4, 32): 100.0},
    **{("tiled", 8, 16): 1.0, ("tiled", 4, 32): 1.0, ("copy", 1, 1): 1.0},
}


def frame(times, **columns):
    """Measurements from {(provider, n_rows, n_cols): µs}."""
    rows = [
        {
            **{"provider": name, "dtype": "float32", "n_rows": n_rows},
            **{"n_cols": n_cols, "input": "contiguous", "clock": "device"},
            "p50_us": time,
        }
        for (name, n_rows, n_cols), time in times.items()
    ]
    return pd.DataFrame(rows).assign(**columns)


def changed(*key_and_time):
    *key, time = key_and_time
    return frame(TIMES | {tuple(key): time})


def n_bytes(case):
    return 2 * case.n_rows * case.n_cols * case.dtype.itemsize


# ---- which matrices ------------------------------------------------------------------

LEAST = r"(\d+) MB or more"
MOST = r"under (\d+) MB"
RANGE = r"(\d+) to (\d+) MB"


@pytest.mark.parametrize("region", regions.REGIONS, ids=lambda region: region.name)
def test_cases_have_the_sizes_that_the_title_says(region):
    """In bytes read and written; the title is what a reader of a figure goes by."""
    sizes = [n_bytes(case) / 1e6 for case in region.cases]
    if limits := re.search(RANGE, region.title):
        low, high = map(int, limits.groups())
        assert low <= min(sizes) and max(sizes) <= high
    elif least := re.search(LEAST, region.title):
        assert min(sizes) >= int(least[1])
    elif most := re.search(MOST, region.title):
        assert max(sizes) < int(most[1])
    else:
        assert region.name in ("longest", "few")  # these are told apart by N


@pytest.mark.parametrize("region", regions.REGIONS, ids=lambda region: region.name)
def test_cases_are_distinct_and_of_several_dtypes(region):
    assert len(set(region.cases)) == len(region.cases)
    assert {torch.float32, torch.bfloat16} <= {case.dtype for case in region.cases}


def test_every_row_of_the_large_region_starts_at_16_bytes():
    large = regions.BY_NAME["large"].cases
    assert all(case.n_cols * case.dtype.itemsize % 16 == 0 for case in large)


def test_most_rows_of_the_region_of_any_length_do_not():
    cases = regions.BY_NAME["any"].cases
    uneven = [case for case in cases if case.n_cols * case.dtype.itemsize % 16]
    assert len(uneven) > 0.9 * len(cases)


def test_few_rows_leave_multiprocessors_idle():
    h200 = gpu.named("H200")
    few = regions.BY_NAME["few"].cases
    assert max(case.n_rows for case in few) < h200.sms


def test_the_longest_rows_are_in_no_other_region():
    lengths = {
        region.name: {case.n_cols for case in region.cases}
        for region in regions.REGIONS
    }
    longest = lengths.pop("longest")
    assert min(longest) > max(set().union(*lengths.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [33, 100, 50257])
def test_the_fewest_rows_that_move_so_many_bytes(n_cols, dtype):
    n_rows = regions.rows_of(10**7, n_cols, dtype)
    assert n_bytes(Case(dtype, n_rows, n_cols)) >= 10**7
    assert n_bytes(Case(dtype, n_rows - 1, n_cols)) < 10**7


def test_strided_inputs_have_rows_apart(monkeypatch):
    monkeypatch.setattr(record.backend, "DEVICE", "cpu")
    starts = set()
    for case in regions.BY_NAME["strided"].cases:
        x = regions.sliced(case.dtype, 3, case.n_cols)
        assert x.shape == (3, case.n_cols) and x.dtype == case.dtype
        assert x.stride(1) == 1 and not x.is_contiguous()
        starts.add(x.stride(0) * case.dtype.itemsize % 16 == 0)
    assert starts == {True, False}  # rows that start at 16 bytes, and others
    with pytest.raises(ValueError, match=r"n_cols must be one of \[781.*got 32"):
        regions.sliced(torch.bfloat16, 3, 32)


def test_the_short_form_is_a_part_of_every_region():
    cases = [case for region in regions.SHORT for case in region.cases]
    assert len(set(cases)) == len(cases) <= 50
    for region, short in zip(regions.REGIONS, regions.SHORT, strict=True):
        assert short.name == region.name and short.title == region.title
        assert set(short.cases) < set(region.cases)
        assert (short.share, short.mean, short.best) == (
            *(region.share, region.mean),
            region.best,
        )
        assert {F32, torch.bfloat16} <= {case.dtype for case in short.cases}


# ---- comparing -----------------------------------------------------------------------


def test_where_all_bars_are_held_there_is_no_shortfall():
    found = regions.shortfalls(frame(TIMES), [HERE])
    assert found.empty and "demanded" in found.columns


def test_a_faster_peer_is_a_shortfall():
    row = regions.shortfalls(changed("torch", 4, 32, 98.0), [HERE]).loc[0]
    assert row.to_dict() == {
        **{"region": "here", "bar": "best peer", "against": "torch"},
        **{"dtype": "float32", "n_rows": 4, "n_cols": 32},
        **{"reached": 0.98, "demanded": 0.99},
    }
    assert regions.shortfalls(changed("torch", 4, 32, 99.0), [HERE]).empty


def test_a_low_share_and_a_low_mean_are_shortfalls():
    df = changed("copy", 8, 16, 80.0)
    share, mean = regions.shortfalls(df, [HERE]).itertuples()
    assert (share.bar, share.against) == ("share of the copy", "copy")
    assert (share.reached, share.demanded, share.n_rows) == (0.8, 0.9, 8)
    assert (mean.bar, mean.demanded, mean.n_rows) == ("mean share", 0.95, 0)
    assert mean.reached == pytest.approx((0.80 * 0.96) ** 0.5)
    assert share.reached / share.demanded < mean.reached / mean.demanded


def test_a_region_without_bars_has_no_shortfalls():
    bare = regions.Region("bare", "Bare", HERE.cases)
    assert regions.shortfalls(changed("copy", 8, 16, 1.0), [bare]).empty
    (row,) = regions.standings(frame(TIMES), [bare]).itertuples()
    assert all(map(pd.isna, (row.share_bar, row.mean_bar, row.best_bar)))


def test_another_provider_can_be_judged():
    found = regions.shortfalls(frame(TIMES), [HERE], ours="torch")
    assert list(found["bar"]) == [
        *("share of the copy", "mean share", "share of the copy", "best peer")
    ]
    assert list(found["reached"] / found["demanded"]) == sorted(
        found["reached"] / found["demanded"]
    )


def test_standings():
    table = regions.standings(frame(TIMES), [HERE])
    row = table.loc[0]
    assert (row["region"], row["title"], row["cases"]) == ("here", "Here", 2)
    assert (row["share"], row["best"]) == (0.95, 1.1)
    assert row["mean"] == pytest.approx((0.95 * 0.96) ** 0.5)
    assert (row["share_bar"], row["mean_bar"], row["best_bar"]) == (0.9, 0.95, 0.99)
    alone = regions.standings(frame(TIMES), [HERE], peers=["quack"])
    assert alone.loc[0, "best"] == float("inf")


def test_a_case_that_was_not_measured_is_no_win():
    whole = frame(TIMES)
    for provider in ("fastest", "copy"):
        df = whole[~((whole["provider"] == provider) & (whole["n_rows"] == 4))]
        for judge in (regions.standings, regions.shortfalls):
            with pytest.raises(ValueError, match=r"'fastest' and 'copy' at .*4, 32"):
                judge(df, [HERE])


def test_absent_providers_and_other_clocks_do_not_count():
    absent = frame({("torch", 4, 32): float("nan"), ("quack", 4, 32): float("nan")})
    host = frame({("torch", 4, 32): 1.0, ("copy", 4, 32): 1.0}, clock="host")
    whole = frame(TIMES)
    df = pd.concat([host, absent, whole], ignore_index=True)
    expected = whole[whole["provider"] != "torch"]
    expected = pd.concat([expected, whole[whole["provider"] == "torch"]])
    assert regions.standings(df, [HERE]).equals(regions.standings(expected, [HERE]))


def test_rows_of_a_region_come_in_its_order_with_the_copy_first():
    df = frame(TIMES)
    df.attrs["source"] = "a source"
    rows = regions.of(HERE, df)
    assert list(rows["n_rows"]) == [8] * 5 + [4] * 4
    assert list(rows["provider"][:2]) == ["copy", "torch"]
    assert list(rows.columns) == list(df.columns)
    assert rows.attrs["source"] == "a source"


def test_strided_rows_are_compared_with_a_contiguous_copy():
    case = Case(F32, 8, 16, "sliced")
    strided = regions.Region("strided", "Strided", (case,), share=0.9)
    providers = {key: time for key, time in TIMES.items() if key[0] != "copy"}
    df = pd.concat(
        [frame(TIMES), frame(providers, input="sliced").assign(p50_us=190.0)],
        ignore_index=True,
    )
    rows = regions.of(strided, df)
    assert list(rows["input"]) == ["contiguous", *["sliced"] * 4]
    (row,) = regions.shortfalls(df, [strided]).itertuples()
    assert (row.against, row.reached) == ("copy", 0.5)
    table = regions.compare(df)
    assert table.loc[("float32", 8, 16, "sliced"), "copy_us"] == 95.0
    assert table.loc[("float32", 8, 16, "contiguous"), "p50_us"] == 100.0


def test_the_quickest_of_some_providers():
    best = regions.quickest(frame(TIMES), regions.PEERS)
    assert best.loc["float32", 8, 16, "contiguous"].to_list() == ["liger", 110.0]
    assert best.loc["float32", 4, 32, "contiguous"].to_list() == ["torch", 150.0]
    assert len(best) == 2


def test_a_record_covers_all_regions_or_the_short_ones(monkeypatch):
    monkeypatch.setattr(regions, "REGIONS", (HERE,))
    short = (regions.Region("here", "Here", HERE.short),)
    monkeypatch.setattr(regions, "SHORT", short)
    df = frame(TIMES)
    assert regions.covered_by(df) == (HERE,)
    assert regions.covered_by(df[df["n_rows"] != 8]) == short
    only_copy = df[(df["n_rows"] == 8) | (df["provider"] == "copy")]
    with pytest.raises(ValueError, match=r"lacks \[\('float32', 4, 32, 'contig.*make"):
        regions.covered_by(only_copy)


def test_every_loss_is_listed_and_no_win():
    assert regions.losses(frame(TIMES), [HERE]).empty
    slower = regions.losses(changed("fastest", 8, 16, 111.0), [HERE])
    (row,) = slower.to_dict("records")
    assert (row["region"], row["n_rows"], row["peer"]) == (HERE.title, 8, "liger")
    assert (
        row["peer / ours"] == pytest.approx(110 / 111) and row["why"] == "peer and copy"
    )
    faster_copy = changed("copy", 4, 32, 80.0)
    assert [*regions.losses(faster_copy, [HERE])["why"]] == ["copy"]


def test_gpus_stand_one_after_the_other(monkeypatch, capsys):
    def recorded(stem, folder):
        if folder == "none":
            raise ValueError("there is no such file")
        return frame(TIMES, gpu=f"NVIDIA {folder}")

    monkeypatch.setattr(record, "recorded", recorded)
    monkeypatch.setattr(regions, "covered_by", lambda df: (HERE,))
    table = regions.beside(["A", "none", "B"])
    assert [*table["GPU"]] == ["A", "B"] and [*table["first"]] == [2, 2]
    assert [*table["copy / ours"]] == [0.95, 0.95]
    assert capsys.readouterr().out == "none has no benchmark yet.\n"
