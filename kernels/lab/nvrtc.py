"""CUDA C++, compiled while the program runs, and launched on PyTorch's tensors.

NVIDIA's compiler NVRTC is a library: it takes C++ as text and gives PTX and machine
code. It needs neither a GPU nor a driver, so `compile` works in both worlds. `run`
launches on a GPU. Both go through NVIDIA's package `cuda.core`, which is optional:
where it is missing, they raise one sentence that says what to install.

Weighed: `torch.utils.cpp_extension.load_inline` (needs nvcc and a C++ compiler, and a
minute for each file), `torch.cuda._compile_kernel` (private, no templates), CuPy's
`RawModule` (a second array library), Numba (Python, not C++).
"""

import functools
import io
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch
import triton

from kernels.lab import backend, clock, gpu, occupancy, record
from kernels.lab.gpu import Gpu


@dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel, or an instance of a template, compiled for a GPU.

    Attributes:
        expression: its name in C++, such as "softmax_block<float, 4, 4>".
        gpu: the GPU that it was compiled for.
        registers, spills: 32-bit registers, and spilled bytes, of a thread.
        shared: bytes of shared memory of a block that the source declares.
        ptx, cubin: NVIDIA's virtual assembly, and the machine code.
        log: what the assembler says (ptxas -v).
        code: what cuda.core loads on a GPU.
    """

    expression: str
    gpu: Gpu = field(repr=False)
    registers: int
    spills: int
    shared: int
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    code: Any = field(repr=False)


@functools.cache
def toolkit() -> tuple[ModuleType, ModuleType, ModuleType]:
    """NVIDIA's packages: cuda.core, and the bindings of its compiler and its driver.

    Raises:
        RuntimeError: they are not installed, or do not work here.
    """
    try:
        import cuda.core
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        series = (torch.version.cuda or "13").partition(".")[0]
        headers = "nvidia-cuda-runtime" + ("-cu12" if series == "12" else "")
        raise RuntimeError(
            f"CUDA C++ needs NVIDIA's package cuda-core, which Python cannot load here "
            f"({error}); install it with: pip install 'cuda-core[cu{series}]' {headers}"
        ) from error
    return cuda.core, nvrtc, driver


def describe() -> str:
    """Says which compiler is here, or what to install."""
    try:
        core, nvrtc, _ = toolkit()
    except RuntimeError as error:
        return str(error)
    version = ".".join(map(str, nvrtc.nvrtcVersion()[1:]))
    return f"CUDA C++ is compiled by NVRTC {version} (cuda-core {core.__version__})."


def observe(
    name: str, function: Callable[[], Iterable[Mapping[str, Any]]]
) -> pd.DataFrame:
    """What only the compiler can tell: asked here where it is installed, or recorded.

    Args, raises: as for `record.observe`. Where nothing is measured, the function is
        called all the same, because compiling needs no GPU.

    Returns:
        The rows, without the columns of `PROVENANCE`.
    """

    def ask() -> Iterable[Mapping[str, Any]]:
        try:
            toolkit()
        except RuntimeError as error:
            raise record.Unavailable(str(error)) from error
        return function()

    if not clock.can_measure():
        try:
            return pd.DataFrame(ask())
        except record.Unavailable as error:
            print(error)
    return record.observe(name, ask).drop(columns=record.PROVENANCE)


def compile(
    code: str,
    expression: str,
    on: Gpu | str | None = None,
    include: Iterable[str | Path] = (),
) -> Compiled:
    """Compiles a kernel. A second call for the same finds the first one's result.

    Args:
        code: CUDA C++.
        expression: the kernel's name, with its arguments if it is a template, such as
            "softmax_warp<float, 4, 32, 8>".
        on: the GPU to compile for, or its name in `gpu.named`; None means the GPU of
            this machine, or the H200 if there is none.
        include: folders of the files that the code includes.

    Raises:
        RuntimeError: cuda-core is not installed, or the code does not compile; then the
            message is the compiler's.
    """
    on = gpu.here() if on is None else gpu.named(on) if isinstance(on, str) else on
    return _compile(code, expression, on, tuple(map(str, include)))


@functools.cache
def _compile(code: str, expression: str, on: Gpu, include: tuple[str, ...]) -> Compiled:
    core, nvrtc, _ = toolkit()
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")  # cuda_fp16.h and others
    options = core.ProgramOptions(
        arch=f"sm_{on.compute_capability}",
        std="c++17",
        include_path=[*include, *filter(None, [found])],
        ftz=True,  # results below 1e-38 become 0, which saves 3 instructions per exp
        ptxas_options="-v",
        # What NVRTC takes from its cache on disk comes without the assembler's log.
        no_cache=tuple(nvrtc.nvrtcVersion()[1:]) >= (12, 9) or None,
    )
    program = core.Program(code, "c++", options)
    log = io.StringIO()
    try:
        made = program.compile("cubin", name_expressions=[expression], logs=log)
    except Exception as error:  # NVRTC's own, whose class cuda.core keeps to itself
        raise RuntimeError(f"{expression} does not compile: {error}") from error
    # cuda.core would ask the driver before it gives PTX away. NVRTC doesn't.
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program.handle)[1])
    nvrtc.nvrtcGetPTX(program.handle, ptx)

    def number(pattern: str) -> int:
        return int((re.findall(pattern, log.getvalue()) or ["0"])[0])

    return Compiled(
        expression=expression,
        gpu=on,
        registers=number(r"Used (\d+) registers"),
        spills=number(r"(\d+) bytes spill stores"),
        shared=number(r"(\d+) bytes smem"),
        ptx=ptx.decode().rstrip("\0"),
        cubin=made.code,
        log=log.getvalue(),
        code=made,
    )


# ---- launching -----------------------------------------------------------------------


@functools.cache
def _loaded(compiled: Compiled, device: int) -> Any:
    """The kernel on a GPU."""
    return compiled.code.get_kernel(compiled.expression)


@functools.cache
def _with_room(compiled: Compiled, device: int) -> Any:
    """The kernel on a GPU, allowed to use all of an SM's shared memory."""
    kernel, driver = _loaded(compiled, device), toolkit()[2]
    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    room = compiled.gpu.shared_per_block - kernel.attributes.shared_size_bytes
    (error,) = driver.cuKernelSetAttribute(name, room, kernel.handle, device)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuKernelSetAttribute of the CUDA driver failed: {error!r}")
    return kernel


