"""One Triton program per row: the row is read once and written once.

Builds on: `kernels.eager`, whose five kernels become one.
Changes: a program keeps its row in registers, if those of 4 warps suffice.
Costs: reads MN values and writes MN, in one kernel of M programs.
Source: Tillet, Kung and Cox, "Triton", MAPL 2019; Triton's tutorials 1 and 2; Numba's
    documentation of CUDA kernels.
"""

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.lab.simt import cuda

MAX_COLS = 131072
"""The longest row. Compiling for rows of twice that length takes about a minute."""


@cuda.jit
def add_element(output, x, y):
    """One thread adds one element (Numba CUDA).

    Args:
        output, x, y: vectors of equal length.
    """
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < output.size:
        output[i] = x[i] + y[i]


@triton.jit
def add_kernel(output_ptr, x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    """One program adds BLOCK neighbouring elements (Triton).

    Args:
        output_ptr, x_ptr, y_ptr: the vectors' first elements.
        n_elements: the length of each vector.
        BLOCK: elements per program, a power of two.
    """
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n_elements  # the last program's block may pass the end
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
    # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    # tl.exp takes no 16-bit values, and a sum in 16 bits would lose small terms.
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    # The store converts y to the output's dtype.
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor, *, block: int = 1024) -> torch.Tensor:
    """Computes x + y for two vectors.

    Args:
        x, y: (n,), float32, contiguous, fewer than 2^31 elements.
        block: elements per program, a power of two, at most MAX_COLS.

    Returns:
        (n,), float32.

    Raises:
        TypeError: x or y is no float32 tensor, or block is no int.
        ValueError: x and y are no such vectors, or block is no such power of two.
    """
    for name, vector in (("x", x), ("y", y)):
        _require_vector(name, vector)
    if len(x) != len(y):
        raise ValueError(
            f"x and y must have the same length, got {len(x)} and {len(y)}; "
            "x.expand_as(y).contiguous() makes a vector of a single element"
        )
    if not isinstance(block, int):
        raise TypeError(f"block must be an int, got {block!r}; 1024 would do")
    if not 0 < block <= MAX_COLS or block & (block - 1):
        raise ValueError(
            f"block must be a power of two up to {MAX_COLS}, got {block}; 1024 would do"
        )
    output = torch.empty_like(x)
    if len(x):
        add_kernel[(triton.cdiv(len(x), block),)](output, x, y, len(x), BLOCK=block)
    return output


def _require_vector(name: str, vector: torch.Tensor) -> None:
    if not isinstance(vector, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(vector).__name__}")
    if vector.dtype != torch.float32:
        raise TypeError(
            f"{name} must be float32, got {vector.dtype}; {name}.float() converts it"
        )
    reachable = vector.device.type == backend.DEVICE and vector.numel() < 2**31
    if vector.ndim != 1 or not vector.is_contiguous() or not reachable:
        raise ValueError(
            f"{name} must be a contiguous vector of fewer than 2^31 elements on "
            f"{backend.DEVICE!r}, got shape {tuple(vector.shape)} with strides "
            f"{vector.stride()} on {str(vector.device)!r}; "
            f"{name}.flatten().contiguous().to({backend.DEVICE!r}) makes one"
        )


def validate(x: torch.Tensor) -> None:
    """Raises TypeError or ValueError if x is no matrix as `softmax` takes it."""
    backend.validate(x, max_cols=MAX_COLS, contiguous=True)
    if x.numel() >= 2**31:
        raise ValueError(
            "x must have fewer than 2^31 elements for this kernel's 32-bit offsets, "
            f"got {x.numel()}; kernels.strided.softmax has 64-bit offsets"
        )


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row of a contiguous matrix.

    Args:
        x: (M, N), contiguous, float32, float16 or bfloat16, N at most MAX_COLS, fewer
            than 2^31 elements.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix.
    """
    validate(x)
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        block_cols = triton.next_power_of_2(n_cols)
        softmax_kernel[(n_rows,)](output, x, n_cols, BLOCK_COLS=block_cols)
    return output
