"""The kernel of chapter `online` with one thing changed, and its three-pass forerunner.

Chapter `online` measures what each of its decisions is worth: `ONLINE` has a softmax
for each. `three_pass` reads a row for its maximum, then for its sum, then for its
values.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import online
from kernels.lab import backend
from kernels.online import exp_shifted_or_zero


@triton.jit
def three_pass_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes the softmax of one row in three passes over it.

    Args:
        output_ptr, input_ptr: the tensors' first elements.
        output_row_stride, output_col_stride, input_row_stride, input_col_stride:
            elements from one row, or column, to the next.
        n_cols: the length of a row.
        BLOCK_COLS: columns in registers at a time, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * output_row_stride
    block = tl.arange(0, BLOCK_COLS).to(tl.int64)

    maxima = tl.full((BLOCK_COLS,), -float("inf"), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        maxima = tl.maximum(maxima, x.to(tl.float32))
    row_max = tl.max(maxima, axis=0)

    sums = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        sums += exp_shifted_or_zero(x.to(tl.float32), row_max)
    factor = 1 / tl.sum(sums, axis=0)

    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        y = exp_shifted_or_zero(x.to(tl.float32), row_max) * factor
        tl.store(output_ptr + cols * output_col_stride, y, cols < n_cols)


def three_pass(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, by a kernel that reads each row three times.

    Args, returns, raises: as `kernels.online.softmax`.
    """
    backend.validate(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        n_rows, n_cols = x.shape
        config = online.choose_config(1, n_cols, x.element_size())
        three_pass_kernel[(n_rows,)](
            output,
            x,
            *output.stride(),
            *x.stride(),
            n_cols,
            BLOCK_COLS=config.block_cols,
            num_warps=config.num_warps,
        )
    return output


def changed(x: torch.Tensor, **changes: Any) -> torch.Tensor:
    """`online.softmax` with some fields of its configuration replaced.

    Args:
        x: (M, N), as for `online.softmax`.
        changes: fields of `online.Config` and their values, such as accumulators=1.
    """
    n_rows, n_cols = (max(size, 1) for size in x.shape)  # an empty matrix has a config
    config = online.choose_config(n_rows, n_cols, x.element_size())
    return online.softmax(x, config=dataclasses.replace(config, **changes))


ONLINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "online.three_pass": three_pass,
    "online.per_block": lambda x: changed(x, accumulators=1),
    "online.forwards": lambda x: changed(x, backwards=False),
    "online.unhinted": lambda x: changed(x, hints=False),
    "online": online.softmax,
}
"""What chapter `online` measures, by the provider's name."""
