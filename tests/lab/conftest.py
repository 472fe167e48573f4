"""What several tests of instruments need."""

import os

import pytest

from kernels.lab import backend, gpu, record

GPU = {"gpu": "NVIDIA Test 100", "driver": "1.2"}
"""What `world` measures on."""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A command nvidia-smi that knows one GPU, an A10, whatever this machine has."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in *=name) echo NVIDIA A10;; *) echo 470.82.01;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of recorded files: that of the only GPU that was ever here."""
    monkeypatch.setattr(record, "RECORDED", tmp_path)
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-test-100")
    return tmp_path / "nvidia-test-100"


@pytest.fixture
def world(monkeypatch):
    """Switches between a machine with a GPU, which measures, and one without."""
    monkeypatch.setattr(record, "_gpu", lambda: GPU)
    monkeypatch.setattr(backend, "DEVICE", "cpu")  # where the inputs are made
    monkeypatch.setattr(gpu, "free_bytes", lambda: 10**9, raising=False)
    monkeypatch.delenv("COURSE_MEASURE", raising=False)

    def switch(has_gpu, recording=False):
        monkeypatch.setattr(backend, "INTERPRETED", not has_gpu)
        monkeypatch.setenv("COURSE_RECORD", "1" if recording else "0")
        monkeypatch.setenv("COURSE_COMMIT", "abc1234")
        record._provenance.cache_clear()

    yield switch
    record._provenance.cache_clear()
