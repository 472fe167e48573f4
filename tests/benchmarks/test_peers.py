"""Peers are measured where they live, on the same input, and only if they are right."""

import functools
import os
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import triton

from benchmarks import peers, regions
from kernels.lab import backend, clock, record
from kernels.lab.record import Case

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
F32 = torch.float32
ON_CPU = pytest.mark.skipif(
    not backend.INTERPRETED, reason="its inputs are made on the CPU"
)

PACKAGE = """
import os, time, torch

def softmax(x):
    n_cols = x.shape[-1]
    if n_cols == 13:
        raise NotImplementedError("N must not be 13")
    if n_cols == 14:
        return torch.softmax(x, -1) * (1 + 1e-3)
    if n_cols == 15:
        time.sleep(60)
    if n_cols == 16:
        os._exit(3)
    return torch.softmax(x, -1)
"""


def load_fake():
    from fakepeer import softmax

    return softmax


def load_with_advice():
    warnings.warn("please update your libraries", stacklevel=1)
    return load_fake()


def load_broken():
    raise ImportError("libfake.so.13 is missing\nand more")


def witness(function, x):
    """A clock that tells where it runs, and on what."""
    function(x)
    print("said by the clock")
    return float(os.getpid()), float(x.abs().sum()) + 1e9, 2e9


def load_copy():
    return torch.clone


def stray(x):
    """Breaks the CUDA context of its process if x has 13 rows."""
    index = torch.tensor([10**9 if len(x) == 13 else 0], device="cuda")
    torch.zeros(1, device="cuda")[index].cpu()
    return x.clone()


