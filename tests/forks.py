"""Processes that start as copies of one, which has imported PyTorch.

A notebook's kernel imports IPython, PyTorch, pandas and Matplotlib: three seconds of a
core, for each of forty notebooks. Here one process imports them once, and forks for
each kernel, and for tests that need a process which has not imported the course. The
course and Triton are imported by the copies, as always.

Weighed: `multiprocessing`'s fork server (it gives a copy pytest's `sys.path` and
`__main__`).
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jupyter_client import launcher

from kernels.lab import backend

SERVER = """
import gc, json, os, runpy, signal, sys, traceback
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as kernels do
import ipykernel.kernelapp, matplotlib.pyplot, pandas, torch
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # copies that end leave nothing behind
for line in sys.stdin:
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    how, server = json.loads(line), os.getppid()
    os.setsid()
    print(os.getpid(), flush=True)
    for stream, file in enumerate(how["streams"]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(how["env"])
    os.chdir(how["cwd"])
    if "code" in how:
        status = 1
        try:
            exec(how["code"], {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        print(end="", flush=True)
        os.write(os.open(how["status"], os.O_WRONLY | os.O_CREAT), b"%d" % status)
        os._exit(status)
    os.environ["JPY_PARENT_PID"] = str(server)
    sys.argv = ["ipykernel_launcher", *how["arguments"]]
    sys.path.insert(0, how["root"])
    from tests import twins  # so that its helpers are copies, too
    twins.install()
    del sys.path[0]
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
    os._exit(0)
"""


@functools.cache
def _server() -> subprocess.Popen:
    """The process that forks. It ends with this one, and notebooks' kernels with it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


class Fork:
    """A copy that runs: what Jupyter needs of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            return os.kill(self.pid, 0)
        return 0

    def wait(self) -> int:
        return 0  # Jupyter polls first

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def launch(
    command: list[str],
    *,
    env: dict[str, str],
    cwd: str | Path | None = None,
    **how: Any,
) -> Any:
    """As `jupyter_client.launcher.launch_kernel`; forks for this Python and path.

    Args:
        command: such as `python -m ipykernel_launcher -f connection.json`.
        env: the kernel's environment.
        cwd: the folder that it starts in; None means this one.
        how: other arguments of a `Popen`, for kernels that are not forked.
    """
    other_path = env.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
    is_ours = command[0] == sys.executable and "ipykernel_launcher" in command
    if other_path or not is_ours:
        return launcher.launch_kernel(command, env=env, cwd=cwd, **how)
    arguments = command[command.index("ipykernel_launcher") + 1 :]
    call = {"arguments": arguments, "env": env, "cwd": str(cwd or os.getcwd())}
    return _fork(**call, root=str(backend.ROOT), streams=3 * [os.devnull])


def _fork(**how: Any) -> Fork:
    server = _server()
    print(json.dumps(how), file=server.stdin, flush=True)
    return Fork(int(server.stdout.readline()))


def python(
    code: str, *, env: dict[str, str], cwd: str | Path
) -> subprocess.CompletedProcess:
    """As `subprocess.run` of `python -c code`, but a copy where there is no GPU.

    Args:
        code: finds PyTorch and pandas imported in a copy.
        env: the process's environment.
        cwd: the folder that it runs in, where it finds modules first.
    """
    if not backend.INTERPRETED:
        command, texts = [sys.executable, "-c", code], {"text": True}
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, **texts)
    with tempfile.TemporaryDirectory() as folder:
        out, err, status = (Path(folder, name) for name in ("out", "err", "status"))
        streams = [os.devnull, str(out), str(err)]
        how = {"code": code, "env": env, "cwd": str(cwd), "status": str(status)}
        fork = _fork(**how, streams=streams)
        while fork.poll() is None:
            time.sleep(0.01)
        ended = int(status.read_text()) if status.exists() else -1
        said = out.read_text(), err.read_text()
    return subprocess.CompletedProcess(code, ended, *said)
