"""What several tests of instruments need."""

import os

import pytest


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A command nvidia-smi that knows one GPU, an A10, whatever this machine has."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in *=name) echo NVIDIA A10;; *) echo 470.82.01;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
