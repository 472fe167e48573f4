"""The sentences of a first cell, and the limit on a process's memory."""

import re

import pytest
import torch
import triton

from kernels.lab import backend, description


def test_description_names_versions():
    assert torch.__version__ in backend.describe()
    assert triton.__version__ in backend.describe()


@pytest.fixture
def t4(monkeypatch):
    """This process, as if it ran on a T4."""
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "obstacle", lambda: "")
    monkeypatch.setattr(description, "driver_version", lambda: "580.82.07")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for name in ("COURSE_GPU_GB", "COURSE_MEASURE"):
        monkeypatch.delenv(name, raising=False)


def test_gpu_is_named_with_its_driver(t4):
    assert backend.describe() == (
        "Kernels are compiled, run and timed on the Tesla T4 (driver 580.82.07, "
        f"torch {torch.__version__}, triton {triton.__version__})."
    )


def test_recorded_times_and_a_limit_are_said(t4, monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    monkeypatch.setenv("COURSE_GPU_GB", "14")
    assert backend.describe().startswith(
        "Kernels are compiled and run on the Tesla T4 here, and times are the ones "
        "recorded on nvidia-h200, because COURSE_MEASURE=recorded is set (at most 14 "
        "GB of its memory, driver 580.82.07, "
    )


def test_brief_times_are_said(t4, monkeypatch):
    whole = backend.describe()
    monkeypatch.setenv("COURSE_MEASURE", "briefly")
    assert "run and timed on" in whole
    assert backend.describe() == whole.replace("timed on", "timed briefly on")


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("cp.async", r"asynchronous copies \(cp\.async\), .* no load starts ahead"),
        ("bfloat16", "bfloat16 arithmetic, .* conversions from and to bfloat16"),
        ("tl.dot", r"tensor cores, .* becomes ordinary multiplications"),
    ],
)
def test_what_an_old_gpu_lacks_is_said(t4, monkeypatch, need, words):
    assert backend.describe(need).startswith(backend.describe())
    lacking = backend.describe(need)[len(backend.describe()) :]
    assert lacking.startswith(" This chapter is about ")
    assert re.search(words, lacking)
    assert "(its compute capability is 7.5, below 8.0)" in lacking
    assert "the rows recorded on nvidia-h200 show the difference." in lacking
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert backend.describe(need) == backend.describe()


def test_needs_of_another_name_are_refused():
    with pytest.raises(ValueError, match=r"'cp\.async', 'tl\.dot'.*got \['tma'\]"):
        backend.describe("cp.async", "tma")


@pytest.mark.skipif(backend.has_gpu(), reason="a GPU's own sentence is longer")
def test_without_a_gpu_needs_add_nothing():
    assert backend.describe("cp.async", "bfloat16", "tl.dot") == backend.describe()


def test_driver_that_nvidia_smi_does_not_know_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert description.driver_version() == "unknown"


def test_driver_version(nvidia_smi):
    assert description.driver_version() == "470.82.01"


@pytest.fixture
def shares(monkeypatch):
    """The shares of an 80 GB GPU's memory that this process was limited to."""
    facts = type("Properties", (), {"total_memory": 80 * 10**9})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    taken = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    return taken


@pytest.mark.parametrize(("gb", "share"), [("14", 0.175), ("0.8", 0.01), ("96", 1.0)])
def test_memory_is_limited(shares, gb, share):
    description.limit_memory(gb)
    assert shares == [pytest.approx(share)]


@pytest.mark.parametrize("gb", ["0", "-1", "14 GB", "nan", "1.2.3", "all"])
def test_limit_that_is_no_number_is_refused(shares, gb):
    with pytest.raises(ValueError, match=f"a number of GB such as 14, got {gb!r}"):
        description.limit_memory(gb)
    assert shares == []
