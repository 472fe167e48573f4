"""The control of the clocks tries what it says, in the order that it says."""

import contextlib
import sys

import pytest
import torch

from benchmarks import flush, peers
from kernels.lab import backend, clock, counters, record
from tests.helpers import assert_right, matrix

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}


class Liger(record.OptionalProvider):
    def __init__(self, there):
        self.there = there

    def available(self):
        return self.there

    def times(self, x, make_input, timer, verify):
        assert make_input() is x and verify is None
        return record.timed(peers.native, x, timer)


@pytest.fixture
def tried(monkeypatch):
    """What the device clock is asked for; every call takes it 2 µs."""
    log = []

    def device_times(function, args, *, flush, rotate):
        log.append((flush, rotate, tuple(args[0].shape)))
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(clock, "device_times", device_times)
    monkeypatch.setattr(flush, "SHAPES", ((4, 8), (2, 16)))
    monkeypatch.setattr(flush, "softmax", peers.native)
    monkeypatch.setattr(flush.online, "softmax", peers.native)
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    return log


@pytest.mark.parametrize("there", [True, False])
def test_every_provider_is_timed_in_every_way(tried, monkeypatch, there):
    monkeypatch.setattr(peers, "providers", lambda: {"liger": Liger(there)})
    names = ["copy", "fastest", "online", "torch", *(["liger"] if there else [])]
    rows = flush.times()
    assert [(row["provider"], row["flush"], row["rotated"]) for row in rows] == [
        (name, *way) for name in names for way in flush.WAYS
    ] * 2
    asked = [(function, way[1]) for way, function in flush.WAYS.items()]
    assert [entry[:2] for entry in tried] == asked * len(names) * 2
    assert [entry[2] for entry in tried] == [
        shape for shape in ((4, 8), (2, 16)) for _ in names for _ in asked
    ]
    assert {row["median_us"] for row in rows} == {2.0}


@pytest.fixture
def watched(monkeypatch):
    """What `run` does: kernels by name and matrix, flushes, and what is watched."""
    log = []

    @contextlib.contextmanager
    def watch():
        log.append("watch")
        yield
        log.append("end")

    def named(name):
        return lambda x=None: log.append((name, None if x is None else id(x)))

    monkeypatch.setattr(counters, "watched", watch)
    monkeypatch.setattr(flush, "KERNELS", {name: named(name) for name in flush.KERNELS})
    monkeypatch.setattr(flush, "FLUSHES", {name: named(name) for name in flush.FLUSHES})
    monkeypatch.setattr(flush, "MATRICES", ((2, 3),))
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    return log


def test_an_experiment_is_a_history_a_flush_and_a_watched_kernel(watched):
    flush.run()
    expected = [*flush.KERNELS]
    for before, flushed, kernel in flush.EXPERIMENTS:
        expected += ["reset, read 1 GiB", *before, flushed, "watch", kernel, "end"]
    assert [step if isinstance(step, str) else step[0] for step in watched] == expected
    matrices = [step[1] for step in watched[3:] if step[0] in flush.KERNELS]
    ran = [len(each.before) + 1 for each in flush.EXPERIMENTS]
    assert len(set(matrices)) == len(ran)  # a matrix for each experiment
    assert [matrices.count(each) for each in dict.fromkeys(matrices)] == ran


def test_the_kernels_are_right_and_the_flushes_run(monkeypatch):
    monkeypatch.setattr(flush, "_others", lambda n: torch.ones(n, 3, 40).to(x.device))
    monkeypatch.setattr(flush, "_reset", lambda: None)
    x = matrix(3, 40)
    for name in ("hinted", "unhinted"):
        assert_right(flush.KERNELS[name](x), x)
    assert flush.KERNELS["sum"](x).shape == (3,)
    for function in flush.FLUSHES.values():
        function()


def test_experiments_name_what_there_is():
    for before, flushed, kernel in flush.EXPERIMENTS:
        assert {*before, kernel} <= {*flush.KERNELS} and flushed in flush.FLUSHES
    assert len(set(flush.EXPERIMENTS)) == len(flush.EXPERIMENTS)


def profiled(monkeypatch, lacking=0):
    """A profiler that notes how it was called and finds half of each matrix read."""
    calls = []

    def profile(function, metrics, **how):
        calls.append((function, [*metrics.values()], how))
        rows = [
            dict.fromkeys(("kernel", *metrics.values()), 2 * m * n)
            for m, n in flush.MATRICES
            for _ in flush.EXPERIMENTS
        ]
        return rows[lacking:]

    monkeypatch.setattr(counters, "profile", profile)
    return calls


def test_each_profiler_watches_all_experiments(monkeypatch):
    calls = profiled(monkeypatch)
    rows = flush.dram()
    assert [how for *_, how in calls] == [*flush.PROFILERS.values()]
    assert {function for function, *_ in calls} == {flush.run}
    assert {row["matrices_read"] for row in rows} == {0.5}
    assert len({tuple(row) for row in rows}) == 1  # the same keys in the same order
    whole = [row for row in rows if row["l2_sectors_read"] is not None]
    assert {row["profiler"] for row in whole} == {"ncu, replayed application"}
    count = len(flush.PROFILERS) * len(flush.MATRICES) * len(flush.EXPERIMENTS)
    assert len(rows) == count


def test_another_number_of_kernels_is_refused(monkeypatch):
    profiled(monkeypatch, lacking=1)
    with pytest.raises(RuntimeError, match="kernels should have run"):
        flush.dram()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    monkeypatch.setattr(record, "_gpu", lambda: GPU)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.delenv("COURSE_MEASURE", raising=False)
    monkeypatch.delenv("COURSE_RECORDED_GPU", raising=False)
    monkeypatch.setenv("COURSE_RECORD", "0")
    record._provenance.cache_clear()
    yield tmp_path / "nvidia-test-100"
    record._provenance.cache_clear()


def test_the_command_records_and_prints(tried, recorded, monkeypatch, capsys):
    monkeypatch.setattr(peers, "providers", lambda: {"liger": Liger(False)})
    monkeypatch.setattr(sys, "argv", ["flush"])

    def profile(*_, **how):
        raise record.Unavailable("no permission")

    monkeypatch.setattr(counters, "profile", profile)
    flush.main()
    assert [path.name for path in recorded.iterdir()] == ["flush.csv"]
    said = capsys.readouterr().out
    assert "median_us" in said and "measured here" in said
    assert "flush_dram is not observed here: no permission." in said
    profiled(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["flush", "dram"])
    flush.main()
    assert {path.name for path in recorded.iterdir()} == {"flush.csv", "flush_dram.csv"}


def test_the_command_refuses_other_parts(recorded, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flush", "everything"])
    with pytest.raises(SystemExit):
        flush.main()
    assert "part must be one of ['times', 'dram']" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_flushes_run_on_a_gpu():
    for function in (*flush.FLUSHES.values(), *flush.WAYS.values()):
        function()
    torch.cuda.synchronize()
