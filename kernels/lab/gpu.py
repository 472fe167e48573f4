"""Facts about GPUs: how much one SM holds, how many SMs there are, how much memory.

`current()` reads them from the driver of the GPU at hand. `named("L4")` has them for
GPUs that are widely met, so that everything the course computes from such facts can be
computed for a GPU that is not there. `of(name)` has them for the GPU that a recorded
measurement names. `free_bytes()` says how much memory a measurement may fill.

Sources. What one SM holds follows from the compute capability: the table "Technical
Specifications per Compute Capability" of the CUDA Programming Guide,
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html.
The units in which registers and shared memory are allocated: `cuda_occupancy.h` of the
CUDA toolkit. How many SMs a product has, its L2 cache and its memory: the `source` of
each GPU.

Weighed: `torch.cuda.get_device_properties` and Triton's driver module report some of
these facts, but neither blocks per SM nor the reserved shared memory, and only of a GPU
that is there.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lab import backend

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a GPU has; sizes in bytes, bandwidth in GB/s (1e9 bytes per second).

    Attributes:
        name: as the driver reports it.
        compute_capability: major * 10 + minor, 90 for Hopper.
        sms: streaming multiprocessors.
        registers_per_sm: 32-bit registers of one SM.
        registers_per_block: the most registers that one block may use.
        max_registers_per_thread: the most registers that one thread can address.
        register_granularity: a warp gets its registers in multiples of this.
        shared_per_sm: shared memory of one SM.
        shared_per_block: the most shared memory that a kernel can ask for (with the
            opt-in call that Triton makes for every kernel above 48 KiB).
        shared_reserved_per_block: shared memory that the driver keeps for each block.
        shared_granularity: a block gets its shared memory in multiples of this.
        threads_per_sm: resident threads of one SM, at most.
        threads_per_block: threads of one block, at most.
        blocks_per_sm: resident blocks of one SM, at most.
        warp_size: threads of a warp.
        l2_bytes: L2 cache.
        peak_bandwidth_gbps: bandwidth of the memory by the datasheet; a copy reaches
            less.
        source: where sms, l2_bytes and peak_bandwidth_gbps are from.
    """

    name: str
    compute_capability: int
    sms: int
    threads_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    shared_reserved_per_block: int
    shared_granularity: int
    l2_bytes: int
    peak_bandwidth_gbps: float
    source: str
    registers_per_sm: int = 64 * KIB
    registers_per_block: int = 64 * KIB
    max_registers_per_thread: int = 255
    register_granularity: int = 256
    threads_per_block: int = 1024
    warp_size: int = 32


def _sm(
    threads: int,
    blocks: int,
    shared: int,
    shared_per_block: int,
    granularity: int = 128,
) -> dict[str, int]:
    """One SM, in KiB; the driver reserves the shared memory that no block can have."""
    return {
        "threads_per_sm": threads,
        "blocks_per_sm": blocks,
        "shared_per_sm": shared * KIB,
        "shared_per_block": shared_per_block * KIB,
        "shared_reserved_per_block": (shared - shared_per_block) * KIB,
        "shared_granularity": granularity,
    }


_SM = {  # by compute capability
    75: _sm(threads=1024, blocks=16, shared=64, shared_per_block=64, granularity=256),
    80: _sm(threads=2048, blocks=32, shared=164, shared_per_block=163),
    86: _sm(threads=1536, blocks=16, shared=100, shared_per_block=99),
    89: _sm(threads=1536, blocks=24, shared=100, shared_per_block=99),
    90: _sm(threads=2048, blocks=32, shared=228, shared_per_block=227),
    100: _sm(threads=2048, blocks=32, shared=228, shared_per_block=227),
    120: _sm(threads=1536, blocks=24, shared=100, shared_per_block=99),
}

_PRODUCTS = {  # name, compute capability, SMs, L2 in bytes, GB/s
    "T4": ("Tesla T4", 75, 40, 4 * MIB, 320.0),
    "A100": ("NVIDIA A100-SXM4-80GB", 80, 108, 40 * MIB, 2039.0),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", 86, 82, 6 * MIB, 936.0),
    "L4": ("NVIDIA L4", 89, 58, 48 * MIB, 300.0),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 89, 128, 72 * MIB, 1008.0),
    "H100": ("NVIDIA H100 80GB HBM3", 90, 132, 50 * MIB, 3350.0),
    "H200": ("NVIDIA H200", 90, 132, 60 * MIB, 4800.0),
    "B200": ("NVIDIA B200", 100, 148, 253 * MIB // 2, 8000.0),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 120, 170, 96 * MIB, 1792.0),
}

