"""What the compiler makes of a kernel: for any documented GPU, on any machine.

`aot` takes a `Launch`, or a kernel and its arguments, and compiles exactly what that
launch would compile on the named GPU. Triton itself derives types and divisibility from
the arguments: `aot` calls `kernel.warmup` while Triton's driver object is one that
claims to be that GPU. Compiling needs no GPU, because Triton's wheel brings NVIDIA's
assembler (`ptxas`) and disassembler. It happens in the compiler's world (see
`process.call_in`), so it changes nothing for the interpreter or for a GPU at hand.

After `torch.compile`, a launch may have other registers than `aot` tells: PyTorch may
set TRITON_PTXAS_PATH to the `ptxas` that it brings, and Triton uses that one for all
later launches of the process. `aot` asks for Triton's own, unless the learner has named
another one. (Triton's cache on disk can't always tell the two apart. Then `aot` shows
the kernel that a launch left there.)

Line numbers are left out (Triton's `disable_line_info`), which keeps the texts readable
and changes no instruction.

Weighed: `triton.compile(ASTSource(...))` compiles ahead of time too, but needs the
signature, constants and divisibility written out by hand; `triton.tools.disasm` prints
SASS with control codes, which is more than a course needs.
"""

import functools
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import make_backend
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.cache import get_cache_manager
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kernels.lab import process
from kernels.lab.gpu import Gpu, named
from kernels.lab.launch import Launch, Pointer, pointer_to

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")

BareLaunch = tuple[Any, tuple, dict[str, Any]]
"""A kernel, its positional arguments, and its keyword arguments."""


