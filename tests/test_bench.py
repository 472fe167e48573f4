"""Times are of flushed calls; they are recorded whole and read back as they were."""

import csv
import dataclasses
import math
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
import triton

from kernels.lab import bench, gpu

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
SHAPES = [(64, 128), (8, 1000)]
PROVIDERS = {"torch": lambda x: torch.softmax(x, dim=-1)}


class FakeTimer:
    """Takes 1 µs per value for the copy, 2 µs for the others; notes what it timed."""

    def __init__(self):
        self.timed = []

    def __call__(self, function, x):
        self.timed.append((function, x.dtype, tuple(x.shape)))
        time = x.numel() * (1.0 if function is torch.clone else 2.0)
        return 0.5 * time, time, 1.5 * time


@pytest.fixture
def timer():
    return FakeTimer()


@pytest.fixture
def record(tmp_path, monkeypatch):
    """An empty folder of recorded files."""
    monkeypatch.setattr(bench, "RECORDED", tmp_path)
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-test-100")
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    return tmp_path / "nvidia-test-100"


@pytest.fixture
def world(monkeypatch):
    """Switches between a machine with a GPU, which measures, and one without."""
    monkeypatch.setattr(bench, "_gpu", lambda: GPU)
    monkeypatch.setattr(bench.backend, "DEVICE", "cpu")  # where the inputs are made

    def switch(has_gpu, recording=False):
        monkeypatch.setattr(bench, "_can_measure", lambda: has_gpu)
        monkeypatch.setenv("COURSE_RECORD", "1" if recording else "0")
        monkeypatch.setenv("COURSE_COMMIT", "abc1234")
        bench._provenance.cache_clear()

    yield switch
    bench._provenance.cache_clear()


def lines(path):
    return path.read_text().splitlines()


# ---- timing --------------------------------------------------------------------------


class FakeGpu:
    """A driver for do_bench whose clock counts what it is asked to do, in ms."""

    def __init__(self):
        self.clock = 0.0
        self.log = []
        self.active = self  # it stands for triton.runtime.driver and for its .active

    def get_device_interface(self):
        return SimpleNamespace(Event=self.event, synchronize=lambda: None)

    def get_empty_cache_for_benchmark(self):
        return "cache"

    def clear_cache(self, cache):
        self.do("flush", 5.0)

    def do(self, what, time):
        self.log.append(what)
        self.clock += time

    def event(self, enable_timing):
        event = SimpleNamespace()

        def record():
            self.log.append("event")
            event.time = self.clock

        event.record = record
        event.elapsed_time = lambda end: end.time - event.time
        return event


def test_a_time_is_of_flushed_calls_after_a_warm_up(world, monkeypatch):
    world(has_gpu=True)
    device = FakeGpu()
    times = []

    def kernel(x):
        times.append(1.0 + len(times) % 5)
        device.do("call", times[-1])

    monkeypatch.setattr(triton.runtime, "driver", device)
    p20, p50, p80 = bench.time_us(kernel, "x")
    timed = device.log.count("event") // 2 - 1  # the first two are of the estimate
    assert device.log[-4 * timed :] == ["flush", "event", "call", "event"] * timed
    assert timed > 5
    assert device.log.index("call") < device.log.index("event")
    before = times[: len(times) - timed]
    assert len(before) >= 1 + 5 + 1  # the first, the estimate's, at least one warm-up
    cuts = statistics.quantiles(times[-timed:], n=5, method="inclusive")
    assert (p20, p80) == pytest.approx((1e3 * cuts[0], 1e3 * cuts[3]))
    assert p50 == 1e3 * statistics.median(times[-timed:])


def test_a_time_asks_for_warm_up_repetitions_and_quantiles(world, monkeypatch):
    world(has_gpu=True)
    asked = {}

    def do_bench(function, **keywords):
        asked.update(keywords)
        function()
        return 0.010, 0.0112345, 0.012

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    called = []
    assert bench.time_us(lambda *args: called.append(args), 1, 2) == (10, 11.234, 12)
    assert called == [(1, 2)]
    assert asked.pop("quantiles") == [0.2, 0.5, 0.8]
    assert 10 <= asked.pop("warmup") <= 25
    assert 50 <= asked.pop("rep") <= 100
    assert not asked


