"""The kernels that run under the profiler are the kernels that the rows name."""

import contextlib

import pytest

from benchmarks import conflicts
from kernels import layouts
from kernels.lab import counters


def rows(monkeypatch, number):
    fake = [{"kernel": "any", "load_passes": i} for i in range(number)]

    def profile(function, metrics):
        assert function is conflicts.run and metrics is conflicts.METRICS
        return fake

    monkeypatch.setattr(counters, "profile", profile)
    return conflicts.experiment()


def test_each_kernel_is_named(monkeypatch):
    found = rows(monkeypatch, 4)
    names = [row["arrangement"] for row in found]
    assert names == ["Triton's own", *layouts.ARRANGEMENTS]
    assert found[-1]["load_passes"] == 3 and found[0]["n_rows"] == conflicts.SIDE


def test_another_number_of_kernels_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match=r"4 kernels should have run, got \['any'"):
        rows(monkeypatch, 3)


def test_one_kernel_of_each_way_is_watched(monkeypatch):
    calls, watching = [], []

    @contextlib.contextmanager
    def watched():
        watching.append(True)
        yield
        watching.pop()

    monkeypatch.setattr(conflicts, "SIDE", 8)
    monkeypatch.setattr(counters, "watched", watched)
    monkeypatch.setattr(
        layouts, "transpose", lambda x, way: calls.append((way, bool(watching)))
    )
    conflicts.run()
    assert [way for way, seen in calls if seen] == [*conflicts.WAYS.values()]
