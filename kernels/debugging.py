"""Softmax kernels with one fault each, to be found with the tools that everyone has.

Builds on: `kernels.program`, whose kernel is right.
Changes: one or two lines of that kernel, for the worse. Every function here returns the
    right softmax of some matrices and fails for others.
Costs: reads MN values and writes MN, as the right kernel; `narrow_sum` reads 2MN.
Source: Triton's documentation of its debugging operations; NVIDIA's documentation of
    Compute Sanitizer; the faults are those that learners' kernels have.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import program
from kernels.lab import backend

PIECE = 16  # columns that `narrow_sum_kernel` adds at a time


@triton.jit
def unshifted_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """One program computes the softmax of one row, if no exponential overflows.

    Args: as of `kernels.program.softmax_kernel`.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x)
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def asserting_kernel(
    output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr, PLAIN: tl.constexpr
):
    """As `unshifted_kernel`; asserts by `assert` if PLAIN, or by `tl.device_assert`."""
    tl.static_assert(BLOCK_COLS <= 4096, "a row must fit 4096 columns")
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    if PLAIN:
        assert tl.max(x, axis=0) < 88.0, "exp overflows"
    else:
        tl.device_assert(tl.max(x, axis=0) < 88.0, "exp overflows")
    numerator = tl.exp(x)
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def zero_filled_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """As `unshifted_kernel`, but right if no lane is masked."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=0.0)
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def unmasked_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """As `unshifted_kernel`, but right if every row fills its block."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols)
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def narrow_sum_kernel(
    output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr, PIECE: tl.constexpr
):
    """One program computes the softmax of one row, whose sum it adds up piece by piece.

    Args, other than those of `unshifted_kernel`:
        PIECE: the columns of a piece, a power of two.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    row_max = tl.max(x, axis=0)
    row_sum = tl.full((), 0, input_ptr.dtype.element_ty)
    for start in range(0, n_cols, PIECE):
        piece = start + tl.arange(0, PIECE)
        ptrs = input_ptr + row * n_cols + piece
        part = tl.load(ptrs, mask=piece < n_cols, other=-float("inf"))
        part_sum = tl.sum(tl.exp(part.to(tl.float32) - row_max), axis=0)
        row_sum = (row_sum + part_sum).to(row_sum.dtype)
    y = tl.exp(x - row_max) / row_sum
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def narrow_offset_kernel(
    output_ptr, input_ptr, input_row_stride, n_cols, BLOCK_COLS: tl.constexpr
):
    """One program computes the softmax of one row, if its offset fits 32 bits.

    Args, other than those of `unshifted_kernel`:
        input_row_stride: elements from one row of the input to the next.
    """
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    input_ptrs = input_ptr + row * input_row_stride + cols
    x = tl.load(input_ptrs, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def in_turn_kernel(output_ptr, input_ptr, turn_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """One program waits until `turn_ptr` holds its row, and adds 1 when done."""
    row = tl.program_id(0)
    while tl.atomic_add(turn_ptr, 0) != row:
        pass
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)
    tl.atomic_add(turn_ptr, 1)


def _launch(
    kernel: Any, x: torch.Tensor, extra: Callable = lambda x: (), **options: Any
) -> torch.Tensor:
    """Launches a program per row; what `extra` makes of x follows the tensors."""
    if kernel is narrow_offset_kernel:  # its fault is what `program.validate` refuses
        backend.validate(x, max_cols=program.MAX_COLS)
    else:
        program.validate(x)
    x = x if x.stride(1) == 1 else x.contiguous()
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if x.numel():
        block = {"BLOCK_COLS": triton.next_power_of_2(n_cols)}
        kernel[(n_rows,)](output, x, *extra(x), n_cols, **block, **options)
    return output


def unshifted(x: torch.Tensor) -> torch.Tensor:
    """Computes exp(x) over its sum in every row; wrong where exp overflows.

    Args, returns, raises: as `kernels.program.softmax`.
    """
    return _launch(unshifted_kernel, x)


def asserting(x: torch.Tensor, *, plain: bool = False, **options: Any) -> torch.Tensor:
    """As `unshifted`, but says that a row has at most 4096 columns, all below 88.

    Args:
        plain: whether `assert` says it, or `tl.device_assert`.
        options: of the launch; on a GPU debug=True turns both kinds of assertion on.

    Raises:
        TypeError, ValueError: as `unshifted`.
        triton.CompilationError, InterpreterError: an assertion is false, and is heard.
    """
    return _launch(asserting_kernel, x, PLAIN=plain, **options)


def zero_filled(x: torch.Tensor) -> torch.Tensor:
    """As `unshifted`; wrong where masked elements enter the maximum or the sum."""
    return _launch(zero_filled_kernel, x)


def unmasked(x: torch.Tensor) -> torch.Tensor:
    """As `unshifted`; reads past the end of rows that are shorter than their block."""
    return _launch(unmasked_kernel, x)


def narrow_sum(x: torch.Tensor) -> torch.Tensor:
    """As `unshifted`; wrong for long rows of a dtype with few digits."""
    return _launch(narrow_sum_kernel, x, PIECE=PIECE)


def narrow_offset(x: torch.Tensor) -> torch.Tensor:
    """As `unshifted`, of rows with or without gaps; wrong from 2^31 elements on."""
    return _launch(narrow_offset_kernel, x, lambda x: (x.stride(0),))


def in_turn(x: torch.Tensor) -> torch.Tensor:
    """As `unshifted`, row after row; never returns from its second call."""
    return _launch(in_turn_kernel, x, lambda x: (_turn(x.device),))


@functools.cache
def _turn(device: torch.device) -> torch.Tensor:
    """Whose turn it is: made for the first call, and kept."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# Those that return from every call, in an order that tells nothing.
SUSPECTS = (zero_filled, narrow_sum, unshifted, unmasked, narrow_offset)