class _Ready(threading.local):
    """The GPUs that this thread has a context for: a new thread has none."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ready = _Ready()


def _here() -> int:
    """The current GPU's number, after this thread was given a context for it."""
    device = triton.runtime.driver.active.get_current_device()
    if device not in _ready.devices:
        toolkit()[0].Device(device).set_current()
        _ready.devices.add(device)
    return device


def _kernel(compiled: Compiled, shared: int, device: int) -> Any:
    """The kernel on a GPU, with the permission that so much memory needs."""
    opts_in = compiled.shared + shared > occupancy.DEFAULT_SHARED_PER_BLOCK
    return (_with_room if opts_in else _loaded)(compiled, device)


@functools.cache
def _stream(handle: int) -> Any:
    return toolkit()[0].Stream.from_handle(handle)


@functools.lru_cache(maxsize=4096)
def _prepared(
    compiled: Compiled,
    grid: int,
    block: int | tuple[int, ...],
    shared: int,
    device: int,
) -> tuple[Callable[..., None], Any, Any]:
    """What calls have in common: cuda.core's launch, its configuration, the kernel."""
    core = toolkit()[0]
    config = core.LaunchConfig(grid=grid, block=block, shmem_size=shared)
    return core.launch, config, _kernel(compiled, shared, device)


def require_gpu() -> None:
    """Refuses to go on where no GPU can be used.

    Raises:
        RuntimeError: kernels are interpreted here.
    """
    if backend.INTERPRETED:
        raise RuntimeError(
            "CUDA C++ has no interpreter: it runs on a GPU, and none can be used here "
            f"({backend.obstacle() or 'TRITON_INTERPRET is set'})"
        )


def run(
    compiled: Compiled,
    grid: int,
    block: int | tuple[int, ...],
    *arguments: torch.Tensor | int,
    shared: int = 0,
) -> None:
    """Launches a kernel on PyTorch's current stream.

    What a call has in common with earlier ones is prepared once: the first call of a
    kernel on a grid takes longer.

    Args:
        compiled: the kernel.
        grid: its blocks.
        block: the threads of a block, along up to three axes.
        arguments: the kernel's: a tensor of the GPU for each pointer, an integer for
            each long long. Nothing checks them.
        shared: bytes of shared memory of a block, beside what the source declares.

    Raises:
        RuntimeError: there is no GPU to run it.
    """
    require_gpu()
    device = _here()
    launch, config, kernel = _prepared(compiled, grid, block, shared, device)
    # Triton's driver finds the stream in a tenth of the time of torch.cuda's function.
    handle = triton.runtime.driver.active.get_current_stream(device)
    values = [a if isinstance(a, int) else a.data_ptr() for a in arguments]
    launch(_stream(handle), config, kernel, *values)


def blocks_per_sm(compiled: Compiled, threads: int, shared: int) -> int:
    """How many blocks of a kernel an SM holds at a time.

    The driver answers for the GPU of this machine, by
    cuOccupancyMaxActiveBlocksPerMultiprocessor; `occupancy.resident` for every other.

    Args:
        compiled: the kernel.
        threads: of a block, a multiple of 32.
        shared: bytes of shared memory of a block, beside what the source declares.
    """
    if backend.INTERPRETED or compiled.gpu is not gpu.current():
        facts = {"num_warps": threads // 32, "registers": compiled.registers}
        shared += compiled.shared
        return occupancy.resident(compiled.gpu, **facts, shared=shared).blocks_per_sm
    ask = _kernel(compiled, shared, _here()).occupancy
    return ask.max_active_blocks_per_multiprocessor(threads, shared)