def test_the_gpu_is_held_until_the_host_is_ahead(world, monkeypatch):
    world(has_gpu=True)
    device = FakeGpu()
    clock = [0.0]  # of the host, s: a call takes it 30 µs

    def kernel(x):
        clock[0] += 30e-6
        device.do("call", 0.007)

    monkeypatch.setattr(triton.runtime, "driver", device)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    spins = []

    def spin(cycles):
        spins.append(cycles)
        device.do("hold", 0.120)

    monkeypatch.setattr(torch.cuda, "_sleep", spin)
    times = bench.device_us(kernel, "x")
    assert times == pytest.approx((7, 7, 7))  # of the call alone
    once = ["flush", "hold", "event", "call", "event"]
    assert device.log == ["call"] * 11 + once * bench.DEVICE_CALLS
    assert spins == pytest.approx([4 * 30 * 2000] * bench.DEVICE_CALLS, abs=1)

    def slow(x):
        clock[0] += 1.0

    bench.device_us(slow, "x")
    assert spins[-1] == 4000 * 2000  # no longer than that


def test_the_hosts_time_is_of_calls_in_a_row(world, monkeypatch):
    world(has_gpu=True)
    device = FakeGpu()
    clock, calls = [0.0], []

    def function(x):
        calls.append(x)
        batch = len(calls) // bench.HOST_CALLS
        clock[0] += (1 + batch % 5) * 1e-6

    monkeypatch.setattr(triton.runtime, "driver", device)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    p20, p50, p80 = bench.host_us(function, "x")
    assert (p20, p50, p80) == pytest.approx((2, 3, 4), abs=0.25)
    assert len(calls) == (1 + bench.HOST_BATCHES) * bench.HOST_CALLS
    assert device.log == []  # no flush, no event


@pytest.mark.gpu
def test_where_the_host_is_early_both_clocks_agree():
    x = torch.randn(8192, 8192, device="cuda")
    alone = bench.device_us(torch.clone, x)[1]
    assert alone == pytest.approx(bench.time_us(torch.clone, x)[1], rel=0.05)


@pytest.mark.gpu
def test_a_slow_host_counts_for_the_host_only():
    def late(x):
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        return x.clone()

    x = torch.randn(64, 64, device="cuda")
    assert bench.host_us(late, x)[1] > 300 > 100 > bench.host_us(torch.clone, x)[1]
    assert bench.time_us(late, x)[1] > 150  # what is left of it after the flush
    assert bench.device_us(late, x)[1] < 20


def test_nothing_is_timed_in_the_interpreter(world):
    world(has_gpu=False)
    for timer in (bench.time_us, bench.device_us, bench.host_us):
        with pytest.raises(RuntimeError, match="interpreter"):
            timer(torch.clone, torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="interpreter"):
        bench.measure(torch.clone, torch.ones(2, 2), "copy")


def test_a_measurement_is_a_row_with_its_provenance(world, timer):
    world(has_gpu=True)
    calls = []
    x = torch.ones(64, 128, dtype=torch.bfloat16)
    one = bench.measure(calls.append, x, "mine", timer=timer)
    assert len(calls) == 1  # compiled before it is timed
    assert (one.provider, one.dtype, one.n_rows, one.n_cols) == (
        "mine",
        "bfloat16",
        64,
        128,
    )
    assert (one.p20_us, one.p50_us, one.p80_us) == (8192.0, 16384.0, 24576.0)
    assert (one.gpu, one.driver, one.commit) == ("NVIDIA Test 100", "1.2", "abc1234")
    assert (one.torch, one.triton) == (torch.__version__, triton.__version__)
    assert one.bytes == 2 * 64 * 128 * 2
    assert one.effective_gbps == pytest.approx(one.bytes / 16384e-6 / 1e9)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([[1.0]], TypeError, "x must be a torch.Tensor, got list"),
        (
            torch.ones(3),
            ValueError,
            r"x must be a matrix with values, got shape \(3,\)",
        ),
        (torch.ones(0, 3), ValueError, r"got shape \(0, 3\)"),
    ],
)
def test_a_measurement_refuses_what_is_no_matrix(x, error, message):
    with pytest.raises(error, match=message):
        bench.measure(torch.clone, x, "copy")


