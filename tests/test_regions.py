"""Regions cover what they say they cover; losses are found, and nothing else."""

import dataclasses

import pytest
import torch

from kernels.lab import bench, regions

WHERE = ("NVIDIA Test 100", "1.2", "2.11", "3.6", "2026-01-01", "abc1234")
BY_NAME = regions.BY_NAME
SMALL = regions.Region(
    "here",
    "Here",
    ((torch.float32, 8, 16), (torch.float32, 4, 32)),
    share=0.9,
    mean=0.95,
    best=0.99,
)


def total(case):
    dtype, n_rows, n_cols = case
    return 2 * n_rows * n_cols * dtype.itemsize


def results(times):
    """Measurements from {(provider, n_rows, n_cols): µs}."""
    return bench.Results(
        [
            bench.Measurement(name, "float32", *shape, time, time, time, *WHERE)
            for (name, *shape), time in times.items()
        ],
        "a source",
    )


def measured(**changes):
    times = {
        **{("copy", 8, 16): 95.0, ("torch", 8, 16): 120.0, ("liger", 8, 16): 110.0},
        **{("copy", 4, 32): 96.0, ("torch", 4, 32): 150.0},
        **{("fastest", 8, 16): 100.0, ("fastest", 4, 32): 100.0},
        **{("tiled", 8, 16): 1.0, ("tiled", 4, 32): 1.0, ("copy", 1, 1): 1.0},
    }
    return results(times | {tuple(key): time for key, time in changes.items()})


@pytest.mark.parametrize("region", regions.REGIONS, ids=lambda one: one.name)
def test_cases_are_distinct_and_fit(region):
    assert len(set(region.cases)) == len(region.cases)
    assert max(map(total, region.cases)) < 2**31
    assert {torch.float32, torch.bfloat16} <= {case[0] for case in region.cases}
    assert all(n_rows >= 1 and n_cols >= 32 for _, n_rows, n_cols in region.cases)


def test_regions_are_what_they_say():
    for name in ("large", "any", "strided"):
        assert min(map(total, BY_NAME[name].cases)) >= 256e6
    large = {n_cols for *_, n_cols in BY_NAME["large"].cases}
    assert (min(large), max(large)) == (32, 1048576)
    assert all(n_cols % 8 == 0 for n_cols in large)
    anything = {n_cols for *_, n_cols in BY_NAME["any"].cases}
    assert {50257, 781, 1001, 12345, 65537, 100003} <= anything
    assert all(n_cols % 8 or n_cols == 12672 for n_cols in anything)
    middle = [*map(total, BY_NAME["middle"].cases)]
    assert min(middle) >= 16e6 and max(middle) <= 256e6
    longest = {n_cols for *_, n_cols in BY_NAME["longest"].cases}
    assert min(longest) > 2**20 and max(longest) == 2**22
    few = BY_NAME["few"].cases
    assert {n_rows for _, n_rows, _ in few} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {n_cols for *_, n_cols in few} >= {65536, 1048576}
    assert max(map(total, BY_NAME["small"].cases)) < 1e6


def test_the_fewest_rows_that_reach_a_total():
    assert regions.rows_of(1000, 10, torch.float32) == 13
    assert regions.rows_of(800, 10, torch.float32) == 10
    assert regions.rows_of(800, 10, torch.bfloat16) == 20


def test_a_sliced_input_has_wider_rows(monkeypatch):
    monkeypatch.setattr(bench.backend, "DEVICE", "cpu")
    for _, _, n_cols in BY_NAME["strided"].cases:
        x = regions.sliced(torch.bfloat16, 3, n_cols)
        assert x.shape == (3, n_cols)
        assert x.stride(0) > n_cols and x.stride(1) == 1
    with pytest.raises(ValueError, match=r"n_cols must be one of \[781.*got 32"):
        regions.sliced(torch.bfloat16, 3, 32)


def test_where_all_bars_are_held_nothing_is_lost():
    assert regions.losses(SMALL, measured()) == []


def test_every_kind_of_loss_is_found():
    (lost,) = regions.losses(SMALL, results_with("torch", 4, 32, 98.0))
    assert (lost.bar, lost.against, lost.got) == ("best peer", "torch", 0.98)
    assert (lost.region, lost.dtype, lost.n_rows, lost.n_cols) == (
        *("here", "float32"),
        *(4, 32),
    )
    assert regions.losses(SMALL, results_with("torch", 4, 32, 99.0)) == []
    below, mean = regions.losses(SMALL, results_with("copy", 8, 16, 89.0))
    assert (below.bar, below.against) == ("share of the copy", "copy")
    assert (below.got, below.wanted) == (0.89, 0.9)
    assert (mean.bar, mean.wanted) == ("mean share", 0.95)
    assert mean.got == pytest.approx((0.89 * 0.96) ** 0.5)
    only = dataclasses.replace(SMALL, share=None, mean=None)
    assert regions.losses(only, results_with("copy", 8, 16, 1.0)) == []
    assert regions.losses(SMALL, measured(), ours="torch")


def results_with(name, n_rows, n_cols, time):
    return results(
        {(one.provider, one.n_rows, one.n_cols): one.p50_us for one in measured()}
        | {(name, n_rows, n_cols): time}
    )


def test_how_we_stand():
    how = regions.standing(SMALL, measured())
    assert (how.share, how.best) == (0.95, 1.1)
    assert how.mean == pytest.approx((0.95 * 0.96) ** 0.5)
    assert regions.standing(SMALL, measured(), peers=["quack"]).best == float("inf")


def test_a_case_that_was_not_measured_is_no_win():
    some = [one for one in measured() if one.provider != "fastest"]
    with pytest.raises(ValueError, match=r"must have 'fastest' and 'copy' at"):
        regions.losses(SMALL, bench.Results(some, ""))


def test_the_measurements_of_a_region_come_in_its_order():
    some = regions.of(SMALL, measured())
    assert [one.n_rows for one in some] == [8] * 5 + [4] * 4
    assert some.value("share_of_copy", provider="torch", n_rows=4) == 96 / 150
    best = regions.against(some, regions.PEERS)
    assert best == {
        ("float32", 8, 16): ("liger", 110.0),
        ("float32", 4, 32): ("torch", 150.0),
    }
