"""How many blocks of a kernel are resident on one SM at a time, and what limits them.

`resident` is the arithmetic of NVIDIA's own occupancy calculator, `cuda_occupancy.h` of
the CUDA toolkit, for compute capability 7.5 and newer. `by_driver` asks the driver of a
GPU. The two must agree: `table` collects the driver's answers, and the tests compute
every answer again.

Four facts that are easy to forget: an SM takes at most 32 blocks, however small they
are (16 or 24 on some GPUs). A warp gets its registers in units of 256. They come from
the quarter of the SM on which the warp runs. And since compute capability 8.0 the
driver keeps 1 KiB of shared memory for itself with every block.

Weighed: Nsight Compute has an occupancy calculator, for a person at a screen; Triton
and PyTorch have none.
"""

import ctypes
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernels.lab import compile
from kernels.lab import gpu as gpus
from kernels.lab.compile import BareLaunch, Compiled
from kernels.lab.gpu import Gpu
from kernels.lab.launch import Launch

SM_PARTITIONS = 4  # quarters of an SM, each with a quarter of its registers
DEFAULT_SHARED_PER_BLOCK = 48 * 1024  # above this, a kernel must opt in


@dataclass(frozen=True)
class Occupancy:
    """Residency of a kernel on one SM.

    Attributes:
        blocks_per_sm: blocks that are resident together; 0 means that the kernel
            cannot run.
        warps_per_sm: the warps of these blocks.
        share: the threads of these blocks, as a share of the threads that the SM can
            hold. NVIDIA's tools call this ratio occupancy.
        limits: how many blocks each resource alone would allow; `math.inf` for a
            resource that the kernel does not use.
    """

    blocks_per_sm: int
    warps_per_sm: int
    share: float
    limits: dict[str, int | float]

    @property
    def limit(self) -> str:
        """The resource that allows the fewest blocks; of several, the first."""
        return min(self.limits, key=self.limits.get)

    def __str__(self) -> str:
        limits = ", ".join(
            f"{name} {'any' if n == math.inf else n}" for name, n in self.limits.items()
        )
        return (
            f"resident blocks per SM: {self.blocks_per_sm}, limited by {self.limit} "
            f"({limits})"
        )


