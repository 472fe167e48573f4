"""Experiments of chapter `persistent`: when each SM is done, and a queue by hand.

from benchmarks import schedules
observed = record.observe("persistent_timeline", schedules.timeline)
providers = {"persistent.queue": schedules.queued}
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels import persistent
from kernels.lab import backend, clock, gpu, occupancy
from kernels.lab.launch import Launch, Pointer, pointer_to

IN_INTERPRETER = 4  # programs: it runs them one after another, and a few show the loop


@functools.cache
def resident_programs(
    kernel: Any,
    pointers: tuple[Pointer, ...],
    scalars: tuple[int, ...],
    block: int,
    num_warps: int,
) -> int:
    """How many programs of a kernel of this module the GPU holds at a time."""
    if backend.INTERPRETED:
        return IN_INTERPRETER
    constants = {"BLOCK": block, "num_warps": num_warps}
    launch = Launch(kernel, (1,), scalars, constants, pointers)
    return occupancy.of(launch).blocks_per_sm * gpu.here().sms


# ---- a clock in the kernel -----------------------------------------------------------


@triton.jit
def timed_kernel(clock_ptr, output_ptr, input_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    """One program notes when it begins, runs chapter `persistent`'s kernel, and ends.

    Args:
        clock_ptr: (n_programs, 3), int64: begin and end of each program in ns, its SM.
        output_ptr, input_ptr: first elements of contiguous (n_rows, n_cols) tensors.
        n_rows, n_cols: their shape.
        BLOCK: n_cols rounded up to a power of two; a tile is a row.
    """
    clock_ptr += 3 * tl.program_id(0)
    tl.store(clock_ptr, cuda.globaltimer())
    persistent.softmax_kernel(
        output_ptr, input_ptr, n_cols, 1, n_cols, 1, n_rows, n_cols, 1, BLOCK, 1
    )
    tl.store(clock_ptr + 1, cuda.globaltimer())
    tl.store(clock_ptr + 2, cuda.smid().to(tl.int64))


def timeline(n_rows: int = 8192, n_cols: int = 8192) -> list[dict[str, Any]]:
    """When each SM begins and ends, with 1 and with 16 programs for each slot.

    The third run counts: the first compiles.

    Returns:
        Rows of programs_per_slot, sm (its number), first_start_us and last_end_us
        (from the first program's start, in steps of the GPU's clock), and rows, of the
        matrix, that the SM computed.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    y, block = torch.empty_like(x), triton.next_power_of_2(n_cols)
    pointers = Pointer(torch.int64), pointer_to(y), pointer_to(x)
    slots = resident_programs(timed_kernel, pointers, (n_rows, n_cols), block, 16)
    result = []
    for per_slot in (1, 16):
        n_programs = min(slots * per_slot, n_rows)
        stamps = torch.zeros(n_programs, 3, dtype=torch.int64, device=x.device)
        with clock.alone():
            for _ in range(3):
                clock.flush_by_reading()
                timed_kernel[(n_programs,)](
                    stamps, y, x, n_rows, n_cols, block, num_warps=16
                )
            torch.cuda.synchronize()
        result += [
            {"programs_per_slot": per_slot, **row} for row in by_sm(stamps, n_rows)
        ]
    return result


def by_sm(stamps: torch.Tensor, n_rows: int) -> list[dict[str, Any]]:
    """The rows of `timeline` for one launch.

    Args:
        stamps: (n_programs, 3), int64: what `timed_kernel` wrote.
        n_rows: of the matrix. Program p computed rows p, p + n_programs, ….
    """
    begin, end, sm = stamps.cpu().T
    n_programs = len(begin)
    computed = (n_rows - 1 - torch.arange(n_programs)) // n_programs + 1
    result = []
    for number in sm.unique().tolist():
        on_sm = sm == number
        result.append(
            {
                "sm": number,
                "first_start_us": (begin[on_sm].min() - begin.min()).item() / 1e3,
                "last_end_us": (end[on_sm].max() - begin.min()).item() / 1e3,
                "rows": computed[on_sm].sum().item(),
            }
        )
    return result


# ---- a queue in memory ---------------------------------------------------------------


@triton.jit
def queue_kernel(queue_ptr, output_ptr, input_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    """One program computes a row, then each row that it draws, until none is left.

    Args:
        queue_ptr: a counter, int32: the rows drawn so far. It is 0 before and after.
        output_ptr, input_ptr: first elements of contiguous (n_rows, n_cols) tensors.
        n_rows, n_cols: their shape.
        BLOCK: n_cols rounded up to a power of two.
    """
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    while row < n_rows:
        places = row.to(tl.int64) * n_cols + cols
        x = tl.load(input_ptr + places, mask=cols < n_cols, other=-float("inf"))
        # Draw a number while x is on its way. No other program draws the same number.
        drawn = tl.atomic_add(queue_ptr, 1, sem="relaxed")
        if drawn == n_rows - 1:  # the last: every row draws once
            tl.store(queue_ptr, 0)
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(output_ptr + places, y, mask=cols < n_cols)
        row = tl.num_programs(0) + drawn


@functools.cache
def counter() -> torch.Tensor:
    """The queue of `queue_kernel`: the rows drawn so far, 0 between calls."""
    return torch.zeros(1, dtype=torch.int32, device=backend.DEVICE)


def queued(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, by resident programs that draw their rows.

    Args:
        x: (M, N), float32, contiguous, not empty. It is not validated. Calls must run
            one after another, because they share `counter`.
    """
    output, shape = torch.empty_like(x), tuple(x.shape)
    config = persistent.choose_config(x.shape[1], x.element_size())
    pointers = Pointer(torch.int32), pointer_to(output), pointer_to(x)
    how = config.block_cols, config.num_warps
    fit = resident_programs(queue_kernel, pointers, shape, *how)
    options = {"BLOCK": config.block_cols, "num_warps": config.num_warps}
    queue_kernel[(min(fit, len(x)),)](counter(), output, x, *shape, **options)
    return output
