"""One Triton program per row: the row is read once and written once.

Builds on: `kernels.eager`, whose five kernels become one.
Changes: a program keeps its row in registers from the load to the store.
Costs: MN values read and MN written, by one kernel of M programs.
Source: Tillet, Kung and Cox, "Triton", MAPL 2019; Triton's tutorials 1 and 2.
"""

import torch
import triton
import triton.language as tl

from kernels.lab import backend

MAX_COLS = 131072
"""The longest row: beyond it a program's registers overflow by far."""


@triton.jit
def add_kernel(output_ptr, x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    """One program adds BLOCK neighbouring elements.

    Args:
        output_ptr, x_ptr, y_ptr: the vectors' first elements.
        n_elements: how many elements each vector has.
        BLOCK: elements per program, a power of two.
    """
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x + y, mask=inside)


@triton.jit
def softmax_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """One program computes the softmax of one row.

    Args:
        output_ptr, input_ptr: first elements of contiguous (n_rows, n_cols) tensors.
        n_cols: the length of a row.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


def traffic(n_rows: int, n_cols: int) -> tuple[int, int]:
    """Values read and values written by one call."""
    return n_rows * n_cols, n_rows * n_cols


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y for two contiguous vectors of one shape, dtype and device.

    Raises:
        TypeError: one of them is not a tensor.
        ValueError: shapes, dtypes or devices differ, kernels cannot reach the device,
            or a vector has gaps.
    """
    for name, vector in (("x", x), ("y", y)):
        if not isinstance(vector, torch.Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(vector).__name__}"
            )
        if vector.device.type != backend.DEVICE or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and on {backend.DEVICE!r}, got strides "
                f"{vector.stride()} on {str(vector.device)!r}; "
                f"{name}.to({backend.DEVICE!r}).contiguous() would do"
            )
    if x.shape != y.shape or x.dtype != y.dtype or x.device != y.device:
        raise ValueError(
            f"x and y must agree in shape, dtype and device, got {tuple(x.shape)} "
            f"{x.dtype} and {tuple(y.shape)} {y.dtype}; broadcast or convert one first"
        )
    output = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        add_kernel[grid](output, x, y, x.numel(), BLOCK=1024)
    return output


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row of a contiguous matrix.

    Args:
        x: (M, N), contiguous, float32, float16 or bfloat16, N at most MAX_COLS,
            fewer than 2^31 elements.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix.
    """
    backend.validate(x, max_cols=MAX_COLS, contiguous=True)
    if x.numel() >= 2**31:
        raise ValueError(
            "x must have fewer than 2^31 elements for this kernel's 32-bit offsets, "
            f"got {x.numel()}; kernels.strided.softmax has 64-bit ones"
        )
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        block_cols = triton.next_power_of_2(n_cols)
        softmax_kernel[(n_rows,)](output, x, n_cols, BLOCK_COLS=block_cols)
    return output