def resident(gpu: Gpu, *, num_warps: int, registers: int, shared: int) -> Occupancy:
    """Computes how many blocks of a kernel one SM holds at a time.

    Args:
        gpu: the GPU whose limits count.
        num_warps: warps per block.
        registers: 32-bit registers per thread.
        shared: bytes of shared memory per block.

    Returns:
        The residency, with the limits "threads", "blocks", "registers" and "shared
        memory". A GPU also limits the barriers of an SM. That is never the lowest limit
        of a kernel with one barrier, and the course's kernels have one.

    Raises:
        TypeError: num_warps, registers or shared is not an integer.
        ValueError: num_warps is below 1, or registers or shared is negative.

    Source: cudaOccMaxActiveBlocksPerMultiprocessor in cuda_occupancy.h, CUDA 13.0.
    """
    for name, value, least in (
        ("num_warps", num_warps, 1),
        ("registers", registers, 0),
        ("shared", shared, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")

    limits = {
        "threads": _by_threads(gpu, num_warps),
        "blocks": gpu.blocks_per_sm,
        "registers": _by_registers(gpu, num_warps, registers),
        "shared memory": _by_shared(gpu, shared),
    }
    blocks = min(limits.values())
    warps = blocks * num_warps
    share = warps * gpu.warp_size / gpu.threads_per_sm
    return Occupancy(blocks, warps, share, limits)


def _by_threads(gpu: Gpu, num_warps: int) -> int:
    if num_warps * gpu.warp_size > gpu.threads_per_block:
        return 0
    return gpu.threads_per_sm // gpu.warp_size // num_warps


def _by_registers(gpu: Gpu, num_warps: int, registers: int) -> int | float:
    if registers == 0:
        return math.inf
    per_warp = _round_up(registers * gpu.warp_size, gpu.register_granularity)
    # A launch is checked as if the block's warps filled every quarter of the SM evenly.
    checked = per_warp * _round_up(num_warps, SM_PARTITIONS)
    if registers > gpu.max_registers_per_thread or checked > gpu.registers_per_block:
        return 0
    warps_per_partition = gpu.registers_per_sm // SM_PARTITIONS // per_warp
    return warps_per_partition * SM_PARTITIONS // num_warps


def _by_shared(gpu: Gpu, shared: int) -> int | float:
    reserved = gpu.shared_reserved_per_block
    per_block = _round_up(shared + reserved, gpu.shared_granularity)
    if per_block == 0:
        return math.inf
    if per_block > gpu.shared_per_block + reserved:
        return 0
    return gpu.shared_per_sm // per_block


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def of(kernel: Compiled | Launch, gpu: Gpu | None = None) -> Occupancy:
    """Computes the residency of a compiled kernel, or of the kernel of a launch.

    Args:
        kernel: what `compile.aot` returned, or a `Launch`, which is compiled first.
        gpu: the GPU to compute for. None means the GPU that the kernel was compiled
            for, and for a `Launch` the GPU of this machine, or the H200 if there is
            none (`gpu.here`).

    Raises:
        TypeError: kernel is neither.
    """
    if isinstance(kernel, Launch):
        gpu = gpu or gpus.here()
        kernel = compile.aot(kernel, gpu=gpu)
    if not isinstance(kernel, Compiled):
        raise TypeError(
            f"kernel must be what compile.aot returns, or a Launch, got {kernel!r}"
        )
    return resident(
        gpu or kernel.gpu,
        num_warps=kernel.num_warps,
        registers=kernel.registers,
        shared=kernel.shared,
    )


def by_driver(compiled: Compiled) -> int:
    """Asks the driver of this machine's GPU how many blocks one of its SMs holds.

    Loads the machine code, opts in to the shared memory that it needs as a launch
    would, and calls cuOccupancyMaxActiveBlocksPerMultiprocessor. Nothing is launched.

    Raises:
        RuntimeError: there is no GPU; the kernel was compiled for another compute
            capability; or a call of the driver fails (the message names the call).
    """
    here = gpus.current()
    if here.compute_capability != compiled.gpu.compute_capability:
        raise RuntimeError(
            f"{compiled.name} was compiled for {compiled.gpu.name}, whose machine code "
            f"{here.name} cannot load; compile it with gpu=gpu.current()"
        )
    gpus.driver("cuCtxPushCurrent_v2", _context())
    try:
        return _ask(compiled, here)
    finally:
        gpus.driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _context() -> ctypes.c_void_p:
    """The context that PyTorch uses too. It is kept, because making it is slow."""
    context = ctypes.c_void_p()
    gpus.driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    return context


def _ask(compiled: Compiled, here: Gpu) -> int:
    module, function, blocks = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    gpus.driver("cuModuleLoadData", ctypes.byref(module), compiled.cubin)
    try:
        name = compiled.name.encode()
        gpus.driver("cuModuleGetFunction", ctypes.byref(function), module, name)
        if DEFAULT_SHARED_PER_BLOCK < compiled.shared <= here.shared_per_block:
            attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            gpus.driver("cuFuncSetAttribute", function, attribute, compiled.shared)
        gpus.driver(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(blocks),
            function,
            compiled.num_warps * here.warp_size,
            ctypes.c_size_t(compiled.shared),
        )
        return blocks.value
    finally:
        gpus.driver("cuModuleUnload", module)


def table(
    launches: Iterable[tuple[Mapping[str, Any], Launch | BareLaunch]],
) -> list[dict[str, Any]]:
    """Compiles launches for this machine's GPU, and asks its driver about each kernel.

    Args:
        launches: pairs of a row's labels and a launch in either form that
            `compile.aot_all` takes. Rows too long for the registers of their warps take
            seconds each to compile.

    Returns:
        One row per launch: its labels, then num_warps, registers (per thread),
        shared_bytes (per block) and blocks_per_sm_driver.

    Raises:
        RuntimeError: there is no GPU to ask.
    """
    here, pairs = gpus.current(), list(launches)
    made = compile.aot_all([launch for _, launch in pairs], gpu=here)
    return [
        {
            **labels,
            "num_warps": compiled.num_warps,
            "registers": compiled.registers,
            "shared_bytes": compiled.shared,
            "blocks_per_sm_driver": by_driver(compiled),
        }
        for (labels, _), compiled in zip(pairs, made, strict=True)
    ]