def pointer(dtype: torch.dtype, aligned: bool = True) -> Pointer:
    """Returns an argument for `aot` in place of a tensor, where there is no tensor.

    Args:
        dtype: the dtype of the elements.
        aligned: whether the address is a multiple of 16 bytes, as a new tensor's is.

    Raises:
        TypeError: dtype is not a torch.dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    return Pointer(dtype, aligned)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, stage by stage.

    Attributes:
        name: the kernel's name.
        gpu: the GPU that it was compiled for.
        num_warps: warps per block.
        num_stages: stages of the software pipeline.
        registers: 32-bit registers per thread.
        spills: bytes per thread that did not fit into registers and are stored to
            memory instead. Functions that are not inlined spill apart from it.
        shared: bytes of shared memory per block.
        ttir, ttgir, llir, ptx: Triton's two intermediate representations, LLVM's, and
        NVIDIA's virtual assembly. A Gluon kernel has no TTIR: it begins as TTGIR.
        cubin: the machine code, as the driver loads it.
        key: a hash of everything that decides the machine code: source, constants,
            specialisation, options, GPU. Launches of one key share a compiled kernel.
    """

    name: str
    gpu: Gpu = field(repr=False)
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared: int
    ttir: str = field(repr=False)
    ttgir: str = field(repr=False)
    llir: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    key: str = field(repr=False)

    def __str__(self) -> str:
        warps = f"{self.num_warps} warp{'s' if self.num_warps > 1 else ''}"
        return (
            f"{self.name} for {self.gpu.name}, {warps}: "
            f"{self.registers} registers and {self.spills} spilled bytes per thread, "
            f"{self.shared} bytes of shared memory per block"
        )

    @functools.cached_property
    def sass(self) -> str:
        """The machine code as text: instructions and labels, without addresses."""
        text = tool("nvdisasm", self.cubin, "--print-code")
        found = re.findall(r"^(\.L\w+:)|^\s+/\*\w{4,}\*/\s+(.*?) *;", text, re.M)
        return "\n".join(label or f"    {code}" for label, code in found)

    def lines(self, pattern: str, stage: str = "ptx") -> list[str]:
        """Returns the lines of a stage in which a regular expression is found.

        Args:
            pattern: a regular expression, such as r"ld\\.global".
            stage: "ttir", "ttgir", "llir", "ptx" or "sass".

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in STAGES:
            raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")
        text = getattr(self, stage).splitlines()
        return [line.strip() for line in text if re.search(pattern, line)]

    def count(self, pattern: str, stage: str = "ptx") -> int:
        """Returns how many lines of a stage match; see `lines`."""
        return len(self.lines(pattern, stage))


def bare(launch: Launch) -> BareLaunch:
    """A launch's kernel, its positional arguments and its keyword arguments.

    In place of each tensor there is a `Pointer`.
    """
    words = (Pointer(torch.int64), 1) if launch.n_words else ()
    args = *launch.pointers, *words, *launch.scalars
    return launch.kernel, args, dict(launch.constants)


def aot(
    kernel: Launch | Any, *args: Any, gpu: Gpu | str = "H200", **options: Any
) -> Compiled:
    """Compiles what a launch would compile on a GPU.

    Two forms: `aot(launch, gpu="T4")` for a `Launch`, and
    `aot(kernel, *args, gpu="T4", **options)` for `kernel[grid](*args, **options)`.

    Args:
        kernel: a `Launch`, or a `@triton.jit` function, also with `triton.heuristics`.
        args: the kernel's arguments: numbers, and for each tensor a tensor on any
            device (only its dtype and its address modulo 16 matter) or
            `pointer(dtype)`. A `Launch` has its own.
        gpu: the GPU to compile for, or its name in `gpu.named`.
        options: the kernel's remaining arguments, and launch options such as num_warps.

    Raises:
        TypeError: kernel is neither a kernel nor a `Launch`; an argument is missing, is
            of an unknown type, or was given beside a `Launch`.
        ValueError: no such GPU.
        KeyError: an option that is neither an argument nor a launch option.
        triton.CompilationError: the kernel does not compile.
    """
    if isinstance(kernel, Launch) and (args or options):
        raise TypeError(
            "a Launch already has its arguments, so no others must be given, got "
            f"{len(args) + len(options)}; dataclasses.replace makes a changed Launch"
        )
    launch = kernel if isinstance(kernel, Launch) else (kernel, args, options)
    return aot_all([launch], gpu=gpu)[0]


def aot_all(
    launches: Iterable[Launch | BareLaunch], *, gpu: Gpu | str = "H200"
) -> list[Compiled]:
    """Compiles many launches, on all cores at once; see `aot`.

    Args:
        launches: `Launch` objects, or tuples of a kernel, its positional arguments and
            its keyword arguments.
        gpu: the GPU to compile for, or its name in `gpu.named`.

    Raises:
        TypeError, ValueError, KeyError, triton.CompilationError: as `aot`.
    """
    gpu = gpu if isinstance(gpu, Gpu) else named(gpu)
    sent = []
    for launch in launches:
        if isinstance(launch, Launch):
            launch = bare(launch)
        kernel, args, options = launch
        _check_kernel(kernel)
        constants = {name: without_data(value) for name, value in options.items()}
        sent.append((kernel, tuple(map(without_data, args)), constants))
    return process.call_in("compiler", _compile, sent, gpu)


def _check_kernel(kernel: Any) -> None:
    if isinstance(kernel, Autotuner):
        raise TypeError(
            "kernel is autotuned, so a launch may compile any of its configurations; "
            "pass the function that triton.autotune wraps, kernel.fn, and one "
            "configuration's options"
        )
    inner = kernel.fn if isinstance(kernel, Heuristics) else kernel
    if not isinstance(inner, JITFunction | InterpretedFunction):
        raise TypeError(
            f"kernel must be a @triton.jit function or a Launch, got {kernel!r}"
        )


def without_data(value: Any) -> Any:
    """Returns what the compiler sees of a tensor; any other value as it is."""
    return pointer_to(value) if isinstance(value, torch.Tensor) else value


# ---- in the compiler's world ---------------------------------------------------------


class Target:
    """A Triton driver that compiling can ask, with one "device" per capability."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(launches: list[BareLaunch], gpu: Gpu) -> list[Compiled]:
    triton.runtime.driver.set_active(Target(gpu.compute_capability))
    triton.knobs.compilation.disable_line_info = True
    _keep_spills()
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        kernels = [
            kernel.warmup(*args, grid=(1,), **options)
            for kernel, args, options in launches
        ]
        # A kernel that is being compiled is a promise, and its result may be an error.
        # Triton 3.9 forgets the error when the mode ends, so it is asked for before.
        promised = triton.FutureKernel
        kernels = [k.result() if isinstance(k, promised) else k for k in kernels]
    return [_read(kernel, gpu) for kernel in kernels]


