"""Peers are measured where they live, on the same input, and only if they are right."""

import functools
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import triton

from kernels.lab import backend, bench, peers

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
F32 = torch.float32

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


def load_broken():
    raise ImportError("libfake.so.13 is missing\nand more")


def witness(function, x):
    """A timer that tells where it runs, and on what."""
    function(x)
    print("said by the timer")
    return float(os.getpid()), float(x.abs().sum()) + 1e9, 2e9


def count(function, x):
    return 1.0, 2.0, 3.0


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


@pytest.fixture(autouse=True)
def world(monkeypatch, folder, tmp_path):
    """A machine that measures on its CPU, and records nowhere."""
    monkeypatch.setenv("COURSE_PEERS", str(folder))
    monkeypatch.setenv("COURSE_COMMIT", "abc1234")
    monkeypatch.setenv("COURSE_RECORD", "0")
    monkeypatch.setattr(bench, "RECORDED", tmp_path)
    monkeypatch.setattr(bench, "_gpu", lambda: GPU)
    monkeypatch.setattr(bench, "_can_measure", lambda: True)
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    monkeypatch.setattr(sys, "path", sys.path[:])  # peers add to it
    bench._provenance.cache_clear()
    yield
    bench._provenance.cache_clear()


def fake(**changes):
    parts = {"inside": ("deep", "."), "apart": True, "cell_s": 20.0} | changes
    return peers.Peer("fake", "fake-peer", load_fake, **parts)


def sweep(peer, columns, timer=witness):
    shapes = [(4, n_cols) for n_cols in columns]
    return bench.sweep(
        "fastest", {"fake": peer}, shapes, timer=timer, prove=peers.prove
    )


# ---- guests --------------------------------------------------------------------------


@pytest.mark.skipif(not backend.INTERPRETED, reason="its inputs are made on the CPU")
def test_a_peer_apart_has_one_process_and_the_same_input(capsys):
    peer = fake()
    assert peer.version() == "1.2" and peer.available()
    results = sweep(peer, (8, 13, 14, 16, 32))
    rows = results.select(provider="fake")
    assert [one.n_cols for one in rows] == [8, 32]
    for one in rows:
        copy = results.one(provider="copy", n_cols=one.n_cols)
        assert (one.p50_us, copy.p20_us) == (copy.p50_us, os.getpid())
    assert os.getpid() not in {one.p20_us for one in rows}
    said = [
        line for line in capsys.readouterr().out.splitlines() if "timer" not in line
    ]
    assert said[0] == (
        "fake is absent at float32 4 × 13: NotImplementedError: N must not be 13"
    )
    assert said[1].startswith(
        "fake is absent at float32 4 × 14: ValueError: wrong value at row 0, column 0: "
    )
    assert said[2].startswith("fake is absent at float32 4 × 16: RuntimeError: the")
    assert len(said) == 3


@pytest.mark.skipif(not backend.INTERPRETED, reason="its inputs are made on the CPU")
def test_a_peer_that_hangs_is_ended_and_started_again(capsys):
    peer = fake(cell_s=1.5)
    began = time.monotonic()
    results = sweep(peer, (8, 15, 9, 17)).select(provider="fake")
    assert time.monotonic() - began < 40
    assert [one.n_cols for one in results] == [8, 9, 17]
    first, second, third = (one.p20_us for one in results)
    assert first != second == third
    said = capsys.readouterr().out
    assert (
        "fake is absent at float32 4 × 15: TimeoutError: no answer within 1.5" in said
    )
    assert said.count("said by the timer") == 4 + 3


def test_a_peer_here_is_loaded_from_its_folder():
    results = sweep(fake(apart=False), (8, 13))
    assert [(one.provider, one.n_cols) for one in results] == [
        *(("copy", 8), ("fake", 8)),
        ("copy", 13),
    ]
    assert results.one(provider="fake").p20_us == os.getpid()


