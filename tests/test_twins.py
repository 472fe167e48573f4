"""A helper process that is a copy is like one that was started."""

import os
import signal
import subprocess
import sys

import nbval.kernel
import pytest

from kernels.lab import backend, process
from tests import twins
from tests.test_forks import said

pytestmark = pytest.mark.skipif(
    not backend.INTERPRETED, reason="no process is a copy on a GPU"
)
WORLDS = process.WORLDS


@pytest.fixture(params=WORLDS)
def helper(request):
    helper = process.Helper(request.param)
    yield helper
    helper.stop()


def seen():
    """What a function finds in the process that runs it."""
    import sys

    import triton

    names = "torch", "triton", "kernels.lab.check", "pytest"
    loaded = [name in sys.modules for name in names]
    kernel = triton.jit(seen)
    main = sorted(name for name in vars(sys.modules["__main__"]) if name[0] != "_")
    return os.getcwd(), dict(os.environ), loaded, type(kernel).__name__, main


def test_a_copy_is_what_a_new_process_is(helper, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_NEW", "1")
    found = helper.call(seen)
    assert isinstance(helper.process, twins.Copy)
    helper.stop()
    monkeypatch.delenv(twins.ADDRESS)
    monkeypatch.setattr(subprocess, "Popen", subprocess.Popen.__base__)
    started = helper.call(seen)
    assert type(helper.process) is subprocess.Popen
    where, environment, loaded, kind, main = found
    del environment[twins.ADDRESS]
    assert (where, environment, loaded, kind, main) == started
    assert where == str(tmp_path) and environment["COURSE_NEW"] == "1"
    assert (kind == "InterpretedFunction") == (helper.world == "interpreter")


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9),
        (lambda: os._exit(3), 3),
        (lambda: sys.exit(4), 4),
        (lambda: sys.exit("words"), 1),
    ],
)
def test_a_copy_that_ends_says_how(helper, end, code):
    with pytest.raises(RuntimeError, match="ended before it answered"):
        helper.call(end)
    assert helper.exit_code == code


def test_what_a_copy_printed_last_is_told(helper):
    def end():
        print("the last words", file=sys.stderr, flush=True)
        os._exit(1)

    with pytest.raises(RuntimeError, match="the last words"):
        helper.call(end)


def test_a_copy_leads_its_session_and_stops_with_it(helper):
    assert helper.call(os.getsid, (0,)) == helper.process.pid
    copy = helper.process
    with pytest.raises(subprocess.TimeoutExpired):
        copy.wait(0.05)
    helper.stop()
    assert copy.wait() == copy.returncode == helper.exit_code == -signal.SIGKILL


def test_a_notebooks_helper_is_a_copy(tmp_path):
    manager, client = nbval.kernel.start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path)
    )
    code = (
        "from kernels.lab import process\n"
        "helper = process.Helper('compiler')\n"
        "import os; print(helper.call(os.getpid) == helper.process.pid)\n"
        "print(type(helper.process)); helper.stop()"
    )
    assert said(client, code) == "True\n<class 'tests.twins.Copy'>"
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("command", [["true"], [sys.executable, "-c", "pass"], "true"])
def test_other_processes_are_started(command):
    assert subprocess.run(command).returncode == 0
    made = subprocess.Popen(command)
    assert isinstance(made, subprocess.Popen) and made.wait() == 0
