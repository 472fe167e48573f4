"""The predictions are what the meter counts; the profiler's table is read as it is."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import eager, traffic
from kernels.lab import backend, bench, counters, meter

SHAPES = [(1, 1), (3, 1), (7, 64), (64, 781)]
NAMES = ["max", "subtract", "exp", "sum", "divide"]


def matrix(*shape, dtype=torch.float32):
    return torch.randn(shape, device=backend.DEVICE).to(dtype)


# ---- what each line moves ------------------------------------------------------------


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_is_counted_line_by_line(shape, dtype):
    counted = meter.count(eager.five_lines, matrix(*shape, dtype=dtype))
    predicted = traffic.predicted(*shape)
    assert [line.name for line in predicted] == NAMES
    for line, op in zip(predicted, counted.rows, strict=True):
        moved = (op.read_values, op.written_values, op.written_indices)
        assert (line.read, line.written, line.indices) == moved
        assert line.read_bytes(dtype.itemsize) == op.read_bytes
        assert line.written_bytes(dtype.itemsize) == op.written_bytes
        assert line.bytes(dtype.itemsize) == op.bytes


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), *SHAPES, (8192, 8192)])
def test_the_five_lines_sum_to_the_formula(shape):
    lines = traffic.predicted(*shape)
    sums = [sum(column) for column in list(zip(*lines, strict=True))[1:]]
    assert tuple(sums) == meter.naive(*shape)


def test_each_line_alone_moves_what_it_moves_among_the_five():
    x = matrix(7, 64)
    whole = meter.count(eager.five_lines, x).rows
    assert list(traffic.LINES) == NAMES
    for line, among in zip(traffic.LINES.values(), whole, strict=True):
        alone = meter.count(line, x).rows[-1]  # the first call also makes its column
        assert alone == among


def test_no_shape():
    with pytest.raises(ValueError, match="n_cols must be 0 or more, got -1"):
        traffic.predicted(2, -1)
    with pytest.raises(TypeError, match="n_rows must be an int, got float"):
        traffic.predicted(2.0, 1)


def test_predicted_time():
    assert traffic.predicted_us(4.8e9, 4800) == 1e3
    for gbps in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="gbps must be a positive bandwidth, got"):
            traffic.predicted_us(1, gbps)


def test_operations():
    assert traffic.operations(1, 1) == 3  # a subtraction, an exponential, a division
    assert traffic.operations(10, 4) == 10 * (3 + 4 + 4 + 3 + 4)
    assert traffic.operations(10, 0) == 0


# ---- what the GPU's counters say -----------------------------------------------------


def test_each_kernel_is_named_by_its_step(monkeypatch):
    rows = [{"kernel": "any", "read_bytes": i} for i in range(20)]
    monkeypatch.setattr(counters, "profile", lambda function: rows)
    named = [tuple(row.values()) for row in traffic.profile_dram()]
    assert named[0] == ("emptied", 8192, 8192, "max", "any", 0)
    assert named[9] == ("emptied", 65536, 1024, "torch", "any", 9)
    assert named[-1] == ("as left", 512, 2048, "divide", "any", 19)
    del rows[0]
    with pytest.raises(RuntimeError, match=r"20 kernels should have run, got \['any'"):
        traffic.profile_dram()


class Recorder(TorchDispatchMode):
    """Notes what computes something, with the shape of its first argument."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ("detach", "select", "view"):
            self.log.append((name, *args[0].shape))
        return func(*args, **kwargs or {})


def test_the_kernels_run_are_the_kernels_named(monkeypatch):
    seen = []
    shapes = iter([(8, 16), (32, 4), (6, 16), (4, 2)])
    small = [(l2, next(shapes), *rest) for l2, _, *rest in traffic.RUNS]
    monkeypatch.setattr(traffic, "RUNS", small)
    monkeypatch.setattr(counters, "_others", lambda: torch.ones(10))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: Recorder(seen))
    traffic.run()
    operators = dict(zip(NAMES, ["max", "sub", "exp", "sum", "div"], strict=True))
    operators |= {"fill": "full_like", "torch": "_softmax"}
    operators |= {"amax": "amax", "scalar": "sub"}
    assert seen == [
        (operators[step], *shape) for _, shape, steps, _ in small for step in steps
    ]


