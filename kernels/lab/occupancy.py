"""How many blocks of a kernel live on one SM at a time, and what stops the next one.

`resident` is the arithmetic of NVIDIA's own occupancy calculator, `cuda_occupancy.h` of
the CUDA toolkit, for compute capability 7.5 and newer. `by_driver` asks the driver of a
GPU. The two must agree: `table` collects the driver's answers, and the tests compute
every one of them.

What is easily forgotten: an SM takes at most 32 blocks, however small they are (16 or
24 on some GPUs); registers are handed out by the warp, in units of 256, from that
quarter of the SM on which the warp runs; and since compute capability 8.0 the driver
keeps 1 KiB of shared memory for itself with every block.

Weighed: Nsight Compute has an occupancy calculator, for a person at a screen; Triton
and PyTorch have none.
"""

import ctypes
import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lab import compile
from kernels.lab import gpu as gpus
from kernels.lab.compile import Compiled
from kernels.lab.gpu import Gpu

SM_PARTITIONS = 4  # quarters of an SM, each with a quarter of its registers
DEFAULT_SHARED_PER_BLOCK = 48 * 1024  # above this, a kernel must opt in
ROWS = 4096  # of the tensors that `table` compiles for


@dataclass(frozen=True)
class Occupancy:
    """Residency of a kernel on one SM.

    Attributes:
        blocks_per_sm: blocks that are resident together; 0 means that it cannot run.
        warps_per_sm: their warps.
        share: their threads, as a share of those that the SM could hold (this ratio is
            what NVIDIA's tools call occupancy).
        limits: how many blocks each resource alone would allow; `math.inf` for one that
            the kernel does not use.
    """

    blocks_per_sm: int
    warps_per_sm: int
    share: float
    limits: dict[str, int | float]

    @property
    def limit(self) -> str:
        """The resource that binds: the first of the lowest in `limits`."""
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
        gpu: the GPU.
        num_warps: warps per block.
        registers: 32-bit registers per thread.
        shared: bytes of shared memory per block.

    Returns:
        The residency, with the four limits "threads", "blocks", "registers" and "shared
        memory". A fifth, on barriers, binds no kernel of one barrier, as Triton's are.

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


def of(compiled: Compiled, gpu: Gpu | None = None) -> Occupancy:
    """Residency of a compiled kernel on the GPU it was compiled for, or on another.

    Raises:
        TypeError: compiled is not a Compiled.
    """
    if not isinstance(compiled, Compiled):
        raise TypeError(f"compiled must be what compile.aot returns, got {compiled!r}")
    return resident(
        gpu or compiled.gpu,
        num_warps=compiled.num_warps,
        registers=compiled.registers,
        shared=compiled.shared,
    )


def by_driver(compiled: Compiled) -> int:
    """Asks the driver of this machine's GPU how many blocks one of its SMs holds.

    Loads the machine code, opts in to the shared memory that it needs, as a launch
    would, and calls cuOccupancyMaxActiveBlocksPerMultiprocessor. Launches nothing.

    Raises:
        RuntimeError: there is no GPU, or not of the kind that the kernel was compiled
            for, or a call of the driver fails (the message names it).
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
    """The context that PyTorch uses too; kept, because making one is slow."""
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


def arguments(
    kernel: Any, dtype: torch.dtype, block_cols: int, num_stages: int
) -> tuple:
    """The arguments of a launch on ROWS contiguous rows of block_cols values.

    They follow from the parameters' names, which mean the same throughout the course.

    Raises:
        ValueError: the kernel has a parameter of another name.
    """
    values = {
        "n_rows": ROWS,
        "n_cols": block_cols,
        "n_elements": ROWS * block_cols,
        "input_row_stride": block_cols,
        "output_row_stride": block_cols,
        "input_col_stride": 1,
        "output_col_stride": 1,
        "BLOCK": block_cols,
        "BLOCK_COLS": block_cols,
        "ROWS_PER_TILE": 1,
        "NUM_STAGES": num_stages,
    }
    result = []
    for name in inspect.signature(kernel.fn).parameters:
        if not name.endswith("_ptr") and name not in values:
            raise ValueError(
                f"kernel must have parameters that end in _ptr or are one of "
                f"{sorted(values)}, got {name!r} in {kernel.fn.__name__}"
            )
        result.append(values.get(name, compile.pointer(dtype)))
    return tuple(result)


def table(
    kernels: Iterable[Any],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    block_cols: Sequence[int] = (512, 2048, 4096),
    num_warps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    num_stages: Sequence[int] = (1, 2, 3, 4),
) -> list[dict[str, Any]]:
    """Compiles kernels in many configurations, and asks the GPU's driver about each.

    Args:
        kernels: Triton kernels, launched with `arguments`.
        dtypes, block_cols, num_warps, num_stages: every combination of these is tried.
            Rows too long for their warps' registers take seconds each to compile.

    Returns:
        One row per configuration: kernel (module and function), dtype, block_cols,
        num_warps, num_stages, registers (per thread), shared_bytes (per block),
        blocks_per_sm_driver.

    Raises:
        RuntimeError: there is no GPU to ask.
        ValueError: a kernel's parameters are not those that `arguments` knows.
    """
    here = gpus.current()
    rows, launches = [], []
    for kernel, dtype, cols, warps, stages in itertools.product(
        kernels, dtypes, block_cols, num_warps, num_stages
    ):
        options = {"num_warps": warps, "num_stages": stages}
        launches.append((kernel, arguments(kernel, dtype, cols, stages), options))
        module = kernel.fn.__module__.rpartition(".")[2]
        rows.append(
            {
                "kernel": f"{module}.{kernel.fn.__name__}",
                "dtype": str(dtype).removeprefix("torch."),
                "block_cols": cols,
                **options,
            }
        )
    for row, compiled in zip(rows, compile.aot_all(launches, gpu=here), strict=True):
        row["registers"] = compiled.registers
        row["shared_bytes"] = compiled.shared
        row["blocks_per_sm_driver"] = by_driver(compiled)
    return rows
