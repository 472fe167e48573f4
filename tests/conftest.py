"""What tests of several folders need."""

import pytest

from kernels.lab import nvrtc


@pytest.fixture
def compiler():
    """Skips where NVIDIA's packages are not installed."""
    try:
        nvrtc.toolkit()
    except RuntimeError as error:
        pytest.skip(str(error))
