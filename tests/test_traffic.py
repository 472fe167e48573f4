"""The predictions are what the meter counts; the profiler's table is read as it is."""

import json
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import eager, traffic
from kernels.lab import backend, bench, meter

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

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC","dram__bytes_read.sum",'
    '"dram__bytes_write.sum","gpu__time_duration.sum"'
)
REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "func_wrapper_t<float, at::native::sum_functor<float>>, unsigned int, float, 4, 4>>"
    "(T3)"
)
ELEMENTWISE = (
    "void at::native::<unnamed>::elementwise_kernel<128, 2, void at::native::"
    "gpu_kernel_impl<at::native::(anonymous namespace)::exp_kernel_cuda>>(int, T3)"
)


def line(number, kernel, read, written, duration):
    cells = [number, 4242, "python3.12", "127.0.0.1", kernel, 1, 7]
    cells += ["(32, 16, 1)", "(512, 1, 1)", 0, "9.0", read, written, duration]
    return ",".join(f'"{cell}"' for cell in cells)


def table(*lines, units=("byte", "byte", "ns")):
    log = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)"]
    log += ['==PROF== Profiling "reduce_kernel" - 0: 0%....50%....100% - 1 pass']
    log += ["==PROF== Disconnected from process 4242", HEADER]
    log += [",".join(f'"{unit}"' for unit in [""] * 11 + list(units)), *lines]
    return "\n".join(log) + "\n"


def test_parse_base_units():
    text = table(
        line(0, REDUCE, "268,501,248", "13,056", "75,232"),
        line(1, ELEMENTWISE, "268452864", "246814208", "140416"),
    )
    assert traffic.parse(text) == [
        {
            "kernel": "reduce_kernel",
            "read_bytes": 268501248,
            "written_bytes": 13056,
            "duration_us": 75.232,
        },
        {
            "kernel": "elementwise_kernel",
            "read_bytes": 268452864,
            "written_bytes": 246814208,
            "duration_us": 140.416,
        },
    ]


def test_parse_scaled_units():
    numbers = line(0, "add(at::Tensor)", "268.50", "13.06", "0.07523")
    (row,) = traffic.parse(table(numbers, units=("Mbyte", "Kbyte", "msecond")))
    assert row["kernel"] == "add"
    assert (row["read_bytes"], row["written_bytes"]) == (268500000, 13060)
    assert row["duration_us"] == 75.23


@pytest.mark.parametrize(
    "text",
    [
        "",
        "==PROF== No kernels were profiled.",
        table(line(0, REDUCE, 1, 1, 1)).replace("dram__bytes_write", "dram__sectors"),
    ],
)
def test_parse_what_is_no_such_table(text):
    with pytest.raises(ValueError, match=r"table with \[.*dram__bytes_write"):
        traffic.parse(text)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts an `ncu` on the PATH that notes its arguments, prints, and exits."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = tmp_path / "arguments"

    def install(text, code=0):
        (tmp_path / "text").write_text(text)
        script = tmp_path / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport json, pathlib, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "(here / 'arguments').write_text(json.dumps(sys.argv))\n"
            "print((here / 'text').read_text(), end='')\n"
            f"sys.exit({code})\n"
        )
        script.chmod(0o755)
        return lambda: json.loads(arguments.read_text())

    return install


def test_profile_names_each_kernel_by_its_step(ncu):
    lines = [line(i, REDUCE, i, 2 * i, 3000) for i in range(len(traffic.STEPS))]
    arguments = ncu(table(*lines))
    rows = traffic.profile_dram()
    assert [(r["l2"], r["n_rows"], r["n_cols"], r["step"]) for r in rows] == (
        traffic.STEPS
    )
    assert [row["read_bytes"] for row in rows] == list(range(len(rows)))
    assert {row["duration_us"] for row in rows} == {3.0}
    given = arguments()
    for words in (
        "--profile-from-start off",
        "--clock-control none",
        "--cache-control none",
        "--csv --page raw",
        "--metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum",
    ):
        assert words in " ".join(given)
    assert given[-3] == sys.executable


def test_profile_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bench.Unavailable, match="not on the PATH"):
        traffic.profile_dram()