@pytest.mark.gpu
def test_a_copy_of_256_mb_is_timed_on_the_gpu():
    x = torch.randn(8192, 8192, device="cuda")
    one = bench.measure(torch.clone, x, "copy")
    assert 0 < one.p20_us <= one.p50_us <= one.p80_us
    assert one.gpu == torch.cuda.get_device_name()
    assert faults_of([one]) == []


# ---- sweeps --------------------------------------------------------------------------


def test_a_sweep_measures_every_provider_beside_a_copy(world, record, timer):
    world(has_gpu=True)
    dtypes = [torch.float32, torch.float16]
    results = bench.sweep("mine", PROVIDERS, SHAPES, dtypes, timer=timer)
    assert [(one.provider, one.dtype, one.n_rows) for one in results] == [
        (provider, dtype, n_rows)
        for dtype in ("float32", "float16")
        for n_rows in (64, 8)
        for provider in ("copy", "torch")
    ]
    assert (
        results.value("share_of_copy", provider="torch", n_rows=8, dtype="float16")
        == 0.5
    )
    assert len(timer.timed) == 8
    assert "measured here" in results.source
    assert not record.exists()  # it was not asked to record


def test_what_is_recorded_is_read_back_without_a_gpu(world, record, timer):
    world(has_gpu=True, recording=True)
    measured = bench.sweep("mine", PROVIDERS, SHAPES, timer=timer)
    header, *rows = lines(record / "mine.csv")
    assert header == (
        "provider,dtype,n_rows,n_cols,p20_us,p50_us,p80_us,"
        "gpu,driver,torch,triton,recorded_at,commit"
    )
    assert rows[0].startswith(
        "copy,float32,8,1000,4000.0,8000.0,12000.0,NVIDIA Test 100"
    )
    assert list(record.iterdir()) == [record / "mine.csv"]  # no draft is left
    world(has_gpu=False)
    read = bench.sweep("mine", PROVIDERS, SHAPES, timer=pytest.fail)
    assert list(read) == list(measured)
    label = f"NVIDIA Test 100 · driver 1.2 · torch {torch.__version__} · triton "
    assert read.source == measured.source.replace(
        "measured here", f"recorded {read[0].recorded_at}"
    )
    assert read.source.startswith(label)


def test_a_new_record_takes_the_place_of_the_same_rows_only(world, record, timer):
    world(has_gpu=True, recording=True)
    bench.sweep("mine", PROVIDERS, SHAPES, timer=timer)
    before = lines(record / "mine.csv")
    more = {"torch": PROVIDERS["torch"], "another": torch.clone}
    later = bench.sweep("mine", more, SHAPES[:1], timer=lambda *_: (1.0, 2.0, 3.0))
    assert len(later) == 3
    rows = [line.split(",")[:7] for line in lines(record / "mine.csv")[1:]]
    assert rows == [
        ["another", "float32", "64", "128", "1.0", "2.0", "3.0"],
        ["copy", "float32", "8", "1000", "4000.0", "8000.0", "12000.0"],
        ["copy", "float32", "64", "128", "1.0", "2.0", "3.0"],
        ["torch", "float32", "8", "1000", "8000.0", "16000.0", "24000.0"],
        ["torch", "float32", "64", "128", "1.0", "2.0", "3.0"],
    ]
    assert before[1] in lines(record / "mine.csv")


def test_a_failed_sweep_records_nothing(world, record, timer):
    def interrupted(x):
        raise KeyboardInterrupt

    world(has_gpu=True, recording=True)
    with pytest.raises(KeyboardInterrupt):
        bench.sweep("mine", {"mine": interrupted}, SHAPES, timer=timer)
    assert not record.exists()