def test_a_peer_that_is_nowhere_is_not_available(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_PEERS")
    peer = fake(apart=False)
    assert (peer.folders(), peer.version(), peer.available()) == ((), "", False)
    assert [one.provider for one in sweep(peer, (8,), count)] == ["copy"]
    assert "fake is left out at 1 of 1 shapes" in capsys.readouterr().out


def test_a_peer_that_cannot_be_imported_says_why_once(capsys):
    peer = peers.Peer("fake", "fake-peer", load_broken)
    assert peer.version() == "1.2"
    assert not peer.available() and not peer.available()
    assert capsys.readouterr().out == (
        "fake cannot be used: ImportError: libfake.so.13 is missing\n"
    )


@pytest.mark.gpu
def test_a_copy_apart_is_as_fast_as_here(monkeypatch):
    monkeypatch.setattr(backend, "DEVICE", "cuda")
    peer = peers.Peer("fake", "fake-peer", lambda: torch.clone, apart=True)
    remake = lambda: bench.random(F32, 8192, 8192)  # noqa: E731
    here = bench.timed(torch.clone, remake(), bench.device_us)[1]
    assert peer.times(None, remake, bench.device_us, None)[1] == pytest.approx(
        here, rel=0.05
    )


@pytest.mark.gpu
def test_a_process_that_lost_its_context_is_replaced(monkeypatch):
    monkeypatch.setattr(backend, "DEVICE", "cuda")

    def stray(x):
        index = torch.tensor([10**9 if len(x) == 13 else 0], device="cuda")
        torch.zeros(1, device="cuda")[index].cpu()
        return x.clone()

    peer = peers.Peer("fake", "fake-peer", lambda: stray, apart=True)
    for n_rows in (4, 13, 5):
        remake = lambda: bench.random(F32, n_rows, 8)  # noqa: B023, E731
        try:
            peer.times(None, remake, bench.device_us, None)
        except RuntimeError:
            assert n_rows == 13
        else:
            assert n_rows != 13


# ---- peers ---------------------------------------------------------------------------


def test_there_are_those_of_the_benchmark():
    everyone = peers.providers()
    assert list(everyone) == [
        *("torch", "torch.compile", "tutorial"),
        *("liger", "quack", "tileops"),
    ]
    assert [name for name, one in everyone.items() if isinstance(one, peers.Peer)] == [
        one.name for one in peers.GUESTS
    ]
    assert {one.name for one in peers.GUESTS if one.apart} == {"quack", "tileops"}


def test_quacks_dsl_comes_before_quack(folder, monkeypatch, tmp_path):
    (tmp_path / "quack").mkdir()
    monkeypatch.setenv("COURSE_PEERS", str(tmp_path))
    quack = peers.providers()["quack"]
    assert [Path(part).relative_to(tmp_path) for part in quack.folders()] == [
        Path("quack/nvidia_cutlass_dsl/dsl_packages"),
        Path("quack"),
    ]


@pytest.mark.skipif(not backend.INTERPRETED, reason="needs no GPU")
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
    peers.prove(x, softmax(x))
    peers.prove(x[:77], softmax(x[:77]))


@pytest.mark.gpu
@pytest.mark.parametrize("peer", peers.GUESTS, ids=lambda peer: peer.name)
def test_guests_are_right_where_they_are_found(peer, monkeypatch):
    monkeypatch.undo()
    if not peer.available():
        pytest.skip(f"{peer.name} is not found here")
    x = bench.random(torch.bfloat16, 512, 4096)
    remake = lambda: bench.random(torch.bfloat16, 512, 4096)  # noqa: E731
    assert peer.times(x, remake, bench.device_us, peers.prove)[1] > 0


def test_a_version_is_told_here_or_as_it_was_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-test-100")
    monkeypatch.setattr(peers, "GUESTS", (fake(),))
    monkeypatch.setenv("COURSE_RECORD", "1")
    first = bench.observe("fastest_peers", peers.versions)
    told = {row["peer"]: row["version"] for row in first}
    assert list(told) == ["torch", "triton", "fake"]
    assert (told["torch"], str(told["fake"])) == (torch.__version__, "1.2")
    monkeypatch.delenv("COURSE_PEERS")
    again = bench.observe("fastest_peers", peers.versions)
    assert {row["peer"]: row["version"] for row in again} == told


# ---- proof ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (1000, 33), (2, 3_000_000)])
def test_a_right_result_is_accepted(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    peers.prove(x, torch.softmax(x, dim=-1))


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
        peers.prove(x, spoil(torch.softmax(x, dim=-1)))


# ---- compiling beforehand ------------------------------------------------------------


def note(x):
    """Leaves a file for each matrix that it got, and fails at one."""
    root = Path(os.environ["NOTES"])
    Path(root, f"{x.shape[0]}x{x.shape[1]}.{os.getpid()}").touch()
    if x.shape == (3, 5):
        raise ValueError
    return x


def load_note():
    from test_peers import note

    return note


@pytest.mark.skipif(not backend.INTERPRETED, reason="its inputs are made on the CPU")
def test_everyone_sees_every_case_beforehand(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTES", str(tmp_path))
    providers = {"mine": note, "gone": peers.Peer("gone", "no-such-peer", load_note)}
    remakes = [
        functools.partial(bench.random, F32, n_rows, 5) for n_rows in range(1, 9)
    ]
    peers.warm(providers, remakes, processes=2)
    names = [path.name.split(".") for path in tmp_path.iterdir()]
    assert sorted(shape for shape, _ in names) == [f"{n}x5" for n in range(1, 9)]
    pids = {pid for _, pid in names}
    assert str(os.getpid()) not in pids
    for pid in pids:
        assert not Path("/proc", pid).exists()
