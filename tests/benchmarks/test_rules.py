"""The judge of rules for num_warps: what it reads, and what it says."""

import pandas as pd
import pytest
import torch
import triton

from benchmarks import rules
from kernels import meta
from kernels.lab import backend, record


@pytest.fixture
def measured():
    return rules.sweep("meta", rules.POWERS)


@pytest.fixture
def from_record(monkeypatch):
    monkeypatch.setattr(record.clocks, "can_measure", lambda: False)


def test_all_allowed_warps_are_taken_by_the_softmax():
    assert rules.allowed(1024) == [*meta.WARPS]
    assert rules.allowed(8193) == [2, 4, 8, 16, 32]
    for n_cols in {case.n_cols for case in (*rules.POWERS, *rules.OTHERS)}:
        x = torch.empty(0, n_cols, device=backend.DEVICE)
        for num_warps in rules.allowed(n_cols):
            meta.softmax(x, num_warps=num_warps)


def test_no_other_length_is_a_power_of_two():
    assert all(triton.next_power_of_2(c.n_cols) > c.n_cols for c in rules.OTHERS)
    assert all(triton.next_power_of_2(c.n_cols) == c.n_cols for c in rules.POWERS)


def test_the_best_of_each_length_is_1(from_record, measured):
    cases = measured.groupby(["dtype", "n_cols"])["share_of_best"]
    assert (cases.max() == 1).all() and len(cases) == len(rules.POWERS)
    row = record.only(measured, dtype="bfloat16", n_cols=4096, num_warps=16)
    assert (row["kib"], row["bytes_per_thread"]) == (8, 16)
    assert "copy" not in set(measured["provider"])


def test_the_course_and_two_other_rules_are_judged(from_record, measured):
    table = rules.compare(measured)
    assert [*table] == ["dtype", "n_cols", *rules.RULES, "best / copy"]
    assert table["ours"].min() > rules.GOOD > table["usual"].min()
    said = rules.judge(meta.pick_num_warps, measured)
    assert said.startswith("pick_num_warps reaches 0.9")
    assert said.endswith("over 12 cases.")


def test_programs_of_short_rows_end_at_one_rate_on_the_h200(from_record, measured):
    """Chapter `meta` gives 1,600 programs per µs for rows of 64 and of 256 values."""
    for n_cols in (64, 256):
        rows = record.select(measured, dtype="bfloat16", n_cols=n_cols)
        assert (rows["n_rows"] / rows["p50_us"]).max() == pytest.approx(1600, rel=0.1)


def small(shares):
    """A sweep of one length with a share for each number of warps."""
    rows = [
        {"dtype": "float32", "n_cols": 8, "num_warps": n, "share_of_best": share}
        for n, share in shares.items()
    ]
    return pd.DataFrame(rows).assign(bytes_per_thread=lambda df: 64 // df["num_warps"])


def test_a_bad_rule_hears_where_and_what_is_best():
    said = rules.judge(lambda n_cols, size: 4, small({1: 1.0, 4: 0.5}), "mine")
    assert said == (
        "mine reaches 0.50 of the best or more, 0.50 on average over 1 cases. Its "
        "worst: float32, N = 8, 4 warps (16 bytes per thread); best 1 warp (64 bytes "
        "per thread)."
    )


def unwritten(n_cols, element_size):
    return ...


def broken(n_cols, element_size):
    return n_cols // 0


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (unwritten, 'Not yet: line 2 of unwritten still has "..." in it.'),
        (broken, "broken fails: ZeroDivisionError"),
        (lambda n, size: 3, "for 8 columns of 4 bytes it returns 3, and num_warps"),
        (lambda n, size: True, "returns True"),
        (lambda n, size: None, "returns None"),
    ],
)
def test_what_is_no_rule_gets_a_sentence(rule, words):
    assert words in rules.judge(rule, small({1: 1.0, 4: 0.5}))


@pytest.mark.gpu
def test_a_length_is_measured_with_every_number_of_warps(monkeypatch):
    monkeypatch.setattr(record, "_recording", lambda: False)
    (case,) = record.cases([(64, 1000)])
    df = rules.sweep("meta_lengths", [case])
    assert [*df["num_warps"]] == [*meta.WARPS]
    assert set(df["n_cols"]) == {1000}
