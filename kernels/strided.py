"""Rows wherever they lie: strides for both dimensions and 64-bit offsets.

Builds on: `kernels.program`.
Changes: an element's address is computed from strides, in 64 bits.
Costs: MN values read and MN written, whatever the strides.
Source: PyTorch's and NumPy's documentation of strides; Triton's tutorial 2.
"""

import torch
import triton
import triton.language as tl

from kernels.lab import backend

MAX_COLS = 131072
"""The longest row: beyond it a program's registers overflow by far."""


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
        output_row_stride, output_col_stride: elements from one row of the output to the
            next, and from one column to the next.
        input_row_stride, input_col_stride: the same of the input.
        n_cols: the length of a row.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS).to(tl.int64)
    inside = cols < n_cols
    input_ptrs = input_ptr + row * input_row_stride + cols * input_col_stride
    x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    output_ptrs = output_ptr + row * output_row_stride + cols * output_col_stride
    tl.store(output_ptrs, y, mask=inside)


def traffic(n_rows: int, n_cols: int) -> tuple[int, int]:
    """Values read and values written by one call."""
    return n_rows * n_cols, n_rows * n_cols


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, whatever x's strides.

    Args:
        x: (M, N), float32, float16 or bfloat16, N at most MAX_COLS; may be transposed,
            sliced, broadcast, and larger than 2^31 elements.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_cols=MAX_COLS)
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        block_cols = triton.next_power_of_2(n_cols)
        softmax_kernel[(n_rows,)](
            output, x, *output.stride(), *x.stride(), n_cols, BLOCK_COLS=block_cols
        )
    return output