def test_rows_that_are_not_recorded_are_named(world, record, timer):
    world(has_gpu=False)
    with pytest.raises(ValueError, match=r"no nvidia-test-100/mine\.csv"):
        bench.sweep("mine", PROVIDERS, SHAPES)
    world(has_gpu=True, recording=True)
    bench.sweep("mine", PROVIDERS, SHAPES, timer=timer)
    world(has_gpu=False)
    wanted = {**PROVIDERS, "faster": torch.clone}
    with pytest.raises(
        ValueError, match=r"lacks 2 of the 6 rows.*faster float32 64 × 128, faster"
    ):
        bench.sweep("mine", wanted, SHAPES)
    with pytest.raises(ValueError, match=r"lacks 20 .* and 12 more; `make record`"):
        bench.sweep("mine", PROVIDERS, [(1, n) for n in range(10)])


def test_a_provider_that_refuses_a_shape_is_absent_and_said_to_be(
    world, record, timer, capsys
):
    def picky(x):
        if x.shape[1] % 16:
            raise NotImplementedError("N must be a multiple of 16\nand more")
        return x

    world(has_gpu=True, recording=True)
    results = bench.sweep("mine", {"picky": picky}, SHAPES, timer=timer)
    said = "picky is absent at float32 8 × 1000"
    reason = "NotImplementedError: N must be a multiple of 16"
    assert capsys.readouterr().out == f"{said}: {reason}\n"
    assert [one.n_cols for one in results.select(provider="picky")] == [128]
    assert repr(results.table()).splitlines()[-1].split() == ["1000", "0", "–"]
    world(has_gpu=False)
    read = bench.sweep("mine", {"picky": picky}, SHAPES)
    assert capsys.readouterr().out == f"{said}\n"
    assert list(read) == list(results)


def test_a_shape_that_does_not_fit_is_left_out_and_said_to_be(
    world, record, timer, capsys, monkeypatch
):
    make = bench.random

    def small_memory(dtype, n_rows, n_cols):
        if n_cols > 500:
            raise torch.OutOfMemoryError
        return make(dtype, n_rows, n_cols)

    monkeypatch.setattr(bench, "random", small_memory)
    world(has_gpu=True, recording=True)
    results = bench.sweep("mine", PROVIDERS, SHAPES, timer=timer)
    said = "float32 8 × 1000 is left out: it does not fit the GPU's memory\n"
    assert capsys.readouterr().out == said
    assert {one.n_cols for one in results} == {128}
    world(has_gpu=False)
    assert list(bench.sweep("mine", PROVIDERS, SHAPES)) == list(results)
    assert capsys.readouterr().out == said


def test_the_same_input_every_time(world):
    world(has_gpu=True)
    first, again = (bench.random(torch.float16, 4, 8) for _ in range(2))
    assert first.equal(again)
    assert first.dtype is torch.float16


def test_a_sweep_refuses_bad_names(record):
    with pytest.raises(ValueError, match="'copy'"):
        bench.sweep("mine", {"copy": torch.clone}, SHAPES)
    with pytest.raises(ValueError, match="name must be of letters"):
        bench.sweep("../mine", PROVIDERS, SHAPES)


def test_a_file_with_other_columns_is_refused(world, record):
    world(has_gpu=False)
    record.mkdir()
    (record / "mine.csv").write_text("provider,p50_us\ncopy,1.0\n")
    with pytest.raises(ValueError, match="must have the columns"):
        bench.sweep("mine", PROVIDERS, SHAPES)


# ---- guests --------------------------------------------------------------------------


class FakeGuest(bench.Guest):
    """There or not; takes 3 µs per value, of the matrix that is made for it."""

    def __init__(self, there=True):
        self.there = there

    def available(self):
        return self.there

    def times(self, x, remake, timer, prove):
        again = remake()
        assert again.equal(x) and again is not x
        return timer(lambda x: x, again)[0], 3.0 * x.numel(), 9.0 * x.numel()


