"""The same kernel, launched with the number of warps that measurement asks for.

Builds on: `kernels.strided`, whose kernel it launches unchanged.
Changes: `num_warps` follows the bytes of a row, instead of Triton's default of 4.
Costs: MN values read and MN written.
Source: the sweep of this chapter (`notebooks/recorded/`). The rule that it is compared
    with is that of Triton's early fused-softmax tutorial and of texts that follow it.
"""

from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from kernels.lab import backend
from kernels.strided import MAX_COLS, MAX_ROWS, softmax_kernel, traffic

__all__ = [
    "MAX_COLS",
    "MAX_ROWS",
    "WARPS",
    "arguments",
    "autotuned",
    "launch",
    "pick_num_warps",
    "softmax",
    "traffic",
    "usual_num_warps",
]

WARPS = (1, 2, 4, 8, 16, 32)
"""What num_warps may be: a power of two, and no block has more than 1024 threads."""

BYTES_PER_WARP = 2048
"""64 bytes of the row for each of a warp's 32 lanes: four loads of 16 bytes."""

VALUES_PER_THREAD = 256
"""What a thread may hold: it has 255 registers, and what does not fit them spills."""


def pick_num_warps(n_cols: int, element_size: int) -> int:
    """One warp for every 2 KiB of the row, between 1 and 32.

    That is 64 bytes for each thread. The registers of an H200's SM then suffice for 32
    warps or more, and for 64 to 128 KiB of rows where a row is 2 KiB or longer: enough
    on its way to keep memory busy. With 16 bytes each, all the threads of an SM hold
    32 KiB, which is too little; with 256, its registers may allow only a few warps.

    Args:
        n_cols: the length of a row, in elements.
        element_size: bytes per element.
    """
    warps = triton.next_power_of_2(n_cols) * element_size // BYTES_PER_WARP
    return min(max(warps, 1), WARPS[-1])


def usual_num_warps(n_cols: int) -> int:
    """The rule of many tutorials: 4 warps, 8 from 2048 columns on, 16 from 4096 on.

    It asks for columns, not for bytes, and is here to be measured.

    Args:
        n_cols: the length of a row, in elements.
    """
    block_cols = triton.next_power_of_2(n_cols)
    return 16 if block_cols >= 4096 else 8 if block_cols >= 2048 else 4


def autotuned(**options: Any) -> Autotuner:
    """The kernel behind an autotuner that has not tried anything yet.

    Args:
        options: further ones of `triton.autotune`, such as do_bench.
    """
    configs = [triton.Config({}, num_warps=warps) for warps in WARPS]
    return triton.autotune(configs, key=["n_cols"], **options)(softmax_kernel)


def arguments(output: torch.Tensor, x: torch.Tensor) -> tuple:
    """The kernel's arguments, in their order, for output and x of one shape."""
    n_cols = x.shape[1]
    block_cols = triton.next_power_of_2(n_cols)
    return output, x, *output.stride(), *x.stride(), n_cols, block_cols


def launch(
    x: torch.Tensor, kernel: KernelInterface = softmax_kernel, **options: Any
) -> torch.Tensor:
    """The softmax of every row by one launch with these options.

    Args:
        x: as in `softmax`, not empty; not validated.
        kernel: `softmax_kernel`, or what a decorator of Triton makes of it.
        options: launch options such as num_warps or maxnreg.
    """
    output = torch.empty_like(x)
    kernel[(x.shape[0],)](*arguments(output, x), **options)
    return output


def softmax(x: torch.Tensor, *, num_warps: int | None = None) -> torch.Tensor:
    """The softmax of every row, whatever x's strides.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides.
        num_warps: 1, 2, 4, 8, 16 or 32, and enough for VALUES_PER_THREAD; None lets
            `pick_num_warps` choose.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix, or num_warps none of those.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    least = triton.next_power_of_2(x.shape[1]) // (32 * VALUES_PER_THREAD)
    if num_warps is None:
        num_warps = pick_num_warps(x.shape[1], x.element_size())
    elif type(num_warps) is not int or num_warps not in WARPS or num_warps < least:
        raise ValueError(
            f"num_warps must be one of {[warps for warps in WARPS if warps >= least]} "
            f"for {x.shape[1]} columns, or None, got {num_warps!r}"
        )
    if x.numel() == 0:
        return torch.empty_like(x)
    return launch(x, num_warps=num_warps)
