"""What tests of several folders need."""

import pytest

from kernels.lab import backend, cases, nvrtc


@pytest.fixture
def compiler():
    """Skips where NVIDIA's packages are not installed."""
    try:
        nvrtc.toolkit()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def fewer_rows(monkeypatch):
    """The checker's tallest matrices have 45 and 61 rows in the interpreter.

    For kernels that hundreds of rows tell no more of: the notebooks, and a GPU's tests,
    try 781 and 1823.
    """
    if backend.INTERPRETED:
        monkeypatch.setattr(cases, "ROWS", (*cases.ROWS[:-2], 45, 61))