def test_a_guest_is_measured_where_it_is(world, record, timer):
    world(has_gpu=True, recording=True)
    providers = {"guest": FakeGuest(), **PROVIDERS}
    results = bench.sweep("mine", providers, SHAPES, timer=timer)
    assert [one.provider for one in results] == ["copy", "guest", "torch"] * 2
    assert results.one(provider="guest", n_rows=64).p50_us == 3 * 8192
    assert "recorded" not in results.source
    world(has_gpu=False)
    assert list(bench.sweep("mine", providers, SHAPES)) == list(results)


def test_a_guest_that_is_not_there_keeps_its_recorded_rows(
    world, record, timer, capsys
):
    world(has_gpu=True, recording=True)
    bench.sweep("mine", {"guest": FakeGuest()}, SHAPES[:1], timer=timer)
    before = [line for line in lines(record / "mine.csv") if "guest" in line]
    providers = {"guest": FakeGuest(there=False), **PROVIDERS}
    results = bench.sweep("mine", providers, SHAPES, timer=timer)
    assert [one.provider for one in results] == [
        *("copy", "guest", "torch"),
        *("copy", "torch"),
    ]
    said = "guest is left out at 1 of 2 shapes: not here, no record\n"
    assert capsys.readouterr().out == said
    day = results.one(provider="guest").recorded_at
    assert results.source.endswith(f"measured here · guest recorded {day}")
    assert [line for line in lines(record / "mine.csv") if "guest" in line] == before
    world(has_gpu=False)
    assert list(bench.sweep("mine", providers, SHAPES)) == list(results)
    assert capsys.readouterr().out == said


def test_a_guest_is_left_out_where_nothing_is_recorded(world, record, timer, capsys):
    world(has_gpu=True)
    providers = {"guest": FakeGuest(there=False), **PROVIDERS}
    results = bench.sweep("mine", providers, SHAPES, timer=timer)
    assert [one.provider for one in results] == ["copy", "torch"] * 2
    assert "guest is left out at 2 of 2 shapes" in capsys.readouterr().out
    assert results.source.endswith("measured here")


def test_a_wrong_provider_is_not_timed(world, record, timer, capsys):
    def prove(x, y):
        if not torch.equal(y, torch.softmax(x, dim=-1)):
            raise ValueError("wrong at row 0")

    world(has_gpu=True)
    providers = {"wrong": lambda x: 2 * x, **PROVIDERS}
    results = bench.sweep("mine", providers, SHAPES[:1], timer=timer, prove=prove)
    assert [one.provider for one in results] == ["copy", "torch"]
    said = "wrong is absent at float32 64 × 128: ValueError: wrong at row 0\n"
    assert capsys.readouterr().out == said
    assert len(timer.timed) == 2


def test_a_sweep_may_make_its_own_input(world, record, timer):
    def sliced(dtype, n_rows, n_cols):
        return torch.ones(n_rows, n_cols + 1, dtype=dtype)[:, :n_cols]

    world(has_gpu=True)
    seen = []
    providers = {"mine": lambda x: seen.append(x.stride())}
    bench.sweep("mine", providers, SHAPES, timer=timer, make=sliced)
    assert seen == [(129, 1), (1001, 1)]


def test_all_that_is_recorded_is_read_in_both_worlds(
    world, record, timer, capsys, monkeypatch
):
    def picky(x):
        raise NotImplementedError

    world(has_gpu=True, recording=True)
    sweep = bench.sweep("mine", {"picky": picky, **PROVIDERS}, SHAPES, timer=timer)
    capsys.readouterr()
    monkeypatch.setenv("COURSE_RECORDED_GPU", "another-gpu")
    assert "Test 100" in bench.recorded("mine").source  # its own
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-test-100")
    for has_gpu in (True, False):
        world(has_gpu=has_gpu)
        read = bench.recorded("mine")
        assert sorted(read, key=str) == sorted(sweep, key=str)
        assert "· recorded " in read.source
        with pytest.raises(ValueError, match=r"no nvidia-test-100/other\.csv"):
            bench.recorded("other")
    assert capsys.readouterr().out == ""


# ---- results -------------------------------------------------------------------------


@pytest.fixture
def results(world, record, timer):
    world(has_gpu=True)
    return bench.sweep("mine", PROVIDERS, SHAPES, timer=timer)


