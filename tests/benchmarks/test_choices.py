"""The judge of rules that choose a kernel: what it tries, and what it says."""

import pandas as pd
import pytest
import torch

from benchmarks import choices, regions
from kernels import fastest, tiled, unaligned
from kernels.lab import backend, record

OF_SLICES = {
    (case.input, case.n_cols)
    for case in choices.CASES
    if case.input == "apart" and case.dtype != torch.float32 and case.n_cols <= 2**16
}
EVERY = choices.CASES + choices.SMALL
WANTED = [(case, name) for case in choices.CASES for name in choices.KERNELS]


def test_matrices_are_drawn_and_the_same_each_time():
    once = choices.draw(400, 2**13, 2**17, seed=5)
    assert once == choices.draw(400, 2**13, 2**17, seed=5)
    assert once != choices.draw(400, 2**13, 2**17, seed=6)
    assert choices.draw(7, 2**13, 2**17, seed=5) == once[:7]
    row_bytes = [case.n_cols * case.dtype.itemsize for case in once]
    assert 2**13 - 32 <= min(row_bytes) < 2**14 and 2**16 < max(row_bytes) <= 2**17
    sizes = [case.n_rows * size for case, size in zip(once, row_bytes, strict=True)]
    assert 0.9 * 2**23 <= min(sizes) < 2**24 and 2**27 < max(sizes) <= 2**28
    assert {case.dtype for case in once} == set(backend.DTYPES)
    apart = sum(case.input == "apart" for case in once)
    by_8 = sum(case.n_cols % 8 == 0 for case in once)
    assert 100 < apart < 170 and 190 < by_8 < 260


def test_the_matrices_of_the_record_are_those_that_are_drawn():
    recorded = record.recorded("fastest_choices", "nvidia-h200")
    names = recorded.loc[recorded["provider"] != "copy", list(regions.CASE)]
    assert {*names.itertuples(index=False, name=None)} == {
        regions.key(case) for case in EVERY
    }
    assert len(set(EVERY)) == len(EVERY) == 48


def test_no_matrix_is_one_of_the_benchmark():
    lengths = {case.n_cols for region in regions.REGIONS for case in region.cases}
    assert not lengths & {case.n_cols for case in EVERY}


