"""A kernel that was forked is like one that was started; only PyTorch is there."""

import os
import sys
import time

import nbval.kernel
import pytest

from kernels.lab import backend
from tests import forks

pytestmark = pytest.mark.skipif(
    not backend.INTERPRETED, reason="no process is a copy on a GPU"
)

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


def test_a_forked_kernel_has_not_imported_the_course(tmp_path):
    manager, client = nbval.kernel.start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path)
    )
    process = manager.provisioner.process
    assert isinstance(process, forks.Fork) and process.poll() is None
    path = os.environ["PYTHONPATH"]
    assert said(client, LOOK) == f"[True, False, False, False] {tmp_path} {path} True"
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    end = time.monotonic() + 5
    while process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_code_runs_in_a_copy(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    code = "import beside, os, sys; print(beside.NAME, dict(os.environ))"
    run = forks.python(code, env={"A": "b"}, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == "beside {'A': 'b'}\n"
    assert os.environ.get("A") is None


def test_code_that_fails_says_how(tmp_path):
    run = forks.python("print(1); 1 / 0", env={}, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (1, "1\n")
    assert run.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert forks.python("import os; os._exit(3)", env={}, cwd=tmp_path).returncode < 0


@pytest.mark.parametrize(
    ("command", "env"),
    [
        (["true", "-m", "ipykernel_launcher"], dict(os.environ)),
        ([sys.executable, "-m", "ipykernel_launcher", "--version"], {}),
    ],
)
def test_kernels_of_another_python_or_path_are_started(command, env):
    process = forks.launch(command, env=env)
    assert not isinstance(process, forks.Fork)
    assert process.wait() == 0