def test_results_select_and_tell(results):
    assert len(results.select(provider="torch", dtype=torch.float32)) == 2
    assert results.one(provider="copy", n_cols=128).p50_us == 8192.0
    assert results.value("p50_us", provider="torch", n_cols=128) == 16384.0
    assert results.value(provider="torch", n_cols=128) == pytest.approx(4.0e-3)
    assert results.select(provider="torch").value("share_of_copy", n_cols=128) == 0.5
    with pytest.raises(ValueError, match="select one measurement, got 2"):
        results.one(provider="copy")
    with pytest.raises(ValueError, match="no such column: 'columns'"):
        results.select(columns=128)
    with pytest.raises(ValueError, match="measure must be one of"):
        results.value("speed", provider="copy", n_cols=128)


def test_results_as_a_table(results):
    assert repr(results.table("p50_us")).splitlines() == [
        "n_cols    copy    torch",
        "──────  ──────  ───────",
        "   128  8192.0  16384.0",
        "  1000  8000.0  16000.0",
    ]
    shares = results.table("share_of_copy", rows=("dtype", "n_rows", "n_cols"))
    assert repr(shares).splitlines()[-1].split() == [
        "float32",
        "8",
        "1000",
        "1.00",
        "0.50",
    ]
    with pytest.raises(ValueError, match="two measurements of 'copy' into one row"):
        results.table(rows="dtype")


def test_the_source_names_all_days_and_versions(results):
    rows = [
        vars(results[0]) | {"recorded_at": day} for day in ("2026-02-03", "2026-01-02")
    ]
    rows[0]["triton"] = "9.9"
    assert bench._label(rows, measured=False) == (
        f"NVIDIA Test 100 · driver 1.2 · torch {torch.__version__} · "
        f"triton {triton.__version__}/9.9 · recorded 2026-01-02 to 2026-02-03"
    )
    assert bench._label([], measured=True) == "no measurements"


def test_the_commit_is_told_or_asked_of_git_or_unknown(world, monkeypatch, tmp_path):
    world(has_gpu=True)
    assert bench._provenance()["commit"] == "abc1234"
    assert bench.commit() == "abc1234"
    monkeypatch.delenv("COURSE_COMMIT")
    monkeypatch.setattr(bench.backend, "ROOT", tmp_path)
    assert bench.commit() == "unknown"


# ---- observations --------------------------------------------------------------------


def test_the_kernels_of_a_trace_are_those_of_the_gpu_in_order():
    events = [
        {"cat": "kernel", "name": "second", "ts": 2.5},
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 0.5},
        {"cat": "kernel", "name": "first", "ts": 1.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.1},
        {"name": "process_name", "ph": "M"},
        {"cat": "kernel", "name": "second", "ts": 4.0},
    ]
    names = bench._kernels_of({"traceEvents": events})
    assert names == ["first", "second", "second"]


def test_nothing_is_launched_in_the_interpreter(world):
    world(has_gpu=False)
    with pytest.raises(RuntimeError, match=r"interpreter.*bench\.observe"):
        bench.launched(torch.clone, torch.ones(2))


@pytest.mark.gpu
def test_an_operation_is_one_kernel_and_a_view_none():
    x = torch.randn(64, 64, device="cuda")
    assert len(bench.launched(torch.exp, x)) == 1
    assert len(bench.launched(lambda x: torch.exp(x.t()) + 1, x)) == 2
    with pytest.raises(bench.Unavailable, match="no kernel"):
        bench.launched(torch.t, x)


def test_an_observation_is_recorded_and_read_back_with_its_types(world, record):
    rows = [
        {"kernel": "program", "blocks": 32, "share": 0.5, "fits": True, "note": None},
        {
            "kernel": "meta",
            "blocks": 16,
            "share": 1e-9,
            "fits": False,
            "note": "1 warp",
        },
    ]
    world(has_gpu=True, recording=True)
    seen = bench.observe("occupancy", lambda: rows)
    assert lines(record / "occupancy.csv")[0].split(",") == [
        *rows[0],
        *bench.PROVENANCE,
    ]
    world(has_gpu=False)
    read = bench.observe("occupancy", pytest.fail)
    assert read == seen
    assert [{name: row[name] for name in rows[0]} for row in read] == rows
    assert [type(value) for value in read[0].values()][:5] == [
        str,
        int,
        float,
        bool,
        type(None),
    ]
    assert (read[0]["driver"], read[0]["commit"]) == ("1.2", "abc1234")
    assert "recorded 20" in read.source
    assert "measured here" in seen.source


