"""What the compiler makes of a kernel: launches to compile, trace and compare.

Builds on: `kernels.program` and `kernels.persistent`, whose kernels are compiled here.
Changes: the softmax has one operation a line, so that a line of any stage belongs to
    one operation. Names and line breaks leave no trace in the machine code, which is
    that of `kernels.program`.
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
from kernels.lab import compile, stages
from kernels.lab import judge as judging
from kernels.lab.compile import Compiled
from kernels.lab.launch import Launch, pointer_to
from kernels.lab.verdict import wrapped

MAX_COLS = program.MAX_COLS
ADD_BLOCK = 512  # elements of a program of the vector addition


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
    kernel: Any = program.add_kernel,
) -> Launch:
    """Returns the launch of a vector addition, in blocks of 512, each of 4 warps.

    Args:
        output, x, y: (N,), contiguous; may be on the "meta" device.
        kernel: has the parameters of `program.add_kernel`; may also have EVEN, which is
            True where no block passes the vectors' end.
    """
    constants = {"BLOCK": ADD_BLOCK, "EVEN": len(x) % ADD_BLOCK == 0, "num_warps": 4}
    if "EVEN" not in kernel.arg_names:
        del constants["EVEN"]
    pointers = tuple(map(pointer_to, (output, x, y)))
    grid = (triton.cdiv(len(x), ADD_BLOCK),)
    return Launch(kernel, grid, (len(x),), constants, pointers)


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
    if stages.opcodes(old) == stages.opcodes(new):
        return "Not judged: both kernels have the same instructions so far."
    before, after = count(old, guess), count(new, guess)
    if before != after:
        return f"Right: there are {after} {guess} where there were {before}."
    if before:
        return f"No: {before} {guess} before and after. Look again at what moved."
    names = sorted({each.split(".")[0] for each in stages.opcodes(old)})
    return f"No: neither kernel has {guess}. The first one has: {', '.join(names)}."


# ---- the learner's addition ----------------------------------------------------------


def judge_add(kernel: Any) -> str:
    """Says whether an addition is right, and has no mask where it needs none.

    Args:
        kernel: takes (output_ptr, x_ptr, y_ptr, n, BLOCK, EVEN); see `add_launch_for`.

    Returns:
        A sentence.
    """

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        add_launch_for(output, x, y, kernel=kernel)(output, x, y)
        return output

    add.__name__ = kernel.fn.__name__
    lengths = [((n,), (n,)) for n in (1000, 1024, 512, 513, 1)]
    dtypes = [torch.float32]
    found = judging.operator(add, torch.add, lengths, dtypes=dtypes, seeds=1)
    if not found:
        return found.sentence
    v = torch.empty(2 * ADD_BLOCK, device="meta")
    made = compile.aot(add_launch_for(v, v, v, kernel=kernel), gpu="H200")
    compares, predicates = count(made, "setp"), made.count(r"@%p\d+ (ld|st)\.global")
    said = f"{add.__name__} is right for {len(lengths)} lengths"
    if compares or predicates:
        return wrapped(
            f"Not yet: {said}, but where EVEN is true, its PTX still has what a mask "
            f"becomes: {compares} setp and {predicates} accesses with a predicate."
        )
    return wrapped(f"Right: {said}, and where EVEN is true, no access has a predicate.")