@pytest.mark.gpu
def test_profile_on_a_gpu():
    try:
        rows = traffic.profile_dram()
    except bench.Unavailable as error:
        pytest.skip(str(error))
    lines = {line.name: line for line in traffic.predicted(*traffic.LARGE)}
    others = 0.1 * 4 * math.prod(traffic.LARGE)  # other tests use the GPU as well
    for row in rows:
        if row["l2"] == "emptied" and row["step"] in traffic.LINES:
            asked = lines[row["step"]]
            assert row["read_bytes"] == pytest.approx(4 * asked.read, abs=others)
            assert row["written_bytes"] <= 4 * asked.written + others


# ---- timing with one precaution left out ---------------------------------------------

TIMERS = (
    traffic.without_flush,
    traffic.flushed_by_reading,
    traffic.without_synchronize,
    traffic.by_wall_clock,
)


@pytest.fixture
def device(monkeypatch):
    """A GPU that needs 3 ms for every call, and a driver that notes its flushes."""
    fake = SimpleNamespace(log=[], pending=0)

    def synchronize():
        time.sleep(3e-3 * fake.pending)
        fake.pending = 0

    def call(*args):
        fake.log.append("call")
        fake.pending += 1

    fake.call = call
    fake.clear_cache = lambda cache: fake.log.append("flush")
    fake.get_empty_cache_for_benchmark = lambda: torch.ones(3)
    monkeypatch.setattr(traffic.backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: fake.log.append("wait"))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=fake))
    return fake


def test_nothing_is_timed_without_a_gpu(monkeypatch):
    monkeypatch.setattr(traffic.backend, "INTERPRETED", True)
    for timer in TIMERS:
        with pytest.raises(RuntimeError, match="nothing can be timed here"):
            timer(torch.clone, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        traffic.first_calls()


@pytest.mark.parametrize(
    ("timer", "expected"),
    [(traffic.without_flush, "wait"), (traffic.flushed_by_reading, "read")],
)
def test_the_flush_is_all_that_these_leave_out(device, monkeypatch, timer, expected):
    def time_us(function, *args):  # as do_bench: flushes, then calls
        triton.runtime.driver.active.clear_cache("cache")
        function(*args)
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(bench, "time_us", time_us)
    monkeypatch.setattr(torch, "sum", lambda cache: device.log.append("read"))
    assert timer(device.call, "x") == (1.0, 2.0, 3.0)
    assert device.log == [expected, "call"]
    triton.runtime.driver.active.clear_cache(None)
    assert device.log[-1] == "flush"  # the driver has its own flush again


def test_the_wall_clock_waits_or_does_not(device):
    waited = traffic.by_wall_clock(device.call)
    assert device.log == ["flush", "call"] * traffic.CALLS
    alone = traffic.without_synchronize(device.call)
    assert list(waited) == sorted(waited) and list(alone) == sorted(alone)
    assert waited[0] >= 3000 > alone[1]


def test_first_calls(monkeypatch):
    clock = iter([200_000.0, 40.0, 30.0, 20.0] + [10.0, 12.0] * 13 + [11.0] * 90)
    monkeypatch.setattr(traffic, "_call_us", lambda function, args: next(clock))
    monkeypatch.setattr(eager, "compiled", lambda function: function)
    monkeypatch.setattr(traffic.backend, "INTERPRETED", False)
    monkeypatch.setattr(traffic.backend, "call_apart", lambda function: function(4, 8))
    first, *others = traffic.first_calls()
    assert first == {
        "provider": "torch",
        "n_rows": 4,
        "n_cols": 8,
        "first_us": 200_000.0,
        "second_us": 40.0,
        "later_us": 11.0,
    }
    assert [row["provider"] for row in others] == ["eager", "matmul", "torch.compile"]


@pytest.mark.gpu
def test_timers_and_first_calls_on_a_gpu():
    x = matrix(64, 256)
    for timer in TIMERS:
        p20, p50, p80 = timer(torch.clone, x)
        assert 0 < p20 <= p50 <= p80
    rows = traffic.first_calls()
    assert all(row["first_us"] > row["later_us"] > 0 for row in rows)