@pytest.mark.parametrize(
    "text",
    [
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
        "NVIDIA GPU Performance Counters\n==ERROR== The application returned an error "
        "code (1).\n",
        "Failed to initialize the profiler: LibraryNotLoaded\n",
    ],
)
def test_profile_without_permission(ncu, text):
    ncu(text, code=1)
    with pytest.raises(bench.Unavailable, match=r"ERR_NVGPUCTRPERM|LibraryNotLoaded"):
        traffic.profile_dram()


def test_a_mistake_of_ours_is_not_taken_for_a_missing_permission(ncu):
    ncu(
        "Traceback: NameError\n==ERROR== The application returned an error code (1).", 1
    )
    with pytest.raises(RuntimeError, match="NameError") as caught:
        traffic.profile_dram()
    assert not isinstance(caught.value, bench.Unavailable)


def test_profile_of_other_kernels_than_asked_for(ncu):
    ncu(table(line(0, REDUCE, 1, 1, 1)))
    with pytest.raises(RuntimeError, match=r"must profile 16 kernels.*reduce_kernel"):
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


def test_the_steps_run_are_the_steps_named(monkeypatch):
    seen = []
    monkeypatch.setattr(traffic, "LARGE", (8, 16))
    monkeypatch.setattr(traffic, "SMALL", (4, 2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "profile", lambda: Recorder(seen))
    traffic.run_steps(n_others=10)
    operators = dict(zip(NAMES, ["max", "sub", "exp", "sum", "div"], strict=True))
    operators["fill"] = "full_like"
    shapes = {traffic.STEPS[0][1:3]: (8, 16), traffic.STEPS[-1][1:3]: (4, 2)}
    assert seen == [
        (operators[step], *shapes[n_rows, n_cols])
        for _, n_rows, n_cols, step in traffic.STEPS
    ]


@pytest.mark.gpu
def test_profile_on_a_gpu():
    try:
        rows = traffic.profile_dram()
    except bench.Unavailable as error:
        pytest.skip(str(error))
    lines = {line.name: line for line in traffic.predicted(*traffic.LARGE)}
    for row in rows:
        if row["l2"] == "emptied" and row["step"] in lines:
            asked = lines[row["step"]]
            assert row["read_bytes"] == pytest.approx(4 * asked.read, rel=0.03)
            assert row["written_bytes"] <= 4.2 * asked.written + 2e6


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
        with pytest.raises(RuntimeError, match="no GPU"):
            timer(torch.clone, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="no GPU"):
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


def test_first_calls(monkeypatch, capsys):
    clock = iter([200_000.0, 40.0, 30.0, 20.0] + [10.0, 12.0] * 13 + [11.0] * 90)
    monkeypatch.setattr(traffic, "_call_us", lambda function, args: next(clock))
    monkeypatch.setattr(eager, "compiled", lambda function: function)
    traffic.run_first_calls(4, 8)
    printed = capsys.readouterr().out
    done = subprocess.CompletedProcess([], 0, stdout="noise\n" + printed, stderr="")
    monkeypatch.setattr(traffic.backend, "INTERPRETED", False)
    monkeypatch.setattr(traffic.subprocess, "run", lambda *args, **kwargs: done)
    first, *others = traffic.first_calls()
    assert first == {
        "provider": "torch",
        "n_rows": 4,
        "n_cols": 8,
        "first_us": 200_000.0,
        "second_us": 40.0,
        "later_us": statistics.median([10.0, 12.0]),
    }
    assert [row["provider"] for row in others] == ["eager", "matmul", "torch.compile"]
    done.returncode, done.stderr = 1, "NameError: x"
    with pytest.raises(RuntimeError, match="NameError: x"):
        traffic.first_calls()


@pytest.mark.gpu
def test_timers_and_first_calls_on_a_gpu():
    x = matrix(64, 256)
    for timer in TIMERS:
        p20, p50, p80 = timer(torch.clone, x)
        assert 0 < p20 <= p50 <= p80
    rows = traffic.first_calls()
    assert all(row["first_us"] > row["later_us"] > 0 for row in rows)
