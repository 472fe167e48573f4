"""The first calls of a function, told apart from later ones."""

import contextlib

import pytest

from benchmarks import calls
from kernels import eager
from kernels.lab import clock, process


def test_the_first_two_calls_and_the_median_of_later_ones(monkeypatch):
    n_typical = calls.CALLS - calls.UNTYPICAL
    times = [200_000.0, 40.0, 30.0, 20.0] + [10.0, 12.0] * (n_typical // 2)
    ticks = iter(times + [11.0] * 3 * calls.CALLS)
    monkeypatch.setattr(clock, "call_us", lambda function, x: next(ticks))
    monkeypatch.setattr(clock, "alone", contextlib.nullcontext)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(eager, "compiled", lambda function: function)
    monkeypatch.setattr(process, "call_apart", lambda function: function(4, 8))
    first, *others = calls.first_calls()
    assert first == {
        "provider": "torch",
        "n_rows": 4,
        "n_cols": 8,
        "first_us": 200_000.0,
        "second_us": 40.0,
        "later_us": 11.0,
    }
    assert [row["provider"] for row in others] == ["eager", "matmul", "torch.compile"]
    assert next(ticks, None) is None


def test_nothing_is_timed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        calls.first_calls()


@pytest.mark.gpu
def test_first_calls_take_longer():
    rows = calls.first_calls()
    assert len(rows) == 4
    assert all(row["first_us"] > row["later_us"] > 0 for row in rows)
