"""The same kernel, launched with the number of warps that measurement asks for.

Builds on: `kernels.strided`, whose kernel it launches unchanged.
Changes: `num_warps` follows the bytes in a row instead of Triton's default of 4.
Costs: MN values read and MN written.
Source: the sweep of this chapter (`notebooks/recorded/`); Triton's documentation of
    `triton.Config`, `triton.autotune` and `triton.heuristics`.
"""

import torch
import triton

from kernels.lab import backend
from kernels.strided import MAX_COLS, softmax_kernel, traffic

__all__ = ["MAX_COLS", "pick_num_warps", "softmax", "traffic"]

BYTES_PER_WARP = 2048
"""64 bytes for each of a warp's 32 lanes: four 16-byte loads in flight."""

WARPS = (1, 2, 4, 8, 16, 32)


def pick_num_warps(n_cols: int, element_size: int) -> int:
    """One warp for every 2 KB of the row, between 1 and 32.

    Args:
        n_cols: the length of a row, in elements.
        element_size: bytes per element.
    """
    warps = triton.next_power_of_2(n_cols) * element_size // BYTES_PER_WARP
    return min(max(warps, 1), WARPS[-1])


def softmax(x: torch.Tensor, *, num_warps: int | None = None) -> torch.Tensor:
    """The softmax of every row, whatever x's strides.

    Args:
        x: (M, N), float32, float16 or bfloat16, N at most MAX_COLS, any strides.
        num_warps: 1, 2, 4, 8, 16 or 32; None lets `pick_num_warps` choose.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix, or num_warps none of those.
    """
    backend.validate(x, max_cols=MAX_COLS)
    n_rows, n_cols = x.shape
    if num_warps is None:
        num_warps = pick_num_warps(n_cols, x.element_size())
    elif num_warps not in WARPS:
        raise ValueError(f"num_warps must be one of {WARPS} or None, got {num_warps!r}")
    output = torch.empty_like(x)
    if x.numel():
        softmax_kernel[(n_rows,)](
            output,
            x,
            *output.stride(),
            *x.stride(),
            n_cols,
            BLOCK_COLS=triton.next_power_of_2(n_cols),
            num_warps=num_warps,
        )
    return output
