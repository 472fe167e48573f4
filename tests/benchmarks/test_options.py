"""The experiments of chapter `meta`: each option is tried, and refusals are rows."""

from types import SimpleNamespace

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

    def events_us(function, *args):
        assert_right(function(*args), args[0])
        return 1.0, 2.0, 3.0

    run = meta.launch
    monkeypatch.setattr(meta, "launch", launch)
    monkeypatch.setattr(clock, "events_us", events_us)
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


def test_the_first_call_of_each_new_autotuner_is_timed(monkeypatch):
    tuners = []

    def autotuned():
        tuners.append(SimpleNamespace(best_config=SimpleNamespace(num_warps=8)))
        return tuners[-1]

    def call_us(function, x, tuned):
        assert function is meta.launch and tuned is tuners[-1]
        return 1_500_000.0

    monkeypatch.setattr(meta, "autotuned", autotuned)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(clock, "call_us", call_us)
    monkeypatch.setattr(clock, "events_us", lambda function, *args: (1.0, 2.0, 3.0))
    rows = list(options.first_calls(32))
    assert len(tuners) == 2
    assert [row["n_rows"] for row in rows] == [64, 16384]
    assert {row["first_s"] for row in rows} == {1.5}
    assert {row["later_us"] for row in rows} == {2.0}
    assert {row["num_warps"] for row in rows} == {8}


@pytest.mark.parametrize("experiment", [options.keywords, options.first_calls])
def test_nothing_is_timed_without_a_gpu(monkeypatch, experiment):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        next(experiment())


@pytest.mark.gpu
def test_fewer_registers_are_slower_and_the_first_call_is_slow():
    rows = {row["keyword"]: row for row in options.keywords()}
    assert rows["maxnreg=32"]["us"] > rows["as it is"]["us"] > 0
    for row in options.first_calls():
        assert 1e6 * row["first_s"] > row["later_us"] > 0
        assert row["num_warps"] in meta.WARPS
