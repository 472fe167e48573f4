"""A kernel that was forked is like one that was started; only PyTorch is there."""

import os
import time

import nbval.kernel
import pytest

from kernels.lab import backend
from tests import forks

LOOK = """
import os, sys
found = [name in sys.modules for name in ("torch", "triton", "kernels", "pytest")]
print(found, os.getcwd(), os.environ["PYTHONPATH"], "" in sys.path)
"""


def said(client, code: str) -> str:
    """What a kernel prints."""
    printed = []

    def hear(message):
        printed.append(message["content"].get("text", ""))

    client.execute_interactive(code, output_hook=hear, timeout=60)
    return "".join(printed).strip()


@pytest.mark.skipif(not backend.INTERPRETED, reason="no kernel is forked on a GPU")
def test_a_forked_kernel_has_not_imported_the_course(tmp_path):
    manager, client = nbval.kernel.start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path)
    )
    process = manager.provisioner.process
    assert isinstance(process, forks.Kernel) and process.poll() is None
    path = os.environ["PYTHONPATH"]
    assert said(client, LOOK) == f"[True, False, False, False] {tmp_path} {path} True"
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    end = time.monotonic() + 5
    while process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_other_kernels_are_started():
    process = forks.launch(["true"], env={})
    assert not isinstance(process, forks.Kernel)
    assert process.wait() == 0