def test_what_a_gpu_cannot_tell_here_is_read(world, record):
    def no_profiler():
        raise bench.Unavailable("ncu is not installed")

    world(has_gpu=True, recording=True)
    with pytest.raises(ValueError, match=r"no nvidia-test-100/counters\.csv"):
        bench.observe("counters", no_profiler)
    bench.observe("counters", lambda: [{"dram_bytes": 7}])
    read = bench.observe("counters", no_profiler)
    assert read[0]["dram_bytes"] == 7
    assert "recorded" in read.source


def test_an_observation_must_be_a_table(world, record):
    world(has_gpu=True, recording=True)
    with pytest.raises(ValueError, match="all rows must have the keys"):
        bench.observe("mixed", lambda: [{"a": 1}, {"b": 2}])
    assert not record.exists()


# ---- what is committed ---------------------------------------------------------------

GPUS = {
    one.name: one
    for one in map(gpu.named, ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200"))
}
FILES = sorted(bench.RECORDED.glob("*/*.csv"))
LIE = "traffic_launch"  # chapter 2 shows that its timer reports the impossible
READ_ONLY = {"eager.max", "eager.sum", "control.amax"}  # these move half of the bytes


def faults_of(rows):
    """What cannot be true of measurements by an honest timer."""
    faults = []
    copies = {
        (row.dtype, row.n_rows, row.n_cols) for row in rows if row.provider == "copy"
    }
    for row in rows:
        absent = [math.isnan(time) for time in (row.p20_us, row.p50_us, row.p80_us)]
        if not all(absent) and not 0 < row.p20_us <= row.p50_us <= row.p80_us:
            faults.append(f"percentiles out of order: {row}")
        if (row.dtype, row.n_rows, row.n_cols) not in copies:
            faults.append(f"no copy beside {row}")
        if (facts := GPUS.get(row.gpu)) and row.bytes > 2 * facts.l2_bytes:
            moved = row.bytes / 2 if row.provider in READ_ONLY else row.bytes
            crossed = moved - facts.l2_bytes  # the last writes may stay in L2
            if crossed / row.p50_us / 1e3 > facts.peak_bandwidth_gbps:
                faults.append(f"faster than the memory: {row}")
    return faults


@pytest.mark.skipif(not FILES, reason="nothing is recorded yet")
@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_committed_file_is_whole_and_possible(path):
    with path.open(newline="") as file:
        header = next(csv.reader(file))
    if "p50_us" in header:
        rows = list(bench._read(path).values())
        assert [*map(bench._key, rows)] == sorted(map(bench._key, rows))
        assert bool(faults_of(rows)) == (path.stem == LIE)
        gpus = {row.gpu for row in rows}
    else:
        assert tuple(header[-len(bench.PROVENANCE) :]) == bench.PROVENANCE
        with path.open(newline="") as file:
            gpus = {row["gpu"] for row in csv.DictReader(file)}
    assert {bench._slug(name) for name in gpus} == {path.parent.name}


def test_faults_are_found():
    provenance = ("NVIDIA H200", "580", "2.11", "3.6", "2026-01-01", "abc1234")
    good = bench.Measurement(
        "copy", "float32", 32768, 8192, 490.0, 500.0, 510.0, *provenance
    )
    assert faults_of([good]) == []
    for change, fault in (
        ({"p80_us": 495.0}, "percentiles"),
        ({"p20_us": math.nan}, "percentiles"),
        ({"provider": "torch"}, "no copy"),
        ({"p20_us": 390.0, "p50_us": 400.0}, "faster"),
    ):
        (found,) = faults_of([dataclasses.replace(good, **change)])
        assert found.startswith(fault)
