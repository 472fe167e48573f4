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


@pytest.fixture(autouse=True)
def fewer_rows(request, monkeypatch):
    """The checker's tallest matrix has 63 rows in the interpreter.

    Hundreds of programs, each of which takes its time, tell no more of a kernel.
    The notebooks and tests of `every_row` try 263, and a GPU's tests 1823.
    """
    if backend.INTERPRETED and "every_row" not in request.fixturenames:
        monkeypatch.setattr(cases, "ROWS", (*cases.ROWS[:-1], 61))


@pytest.fixture
def few_rows(monkeypatch):
    """The checker's matrices have 1, 2 or 9 rows: each takes many programs."""
    monkeypatch.setattr(cases, "ROWS", (1, 2, 9))


@pytest.fixture
def every_row():
    """The checker's tallest matrices are in the interpreter those of the notebooks."""


@pytest.fixture
def tritons_ptxas(monkeypatch):
    """Launches use Triton's `ptxas`, even if `torch.compile` ran in this process."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