_DRIVER = "SMs and L2 as the driver reports them"
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_PAPERS = "https://images.nvidia.com/aem-dam"
_SOURCES = {
    "T4": f"{_DRIVER}; bandwidth: T4 datasheet, {_NVIDIA}/tesla-t4/",
    "A100": "NVIDIA A100 Tensor Core GPU Architecture, "
    f"{_PAPERS}/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf; "
    f"bandwidth: A100 datasheet (80 GB, SXM), {_NVIDIA}/a100/",
    "RTX 3090": "NVIDIA Ampere GA102 GPU Architecture, https://www.nvidia.com/content/"
    "PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    "L4": f"{_DRIVER}; bandwidth: L4 datasheet, {_NVIDIA}/l4/",
    "RTX 4090": "NVIDIA Ada GPU Architecture, "
    f"{_PAPERS}/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    "H100": f"{_DRIVER}; bandwidth: H100 datasheet (SXM), {_NVIDIA}/h100/",
    "H200": f"{_DRIVER}; bandwidth: H200 datasheet, {_NVIDIA}/h200/",
    "B200": f"{_DRIVER} (L2: 126 MB in the Blackwell Tuning Guide, "
    "https://docs.nvidia.com/cuda/blackwell-tuning-guide/); bandwidth: an eighth of "
    f"the 64 TB/s of a DGX B200, which has eight, {_NVIDIA}/dgx-b200/",
    "RTX 5090": "NVIDIA RTX Blackwell GPU Architecture, "
    f"{_PAPERS}/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
}


def _documented(key: str) -> Gpu:
    name, capability, sms, l2_bytes, bandwidth = _PRODUCTS[key]
    return Gpu(
        name=name,
        compute_capability=capability,
        sms=sms,
        l2_bytes=l2_bytes,
        peak_bandwidth_gbps=bandwidth,
        source=_SOURCES[key],
        **_SM[capability],
    )


_DOCUMENTED = {key: _documented(key) for key in _PRODUCTS}


