"""Runs a function in another process: interpreted, compiled, or in a fresh one.

A reader without a GPU wants to see what the compiler makes of a kernel. A reader with a
GPU wants to count every access of a kernel, which only the interpreter can do. One
process cannot be both worlds: Triton decides when it is imported whether its own
functions and ours are compiled or interpreted, and the interpreter replaces parts of
`triton.language` while a kernel runs. So `call_in` runs a function in the other world,
in a helper process that lives as long as this one. `call_apart` runs a function in a
new process of this world, for what may break the process that it runs in.

Weighed: `multiprocessing` pickles a function by its name, so a new process cannot find
a function of a notebook; it also gives a new process no environment of its own, and
TRITON_INTERPRET and CUDA_VISIBLE_DEVICES must differ. `concurrent.futures` is built on
it, and its time limit stops the waiting, not the process. `loky` comes nearest: it
pickles by value with cloudpickle, and its workers have an environment of their own. But
what is most of this module would still be ours: how kernels and a GPU's tensors travel,
a time limit that ends the process, and the last output of a process that died. So
cloudpickle is used, and a pipe.
"""

import atexit
import contextlib
import functools
import io
import linecache
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from kernels.lab import backend, description

WORLDS = ("compiler", "interpreter")


def call_in(world: str, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` in the named world and returns its result.

    Where kernels are interpreted, this process is the interpreter's world, and the
    function is simply called. The compiler's world is always a helper process that sees
    no GPU: it compiles for any GPU and launches nothing. Functions, kernels and
    arguments travel by value, tensors as CPU tensors with their strides. An exception
    comes back as it was raised.

    Args:
        world: "compiler" or "interpreter".
        function: what to call; may be defined in a notebook.

    Raises:
        ValueError: the world is neither of the two.
        RuntimeError: the helper process died; the message ends with its last output. Or
            the interpreter does not work with the NumPy that is installed.
    """
    if world not in WORLDS:
        raise ValueError(f"world must be one of {WORLDS}, got {world!r}")
    if world == "interpreter":
        description.require_interpreter()
        if backend.INTERPRETED:
            return function(*args, **kwargs)
    return _helper(world).call(function, args, kwargs)


def call_apart(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` in a new process of this world, GPU and all.

    Use it for what may break the process that it runs in: after one illegal access, a
    CUDA context is lost for good. The new process ends with the call. Arguments and
    results travel as in `call_in`.

    Args:
        function: what to call; may be defined in a notebook.

    Raises:
        RuntimeError: the process died; the message ends with its last output.
    """
    world = "interpreter" if backend.INTERPRETED else "compiler"
    helper = Helper(world, hide_gpu=False)
    try:
        return helper.call(function, args, kwargs)
    finally:
        helper.stop()


# ---- what travels --------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """cloudpickle that also takes Triton's kernels, and tensors of a GPU.

    And a function's code keeps the name of its file, which cloudpickle drops from 3.1.3
    on: Triton and tracebacks find the lines of a notebook's function by it.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            make, values = self.dispatch_table[types.CodeType](obj)
            return _rebuild_code, (make, values, obj.co_filename)
        if isinstance(obj, KernelInterface) and not isinstance(obj, type):
            return _reduce_kernel(obj)
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            storage = obj.untyped_storage().cpu()
            view = (storage, obj.storage_offset(), obj.size(), obj.stride())
            return torch.empty(0, dtype=obj.dtype).set_(*view).__reduce_ex__(5)
        return super().reducer_override(obj)


def _rebuild_code(make: Callable, values: tuple, filename: str) -> types.CodeType:
    return make(*values).replace(co_filename=filename)


def _reduce_kernel(kernel: KernelInterface) -> tuple:
    """Sends a kernel of a module by its name, and one of a notebook by its source."""
    function = kernel
    while isinstance(function, KernelInterface):  # autotune and heuristics wrap it
        function = function.fn
    module, name = function.__module__, function.__qualname__
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is kernel:
        return operator.attrgetter(name), (sys.modules[module],)
    if not isinstance(kernel, JITFunction | InterpretedFunction):
        return object.__reduce_ex__(kernel, 5)
    kept = kernel.kwargs if isinstance(kernel, InterpretedFunction) else vars(kernel)
    options = {option: kept[option] for option in _JIT_OPTIONS if kept.get(option)}
    filename = function.__code__.co_filename
    return _rebuild_kernel, (function, filename, linecache.getlines(filename), options)


_JIT_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline")


def _rebuild_kernel(
    function: Callable, filename: str, lines: list[str], options: dict[str, Any]
) -> KernelInterface:
    """Makes the kernel again; Triton reads its source from `linecache`."""
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return triton.jit(**options)(function)


def dumps(message: Any) -> bytes:
    """What travels, as bytes: functions and kernels of a notebook by their source."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


# ---- the process ---------------------------------------------------------------------


def is_pytorchs(path: str) -> bool:
    """Whether a file is in PyTorch's folder.

    A learner may name a `ptxas` in TRITON_PTXAS_PATH. `torch.compile` may name
    PyTorch's own there; whether it does depends on timing.
    """
    return Path(path).is_relative_to(Path(torch.__file__).parent)


class Helper:
    """A process of one world that answers calls, one after another.

    It starts with the first call. After it died or was stopped, the next call starts a
    new one.
    """

    def __init__(self, world: str, *, hide_gpu: bool = True) -> None:
        """Prepares the process, and does not start it.

        Args:
            world: "compiler" or "interpreter".
            hide_gpu: whether the process sees no GPU.
        """
        self.world, self.hide_gpu = world, hide_gpu
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.exit_code: int | None = None

    def start(self) -> None:
        """Starts the process, with the course first on its path.

        It compiles with Triton's `ptxas`, or with another one that the learner named.
        """
        rest = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, (str(backend.ROOT), rest)))
        changed = {"TRITON_INTERPRET": "1" if self.world == "interpreter" else "0"}
        if self.hide_gpu:
            changed["CUDA_VISIBLE_DEVICES"] = ""
        environment = os.environ | changed | {"PYTHONPATH": path}
        if is_pytorchs(environment.get("TRITON_PTXAS_PATH", "")):
            del environment["TRITON_PTXAS_PATH"]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kernels.lab.process import _serve; _serve()"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # an interrupt of the notebook must not reach it
        )
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the process and every process that it started."""
        if self.process is not None:
            self._kill()
            self.exit_code = self.process.wait()  # negative: the signal that ended it
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None
            atexit.unregister(self.stop)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads its session

    @contextlib.contextmanager
    def _limit(self, limit_s: float | None) -> Iterator[threading.Event]:
        """Ends the process in limit_s seconds, and then sets the event."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._kill()

        alarm = threading.Timer(limit_s, expire) if limit_s else None
        if alarm:
            alarm.daemon = True
            alarm.start()
        try:
            yield late
        finally:
            if alarm:
                alarm.cancel()
                alarm.join()  # it may be about to end the process
            if late.is_set():
                self.stop()

    def call(
        self,
        function: Callable,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        *,
        limit_s: float | None = None,
    ) -> Any:
        """Runs `function(*args, **kwargs)` in the process; see `call_in`.

        Args:
            function: what to call; may be defined in a notebook.
            args: its positional arguments.
            kwargs: its named arguments.
            limit_s: the seconds that the call may take, start-up included; None means
                any number.

        Raises:
            TimeoutError: the call took longer, and the process was ended.
            RuntimeError: the process died; the message ends with its last output.
        """
        message = dumps((list(sys.path), dumps((function, args, kwargs or {}))))
        with self.lock:
            if self.process is None:
                self.start()
            try:
                with self._limit(limit_s) as late:
                    self.process.stdin.write(message)
                    self.process.stdin.flush()
                    succeeded, answer, words = pickle.load(self.process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
                if self.process is not None:  # it ends by itself, and says how
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(5)
                self.stop()
                if late.is_set():
                    raise TimeoutError(f"no answer within {limit_s:g} s") from error
                self.errors.seek(0)
                words = self.errors.read().decode(errors="replace").strip()
                raise RuntimeError(
                    f"the process that ran the function ({self.world}) ended before it "
                    f"answered; its last output: {words[-2000:] or '(none)'}"
                ) from error
            except BaseException:  # interrupted; the next call must not get its answer
                self.stop()
                raise
        try:
            result = pickle.loads(answer)
        except ImportError as error:  # of a package that only the process can import
            raise RuntimeError(words) from error
        if succeeded:
            return result
        raise result


@functools.cache
def _helper(world: str) -> Helper:
    return Helper(world)


def _serve() -> None:
    """Runs in the helper process: reads calls from stdin, writes results to stdout."""
    calls = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints must not mix with the results
    while True:
        try:
            path, call = pickle.load(calls)
        except EOFError:
            return
        sys.path[:] = list(dict.fromkeys([*sys.path, *path]))
        try:
            function, args, kwargs = pickle.loads(call)
            answer = True, dumps(function(*args, **kwargs)), "an unknown result"
        except Exception as error:
            error.__cause__ = RuntimeError(f"in the helper:\n{traceback.format_exc()}")
            words = repr(error)
            try:
                answer = False, dumps(error), words
                pickle.loads(answer[1])
            except Exception:
                answer = False, dumps(RuntimeError(words)), words
        results.write(pickle.dumps(answer))
        results.flush()
