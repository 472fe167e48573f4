"""The two worlds: a CUDA GPU, or Triton's interpreter where there is none.

Triton decides once, when it is imported, whether `@triton.jit` makes a compiled or an
interpreted kernel. This module asks the CUDA driver and decides before that. It is the
first thing that `import kernels` runs.

Each world sometimes needs the other: a reader without a GPU wants to see what the
compiler makes of a kernel, and a reader with one wants to count every access, which
only the interpreter can do. `call_in` runs a function in the other world, in a helper
process that lives as long as this one. One process cannot be both: the interpreter
replaces parts of `triton.language` while it runs.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.metadata
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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLDS = ("compiler", "interpreter")


@functools.cache
def has_gpu() -> bool:
    """True if the CUDA driver reports at least one device (PyTorch is not asked)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    ready = driver.cuInit(0) == 0
    return (
        ready and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    )


def _choose_world() -> bool:
    """Sets TRITON_INTERPRET for this process; returns True for the interpreter."""
    wanted = os.environ.get("TRITON_INTERPRET")
    interpreted = (
        wanted.lower() in ("1", "true", "yes", "on") if wanted else not has_gpu()
    )
    if interpreted and not wanted:
        if "triton" in sys.modules:
            raise RuntimeError(
                "triton was imported before kernels, so its interpreter is off and "
                "nothing can run here without a GPU; restart Python and import kernels "
                "first, or set TRITON_INTERPRET=1"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    return interpreted


def _version(package: str) -> tuple[int, int]:
    major, minor = importlib.metadata.version(package).split(".")[:2]
    return int(major), int(minor)


INTERPRETED: bool = _choose_world()
DEVICE: str = "cpu" if INTERPRETED else "cuda"

if INTERPRETED and _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
    raise RuntimeError(
        "Triton 3.6's interpreter does not work with NumPy 2.4 or newer, got NumPy "
        f"{importlib.metadata.version('numpy')}; install 'numpy<2.4' or triton 3.7"
    )

import cloudpickle  # noqa: E402
import torch  # noqa: E402 - may import Triton, so the world is chosen first
import triton  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction, KernelInterface  # noqa: E402

if INTERPRETED:  # NumPy warns of inf - inf; a GPU makes its NaN in silence
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def driver_version() -> str:
    """The NVIDIA driver's version, such as "580.159.04".

    Raises:
        RuntimeError: where there is no driver.
    """
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            "no NVIDIA driver answers here: nvidia-smi failed"
        ) from error
    return output.stdout.split()[0]


def describe() -> str:
    """One sentence: which of the two worlds this is, and with which versions."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    if not INTERPRETED:
        name = torch.cuda.get_device_name()
        return (
            f"This is {name}: kernels are compiled and timed here "
            f"(driver {driver_version()}, {versions})."
        )
    folder = ROOT / "notebooks" / "recorded"
    recorded = sorted(path.name for path in folder.glob("*") if path.is_dir())
    source = f"recorded on {', '.join(recorded)}" if recorded else "not recorded yet"
    return (
        "There is no GPU here: kernels run in Triton's interpreter, and measured "
        f"figures are the ones {source} ({versions})."
    )


def validate(
    x: torch.Tensor,
    *,
    max_rows: int | None = None,
    max_cols: int | None = None,
    contiguous: bool = False,
) -> None:
    """Checks the input of a softmax over the rows of a matrix.

    Args:
        x: what the caller passed; should be a float tensor (n_rows, n_cols).
        max_rows: as many as the kernel's grid has room for; None means any.
        max_cols: the longest row that the kernel takes; None means any.
        contiguous: whether the kernel needs rows that follow each other in memory.

    Raises:
        TypeError: x is not a tensor, or not float32, float16 or bfloat16.
        ValueError: x is not a matrix, lies on a device that kernels cannot reach here,
            has more or longer rows than the kernel takes, or is not contiguous where it
            must.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"x must be float32, float16 or bfloat16, got {x.dtype}; "
            "convert it with x.float()"
        )
    if x.ndim != 2:
        raise ValueError(
            f"x must have 2 dimensions (rows, columns), got shape {tuple(x.shape)}; "
            "x.reshape(-1, x.shape[-1]) makes a matrix of the last dimension's rows"
        )
    if x.device.type != DEVICE:
        raise ValueError(
            f"x must be on {DEVICE!r}, where kernels run here, got a tensor on "
            f"{str(x.device)!r}; move it with x.to({DEVICE!r})"
        )
    if max_rows is not None and x.shape[0] > max_rows:
        raise ValueError(
            f"x must have at most {max_rows} rows for this kernel, got {x.shape[0]}; "
            "rows do not depend on each other, so parts of x can go one after another"
        )
    if max_cols is not None and x.shape[1] > max_cols:
        raise ValueError(
            f"x must have at most {max_cols} columns for this kernel, got "
            f"{x.shape[1]}; torch.softmax takes longer rows"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous for this kernel, got strides {x.stride()} for shape "
            f"{tuple(x.shape)}; x.contiguous() copies it, and kernels.strided.softmax "
            "takes it as it is"
        )


