"""Experiments of chapter `persistent`: when each SM is done, and a queue by hand.

from benchmarks import schedules
providers = {"persistent.resident": schedules.launched(programs_per_slot=1)}
observed = record.observe("persistent_timeline", schedules.timeline)
schedules.populations(observed)
providers = {"persistent.queue": schedules.queued}
observed = record.observe("persistent_draws", schedules.draws)
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels import persistent
from kernels.lab import backend, clock, compile, gpu, occupancy
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


# ---- other launches of the chapter's kernel ------------------------------------------

ALL = 10**6  # programs per slot: as many as there are tiles


def launched(**changes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The chapter's softmax, with other values in some fields of the chosen config.

    Args:
        changes: fields of `persistent.Config`.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        config = persistent.choose_config(x.shape[1], x.element_size())
        return persistent.softmax(x, config=dataclasses.replace(config, **changes))

    return softmax


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


def clock_step(observed: pd.DataFrame) -> int:
    """The step of the GPU's clock in ns: what divides all times of a `timeline`."""
    times = observed[["first_start_us", "last_end_us"]].to_numpy().ravel()
    return math.gcd(*(round(1000 * time) for time in times))


def populations(observed: pd.DataFrame) -> pd.DataFrame:
    """The SMs that end early with 1 program for each slot, and all others.

    The two groups are divided where the times have their largest gap.

    Args:
        observed: rows of `timeline`.

    Returns:
        A row for each group, "early" and "late": how many SMs, their numbers, when they
        end with 1 program for each slot, and how many rows they take with 16.
    """
    staying, queued = (
        observed[observed["programs_per_slot"] == n].set_index("sm") for n in (1, 16)
    )
    ends = staying["last_end_us"].sort_values()
    n_early = int(ends.diff().argmax())
    groups = {"early": ends.index[:n_early], "late": ends.index[n_early:]}
    rows = []
    for name, sms in groups.items():
        done, taken = ends[sms], queued["rows"].reindex(sms).dropna().astype(int)
        rows.append(
            {
                "SMs that end": name,
                "how many": len(sms),
                "their numbers": spans(sms) if name == "early" else "the others",
                "1 per slot: done after, µs": f"{done.min():.0f} to {done.max():.0f}",
                "16 per slot: rows": f"{taken.min()} to {taken.max()}",
            }
        )
    return pd.DataFrame(rows).set_index("SMs that end")


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as text, neighbours as "3–5"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}–{b}" if a < b else f"{a}" for a, b in found)


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


def fits(n_cols: int, on: str = "H200") -> dict[str, int]:
    """How many programs fit on an SM, of the queue's kernel and of the chapter's.

    Args:
        n_cols: of contiguous float32 rows, launched as `choose_config` chooses.
        on: the name of the GPU.
    """
    config = persistent.choose_config(n_cols, 4)
    x, sizes = compile.pointer(torch.float32), (2**26 // n_cols, n_cols)
    queue = compile.aot(
        queue_kernel,
        compile.pointer(torch.int32),
        *(x, x, *sizes, config.block_cols),
        num_warps=config.num_warps,
        gpu=on,
    )
    strides = (n_cols, 1, n_cols, 1)
    loop = compile.aot(
        persistent.softmax_kernel, x, x, *strides, *sizes, gpu=on, **config.constants
    )
    kernels = {"queue_kernel": queue, "persistent.softmax_kernel": loop}
    return {name: occupancy.of(made).blocks_per_sm for name, made in kernels.items()}


@triton.jit
def draws_kernel(queue_ptr, n_rows):
    """As `queue_kernel`, but a program only draws: no row is loaded or stored."""
    row = tl.program_id(0)
    while row < n_rows:
        drawn = tl.atomic_add(queue_ptr, 1, sem="relaxed")
        if drawn == n_rows - 1:
            tl.store(queue_ptr, 0)
        row = tl.num_programs(0) + drawn


def draws(columns: Iterable[int] = (1024, 4096)) -> list[dict[str, Any]]:
    """The time that `queued` takes for its draws alone, for 256 MiB of float32.

    Returns:
        Rows of n_cols, n_rows, n_programs, and p20_draws_us, p50_draws_us and
        p80_draws_us.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    result = []
    for n_cols in columns:
        n_rows, config = 2**26 // n_cols, persistent.choose_config(n_cols, 4)
        x = Pointer(torch.float32)
        how = (Pointer(torch.int32), x, x), (n_rows, n_cols)
        n_programs = resident_programs(
            queue_kernel, *how, config.block_cols, config.num_warps
        )
        launch = functools.partial(
            draws_kernel[(n_programs,)], counter(), n_rows, num_warps=config.num_warps
        )
        p20, p50, p80 = clock.device_us(launch)
        sizes = {"n_cols": n_cols, "n_rows": n_rows, "n_programs": n_programs}
        times = {"p20_draws_us": p20, "p50_draws_us": p50, "p80_draws_us": p80}
        result.append(sizes | times)
    return result