def test_small_matrices_of_the_record_are_what_page_18_says(monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-h200")
    table = choices.picks(fastest.choose, choices.sweep(choices.SMALL))
    worst = table.nlargest(2, "times_as_long").reset_index()
    assert [*worst.loc[0, ["n_rows", "n_cols"]]] == [3, 4624]
    assert round(100 * (worst.loc[0, "times_as_long"] - 1)) == 9
    assert [*worst.loc[0, ["chosen", "fastest"]]] == ["tiled", "unaligned"]
    assert worst.loc[1, "times_as_long"] <= choices.GOOD


def test_small_matrices_have_few_rows_or_short_ones():
    sizes = [case.n_rows * case.n_cols * case.dtype.itemsize for case in choices.SMALL]
    assert min(sizes) < 2**15 and 2**22 < max(sizes) <= 2**23
    assert sum(size < 500_000 for size in sizes) >= 5  # "under 1 MB", as regions count
    assert sum(case.n_rows <= 32 and case.n_cols > 20_000 for case in choices.SMALL) > 3
    assert sum(case.n_cols * case.dtype.itemsize < 1024 for case in choices.SMALL) > 3
    assert {case.input for case in choices.SMALL} == {"contiguous", "apart"}


def test_each_kernel_is_timed_at_every_matrix_that_it_takes(monkeypatch):
    asked = []
    sweep = lambda stem, providers, cases, **how: asked.append((providers, cases))  # noqa: E731
    monkeypatch.setattr(record, "sweep", sweep)
    monkeypatch.setattr(record, "concat", lambda frames: frames)
    choices.sweep()
    both = [
        (c, name) for providers, cases in asked for c in cases for name in providers
    ]
    lacking = {pair for pair in WANTED if pair not in both}
    assert lacking == {
        (case, name)
        for case, name in WANTED
        if (name in choices.ONE_PROGRAM and case.n_cols > tiled.MAX_COLS)
        or (name == "windows" and (case.input, case.n_cols) not in OF_SLICES)
    }
    assert len({*both}) == len(both)


@pytest.mark.parametrize("case", EVERY)
def test_a_rule_is_told_of_the_matrix_that_is_timed(case):
    x = torch.empty(3, case.n_cols + 3 * (case.input == "apart"), dtype=case.dtype)
    x, y = x[:, : case.n_cols], torch.empty(3, case.n_cols, dtype=case.dtype)
    told = choices.alignment(case.n_cols, case.dtype, case.input)
    assert told == unaligned.alignment(y, x)
    assert told[1] == (case.input == "contiguous")


def test_rows_apart_are_a_part_of_wider_rows():
    x = choices.apart(torch.float32, 3, 8)
    assert (x.shape, x.stride()) == ((3, 8), (11, 1))


def times(us, **columns):
    """A sweep of one matrix, 4 × 8192 float32, with a time for each kernel."""
    rows = [
        {
            **{"provider": name, "dtype": "float32", "n_rows": 4, "n_cols": 8192},
            **{"input": "contiguous", "clock": "device", "p50_us": time},
        }
        for name, time in us.items()
    ]
    return pd.DataFrame(rows).assign(**columns)


MEASURED = times({"tiled": 20.0, "online": 30.0, "cooperative": 10.0})


def judge(rule, name=None):
    """The judgement in one line; as it is printed, lines fit a page."""
    said = choices.judge(rule, MEASURED, name)
    assert max(map(len, said.splitlines())) <= 80
    return " ".join(said.split())


def test_a_rule_hears_what_it_costs_and_where():
    good = judge(lambda *matrix: "cooperative", "good")
    assert good == (
        "good: at most 1.00 times the fastest kernel's time, 1.00 on average, at 1 "
        "matrices."
    )
    bad = judge(lambda *matrix: "tiled", "bad")
    assert bad.endswith(
        "The worst: 4 rows of 32 KiB (float32); tiled 20.0 µs, cooperative 10.0 µs."
    )


def unwritten(n_rows, n_cols, dtype, vector, same_shift):
    longest = ...
    return "tiled" if n_cols < longest else "cooperative"


def broken(n_rows, n_cols, dtype, vector, same_shift):
    return n_rows // 0


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (unwritten, 'Not yet: line 2 of unwritten still has "..." in it.'),
        (broken, "broken fails: ZeroDivisionError"),
        (lambda *matrix: None, "it returns None, and must return one of"),
        (lambda *matrix: "unaligned", "unaligned does not take 4 rows of 32 KiB"),
    ],
)
def test_what_is_no_rule_gets_a_sentence(rule, words):
    assert words in judge(rule)


def test_a_rule_is_asked_with_what_the_courses_rule_is_asked():
    seen = []
    choices.picks(lambda *matrix: seen.append(matrix) or "tiled", MEASURED)
    assert seen == [(4, 8192, torch.float32, 4, True)]
    assert fastest.choose(*seen[0]) in choices.KERNELS


def test_the_crossing_is_read_off_the_benchmark():
    """The H200's, whose ratios these are, on any machine."""
    lines = choices.crossing(record.recorded("fastest", "nvidia-h200"))
    assert set(lines) == {
        f"{dtype}, {size}"
        for size in ("256 MiB", "8 MB")
        for dtype in ("float32", "bfloat16")
    }
    for line in lines.values():
        assert len(line) >= 3 and min(line) >= 8
        assert line[min(line)] < 0.97  # short rows are better not shared
        assert line[max(line)] > 0.98  # and long rows as well shared as not, or better
        assert line[max(line)] > line[min(line)] + 0.1
