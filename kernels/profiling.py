"""A softmax that is right and slow: one line is at fault, and profilers find it.

Builds on: `kernels.program`, whose kernel differs in that line only, and
    `kernels.meta`, whose rule chooses the warps of both.
Changes: a thread of `slow_kernel` takes neighbouring columns, as a thread of a CPU
    would. So the 32 lanes of a warp load from 32 places that lie far apart.
Costs: reads MN values and writes MN, as without the fault. But a load of a warp touches
    a sector of 32 bytes for each value of 4.
Source: CUDA C++ Best Practices Guide, coalesced access to global memory; the benchmark
    of taot's "triton_fused_softmax" and of "2.fused_softmax.py".
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from kernels import eager, program
from kernels.lab import backend, compile
from kernels.meta import WARPS, pick_num_warps
from kernels.program import MAX_COLS

__all__ = [
    "MAX_COLS",
    "PROVIDERS",
    "autotuned",
    "compiled",
    "judge",
    "slow_kernel",
    "slow_softmax",
    "softmax",
]


@triton.jit
def slow_kernel(
    output_ptr,
    input_ptr,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """One program computes the softmax of one row.

    Args:
        output_ptr, input_ptr: first elements of contiguous (n_rows, n_cols) tensors.
        n_cols: the length of a row.
        BLOCK_COLS: n_cols rounded up to a power of two.
        THREADS: the threads of a program, 32 for each warp; at most BLOCK_COLS.
    """
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_COLS)
    # Thread i % THREADS takes a chunk of neighbours, as a thread of a CPU would.
    cols = i % THREADS * (BLOCK_COLS // THREADS) + i // THREADS
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


def autotuned(**options: Any) -> Autotuner:
    """Wraps the slow kernel in a new autotuner, which tries each number of warps.

    Args:
        options: further options of `triton.autotune`, such as do_bench.
    """
    configs = [triton.Config({"THREADS": 32 * w}, num_warps=w) for w in WARPS]
    return triton.autotune(configs, ["n_cols"], **options)(slow_kernel)


# ---- what is timed -------------------------------------------------------------------


def _softmax(kernel: KernelInterface, x: torch.Tensor) -> torch.Tensor:
    """One launch of `slow_kernel`, or of a kernel without its THREADS."""
    backend.validate(x, max_cols=MAX_COLS, contiguous=True)
    if x.numel() >= 2**31:
        raise ValueError(
            "x must have fewer than 2^31 elements for this kernel's 32-bit offsets, "
            f"got {x.numel()}; kernels.strided.softmax has 64-bit offsets"
        )
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        warps = pick_num_warps(n_cols, x.element_size())
        block = max(triton.next_power_of_2(n_cols), 32 * warps)
        constants = {"BLOCK_COLS": block, "THREADS": 32 * warps}
        constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
        kernel[(n_rows,)](output, x, n_cols, **constants, num_warps=warps)
    return output


def slow_softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row of a contiguous matrix with `slow_kernel`.

    Args, returns, raises: as `softmax`.
    """
    return _softmax(slow_kernel, x)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row of a contiguous matrix, mended.

    Args:
        x: (M, N), contiguous, float32, float16 or bfloat16, N at most MAX_COLS, fewer
            than 2^31 elements.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix.
    """
    return _softmax(program.softmax_kernel, x)


def compiled(x: torch.Tensor) -> torch.Tensor:
    """The five lines of `kernels.eager`, as torch.compile compiles them for x."""
    return eager.compiled(eager.five_lines)(x)


PROVIDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "naive": eager.five_lines,
    "torch": lambda x: torch.softmax(x, dim=1),
    "torch.compile": compiled,
    "slow": slow_softmax,
    "ours": softmax,
}
"""The softmaxes of the benchmark, by the names of its lines."""

# ---- the learner's kernel ------------------------------------------------------------


def judge(kernel: KernelInterface) -> str:
    """Says whether a kernel with the parameters of `slow_kernel` is right, and mended.

    Mended is a kernel that loads and stores 16 bytes at a time where n_cols allows it:
    the compiler uses such accesses only where a thread's columns are neighbours, and
    then the next thread takes the next 16 bytes.
    """
    try:
        fault = _fault(kernel)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        return f"Not yet: {type(error).__name__}: {lines[-1].strip()}"
    if fault:
        return f"Not yet: {fault}."
    x = compile.pointer(torch.float32)
    made = compile.aot(kernel, x, x, 4096, 4096, 256, num_warps=8)
    moves = {word: made.count(rf"{word}\.global") for word in ("ld", "st")}
    loads, stores = (f"{16 * 4 // n} bytes" for n in moves.values())
    said = f"a thread loads its 16 values {loads} at a time, and stores them {stores}"
    if all(n == 4 for n in moves.values()):
        return f"Mended: the result is right, and {said} at a time."
    return f"Not yet: the result is right, but {said} at a time; 16 bytes would do."


def _fault(kernel: KernelInterface) -> str:
    for n_rows, n_cols in ((3, 64), (2, 100), (2, 781)):
        generator = torch.Generator().manual_seed(n_cols)
        x = torch.randn(n_rows, n_cols, generator=generator).to(backend.DEVICE)
        y = torch.full_like(x, float("nan"))
        block = triton.next_power_of_2(n_cols)
        kernel[(n_rows,)](y, x, n_cols, block, 64, num_warps=2)
        wrong = ~torch.isclose(y, torch.softmax(x, dim=1), rtol=1e-4, atol=1e-7)
        if wrong.any():
            row, col = wrong.nonzero()[0].tolist()
            return (
                f"in a {n_rows} × {n_cols} matrix, row {row}, column {col} is "
                f"{y[row, col].item():.4g} and should be "
                f"{torch.softmax(x, dim=1)[row, col].item():.4g}"
            )
    return ""
