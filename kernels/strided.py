"""Rows anywhere in memory: a stride for each dimension, and 64-bit offsets.

Builds on: `kernels.program`.
Changes: the kernel computes an element's address from strides, in 64 bits. Row × stride
    exceeds 2^31 in a tensor of a few gigabytes, and so does column × stride in a
    transposed tensor.
Costs: reads MN values and writes MN, whatever the strides.
Source: PyTorch's documentation of `torch.Tensor.stride` and `torch.empty_like`;
    Triton's documentation of `tl.load`.
"""

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.program import MAX_COLS

__all__ = ["MAX_COLS", "MAX_ROWS", "softmax", "softmax_kernel"]

MAX_ROWS = 2**31 - 1
"""The most programs along a grid's first axis; each program takes one row."""


@triton.jit
def softmax_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes the softmax of one row.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        *_row_stride, *_col_stride: elements from one row, or column, to the next.
        n_cols: the length of a row.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    # Both offsets are 64 bits wide: index × stride may exceed 2^31 along either axis.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64)
    inside = cols < n_cols
    input_ptrs = input_ptr + row * input_row_stride + cols * input_col_stride
    # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
    x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    # The output has strides of its own.
    output_ptrs = output_ptr + row * output_row_stride + cols * output_col_stride
    tl.store(output_ptrs, y, mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row, whatever x's strides.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS. It may be transposed, sliced or broadcast, overlap itself, and
            have more than 2^31 elements.

    Returns:
        (M, N) in x's dtype, with the strides that `torch.empty_like(x)` chooses; empty
        if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        block_cols = triton.next_power_of_2(n_cols)
        softmax_kernel[(n_rows,)](
            output, x, *output.stride(), *x.stride(), n_cols, BLOCK_COLS=block_cols
        )
    return output