def load_stray():
    return stray


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What COURSE_PEERS names: one package, unpacked."""
    root = tmp_path_factory.mktemp("peers")
    (root / "fake" / "deep" / "fakepeer").mkdir(parents=True)
    (root / "fake" / "deep" / "fakepeer" / "__init__.py").write_text(PACKAGE)
    info = root / "fake" / "fake_peer-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fake-peer\nVersion: 1.2"
    )
    return root


@pytest.fixture
def machine(monkeypatch, folder, tmp_path):
    """A machine that measures on its CPU, and records nowhere."""
    monkeypatch.setenv("COURSE_PEERS", str(folder))
    monkeypatch.setenv("COURSE_COMMIT", "abc1234")
    monkeypatch.setenv("COURSE_RECORD", "0")
    monkeypatch.delenv("COURSE_RECORDED_GPU", raising=False)
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    monkeypatch.setattr(record, "_gpu", lambda: GPU)
    monkeypatch.setattr(clock, "can_measure", lambda: True)
    monkeypatch.setitem(clock.CLOCKS, "device", witness)
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "path", sys.path[:])  # peers add to it
    record._provenance.cache_clear()
    yield
    record._provenance.cache_clear()


def fake(**changes):
    parts = {"inside": ("deep", "."), "apart": True, "case_s": 20.0} | changes
    return peers.Peer("fake", "fake-peer", load_fake, **parts)


def sweep(peer, columns):
    cases = [Case(F32, 4, n_cols) for n_cols in columns]
    how = {"clock": "device", "verify": peers.verify}
    return record.sweep("fastest", {"fake": peer}, cases, **how)


# ---- optional providers --------------------------------------------------------------


@ON_CPU
def test_a_peer_apart_has_one_process_and_the_same_input(machine, capsys):
    peer = fake()
    assert peer.version() == "1.2" and peer.available()
    df = sweep(peer, (8, 13, 14, 32, 16))
    rows = record.select(df, provider="fake")
    assert list(rows["n_cols"]) == [8, 32]
    for row in rows.itertuples():
        copy = record.only(df, provider="copy", n_cols=row.n_cols)
        assert (row.p50_us, copy["p20_us"]) == (copy["p50_us"], os.getpid())
    assert rows["p20_us"].nunique() == 1 and os.getpid() not in set(rows["p20_us"])
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if "said by the clock" not in line]
    absent = "fake is absent at float32 4 × "
    assert len(lines) == 3 and all(line.startswith(absent) for line in lines)
    assert lines[0].startswith(f"{absent}13:")
    assert lines[0].endswith(": NotImplementedError: N must not be 13")
    assert "ValueError: wrong value at row 0, column 0: " in lines[1]
    assert "RuntimeError: the process that ran the function" in lines[2]


@ON_CPU
def test_a_peer_that_hangs_is_ended_and_started_again(machine, capsys):
    peer = fake(case_s=1.5)
    start = time.monotonic()
    rows = record.select(sweep(peer, (8, 15, 9, 17)), provider="fake")
    assert time.monotonic() - start < 40
    assert list(rows["n_cols"]) == [8, 9, 17]
    first, second, third = rows["p20_us"]
    assert first != second == third
    printed = capsys.readouterr().out
    assert "TimeoutError: no answer within 1.5" in printed
    assert printed.count("said by the clock") == 4 + 3


def test_a_peer_here_is_loaded_from_its_folder(machine):
    df = sweep(fake(apart=False), (8, 13))
    assert list(zip(df["provider"], df["n_cols"], strict=True)) == [
        *(("copy", 8), ("fake", 8)),
        ("copy", 13),
    ]
    assert record.only(df, provider="fake")["p20_us"] == os.getpid()


def test_a_peer_that_is_nowhere_is_not_available(machine, monkeypatch, capsys):
    monkeypatch.delenv("COURSE_PEERS")
    peer = fake(apart=False)
    assert (peer.folders(), peer.version(), peer.available()) == ((), "", False)
    assert list(sweep(peer, (8,))["provider"]) == ["copy"]
    assert "fake is left out at 1 of 1 shapes" in capsys.readouterr().out


def test_a_peers_advice_about_its_libraries_is_not_shown(machine, recwarn):
    peer = peers.Peer("fake", "fake-peer", load_with_advice, inside=("deep", "."))
    assert peer.available() and not recwarn
    load_with_advice()
    assert len(recwarn) == 1


def test_a_peer_that_cannot_be_imported_says_why_once(machine, capsys):
    peer = peers.Peer("fake", "fake-peer", load_broken)
    assert peer.version() == "1.2"
    assert not peer.available() and not peer.available()
    assert capsys.readouterr().out == (
        "fake cannot be used: ImportError: libfake.so.13 is missing\n"
    )


@pytest.mark.gpu
def test_a_copy_apart_is_as_fast_as_here():
    peer = peers.Peer("fake", "fake-peer", load_copy, apart=True)
    make_input = functools.partial(record.random, F32, 8192, 8192)
    here = record.timed(torch.clone, make_input(), clock.device_us)[1]
    there = peer.times(make_input(), make_input, clock.device_us, None)[1]
    assert there == pytest.approx(here, rel=0.05)


@pytest.mark.gpu
def test_a_process_that_lost_its_context_is_replaced():
    peer = peers.Peer("fake", "fake-peer", load_stray, apart=True)
    for n_rows in (4, 13, 5):
        make_input = functools.partial(record.random, F32, n_rows, 8)
        try:
            peer.times(make_input(), make_input, clock.device_us, None)
        except RuntimeError:
            assert n_rows == 13
        else:
            assert n_rows != 13


# ---- peers ---------------------------------------------------------------------------


def test_the_benchmarks_peers():
    everyone = peers.providers()
    assert set(everyone) == set(regions.PEERS)
    optional = [peer for peer in everyone.values() if isinstance(peer, peers.Peer)]
    assert optional == list(peers.OPTIONAL)
    assert all(name == peer.name for name, peer in everyone.items() if peer in optional)


def test_quacks_dsl_comes_before_quack(monkeypatch, tmp_path):
    (tmp_path / "quack").mkdir()
    monkeypatch.setenv("COURSE_PEERS", str(tmp_path))
    quack = peers.providers()["quack"]
    assert [Path(part).relative_to(tmp_path) for part in quack.folders()] == [
        Path("quack/nvidia_cutlass_dsl/dsl_packages"),
        Path("quack"),
    ]


@ON_CPU
@pytest.mark.parametrize("n_programs", [1, 3, 8])
def test_the_tutorials_kernel_takes_every_programth_row(n_programs):
    x = torch.randn(5, 130)[:, :100]
    y = torch.full((5, 100), torch.nan)
    sizes = x.stride(0), y.stride(0), *x.shape
    peers.tutorial_kernel[(n_programs,)](y, x, *sizes, 128, 4)
    torch.testing.assert_close(y, torch.softmax(x, dim=-1))


@pytest.mark.gpu
def test_the_tutorial_refuses_what_its_stages_have_no_room_for():
    with pytest.raises(triton.OutOfResources, match="shared memory"):
        peers.tutorial(torch.zeros(2, 2**20, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("softmax", [peers.native, peers.compiled, peers.tutorial])
@pytest.mark.parametrize("n_cols", [100, 1024, 4097])
def test_those_that_are_always_here_are_right(softmax, n_cols):
    x = torch.randn(1823, n_cols, device="cuda")
    peers.verify(x, softmax(x))
    peers.verify(x[:77], softmax(x[:77]))


@pytest.mark.gpu
@pytest.mark.parametrize("peer", peers.OPTIONAL, ids=lambda peer: peer.name)
def test_optional_peers_are_right_where_they_are_found(peer):
    if not peer.available():
        pytest.skip(f"{peer.name} is not found here")
    make_input = functools.partial(record.random, torch.bfloat16, 512, 4096)
    times = peer.times(make_input(), make_input, clock.device_us, peers.verify)
    assert times[1] > 0


def test_a_version_is_found_here_or_in_the_record(machine, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-test-100")
    monkeypatch.setattr(peers, "OPTIONAL", (fake(),))
    monkeypatch.setenv("COURSE_RECORD", "1")
    first = record.observe("fastest_peers", peers.versions)
    found = dict(zip(first["peer"], first["version"], strict=True))
    assert list(found) == ["torch", "triton", "fake"]
    assert (found["torch"], found["fake"]) == (torch.__version__, "1.2")
    monkeypatch.delenv("COURSE_PEERS")
    again = record.observe("fastest_peers", peers.versions)
    assert dict(zip(again["peer"], again["version"], strict=True)) == found
    assert capsys.readouterr().out == ""


# ---- verifying -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1000, 33), (2, 3_000_000)])
def test_a_right_result_is_accepted(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    peers.verify(x, torch.softmax(x, dim=-1))


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda y: y[:, :-1], "wrong result: expected"),
        (lambda y: y.double(), "wrong result: expected"),
        (lambda y: None, "got <class 'NoneType'>"),
        (lambda y: y.index_fill(1, torch.tensor([99]), 0.0), "row 0, column 99"),
        (
            lambda y: y.index_fill(0, torch.tensor([776]), torch.nan),
            "row 776, col.* nan",
        ),
        (lambda y: y * 1.04, "row 0, column 0"),
    ],
)
def test_a_wrong_result_is_refused(dtype, spoil, words):
    x = torch.randn(777, 100, dtype=dtype)
    with pytest.raises(ValueError, match=words):
        peers.verify(x, spoil(torch.softmax(x, dim=-1)))


# ---- compiling beforehand ------------------------------------------------------------


def note(x):
    """Leaves a file for each matrix that it got, and fails at one."""
    root = Path(os.environ["NOTES"])
    Path(root, f"{x.shape[0]}x{x.shape[1]}.{os.getpid()}").touch()
    if x.shape == (3, 5):
        raise ValueError
    return x


def precompiled(tmp_path):
    """The shapes that were seen, and the processes that saw them."""
    seen = [path.name.split(".") for path in tmp_path.iterdir()]
    return sorted(shape for shape, _ in seen), {int(pid) for _, pid in seen}


def notes(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTES", str(tmp_path))
    providers = {"mine": note, "gone": peers.Peer("gone", "no-such-peer", load_broken)}
    return providers, [Case(F32, n_rows, 5) for n_rows in range(1, 9)]


@ON_CPU
def test_every_provider_sees_every_case_beforehand(monkeypatch, tmp_path):
    providers, cases = notes(monkeypatch, tmp_path)
    cases.append(Case(F32, 9, 5, "twice"))
    twice = {"twice": lambda dtype, n_rows, n_cols: torch.ones(n_rows, 2 * n_cols)}
    peers.precompile(providers, cases, twice, processes=2)
    shapes, pids = precompiled(tmp_path)
    assert shapes == [*(f"{n}x5" for n in range(1, 9)), "9x10"]
    assert os.getpid() not in pids
    for pid in pids:
        assert not Path("/proc", str(pid)).exists()


@ON_CPU
def test_processes_move_on_to_the_peers_that_are_left(machine, monkeypatch, tmp_path):
    providers, cases = notes(monkeypatch, tmp_path)
    peers.precompile(providers | {"fake": fake()}, cases[:3], processes=1)
    assert precompiled(tmp_path)[0] == ["1x5", "2x5", "3x5"]


@ON_CPU
def test_compiling_ends_in_time(monkeypatch, tmp_path):
    providers, cases = notes(monkeypatch, tmp_path)
    peers.precompile(providers, cases, processes=1, until=time.monotonic())
    assert precompiled(tmp_path)[0] == []


def test_as_many_processes_as_fit_the_gpu(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    large, small = Case(F32, 2**16, 2**10), Case(F32, 2, 2)  # 256 MiB, 16 bytes
    for free, cases, expected in [
        (140 * 10**9, [large, small], 14),
        (14 * 10**9, [small, large], 7),
        (10**9, [large], 1),
    ]:
        monkeypatch.setattr(peers.gpu, "free_bytes", lambda free=free: free)
        assert peers._how_many(cases) == expected
