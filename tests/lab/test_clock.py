"""Calls are timed flushed, on inputs in turn, by one process at a time."""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch

from kernels.lab import backend, clock, gpu
from tests.helpers import in_company

X = "x"  # a function's argument, where no tensor is needed


class FakeCuda:
    """A GPU whose time passes with what it is asked to do; notes all of it in `log`."""

    def __init__(self):
        self.log = []
        self.now_us = 0.0
        self.host_s = 0.0
        self.spins = []

    def do(self, what, us):
        self.log.append(what)
        self.now_us += us

    def call(self, us=7.0, host_us=30.0):
        """A function that takes the GPU and the host so long; notes its arguments."""

        def function(*args):
            self.passed.append(args)
            self.host_s += 1e-6 * host_us
            self.do("call", us)

        self.passed = []
        return function

    def event(self, enable_timing):
        event = SimpleNamespace()

        def record():
            self.log.append("event")
            event.us = self.now_us

        event.record = record
        event.elapsed_time = lambda end: 1e-3 * (end.us - event.us)
        return event

    def spin(self, cycles):
        self.spins.append(cycles)
        self.do("spin", cycles / 2000)

    def synchronize(self):
        self.host_s = max(self.host_s, 1e-6 * self.now_us)


@pytest.fixture
def cuda(monkeypatch):
    """Clocks measure on a fake GPU with 1000 bytes of L2, and take no lock."""
    fake = FakeCuda()
    buffer = SimpleNamespace(
        sum=lambda: fake.do("read", 65.0), zero_=lambda: fake.do("write", 65.0)
    )
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.delenv("COURSE_MEASURE", raising=False)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.spin)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: fake.host_s)
    monkeypatch.setattr(clock, "_buffer", lambda: buffer)
    monkeypatch.setattr(clock, "alone", contextlib.nullcontext)
    l2 = SimpleNamespace(l2_bytes=1000)
    monkeypatch.setattr(gpu, "here", lambda: l2)
    monkeypatch.setattr(gpu, "free_bytes", lambda: 10**9, raising=False)
    return fake


# ---- what the GPU does, in which order -----------------------------------------------


@pytest.mark.parametrize("timer", [clock.events_us, clock.device_us])
def test_a_time_is_a_percentile_of_single_calls(cuda, monkeypatch, timer):
    times = [float(t * t) for t in range(1, 31)]
    monkeypatch.setattr(clock, "_timed", lambda *_: times[::-1])
    p20, p50, p80 = timer(cuda.call(), X)
    cuts = statistics.quantiles(times, n=5, method="inclusive")
    assert (p20, p80) == pytest.approx((cuts[0], cuts[3]))
    assert p50 == statistics.median(times)


@pytest.mark.parametrize(
    ("timer", "prepared"),
    [
        (clock.device_us, ["read", "spin"]),
        (clock.events_us, ["read"]),
        (clock.unflushed_us, ["spin"]),
        (clock.written_us, ["write", "spin"]),
    ],
)
def test_what_precedes_a_timed_call(cuda, timer, prepared):
    x = torch.ones(100)
    assert timer(cuda.call(), x) == pytest.approx((7, 7, 7))
    once = [*prepared, "event", "call", "event"]
    assert cuda.log == ["call"] * 11 + once * clock.DEVICE_CALLS
    rotate = prepared[0] == "read"
    assert (len({args[0].data_ptr() for args in cuda.passed}) > 1) == rotate


def test_the_gpu_is_held_until_the_host_is_ahead(cuda):
    assert clock.device_us(cuda.call(), X) == pytest.approx((7, 7, 7))
    assert cuda.spins == pytest.approx([4 * 30 * 2000] * clock.DEVICE_CALLS, abs=1)


def test_the_gpu_is_not_held_forever(cuda):
    clock.device_us(cuda.call(host_us=1e6), X)
    assert set(cuda.spins) == {4000 * 2000}


