"""The benchmark's script measures each case once, and goes on where it stopped."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.lab import backend, bench, peers, regions

PATH = Path(__file__).parents[1] / "benchmarks" / "fastest.py"
GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
F32 = torch.float32
CASES = ((F32, 8, 16), (F32, 4, 32), (F32, 2, 64))


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("benchmark_of_fastest", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Machine:
    """Measures in no time; its clock advances by a minute for each measurement."""

    def __init__(self):
        self.minutes, self.timed, self.warmed = 0, [], []

    def timer(self, function, x):
        self.minutes += 1
        self.timed.append((tuple(x.shape), x.stride()))
        return 1.0, 2.0, 3.0


def inputs(remakes):
    return [(tuple(x.shape), x.stride()) for x in (remake() for remake in remakes)]


@pytest.fixture
def machine(script, monkeypatch, tmp_path):
    machine = Machine()
    for region in ("here", "there"):
        assert region not in {one.name for one in regions.REGIONS}
    some = (
        regions.Region("here", "", CASES[:2]),
        regions.Region("there", "", CASES[1:]),
        regions.Region("strided", "", ((F32, 2, 781),), stem="fastest_strided"),
    )
    providers = {"fastest": peers.native, "torch": peers.native}
    monkeypatch.setattr(regions, "REGIONS", some)
    monkeypatch.setattr(regions, "HOST", CASES[:1])
    monkeypatch.setattr(script, "providers", lambda: dict(providers))
    monkeypatch.setattr(script, "bare", peers.native)
    monkeypatch.setattr(script.time, "monotonic", lambda: 60.0 * machine.minutes)
    monkeypatch.setattr(
        peers, "warm", lambda who, remakes: machine.warmed.append(inputs(remakes))
    )
    for timer in ("device_us", "host_us"):
        monkeypatch.setattr(bench, timer, machine.timer)
    monkeypatch.setattr(bench, "RECORDED", tmp_path)
    monkeypatch.setattr(bench, "_gpu", lambda: GPU)
    monkeypatch.setattr(bench, "_can_measure", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU["gpu"])
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    monkeypatch.setenv("COURSE_RECORD", "0")
    monkeypatch.setenv("COURSE_COMMIT", "abc1234")
    bench._provenance.cache_clear()
    yield machine
    bench._provenance.cache_clear()


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(PATH), *arguments])
    script.main()


def test_every_case_is_measured_once_with_all_providers(
    script, machine, monkeypatch, tmp_path, capsys
):
    run(script, monkeypatch)
    folder = tmp_path / "nvidia-test-100"
    assert {path.stem for path in folder.iterdir()} == {
        *("fastest", "fastest_strided", "fastest_host", "fastest_peers"),
    }
    rows = bench.recorded("fastest")
    assert len(rows) == 3 * 3
    assert {one.provider for one in rows} == {"copy", "fastest", "torch"}
    assert len(machine.timed) == 3 * 3 + 3 + 4
    assert ((2, 781), (800, 1)) in machine.timed
    assert {one.provider for one in bench.recorded("fastest_host")} == {
        *("bare", "copy", "fastest", "torch"),
    }
    (warmed,) = machine.warmed
    assert set(warmed) == set(machine.timed) and len(warmed) == 5
    assert "0 cases are left" in capsys.readouterr().out


def test_a_run_stops_in_time_and_the_next_one_goes_on(
    script, machine, monkeypatch, capsys
):
    run(script, monkeypatch, "--minutes", "4", "here", "there")
    assert len(machine.timed) == 2 * 3
    assert "1 cases are left" in capsys.readouterr().out
    run(script, monkeypatch, "here", "there")
    assert len(machine.timed) == 3 * 3
    assert machine.warmed[-1] == [((2, 64), (64, 1))]
    run(script, monkeypatch, "here", "there")
    assert len(machine.timed) == 3 * 3
    run(script, monkeypatch, "--again", "here")
    assert len(machine.timed) == 3 * 3 + 2 * 3
    monkeypatch.setenv("COURSE_COMMIT", "def5678")
    bench._provenance.cache_clear()
    run(script, monkeypatch, "there")
    assert len(machine.timed) == 3 * 3 + 4 * 3


def test_an_unknown_region_is_refused(script, machine, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "here", "nowhere")
    assert "got ['nowhere']" in capsys.readouterr().err
    assert not machine.timed


def test_a_bare_launch_is_a_softmax(script):
    x = torch.randn(5, 100, device=backend.DEVICE)
    torch.testing.assert_close(script.bare(x), torch.softmax(x, dim=-1))


def test_the_benchmark_needs_a_gpu(script, monkeypatch):
    monkeypatch.setattr(bench, "_can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        run(script, monkeypatch)


def test_the_chapters_and_the_peers_found_here_are_its_providers(script, monkeypatch):
    for stem in script.COURSE:
        pytest.importorskip(f"kernels.{stem}")
    monkeypatch.delenv("COURSE_PEERS", raising=False)
    names = [*script.providers()]
    assert names[: len(script.COURSE)] == [*script.COURSE]
    assert (
        {"torch", "torch.compile", "tutorial"}
        <= set(names)
        <= {
            *script.COURSE,
            *regions.PEERS,
        }
    )
