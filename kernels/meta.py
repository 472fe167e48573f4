"""The same kernel, launched with a number of warps that follows from the row.

Builds on: `kernels.strided`, whose kernel is launched unchanged.
Changes: `num_warps` follows the bytes of a row; Triton's default is always 4.
Costs: reads MN values and writes MN.
Source: this chapter's sweep (`notebooks/recorded/`).
"""

from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from kernels.lab import backend
from kernels.strided import MAX_COLS, MAX_ROWS, softmax_kernel

WARPS = (1, 2, 4, 8, 16, 32)
"""The numbers of warps to choose from: a thread block has at most 1024 threads."""

BYTES_PER_WARP = 2048
"""64 bytes of the row for each of a warp's 32 lanes: four loads of 16 bytes."""

VALUES_PER_THREAD = 256
"""The most values that a thread may hold. It has 255 registers; the rest spills."""


def pick_num_warps(n_cols: int, element_size: int) -> int:
    """Returns one warp for every 2 KiB of the block, between 1 and 32 warps.

    Each thread then holds 64 bytes. If n_cols is a power of two and a row has 2 KiB or
    more, an SM of the H200 has registers for at least 32 warps and for 64 to 128 KiB of
    rows: enough bytes in flight to keep the memory busy. With 16 bytes per thread, all
    threads of an SM hold only 32 KiB. With 256 bytes, a thread may need so many
    registers that only a few warps fit.

    The block is as long as the next power of two, and its masked elements count. So a
    row just above a power of two gets twice the warps that its own bytes would give it.

    Args:
        n_cols: the length of a row, in elements.
        element_size: bytes per element.
    """
    warps = triton.next_power_of_2(n_cols) * element_size // BYTES_PER_WARP
    return min(max(warps, 1), WARPS[-1])


def autotuned(**options: Any) -> Autotuner:
    """Wraps the kernel in a new autotuner, which tries each of WARPS.

    Args:
        options: further options of `triton.autotune`, such as do_bench.
    """
    configs = [triton.Config({}, num_warps=warps) for warps in WARPS]
    return triton.autotune(configs, key=["n_cols"], **options)(softmax_kernel)


def arguments(output: torch.Tensor, x: torch.Tensor) -> tuple:
    """Returns the kernel's arguments in their order.

    Args:
        output, x: tensors of equal shape (M, N), on any device.
    """
    n_cols = x.shape[1]
    block_cols = triton.next_power_of_2(n_cols)
    return output, x, *output.stride(), *x.stride(), n_cols, block_cols


def launch(
    x: torch.Tensor, kernel: KernelInterface = softmax_kernel, **options: Any
) -> torch.Tensor:
    """Computes the softmax of every row by one launch with the given options.

    Args:
        x: a matrix as in `softmax`, not empty. It is not validated.
        kernel: `softmax_kernel`, or the result of a Triton decorator applied to it.
        options: launch options such as num_warps or maxnreg.
    """
    output = torch.empty_like(x)
    kernel[(x.shape[0],)](*arguments(output, x), **options)
    return output


def softmax(x: torch.Tensor, *, num_warps: int | None = None) -> torch.Tensor:
    """Computes the softmax of every row, whatever x's strides.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides.
        num_warps: one of WARPS, large enough that no thread holds more than
            VALUES_PER_THREAD values; None lets `pick_num_warps` choose.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix, or num_warps no such number.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    fewest = triton.next_power_of_2(x.shape[1]) // (32 * VALUES_PER_THREAD)
    if num_warps is None:
        num_warps = pick_num_warps(x.shape[1], x.element_size())
    elif type(num_warps) is not int or num_warps not in WARPS or num_warps < fewest:
        raise ValueError(
            f"num_warps must be one of {[warps for warps in WARPS if warps >= fewest]} "
            f"for {x.shape[1]} columns, or None, got {num_warps!r}"
        )
    if x.numel() == 0:
        return torch.empty_like(x)
    return launch(x, num_warps=num_warps)