@pytest.mark.parametrize(
    ("us", "calls"), [(900.0, clock.DEVICE_CALLS), (1100.0, clock.LONG_DEVICE_CALLS)]
)
def test_the_device_clock_calls_long_functions_less_often(cuda, us, calls):
    clock.device_us(cuda.call(us=us), X)
    assert cuda.log.count("event") == 2 * calls


def test_the_safeguards_of_the_device_clock_can_be_chosen(cuda):
    x = torch.ones(100)
    clock.device_times(cuda.call(), [x], flush=clock.flush_by_writing, rotate=False)
    assert cuda.log[-5:] == ["write", "spin", "event", "call", "event"]
    assert all(args[0] is x for args in cuda.passed)
    clock.device_times(cuda.call(), [x], flush=lambda: None)
    assert cuda.log[-4:] == ["spin", "event", "call", "event"]
    assert len({args[0].data_ptr() for args in cuda.passed}) > 1


def test_the_hosts_time_is_of_calls_in_a_row(cuda):
    calls = []

    def function(_):
        calls.append(1)
        cuda.host_s += (1 + len(calls) // clock.HOST_CALLS % 5) * 1e-6

    assert clock.host_us(function, X) == pytest.approx((2, 3, 4), abs=0.25)
    assert len(calls) == (1 + clock.HOST_BATCHES) * clock.HOST_CALLS
    assert cuda.log == []  # no flush, no event


def test_the_wall_clock_waits_or_does_not(cuda):
    waited = clock.wall_us(cuda.call(us=3000.0), X)
    assert cuda.log == ["read", "call"] * clock.WALL_CALLS
    alone = clock.launch_us(cuda.call(us=3000.0), X)
    assert waited[0] == pytest.approx(3000)
    assert alone == pytest.approx((30, 30, 30))
    assert clock.call_us(cuda.call(us=50.0), X) == pytest.approx(50)
    assert clock.call_us(cuda.call(us=50.0), X, wait=False) == pytest.approx(30)


def test_the_flush_is_several_times_as_large_as_l2(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch, "ones", lambda n, device: sizes.append(4 * n))
    for name in ("T4", "H200", "B200"):
        facts = gpu.named(name)
        monkeypatch.setattr(gpu, "here", lambda facts=facts: facts)
        clock._buffer.__wrapped__()
        assert sizes[-1] >= max(2**28, 4 * facts.l2_bytes)


# ---- rotating inputs -----------------------------------------------------------------


@pytest.mark.parametrize("timer", [clock.events_us, clock.device_us])
def test_timed_calls_take_turns_on_copies(cuda, timer):
    x = torch.arange(100.0)  # 400 bytes: 6 copies exceed twice the L2 of 1000 bytes
    timer(cuda.call(us=3000.0), x, 1)
    calls = clock.LONG_DEVICE_CALLS
    pointers = [args[0].data_ptr() for args in cuda.passed[-calls:]]
    assert len(set(pointers)) == 6
    assert pointers == [pointers[place % 6] for place in range(calls)]
    assert all(args[0].equal(x) and args[1] == 1 for args in cuda.passed)


@pytest.mark.parametrize(
    ("n_bytes", "free", "count"),
    [
        (400, 10**9, 6),
        (1000, 10**9, 3),
        (2004, 10**9, 1),  # one input is larger than twice L2
        (4, 10**9, clock.MAX_COPIES),
        (400, 4 * 1200, 4),  # three more fit a quarter of the memory
        (400, 100, 1),
    ],
)
def test_as_many_copies_as_exceed_l2_and_fit(cuda, monkeypatch, n_bytes, free, count):
    monkeypatch.setattr(gpu, "free_bytes", lambda: free)
    x = torch.ones(n_bytes // 4)
    copies = clock.rotated([x])
    assert len(copies) == count
    assert copies[0][0] is x
    assert len({args[0].data_ptr() for args in copies}) == count


def test_copies_lie_in_memory_as_the_original(cuda):
    x = torch.arange(200.0).view(10, 20)[1:, 3:9].t()
    y, weight = x[2:], torch.ones(3, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    options = {"many": [1, 2]}
    original, *others = clock.rotated([x, 3, y, options, weight, sparse, None])
    assert original[0] is x and original[4] is weight
    assert others
    for other in others:
        assert other[0].stride() == x.stride() and other[0].equal(x)
        assert other[0].storage_offset() == x.storage_offset()
        assert other[0].data_ptr() != x.data_ptr()
        other[0][2, 0] = -1.0  # arguments that share memory share it in a copy, too
        assert other[2][0, 0] == -1.0 and y[0, 0] != -1.0
        assert other[4].requires_grad and other[4].is_leaf
        assert other[1] == 3 and other[3] is options
        assert other[5] is sparse and other[6] is None


def test_without_tensors_there_is_one_tuple(cuda):
    assert clock.rotated([]) == [()]
    assert clock.rotated([1, "x"]) == [(1, "x")]
    assert clock.rotated([torch.ones(0)])[0][0].numel() == 0


def test_where_memory_ends_there_are_fewer_copies(cuda, monkeypatch):
    made = []

    def clone(storage):
        made.append(storage)
        if len(made) == 3:
            raise torch.OutOfMemoryError
        return torch.ones(100).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "clone", clone)
    assert len(clock.rotated([torch.ones(100)])) == 3


# ---- who may measure, and when -------------------------------------------------------


def test_nothing_is_timed_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.delenv("COURSE_MEASURE", raising=False)
    assert not clock.can_measure()
    for timer in clock.CLOCKS.values():
        with pytest.raises(RuntimeError, match=r"timed here.*interpreter.*record\."):
            timer(torch.clone, torch.ones(2, 2))


def test_a_gpu_may_show_recorded_times(cuda, monkeypatch):
    assert clock.can_measure()
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    assert not clock.can_measure()
    for timer in clock.CLOCKS.values():
        with pytest.raises(RuntimeError, match="COURSE_MEASURE=recorded is set; unset"):
            timer(torch.clone, torch.ones(2, 2))
    monkeypatch.setenv("COURSE_MEASURE", "briefly")
    assert clock.can_measure()
    monkeypatch.setenv("COURSE_MEASURE", "always")
    with pytest.raises(ValueError, match=r"must be 'recorded'.* got 'always'"):
        clock.can_measure()


@pytest.mark.parametrize("name", clock.CLOCKS)
def test_a_brief_time_is_of_a_fifth_of_the_calls(cuda, monkeypatch, name):
    n_calls = []
    for briefly in (False, True):
        monkeypatch.setattr(clock, "BRIEFLY", briefly)
        call, calls = cuda.call(), []
        clock.CLOCKS[name](lambda *args, c=call, n=calls: (n.append(1), c(*args)), X)
        n_calls.append(len(calls))
    all_of_them, few = n_calls
    assert all_of_them / 5 <= few < all_of_them / 3


@pytest.mark.parametrize("name", clock.CLOCKS)
def test_every_clock_measures_alone(cuda, monkeypatch, name):
    @contextlib.contextmanager
    def alone():
        cuda.log.append("alone")
        yield
        cuda.log.append("done")

    monkeypatch.setattr(clock, "alone", alone)
    clock.CLOCKS[name](cuda.call(), X)
    first, timed = cuda.log[: (start := cuda.log.index("alone"))], cuda.log[start:]
    assert timed.count("alone") == 1 and timed.index("done") == len(timed) - 1
    assert timed.count("call") > 1
    # Others may measure while the first call compiles.
    compiles = {"host": clock.HOST_CALLS, "wall": 0, "launch": 0}.get(name, 1)
    assert first == ["call"] * compiles


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """The lock of a GPU that is not there, in a folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(clock, "_gpu_uuid", lambda: "GPU-5eed/..")
    clock._lock.cache_clear()
    yield tmp_path / "measuring-on-gpu" / "GPU-5eed.lock"
    clock._lock.cache_clear()


OTHER_PROCESS = """
import tempfile
from kernels.lab import clock
clock._gpu_uuid = lambda: "GPU-5eed/.."
clock.PATIENCE_S = 0.01
print("ready", flush=True)
with clock.alone():
    print("alone", flush=True)
    input()
print("done", flush=True)
"""


def test_two_processes_exclude_each_other(lock, monkeypatch, capsys):
    where = {"TMPDIR": str(lock.parent.parent), "PYTHONPATH": str(backend.ROOT)}
    where["COURSE_WAIT_SILENTLY"] = ""  # tests set it, and this one reads the line
    with (
        clock.alone(),
        subprocess.Popen(
            [sys.executable, "-c", OTHER_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | where,
        ) as other,
    ):
        said = [other.stdout.readline()]
        said.append(other.stdout.readline())  # it waits, and says so
        clock._lock("GPU-5eed/..").release()  # as the end of this block would
        said.append(other.stdout.readline())
        monkeypatch.setattr(clock, "PATIENCE_S", 0.01)
        waiting = clock._lock("GPU-5eed/..")
        with pytest.raises(clock.filelock.Timeout):
            waiting.acquire(timeout=0.01)
        other.stdin.write("\n")
        other.stdin.flush()
        said.append(other.stdout.readline())
        with clock.alone():
            pass
    assert [line.split()[0] for line in said] == ["ready", "Another", "alone", "done"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as two users")
def test_users_take_the_lock_in_turn(lock, monkeypatch):
    """The first user makes folder and file, under a umask that keeps others out."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o1777)  # as /tmp is
        monkeypatch.setattr(tempfile, "tempdir", folder)
        for user in (1, 65534, 0):
            if not (child := os.fork()):
                status = 1
                try:
                    os.umask(0o077)
                    os.setuid(user)
                    with clock.alone():
                        status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0, f"user {user} cannot take the lock"
        assert len(os.listdir(folder)) == 1


def test_who_is_alone_may_ask_again(lock):
    with clock.alone(), clock.alone():
        assert clock._lock("GPU-5eed/..").is_locked
    assert not clock._lock("GPU-5eed/..").is_locked


def test_an_error_ends_the_turn(lock):
    with pytest.raises(KeyError), clock.alone():
        raise KeyError
    assert not clock._lock("GPU-5eed/..").is_locked


def test_every_user_may_take_the_lock(lock):
    before = os.umask(0o077)
    try:
        with clock.alone():
            assert lock.stat().st_mode & 0o777 == 0o666
            assert lock.parent.stat().st_mode & 0o7777 == 0o777
    finally:
        os.umask(before)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", clock.CLOCKS)
def test_every_clock_on_a_gpu(name):
    x = torch.randn(64, 256, device="cuda")
    p20, p50, p80 = clock.CLOCKS[name](torch.clone, x)
    assert 0 < p20 <= p50 <= p80


@pytest.mark.gpu
@in_company
def test_where_the_host_is_early_both_clocks_agree():
    x = torch.randn(8192, 8192, device="cuda")
    alone = clock.device_us(torch.clone, x)[1]
    assert alone == pytest.approx(clock.events_us(torch.clone, x)[1], rel=0.05)


@pytest.mark.gpu
@in_company
def test_a_slow_host_counts_for_the_host_only():
    def late(x, arrive=lambda: None):
        arrive()
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        return x.clone()

    x = torch.randn(64, 64, device="cuda")
    assert clock.host_us(late, x)[1] > 300 > 100 > clock.host_us(torch.clone, x)[1]
    # Others may slow down the flush: after it, the host is late however long it took.
    assert clock.events_us(late, x, torch.cuda.synchronize)[1] > 300
    assert clock.device_us(late, x)[1] < 20


@pytest.mark.gpu
def test_copies_on_a_gpu_are_as_aligned_as_the_original():
    x = torch.randn(64, 1001, device="cuda")[:, 1:]
    copies = clock.rotated([x])
    assert 1 < len(copies) <= clock.MAX_COPIES
    for (other,) in copies:
        assert other.stride() == x.stride() and other.equal(x)
        assert other.data_ptr() % 16 == x.data_ptr() % 16


@pytest.mark.gpu
def test_the_lock_is_of_this_gpu():
    with clock.alone():
        assert clock._lock(clock._gpu_uuid()).is_locked