def named(name: str) -> Gpu:
    """A documented GPU, by its short name.

    Args:
        name: "T4", "A100" (SXM, 80 GB), "RTX 3090", "L4", "RTX 4090", "H100" (SXM,
            80 GB), "H200", "B200" or "RTX 5090".

    Raises:
        TypeError: name is not a string.
        ValueError: no documented GPU has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'H200', got {name!r}")
    if name not in _DOCUMENTED:
        raise ValueError(f"name must be one of {', '.join(_DOCUMENTED)}; got {name!r}")
    return _DOCUMENTED[name]


def documented() -> dict[str, Gpu]:
    """Every documented GPU, by the short name that `named` takes."""
    return dict(_DOCUMENTED)


def of(name: str) -> Gpu:
    """The GPU that the driver calls `name`, such as "NVIDIA H200".

    Args:
        name: as the column `gpu` of a recorded measurement has it.

    Returns:
        The GPU of this machine where it has that name, else the documented one.

    Raises:
        ValueError: neither this machine's GPU nor a documented one has this name.
    """
    if backend.has_gpu() and current().name == name:
        return current()
    by_name = {gpu.name: gpu for gpu in _DOCUMENTED.values()}
    if name not in by_name:
        known = ", ".join(map(repr, by_name))
        raise ValueError(
            f"name must be the driver's full name for this machine's GPU, or for a "
            f"documented GPU ({known}), got {name!r}"
        )
    return by_name[name]


@functools.cache
def current() -> Gpu:
    """The first GPU of this machine; its driver is asked once.

    The peak bandwidth of a documented GPU is the documented one. That of another GPU is
    computed: two transfers per cycle of the memory's clock, over the bus's width.

    Raises:
        RuntimeError: there is no GPU, or the driver does not answer.
    """
    if not backend.has_gpu():
        raise RuntimeError(
            "there is no CUDA GPU here to read; gpu.named('H200') has documented facts"
        )
    driver("cuInit", 0)
    device = ctypes.c_int()
    driver("cuDeviceGet", ctypes.byref(device), 0)
    buffer = ctypes.create_string_buffer(256)
    driver("cuDeviceGetName", buffer, len(buffer), device)
    name = buffer.value.decode()

    def read(attribute: str) -> int:
        value = ctypes.c_int()
        number = _ATTRIBUTES[attribute]
        driver("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    documented = {gpu.name: gpu.peak_bandwidth_gbps for gpu in _DOCUMENTED.values()}
    bytes_per_ms = 2 * read("MEMORY_CLOCK_RATE") * read("GLOBAL_MEMORY_BUS_WIDTH") / 8
    major = read("COMPUTE_CAPABILITY_MAJOR")
    return Gpu(
        name=name,
        compute_capability=10 * major + read("COMPUTE_CAPABILITY_MINOR"),
        sms=read("MULTIPROCESSOR_COUNT"),
        threads_per_sm=read("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks_per_sm=read("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        shared_per_sm=read("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        shared_per_block=read("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_reserved_per_block=read("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        shared_granularity=128 if major >= 8 else 256,
        l2_bytes=read("L2_CACHE_SIZE"),
        peak_bandwidth_gbps=documented.get(name, round(bytes_per_ms / 1e6)),
        source="the driver of this machine",
        registers_per_sm=read("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        registers_per_block=read("MAX_REGISTERS_PER_BLOCK"),
        threads_per_block=read("MAX_THREADS_PER_BLOCK"),
        warp_size=read("WARP_SIZE"),
    )


def here() -> Gpu:
    """The GPU that kernels run on here; where they are interpreted, the H200."""
    on_gpu = backend.has_gpu() and not backend.INTERPRETED
    return current() if on_gpu else named("H200")


SMALLEST_BYTES = 14 * 10**9
"""The memory in which every chapter runs: what a T4 leaves to a learner."""


def free_bytes() -> int:
    """How much of the GPU's memory new tensors of this process can have, in bytes.

    Memory that PyTorch keeps for reuse counts as free. A limit on the process, set by
    COURSE_GPU_GB or `torch.cuda.set_per_process_memory_fraction`, is kept. Where
    kernels cannot run on a GPU, the answer is `SMALLEST_BYTES`, so that shapes that are
    chosen by it are those of a small GPU.
    """
    if backend.INTERPRETED or not torch.cuda.is_available():
        return SMALLEST_BYTES
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.memory_allocated()
    limit = int(torch.cuda.get_per_process_memory_fraction() * total)
    return max(0, min(free + torch.cuda.memory_reserved() - used, limit - used))


_ATTRIBUTES = {  # CU_DEVICE_ATTRIBUTE_… of cuda.h
    "MAX_THREADS_PER_BLOCK": 1,
    "WARP_SIZE": 10,
    "MAX_REGISTERS_PER_BLOCK": 12,
    "MULTIPROCESSOR_COUNT": 16,
    "MEMORY_CLOCK_RATE": 36,  # kHz
    "GLOBAL_MEMORY_BUS_WIDTH": 37,  # bits
    "L2_CACHE_SIZE": 38,
    "MAX_THREADS_PER_MULTIPROCESSOR": 39,
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 81,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 82,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 97,
    "MAX_BLOCKS_PER_MULTIPROCESSOR": 106,
    "RESERVED_SHARED_MEMORY_PER_BLOCK": 111,
}


def driver(function: str, *arguments: Any) -> None:
    """Calls a function of the CUDA driver API.

    Args:
        function: its name in the library, such as "cuInit".
        arguments: ctypes values; a Python integer is passed as a C int.

    Raises:
        RuntimeError: the driver cannot be loaded, lacks the function, or the call
            returned an error; the message names the call and the error.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        code = getattr(library, function)(*arguments)
    except (OSError, AttributeError) as error:
        message = f"the CUDA driver has no {function} here: {error}"
        raise RuntimeError(message) from error
    if code != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        name = text.value.decode() if text.value else "an unknown error"
        raise RuntimeError(f"{function} of the CUDA driver failed: {name} ({code})")
