"""What the compiler makes of a kernel: launches to compile, trace and compare.

Builds on: `kernels.program` and `kernels.persistent`, whose kernels are compiled here.
Changes: the softmax has one operation a line, so that a line of any stage belongs to
    one operation; the vector addition has no mask. Names and line breaks leave no trace
    in the machine code, which is that of `kernels.program`.
Costs: MN values read and MN written, as `kernels.program`.
Source: the passes of Triton's NVIDIA backend (`triton/backends/nvidia/compiler.py`);
    NVIDIA's PTX ISA, and the CUDA Binary Utilities on the instructions of SASS.
"""

import types
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import persistent, program
from kernels.lab import stages
from kernels.lab.compile import Compiled
from kernels.lab.launch import Launch, pointer_to

MAX_COLS = program.MAX_COLS


@triton.jit
def add_unmasked_kernel(output_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    """One program adds BLOCK neighbouring elements, all of which must exist.

    Args:
        output_ptr, x_ptr, y_ptr: the vectors' first elements.
        BLOCK: elements per program, a power of two that divides the vectors' length.
    """
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(output_ptr + offsets, x + y)


@triton.jit
def softmax_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """One program computes the softmax of one row, one operation a line.

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
    x = x.to(tl.float32)
    row_max = tl.max(x, axis=0)
    shifted = x - row_max
    numerator = tl.exp(shifted)
    row_sum = tl.sum(numerator, axis=0)
    y = numerator / row_sum
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


def softmax_launch_for(
    output: torch.Tensor, x: torch.Tensor, *, num_warps: int = 4
) -> Launch:
    """Returns the launch of `softmax_kernel` on the rows of a matrix.

    Args:
        output, x: (M, N), contiguous, of one shape; may be on the "meta" device.
        num_warps: warps per program.
    """
    n_rows, n_cols = x.shape
    block_cols = triton.next_power_of_2(n_cols)
    constants = {"BLOCK_COLS": block_cols, "num_warps": num_warps}
    pointers = pointer_to(output), pointer_to(x)
    return Launch(softmax_kernel, (n_rows,), (n_cols,), constants, pointers)


def add_launch_for(
    output: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    block: int = 512,
    masked: bool = True,
) -> Launch:
    """Returns the launch of a vector addition, in programs of 4 warps.

    Args:
        output, x, y: (N,), contiguous; may be on the "meta" device.
        block: elements per program, a power of two.
        masked: whether the kernel is `program.add_kernel`, or the one without a mask.

    Raises:
        ValueError: masked is False, and block does not divide N.
    """
    if not masked and len(x) % block:
        raise ValueError(
            f"block must divide the {len(x)} elements of x where there is no mask, "
            f"got {block}; masked=True takes any length"
        )
    kernel = program.add_kernel if masked else add_unmasked_kernel
    scalars = (len(x),) if masked else ()
    pointers = tuple(map(pointer_to, (output, x, y)))
    grid = (triton.cdiv(len(x), block),)
    return Launch(kernel, grid, scalars, {"BLOCK": block, "num_warps": 4}, pointers)


def loop_launch_for(
    output: torch.Tensor, x: torch.Tensor, *, num_stages: int, num_warps: int = 8
) -> Launch:
    """Returns the launch of the loop over rows of `persistent.softmax_kernel`.

    Args:
        output, x: (M, N), may be on the "meta" device.
        num_stages: the stages of the loop's software pipeline; 1 loads nothing ahead.
        num_warps: warps per program.
    """
    n_rows, n_cols = x.shape
    block_cols = triton.next_power_of_2(n_cols)
    constants = {"ROWS_PER_TILE": 1, "BLOCK_COLS": block_cols}
    constants |= {"NUM_STAGES": num_stages, "num_warps": num_warps}
    scalars = (*output.stride(), *x.stride(), n_rows, n_cols)
    pointers = pointer_to(output), pointer_to(x)
    return Launch(persistent.softmax_kernel, (n_rows,), scalars, constants, pointers)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row of a contiguous matrix.

    Args, returns, raises: as `kernels.program.softmax`.
    """
    program.validate(x)
    output = torch.empty_like(x)
    if x.numel():
        softmax_launch_for(output, x)(output, x)
    return output


# ---- what changes from one launch to another -----------------------------------------


def count(made: Compiled, name: str, stage: str = "ptx") -> int:
    """Counts a thread's instructions whose name begins so, such as "ld.global"."""
    names = stages.opcodes(made, stage)
    return sum(number for each, number in names.items() if each.startswith(name))


def judge(guess: Any, old: Compiled, new: Compiled) -> str:
    """Says whether a guess names an instruction whose number differs in the PTX.

    Args:
        guess: the beginning of an instruction's name, such as "ld.global"; `...` if
            there is no guess yet.
        old, new: the kernels as compiled before and after a change.

    Returns:
        A sentence.

    Raises:
        TypeError: guess is neither text nor `...`.
    """
    if isinstance(guess, types.EllipsisType) or guess == "":
        return 'No guess yet: put the name of an instruction there, such as "setp".'
    if not isinstance(guess, str):
        raise TypeError(f"guess must be text such as 'setp', got {guess!r}")
    before, after = count(old, guess), count(new, guess)
    if before != after:
        return f"Right: there are {after} {guess} where there were {before}."
    if before:
        return f"No: {before} {guess} before and after. Look again at what moved."
    names = sorted({each.split(".")[0] for each in stages.opcodes(old)})
    return f"No: neither kernel has {guess}. The first one has: {', '.join(names)}."
