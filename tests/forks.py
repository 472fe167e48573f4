"""Notebooks' kernels that start as copies of one process, which has imported PyTorch.

A notebook's kernel imports IPython, PyTorch and pandas: two seconds of a core, for each
of forty notebooks. Here one process imports them once, and forks for each kernel. The
course and Triton are imported by the notebook itself, as always.

Weighed: `multiprocessing`'s fork server (it gives a kernel pytest's `sys.path` and
`__main__`).
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from typing import Any

from jupyter_client import launcher

SERVER = """
import gc, json, os, runpy, signal, sys
import ipykernel.kernelapp, pandas, torch
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # kernels that end leave nothing behind
for line in sys.stdin:
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    how, server = json.loads(line), os.getppid()
    os.setsid()
    print(os.getpid(), flush=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.environ.clear()
    os.environ.update(how["env"], JPY_PARENT_PID=str(server))
    os.chdir(how["cwd"])
    sys.argv = ["ipykernel_launcher", *how["arguments"]]
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
    os._exit(0)
"""


@functools.cache
def _server() -> subprocess.Popen:
    """The process that forks. It ends with this one, and its kernels with it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", SERVER]
    return subprocess.Popen(command, text=True, start_new_session=True, **pipes)


class Kernel:
    """What Jupyter needs of a `subprocess.Popen`."""

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
    command: list[str], *, env: dict[str, str], cwd: str | None = None, **how: Any
) -> Any:
    """As `jupyter_client.launcher.launch_kernel`; forks kernels of this Python.

    Args:
        command: such as `python -m ipykernel_launcher -f connection.json`.
        env: the kernel's environment.
        cwd: the folder that it starts in; None means this one.
        how: other arguments of a `Popen`, for kernels that are not forked.
    """
    if command[0] != sys.executable or "ipykernel_launcher" not in command:
        return launcher.launch_kernel(command, env=env, cwd=cwd, **how)
    arguments = command[command.index("ipykernel_launcher") + 1 :]
    call = {"arguments": arguments, "env": env, "cwd": cwd or os.getcwd()}
    server = _server()
    print(json.dumps(call), file=server.stdin, flush=True)
    return Kernel(int(server.stdout.readline()))