def _read(kernel: Any, gpu: Gpu) -> Compiled:
    if kernel.hash not in _resources:
        _resources[kernel.hash] = _count_resources(kernel)
    registers, spills = _resources[kernel.hash]
    return Compiled(
        name=kernel.name,
        gpu=gpu,
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        registers=registers,
        spills=spills,
        shared=kernel.metadata.shared + _reserved(kernel.asm["ptx"]),
        ttir=_without_locations(kernel.asm.get("ttir", "")),
        ttgir=_without_locations(kernel.asm["ttgir"]),
        llir=kernel.asm["llir"],
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        key=kernel.hash,
    )


_resources: dict[str, tuple[int, int]] = {}


def _count_resources(kernel: Any) -> tuple[int, int]:
    """Returns the registers and the spilled bytes per thread."""
    usage = tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return registers, _spills(kernel) if stack else 0


def _reserved(ptx: str) -> int:
    """The shared memory that inline PTX reserves, in bytes: Triton counts none."""
    return sum(map(int, re.findall(r"\.shared [^;\[]*\[(\d+)\]", ptx)))


@functools.cache  # once in a process
def _keep_spills() -> None:
    """From here on, the spills that `ptxas` logs are kept beside the machine code."""
    assemble, said = CUDABackend.make_cubin, threading.local()

    def make_cubin(backend: Any, ptx: str, metadata: dict, *rest: Any) -> bytes:
        cubin = assemble(backend, ptx, metadata, *rest)
        if "hash" in metadata:  # `stages` assembles what is in no cache
            found = rf"properties for {metadata['name']}\n.*?(\d+) bytes spill stores"
            n_bytes = re.search(found, said.log, re.DOTALL)[1]
            _kept(metadata["hash"], "spills", lambda: n_bytes)
        return cubin

    triton.knobs.nvidia.dump_ptxas_log = True  # Triton prints it; here nobody reads it
    nvidia.print = functools.partial(setattr, said, "log")
    CUDABackend.make_cubin = make_cubin


def _spills(kernel: Any) -> int:
    """The bytes per thread. What a launch left in the cache is assembled once more."""
    name = f"spills-{triton.__version__}.txt"
    kept = functools.partial(get_cache_manager(kernel.hash).get_file, name)
    if kept() is None:
        metadata, target = kernel.metadata, kernel.metadata.target
        named = {"hash": kernel.hash, "name": kernel.name}
        make_backend(target).make_cubin(kernel.asm["ptx"], named, metadata, target.arch)
    return int(Path(kept()).read_text())


def _kept(key: str, name: str, make: Callable[[], str]) -> str:
    """What `make` returns. Triton's cache on disk keeps it for the next process.

    Args:
        key: hexadecimal, of all that the text depends on, but for its name and Triton.
        name: of the file.
    """
    cache, name = get_cache_manager(key), f"{name}-{triton.__version__}.txt"
    if (path := cache.get_file(name)) is None:
        path = cache.put(make(), name, binary=False)
    return Path(path).read_text()


def _without_locations(ir: str) -> str:
    ir = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", ir)
    return re.sub(r"^#loc.*\n", "", ir, flags=re.M)


@functools.lru_cache(maxsize=256)
def tool(name: str, cubin: bytes, *options: str) -> str:
    """Runs a binary utility of Triton's wheel on machine code; drops its warnings.

    A second call for the same finds what the first one printed.

    Args:
        name: "nvdisasm" or "cuobjdump".
        cubin: the machine code.
        options: of the command line, before the file's name.

    Returns:
        What the utility prints.

    Raises:
        RuntimeError: the utility fails.
    """
    said = "-".join((name, *options))
    made = functools.partial(_run, name, cubin, options)
    return _kept(hashlib.sha256(cubin).hexdigest(), said, made)


def _run(name: str, cubin: bytes, options: tuple[str, ...]) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout
