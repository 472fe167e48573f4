"""The pieces of a call on the host: each does what a table says of it."""

import itertools

import pytest
import torch

from benchmarks import host
from kernels.lab import clock


def test_every_call_gives_the_softmax_or_is_a_piece():
    results = {name: call() for name, call in host.calls().items()}
    whole = results["torch.softmax"]
    for name, result in results.items():
        if "softmax" in name:
            torch.testing.assert_close(result.detach(), whole)


def test_steps_are_ours_and_the_peers(monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    rows = host.steps()
    found = {*rows["provider"]}
    assert {"gradient", "torch", "torch.compile", "liger", "quack"} <= found
    assert not {"copy", "stream"} & found
    assert {*zip(rows["n_rows"], rows["n_cols"], strict=True)} == {host.SHAPE}
    assert {*rows["clock"]} == {"host"} and rows["p50_us"].is_monotonic_increasing


def test_each_piece_of_a_first_call_is_in_the_call(monkeypatch):
    monkeypatch.setattr(host, "TURN", 2)
    pieces = host.new_lengths(2, [517, 518, 519, 520, 521])
    assert list(pieces) == [host.WHOLE, *host.PIECES, host.REST, host.STOPWATCHES]
    pieces.pop(host.STOPWATCHES)  # a difference of two medians
    assert all(us > 0 for us in pieces.values()), pieces
    again = host.new_lengths(2, [518] * 5)  # nothing is chosen anew
    for name in ("choose the kernel", "make the Launch", "check the input"):
        assert again[f"new length: {name}"] == 0


def test_a_piece_is_timed_without_the_pieces_that_it_calls(monkeypatch):
    now = itertools.count()  # every look at the clock takes one second
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(now))

    class Work:
        def inner(self):
            next(now)

        def outer(self):
            self.inner()
            self.inner()

    watch, inside = {"inner": 0.0, "outer": 0.0}, [0.0]
    with (
        host._stopwatch(Work, "inner", watch, "inner", inside),
        host._stopwatch(Work, "outer", watch, "outer", inside),
    ):
        Work().outer()
    assert watch == {"inner": 4e6, "outer": 3e6} and inside == [7e6]


def test_a_host_that_slows_down_slows_every_call(monkeypatch):
    n_timed = 0

    def host_us(call):
        nonlocal n_timed
        n_timed += 1
        slowness = 1 if n_timed <= 6 else 2  # twice as slow from the second of three on
        return 0.0, slowness * call(), 1000.0

    monkeypatch.setattr(host, "ROUNDS", 3)
    monkeypatch.setattr(clock, "host_us", host_us)
    calls = {"one": lambda: 1.0, "two": lambda: 2.0, "three": lambda: 3.0}
    assert host.in_turns(calls) == {"one": 1.0, "two": 2.0, "three": 3.0}
    n_timed = 3
    assert host.in_turns(calls) == {"one": 2.0, "two": 4.0, "three": 6.0}


def test_few_kernels_serve_many_lengths():
    ours, every = host.kernels_for(970)
    assert ours <= 24 < every


def test_no_length_is_counted_twice():
    lengths = host.some_lengths(970)
    assert len(set(lengths)) == len(lengths) == 970
    assert min(lengths) >= 1 and max(lengths) <= 10**6
    with pytest.raises(ValueError, match="at most longest / 2, 5, got 6"):
        host.some_lengths(6, 10)


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    with pytest.raises(RuntimeError, match="nothing can be timed"):
        host.pieces()


@pytest.mark.gpu
def test_pieces_are_timed():
    rows = host.pieces()
    assert [row["call"] for row in rows] == [
        *host.calls(),
        *(host.WHOLE, *host.PIECES, host.REST, host.STOPWATCHES),
    ]
    assert rows.pop()["us"] < 2000  # a difference of two medians
    assert all(0 < row["us"] < 2000 for row in rows)
