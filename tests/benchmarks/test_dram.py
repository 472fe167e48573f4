"""The kernels that run under the profiler are the kernels that the rows name."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from benchmarks import dram
from kernels import traffic
from kernels.lab import backend, counters, gpu, record
from tests.helpers import in_company

NAMES = [*traffic.LINES]
EXPERIMENTS = {
    dram.traffic_experiment: dram.run_traffic,
    dram.online_experiment: dram.run_online,
}


def rows(experiment, monkeypatch, count):
    """The experiment's rows, where so many kernels ran."""
    fake = [{"kernel": "any", "read_bytes": i} for i in range(count)]

    def profile(function):
        assert function is EXPERIMENTS[experiment]
        return fake

    monkeypatch.setattr(counters, "profile", profile)
    return experiment()


def test_each_kernel_of_the_five_lines_is_named(monkeypatch):
    named = [
        tuple(row.values()) for row in rows(dram.traffic_experiment, monkeypatch, 16)
    ]
    assert named[0] == ("emptied", *dram.LARGE, "max", "any", 0)
    assert named[5] == ("emptied", *dram.LARGE, "torch", "any", 5)
    assert named[-1] == ("as left", *dram.SMALL, "divide", "any", 15)


def test_each_kernel_of_the_variants_is_named(monkeypatch):
    count = len(dram.COUNTED_COLS) * len(dram.ONLINE)
    named = rows(dram.online_experiment, monkeypatch, count)
    assert [row["provider"] for row in named[: len(dram.ONLINE)]] == [*dram.ONLINE]
    assert named[-1] == {
        **{"provider": "online.silent", "n_rows": dram.COUNTED_ROWS},
        **{"n_cols": dram.COUNTED_COLS[-1], "kernel": "any", "read_bytes": count - 1},
    }


@pytest.mark.parametrize(
    ("experiment", "count"), [*zip(EXPERIMENTS, (16, 20), strict=True)]
)
def test_another_number_of_kernels_is_refused(experiment, count, monkeypatch):
    said = rf"{count} kernels should have run, got \['any'"
    with pytest.raises(record.Unavailable, match=said):
        rows(experiment, monkeypatch, count - 1)


class Watched(TorchDispatchMode):
    """Notes what computes something while it is watched, with the first shape."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ("detach", "select", "view", "empty"):
            self.log.append((name, *args[0].shape))
        return func(*args, **kwargs or {})


@pytest.fixture
def seen(monkeypatch):
    """The operators of PyTorch that run while the profiler watches."""
    log = []
    monkeypatch.setattr(counters, "_others", lambda: torch.ones(10))
    monkeypatch.setattr(gpu, "driver", lambda function: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: Watched(log))
    return log


def test_the_five_lines_that_run_are_those_named(seen, monkeypatch):
    shapes = iter([(8, 16), (6, 16), (4, 2)])
    runs = [run._replace(shape=next(shapes)) for run in dram.TRAFFIC_RUNS]
    monkeypatch.setattr(dram, "TRAFFIC_RUNS", runs)
    dram.run_traffic()
    operators = dict(zip(NAMES, ["max", "sub", "exp", "sum", "div"], strict=True))
    operators["torch"] = "_softmax"
    assert seen == [(operators[step], *run.shape) for run in runs for step in run.steps]


@pytest.mark.skipif(not backend.INTERPRETED, reason="counts the interpreter's launches")
def test_each_variant_is_watched_for_one_launch(seen, monkeypatch):
    launches, call = [], GridExecutor.__call__

    def counted(self, *args, **kwargs):
        launches.append(bool(watching))
        return call(self, *args, **kwargs)

    watching = []

    class Profiled:
        def __enter__(self):
            watching.append(True)

        def __exit__(self, *error):
            watching.clear()

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    monkeypatch.setattr(torch.cuda.profiler, "profile", Profiled)
    monkeypatch.setattr(dram, "COUNTED_ROWS", 2)
    monkeypatch.setattr(dram, "COUNTED_COLS", (70,))
    dram.run_online()
    assert launches == [False, True] * len(dram.ONLINE)


@pytest.mark.parametrize("run", EXPERIMENTS.values())
def test_a_new_process_can_import_what_runs(run):
    assert run.__module__ == "benchmarks.dram"
    assert getattr(dram, run.__qualname__) is run


def is_expected(row: dict[str, int], asked: traffic.Line, l2_bytes: int) -> bool:
    """Whether a line moved the bytes that are predicted for it, where L2 was emptied.

    The counters are the whole GPU's, and other tests use the GPU as well. Other
    processes may run between the emptying and the line, and leave values in L2 that are
    written to DRAM while the line runs: at most what L2 holds. As many of the line's
    own values may still be there when it ends.
    """
    others = 0.1 * 4 * math.prod(dram.LARGE)
    return (
        abs(row["read_bytes"] - 4 * asked.read) <= others
        and abs(row["written_bytes"] - 4 * asked.written) <= l2_bytes
    )


@pytest.mark.parametrize(
    ("matrices_read", "written_bytes", "expected"),
    [
        (1, 32_768, True),  # a value for each row
        (1, 28_669_696, True),  # an H200's, with what other tests had left in L2
        (1, 4 * math.prod(dram.LARGE), False),  # an intermediate matrix
        (2, 32_768, False),
        (0, 32_768, False),
    ],
)
def test_an_intermediate_matrix_is_not_expected(matrices_read, written_bytes, expected):
    row = {"read_bytes": matrices_read * 4 * math.prod(dram.LARGE)}
    row["written_bytes"] = written_bytes
    lines = {line.name: line for line in traffic.predicted(*dram.LARGE)}
    for name in ("H200", "RTX 5090"):
        assert is_expected(row, lines["sum"], gpu.named(name).l2_bytes) == expected


@pytest.mark.gpu
@in_company
def test_the_five_lines_under_the_profiler():
    try:
        found = dram.traffic_experiment()
    except record.Unavailable as error:
        pytest.skip(str(error))
    lines = {line.name: line for line in traffic.predicted(*dram.LARGE)}
    found = [row for row in found if row["l2"] == "emptied" and row["step"] in lines]
    assert [row["step"] for row in found] == [*lines]
    for row in found:
        assert is_expected(row, lines[row["step"]], gpu.here().l2_bytes), row
