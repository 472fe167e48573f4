"""The usual driver of a persistent softmax, and what happens where it is wrong.

Chapter `persistent` asks its readers for the driver's four faults. It keeps compiled
kernels by the block alone. It counts registers and shared memory only, and counts them
wrongly. It divides by the kernel's shared memory, which may be 0. Its grid may be
empty.

    from benchmarks import usual
    observed = record.observe("persistent_faults", usual.faults)

Source: Triton's tutorial 2, fused softmax, without its benchmark, and the text listed
    in `book/sources.md` that keeps kernels by the block.
"""

from typing import Any

import torch
import triton

from kernels import persistent
from kernels.lab import backend, clock, process

kept: dict[int, tuple[Any, int]] = {}


def softmax(x: torch.Tensor, num_warps: int = 8, num_stages: int = 4) -> torch.Tensor:
    """Computes the softmax of every row, or fails; for `faults` only."""
    strides, block_cols = (x.stride(0), 1), triton.next_power_of_2(x.shape[1])
    output = torch.empty_like(x)
    args = (output, x, *strides, *strides, *x.shape, 1, block_cols, num_stages)
    if block_cols not in kept:
        # Compile the kernel, and divide what the GPU has by what the kernel needs.
        kernel = persistent.softmax_kernel.warmup(*args, num_warps=num_warps, grid=(1,))
        kernel._init_handles()
        has = triton.runtime.driver.active.utils.get_device_properties(0)
        per_sm = has["max_num_regs"] // (kernel.n_regs * 32 * num_warps)
        per_sm = min(per_sm, has["max_shared_mem"] // kernel.metadata.shared)
        kept[block_cols] = kernel, per_sm * has["multiprocessor_count"]
    kernel, n_programs = kept[block_cols]
    kernel[(min(n_programs, len(x)), 1, 1)](*args)
    return output


def faults() -> list[dict[str, str]]:
    """Calls the driver where it is wrong, in a process that may be lost.

    Returns:
        Rows of tried and outcome: "right", or the error.

    Raises:
        RuntimeError: kernels are not run on a GPU here.
    """
    clock.require_gpu()
    return process.call_apart(_faults)


def _faults() -> list[dict[str, str]]:
    tried = {
        "128 columns, 1 warp": _outcome(128, num_warps=1, num_stages=1),
        "32768 columns": _outcome(32768),
        "1024 columns, then 1001": _outcome(1024, 1001),  # last: it may end all others
    }
    return [{"tried": words, "outcome": outcome} for words, outcome in tried.items()]


def _outcome(*columns: int, **options: int) -> str:
    """What `softmax` makes of matrices of these widths, one after another."""
    try:
        for n_cols in columns:
            x = torch.randn(64, n_cols, device=backend.DEVICE)
            torch.testing.assert_close(softmax(x, **options), torch.softmax(x, 1))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "right"