# ---- the other world, in a helper process --------------------------------------------


def call_in(world: str, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` in the named world and returns its result.

    The interpreter's world is this process where kernels are interpreted here. The
    compiler's is always a helper process that sees no GPU: it compiles for any GPU and
    launches nothing. Functions, kernels and arguments travel by value, tensors as CPU
    tensors with the strides they have; exceptions come back as they were raised.

    Args:
        world: "compiler" or "interpreter".
        function: what to call; may be defined in a notebook.

    Raises:
        ValueError: the world is neither of the two.
        RuntimeError: the helper process died; the message ends with its last words.
    """
    if world not in WORLDS:
        raise ValueError(f"world must be one of {WORLDS}, got {world!r}")
    if world == "interpreter" and INTERPRETED:
        return function(*args, **kwargs)
    return _helper(world).call(function, args, kwargs)


def call_apart(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` in a new process of this world, GPU and all.

    For what may break the process that it runs in: a CUDA context is lost for good
    after one illegal access. The new process ends with the call. Arguments and results
    travel as in `call_in`.

    Args:
        function: what to call; may be defined in a notebook.

    Raises:
        RuntimeError: the process died; the message ends with its last words.
    """
    world = "interpreter" if INTERPRETED else "compiler"
    helper = Helper(world, hide_gpu=False)
    try:
        return helper.call(function, args, kwargs)
    finally:
        helper.stop()


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, and Triton's kernels, and tensors of a GPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, KernelInterface) and not isinstance(obj, type):
            return _reduce_kernel(obj)
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            storage = obj.untyped_storage().cpu()
            view = (storage, obj.storage_offset(), obj.size(), obj.stride())
            return torch.empty(0, dtype=obj.dtype).set_(*view).__reduce_ex__(5)
        return super().reducer_override(obj)


def _reduce_kernel(kernel: KernelInterface) -> tuple:
    """A kernel of a module goes by its name, one of a notebook by its source."""
    function = kernel
    while isinstance(function, KernelInterface):  # autotune and heuristics wrap one
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
    function: Any, filename: str, lines: list[str], options: dict[str, Any]
) -> KernelInterface:
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    return triton.jit(**options)(function)


def _dumps(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getvalue()


class Helper:
    """A process of a world, with no GPU in sight or all, that answers calls in turn.

    It starts with the first call, and anew with the first after it died or was stopped.
    """

    def __init__(self, world: str, *, hide_gpu: bool = True) -> None:
        self.world, self.hide_gpu = world, hide_gpu
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        changed = {"TRITON_INTERPRET": "1" if self.world == "interpreter" else "0"}
        if self.hide_gpu:
            changed["CUDA_VISIBLE_DEVICES"] = ""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from kernels.lab.backend import _serve; _serve()"],
            env=os.environ | changed | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # an interrupt of the notebook is not for it
        )
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the process and those that it started, if there are any."""
        if self.process is not None:
            self._kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads its session

    @contextlib.contextmanager
    def _limit(self, limit_s: float | None) -> Iterator[threading.Event]:
        """Ends the process in limit_s seconds, and says so in the event."""
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
        function: Any,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        *,
        limit_s: float | None = None,
    ) -> Any:
        """Runs `function(*args, **kwargs)` there; see `call_in`.

        Args:
            limit_s: how long it may take, start-up included; None means any time.

        Raises:
            TimeoutError: it took longer, and the process was ended.
            RuntimeError: the process died; the message ends with its last words.
        """
        message = _dumps((list(sys.path), _dumps((function, args, kwargs or {}))))
        with self.lock:
            if self.process is None:
                self.start()
            try:
                with self._limit(limit_s) as late:
                    self.process.stdin.write(message)
                    self.process.stdin.flush()
                    succeeded, result = pickle.load(self.process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
                self.stop()
                if late.is_set():
                    raise TimeoutError(f"no answer within {limit_s:g} s") from error
                self.errors.seek(0)
                words = self.errors.read().decode(errors="replace").strip()
                raise RuntimeError(
                    f"the helper process of the {self.world} world died; its last "
                    f"words: {words[-2000:] or '(none)'}"
                ) from error
            except BaseException:  # interrupted; the next call must not get its answer
                self.stop()
                raise
        if succeeded:
            return result
        raise result


@functools.cache
def _helper(world: str) -> Helper:
    return Helper(world)


def _serve() -> None:
    """The helper process: reads calls from stdin, writes results to stdout."""
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
            answer = _dumps((True, function(*args, **kwargs)))
        except Exception as error:
            error.__cause__ = RuntimeError(f"in the helper:\n{traceback.format_exc()}")
            try:
                answer = _dumps((False, error))
                pickle.loads(answer)
            except Exception:
                answer = _dumps((False, RuntimeError(repr(error))))
        results.write(answer)
        results.flush()
