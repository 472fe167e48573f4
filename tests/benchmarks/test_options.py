"""The experiments of chapter `meta`: each option is tried, and refusals are rows."""

import contextlib
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from benchmarks import options
from kernels import meta
from kernels.lab import clock
from tests.helpers import assert_right


@pytest.fixture
def timed(monkeypatch):
    """The options and rows that were timed; each call takes 2 µs.

    A cooperative launch of more than 3 programs is refused.
    """
    log = []

    def launch(x, kernel=None, **given):
        log.append((given, len(x)))
        if given.get("launch_cooperative_grid") and len(x) > 3:
            raise RuntimeError("too many blocks in cooperative launch")
        return run(x)

    def device_us(function, *args):
        assert_right(function(*args), args[0])
        return 1.0, 2.0, 3.0

    run = meta.launch
    monkeypatch.setattr(meta, "launch", launch)
    monkeypatch.setattr(clock, "device_us", device_us)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    return log


def test_every_option_is_tried_with_the_same_warps(timed):
    rows = list(options.keywords(5, 64, n_few=2))
    assert [row["keyword"] for row in rows] == [
        "as it is",
        "num_stages=1",
        "enable_fp_fusion=False",
        "maxnreg=64",
        "maxnreg=32",
        "launch_cooperative_grid=True",
        "launch_cooperative_grid=True",
    ]
    assert {given["num_warps"] for given, _ in timed} == {4}
    assert [given for given, _ in timed] == [
        {"num_warps": 4, **tried} for tried in (*options.OPTIONS, options.COOPERATIVE)
    ]


def test_a_refused_launch_is_a_row_with_its_reason(timed):
    *others, refused, granted = options.keywords(5, 64, n_few=2)
    assert all((row["us"], row["error"]) == (2.0, None) for row in others)
    assert (refused["programs"], refused["us"]) == (5, None)
    assert "cooperative" in refused["error"]
    assert (granted["programs"], granted["us"], granted["error"]) == (2, 2.0, None)


def test_the_table_says_what_each_keyword_changes_and_where(timed):
    observed = pd.DataFrame(options.keywords(5, 64, n_few=2))
    table = options.effects(observed)
    code = table["our machine code"]
    for keyword in ("num_stages=1", "enable_fp_fusion=False"):
        assert code[keyword] == "same"
    assert set(code["launch_cooperative_grid=True"]) == {"same"}
    assert re.fullmatch(
        r"new: \d+ bytes spilled, 16 programs per SM", code["maxnreg=32"]
    )
    assert [*table["µs"][:7]] == ["2"] * 5 + ["refused", "2"]
    places = table["takes effect in"]
    assert "8 asynchronous copies; with the launch's 4 only: 0" in places.iloc[1]
    assert (
        places["enable_fp_fusion=False"] == "a * b + c: fma; without fusion: mul, add"
    )
    assert places["num_ctas=2"].endswith(".reqnctapercluster 2")


def test_new_autotuners_choose_for_few_rows_and_for_many(monkeypatch):
    tuners, rows = [], []

    def autotuned():
        warps = 8 if len(tuners) % 2 else 4
        tuners.append(SimpleNamespace(best_config=SimpleNamespace(num_warps=warps)))
        return tuners[-1]

    def call_us(function, x, tuned):
        assert function is meta.launch and any(tuned is each for each in tuners)
        rows.append(x.shape)
        return 1_500_000.0

    monkeypatch.setattr(meta, "autotuned", autotuned)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(clock, "call_us", call_us)
    monkeypatch.setattr(clock, "alone", contextlib.nullcontext)
    found = pd.DataFrame(options.first_calls([2**20], few=3, tries=2))
    assert rows == [(3, 2**20)] * 2 + [(64, 2**20)] * 2
    assert [*found["n_rows"]] == [3, 64]
    assert set(found["first_s"]) == {1.5}
    assert set(found["chosen"]) == {"4, 8"}


def test_a_choice_is_worth_what_was_measured_for_many_rows():
    measured = pd.DataFrame(
        {
            "dtype": ["bfloat16", "bfloat16", "float32"],
            "n_cols": 256,
            "num_warps": [1, 8, 8],
            "share_of_best": [1.0, 0.5, 0.9],
        }
    )
    first = {"n_cols": 256, "n_rows": 64, "first_s": 1.5}
    observed = pd.DataFrame([{**first, "chosen": c} for c in ("1, 8, 1", "1")])
    assert [*options.worst_choices(observed, measured)["worst"]] == [0.5, 1.0]


@pytest.mark.parametrize("experiment", [options.keywords, options.first_calls])
def test_nothing_is_timed_without_a_gpu(monkeypatch, experiment):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        next(experiment())


@pytest.mark.gpu
def test_fewer_registers_are_slower_and_the_first_call_is_slow():
    rows = {row["keyword"]: row for row in options.keywords()}
    assert rows["maxnreg=32"]["us"] > rows["as it is"]["us"] > 0
    for row in options.first_calls([256], tries=2):
        assert row["first_s"] > 0
        assert {int(each) for each in row["chosen"].split(", ")} <= {*meta.WARPS}
