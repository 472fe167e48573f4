"""Experiments of chapter `residency`, and what it says of the learner's two functions.

from benchmarks import residency as lives
asked = record.observe("residency_occupancy", lives.ask_driver)
latency = record.observe("residency_latency", lives.latencies)
observed = record.observe("residency_lives", lives.lives)
measured = record.sweep("residency", lives.providers(), lives.cases())
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels import meta, persistent, program, residency, strided
from kernels.lab import backend, clock, compile, gpu, occupancy, record, verdict
from kernels.lab.launch import Launch, Pointer, pointer_to
from kernels.lab.limited import LimitedLaunch

# ---- what the driver is asked --------------------------------------------------------

N_ROWS = 4096
COLUMNS = (512, 2048, 4096)
STAGES = (1, 2, 3, 4)


def launches() -> Iterator[tuple[dict[str, Any], Launch]]:
    """The kernels of chapters `program` to `persistent`, on contiguous float32 rows.

    Yields:
        Labels (kernel, block_cols and num_stages) and a launch, for every combination
        of kernel, COLUMNS, `meta.WARPS` and STAGES.
    """
    x = compile.pointer(torch.float32)
    for n_cols, warps, stages in itertools.product(COLUMNS, meta.WARPS, STAGES):
        options = {"num_warps": warps, "num_stages": stages}
        block = {"BLOCK_COLS": n_cols}
        tile = {"ROWS_PER_TILE": 1, **block, "NUM_STAGES": stages}
        strides = (n_cols, 1, n_cols, 1)
        for kernel, pointers, scalars, constants in (
            (program.add_kernel, (x, x, x), (N_ROWS * n_cols,), {"BLOCK": n_cols}),
            (program.softmax_kernel, (x, x), (n_cols,), block),
            (strided.softmax_kernel, (x, x), (*strides, n_cols), block),
            (persistent.softmax_kernel, (x, x), (*strides, N_ROWS, n_cols), tile),
        ):
            module = kernel.fn.__module__.removeprefix("kernels.")
            name = f"{module}.{kernel.fn.__name__}"
            labels = {"kernel": name, "block_cols": n_cols, "num_stages": stages}
            yield labels, Launch(kernel, (1,), scalars, constants | options, pointers)


def ask_driver() -> list[dict[str, Any]]:
    """What the driver says of each of `launches`; see `occupancy.table`."""
    return occupancy.table(launches())


def usual_answers(asked: pd.DataFrame) -> str:
    """Says how often the usual formula gives the driver's answer.

    The formula divides the registers by those of a block, and the shared memory that a
    block may have by that of a block, and takes the smaller.

    Args:
        asked: from `ask_driver`.

    Source: Triton's tutorial 2, fused softmax.
    """
    uses = asked[asked["shared_bytes"] > 0]
    on = gpu.of(asked["gpu"].iloc[0])
    by_registers = on.registers_per_sm // (uses["registers"] * 32 * uses["num_warps"])
    by_shared = on.shared_per_block // uses["shared_bytes"]
    usual = by_registers.clip(upper=by_shared)
    too_many = (usual > uses["blocks_per_sm_driver"]).sum()
    return (
        f"the usual formula divides by zero for {len(asked) - len(uses)} of "
        f"{len(asked)} kernels, and promises too much for {too_many}"
    )


# ---- how long a load takes -----------------------------------------------------------

LINKS = 4096  # 4 KiB apart: 16 MiB


def latencies() -> list[dict[str, Any]]:
    """The time of a load that waits for the load before it, from DRAM and from L2.

    One program follows `residency.links`. Where the clock flushes L2 before each call,
    every link comes from DRAM; where it does not, from L2, which the call before
    filled. The launch takes some µs of the ms, and is not subtracted.

    Returns:
        Rows of memory ("DRAM" or "L2"), links, and p20_ns, p50_ns, p80_ns of a step.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    ring = residency.links(LINKS)
    rows = []
    for memory, timer in (("DRAM", clock.device_us), ("L2", clock.unflushed_us)):
        times = timer(residency.chase, ring, LINKS)
        p20, p50, p80 = (round(1e3 * us / LINKS, 1) for us in times)
        each = {"p20_ns": p20, "p50_ns": p50, "p80_ns": p80}
        rows.append({"memory": memory, "links": LINKS, **each})
    return rows


# ---- how long a program lives --------------------------------------------------------

