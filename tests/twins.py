"""The course's helper processes, as copies of two that have imported Triton.

`kernels.lab.process.Helper` starts a process that imports PyTorch and Triton: three
seconds of a core, for each notebook that compiles, and for each exercise that is
judged. Here two processes import them once, one for each world, and fork for each
helper. A copy has what a `Popen` of the helper would have: its environment, folder,
pipes and session, and an exit code. It imports the course by itself.

Only the standard library is imported, since notebooks' kernels import this, too.
`tests.forks` does the same for the kernels themselves.
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

ADDRESS = "COURSE_TWINS"  # names the folder of the two sockets
SERVED = "from kernels.lab.process import _serve; _serve()"

SERVER = """
import gc, json, os, select, signal, socket, sys, traceback, types
folder, worlds = sys.argv[1], ("0", "1")
listeners = {}
for world in worlds:
    listeners[world] = socket.socket(socket.AF_UNIX)
    listeners[world].bind(os.path.join(folder, world))
    listeners[world].listen(64)
import pandas, torch
world = worlds[os.fork() == 0]
os.environ["TRITON_INTERPRET"] = world
import triton
if world == "0":
    triton.runtime.cache.triton_key()  # reads all of Triton's files
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
base = [path for path in sys.path if path not in os.environ["PYTHONPATH"].split(":")]
while 0 not in select.select([listeners[world], 0], [], [])[0]:  # which ends with us
    connection, _ = listeners[world].accept()
    if os.fork():
        connection.close()
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, streams, _, _ = socket.recv_fds(connection, 2**16, 3)
    while not said.endswith(b"\\n"):
        said += connection.recv(2**16)
    how, (alive, started) = json.loads(said), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.write(started, b".")
        for stream, file in enumerate(streams):
            os.dup2(file, stream)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(how["env"])
        os.chdir(how["cwd"])
        paths = os.environ.get("PYTHONPATH", "").split(":")
        sys.path[:] = ["", *filter(None, paths), *filter(None, base)]
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        status = 1
        try:
            exec(how["code"], vars(main))
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    for file in streams:
        os.close(file)
    os.read(alive, 1)  # it leads its session now
    connection.sendall(b"%d\\n" % pid)
    _, status = os.waitpid(pid, 0)
    try:
        connection.sendall(b"%d\\n" % os.waitstatus_to_exitcode(status))
    except OSError:
        pass  # nobody waits
    os._exit(0)
"""


def start() -> Callable[[], None]:
    """Starts the two processes, and tells this one's children where they listen.

    Returns what ends them. They also end with this process.
    """
    folder = tempfile.mkdtemp(prefix="twins-")
    command = [sys.executable, "-c", SERVER, folder]
    how = {"stdin": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen(command, **how)
    os.environ[ADDRESS] = folder

    def stop() -> None:
        process.stdin.close()
        process.wait()
        shutil.rmtree(folder)

    return stop


class Copy:
    """A copy that runs: what `Helper` needs of a `subprocess.Popen`."""

    def __init__(self, code: str, env: dict[str, str], errors: Any) -> None:
        self.returncode: int | None = None
        their_stdin, stdin = os.pipe()
        stdout, their_stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self.connection = socket.socket(socket.AF_UNIX)
        world = env["TRITON_INTERPRET"]
        self.connection.connect(os.path.join(os.environ[ADDRESS], world))
        how = json.dumps({"code": code, "env": env, "cwd": os.getcwd()}).encode()
        streams = [their_stdin, their_stdout, errors.fileno()]
        sent = socket.send_fds(self.connection, [how + b"\n"], streams)
        self.connection.sendall((how + b"\n")[sent:])
        os.close(their_stdin)
        os.close(their_stdout)
        self.answers = self.connection.makefile()
        self.pid = int(self.answers.readline())

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`."""
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a helper", timeout)
            self.returncode = int(self.answers.readline())
            self.connection.close()
        return self.returncode


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, but a helper of the course is a copy."""

    def __new__(cls, command: Any, *args: Any, **how: Any) -> Any:
        if isinstance(command, list) and command[1:] == ["-c", SERVED]:
            return Copy(SERVED, how["env"], how["stderr"])
        return super().__new__(cls)


def install() -> None:
    """From here on, this process's helpers are copies, if there are the two."""
    if os.environ.get(ADDRESS):
        subprocess.Popen = Popen