WORK = ("empty", "copy", "softmax")
LIVES = [*((work, 1) for work in WORK), *(("softmax", k) for k in (2, 4, 8, 0))]


@triton.jit
def copy_row(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    """One program copies its row."""
    cols = tl.arange(0, BLOCK_COLS)
    places = tl.program_id(0).to(tl.int64) * n_cols + cols
    x = tl.load(input_ptr + places, mask=cols < n_cols)
    tl.store(output_ptr + places, x, mask=cols < n_cols)


@triton.jit
def timed_kernel(
    clock_ptr,
    output_ptr,
    input_ptr,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    WORK: tl.constexpr,
):
    """One program notes when it begins, does its work, and notes its end and its SM.

    Args:
        clock_ptr: (n_rows, 3), int64: begin and end of each program in ns, its SM.
        output_ptr, input_ptr: first elements of contiguous matrices, one row a program.
        n_cols: the length of a row.
        BLOCK_COLS: n_cols rounded up to a power of two.
        WORK: "empty", "copy" (of the row) or "softmax", chapter `strided`'s kernel.
    """
    stamps_ptr = clock_ptr + 3 * tl.program_id(0)
    tl.store(stamps_ptr, cuda.globaltimer())
    if WORK == "copy":
        copy_row(output_ptr, input_ptr, n_cols, BLOCK_COLS)
    if WORK == "softmax":
        strided.softmax_kernel(
            output_ptr, input_ptr, n_cols, 1, n_cols, 1, n_cols, BLOCK_COLS
        )
    tl.store(stamps_ptr + 1, cuda.globaltimer())
    tl.store(stamps_ptr + 2, cuda.smid().to(tl.int64))


def timed_launch(x: torch.Tensor, work: str) -> Launch:
    """The launch of `timed_kernel` with 4 warps for each row of x, on any device."""
    n_rows, n_cols = x.shape
    constants = {"BLOCK_COLS": triton.next_power_of_2(n_cols), "WORK": work}
    pointers = Pointer(torch.int64), pointer_to(x), pointer_to(x)
    options = {"num_warps": 4}
    return Launch(timed_kernel, (n_rows,), (n_cols,), constants | options, pointers)


def lives(n_rows: int = 32768, n_cols: int = 2048) -> list[dict[str, Any]]:
    """How many programs live on an SM at once, and for how long, with each limit.

    The third run counts: the first compiles.

    Returns:
        Rows of work, limit (of programs per SM; 0: none) and what `observed` returns.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    y, rows = torch.empty_like(x), []
    for work, limit in LIVES:
        launch: Callable = timed_launch(x, work)
        if limit:
            launch = LimitedLaunch(launch, limit)
        stamps = torch.zeros(n_rows, 3, dtype=torch.int64, device=x.device)
        with clock.alone():
            for _ in range(3):
                clock.flush_by_reading()
                launch(stamps, y, x)
            torch.cuda.synchronize()
        rows.append({"work": work, "limit": limit, **observed(stamps)})
    return rows


def observed(stamps: torch.Tensor) -> dict[str, float]:
    """What the stamps of one launch say.

    Args:
        stamps: (n_programs, 3), int64: what `timed_kernel` wrote.

    Returns:
        seen: the most programs that lived on one SM at once. life_us: the median of
        their lives. place_us: for how long a program takes up one of these places, from
        its begin to its successor's, if all SMs were always full.
    """
    begin, end, sm = stamps.cpu().T
    n_sms, seen = len(sm.unique()), 0
    for number in sm.unique():
        on_sm = sm == number
        events = [(time, 1) for time in begin[on_sm].tolist()]
        events += [(time, -1) for time in end[on_sm].tolist()]
        # Of two events at one time the end comes first: a place is free, then taken.
        alive = itertools.accumulate(change for _, change in sorted(events))
        seen = max(seen, *alive)
    whole_us = (end.max() - begin.min()).item() / 1e3
    return {
        "seen": seen,
        "life_us": round((end - begin).double().median().item() / 1e3, 3),
        "place_us": round(whole_us * n_sms * seen / len(begin), 3),
    }


# ---- what a limit costs --------------------------------------------------------------

LIMITS = (1, 2, 3, 4, 6, 8)


def providers() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The softmax with each of LIMITS, without one, and with at most 32 registers."""
    limited = {
        f"residency.limit{k}": functools.partial(residency.softmax, programs_per_sm=k)
        for k in LIMITS
    }
    return limited | {"residency": residency.softmax, "residency.maxnreg32": squeezed}


def squeezed(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, of a kernel compiled to at most 32 registers."""
    output = torch.empty_like(x)
    residency.launch_for(output, x, maxnreg=32)(output, x)
    return output


def cases() -> list[record.Case]:
    """256 MiB of float32 in rows of each of COLUMNS."""
    return record.of_size(2**28, COLUMNS)


def on_an_sm(measured: pd.DataFrame, asked: pd.DataFrame) -> pd.DataFrame:
    """The measured limits, with the programs, and the KiB of rows, that an SM holds.

    Args:
        measured: from `record.sweep` with `providers` and `cases`.
        asked: from `ask_driver`, on the same GPU: how many programs fit.

    Returns:
        Rows of n_cols, programs, kib and share_of_copy.
    """
    plain = record.select(asked, kernel="strided.softmax_kernel", num_warps=4)
    fit = plain.groupby("block_cols")["blocks_per_sm_driver"].first()
    chosen = measured[measured["provider"].str.fullmatch(r"residency(\.limit\d+)?")]
    limit = chosen["provider"].str.extract(r"(\d+)")[0].astype(float)
    most = chosen["n_cols"].map(fit)
    programs = limit.fillna(most).clip(upper=most).astype(int)
    kib = programs * chosen["n_cols"] * 4 / 1024
    named = {"n_cols": chosen["n_cols"], "programs": programs, "kib": kib}
    return pd.DataFrame({**named, "share_of_copy": chosen["share_of_copy"]})


# ---- what is said of the learner's functions -----------------------------------------


def judge_count(function: Callable[[int, int, int], int]) -> str:
    """Says whether a function counts the programs that fit on an SM of the H200.

    Args:
        function: takes num_warps, registers (per thread) and shared (bytes per block).
    """
    if unwritten := _unwritten(function):
        return unwritten
    h200, tried = gpu.named("H200"), 0
    # Programs of many warps first, whose rules are fewer.
    for warps, registers, shared in itertools.product(
        (16, 8, 4, 32, 2, 1), (32, 33, 40, 64, 85, 128, 166), (0, 64, 8192, 65536)
    ):
        needs = {"num_warps": warps, "registers": registers, "shared": shared}
        right = occupancy.resident(h200, **needs)
        if right.blocks_per_sm == 0:
            continue
        try:
            said = function(**needs)
        except Exception as error:
            return f"Not yet: {verdict.raised(error, function)}"
        if said != right.blocks_per_sm:
            return (
                f"Not yet: of programs with {warps} warp{'s' * (warps > 1)}, "
                f"{registers} registers and {shared} bytes, {right.blocks_per_sm} fit; "
                f"yours says {said}. {_hint(said, right, **needs)}"
            ).rstrip()
        tried += 1
    return f"Right in all {tried} cases: 1 to 32 warps, 32 to 166 registers."


def _hint(
    said: Any,
    right: occupancy.Occupancy,
    num_warps: int,
    registers: int,
    shared: int,
) -> str:
    per_warp = 32 * registers
    portions = -(-per_warp // 256) * 256
    if right.limit != "registers":
        return f"They run out of {right.limit} first."
    if said == 65536 // per_warp // num_warps and per_warp != portions:
        return "A warp gets registers in portions of 256."
    if said == 65536 // portions // num_warps:
        return (
            "An SM is four quarters of 16,384 registers, and a warp lives in one of "
            "them: how many warps fit in a quarter?"
        )
    return "They run out of registers first."


def judge_chase(kernel: Any) -> str:
    """Says whether a kernel follows links as `residency.chase_kernel` does."""
    if unwritten := _unwritten(kernel):
        return unwritten
    ring = residency.links(16, apart=4)
    place = 0
    for steps in range(18):
        output = torch.full((1,), -1, dtype=torch.int32, device=backend.DEVICE)
        try:
            kernel[(1,)](output, ring, steps, num_warps=1)
        except Exception as error:
            return f"Not yet: {verdict.raised(error, kernel)}"
        if output.item() != place:
            return (
                f"Not yet: after {steps} step{'s' * (steps != 1)} from place 0 the "
                f"links lead to place {place}; yours is at {output.item()}."
            )
        place = ring[place].item()
    return "Right: it follows the links, and is back at place 0 after all 16."


def _unwritten(function: Any) -> str:
    if (place := verdict.unfinished(function)) is None:
        return ""
    return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
