"""Chapter `online`'s kernel on its way: three passes, pairs, backwards, two launches.

from benchmarks import passes
show.diff(variants.three_pass_kernel, passes.two_pass_kernel)
show.diff(passes.two_pass_kernel, passes.backwards_kernel)
passes.judge(my_merge)
"""

import dataclasses
import functools
import random
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl

from benchmarks import variants
from kernels import online
from kernels.lab import backend, check, compile, gpu, occupancy, record, show
from kernels.online import exp_shifted_or_zero, merge, merge_axis

Softmax = Callable[[torch.Tensor], torch.Tensor]

# ---- two passes, one row a program ---------------------------------------------------


@triton.jit
def two_pass_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One program computes the softmax of one row in two passes over it.

    Args:
        output_ptr, …, BLOCK_COLS: as for `variants.three_pass_kernel`.
        MERGE: merges two pairs, as `kernels.online.merge` does.
    """
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * output_row_stride
    block = tl.arange(0, BLOCK_COLS).to(tl.int64)

    maxima = tl.full((BLOCK_COLS,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        maxima, sums = MERGE(maxima, sums, x.to(tl.float32), 1.0)
    row_max, row_sum = merge_axis(maxima, sums, 0)
    factor = 1 / row_sum

    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, other=-float("inf"))
        y = exp_shifted_or_zero(x.to(tl.float32), row_max) * factor
        tl.store(output_ptr + cols * output_col_stride, y, cols < n_cols)


@triton.jit
def backwards_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """As `two_pass_kernel`, but the second pass begins with the last block.

    Args:
        As for `two_pass_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * output_row_stride
    block = tl.arange(0, BLOCK_COLS).to(tl.int64)

    maxima = tl.full((BLOCK_COLS,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, -float("inf"), eviction_policy="evict_last")
        maxima, sums = MERGE(maxima, sums, x.to(tl.float32), 1.0)
    row_max, row_sum = merge_axis(maxima, sums, 0)
    factor = 1 / row_sum

    last = (n_cols - 1) // BLOCK_COLS * BLOCK_COLS
    for start in range(last, -1, -BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, -float("inf"), eviction_policy="evict_first")
        y = exp_shifted_or_zero(x.to(tl.float32), row_max) * factor
        ptrs = output_ptr + cols * output_col_stride
        tl.store(ptrs, y, cols < n_cols, eviction_policy="evict_first")


@triton.jit
def silent_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    output_col_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    MERGE: tl.constexpr,
):
    """As `backwards_kernel`, but only the sum of a row's results is stored.

    It tells what the stores of `backwards_kernel` take of L2.

    Args:
        As for `two_pass_kernel`. The sum is stored in a row's first element.
    """
    row = tl.program_id(0).to(tl.int64)
    input_ptr += row * input_row_stride
    output_ptr += row * output_row_stride
    block = tl.arange(0, BLOCK_COLS).to(tl.int64)

    maxima = tl.full((BLOCK_COLS,), -float("inf"), tl.float32)
    sums = tl.zeros((BLOCK_COLS,), tl.float32)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, -float("inf"), eviction_policy="evict_last")
        maxima, sums = MERGE(maxima, sums, x.to(tl.float32), 1.0)
    row_max, row_sum = merge_axis(maxima, sums, 0)
    factor = 1 / row_sum

    total = tl.zeros((BLOCK_COLS,), tl.float32)
    last = (n_cols - 1) // BLOCK_COLS * BLOCK_COLS
    for start in range(last, -1, -BLOCK_COLS):
        cols = start + block
        ptrs = input_ptr + cols * input_col_stride
        x = tl.load(ptrs, cols < n_cols, -float("inf"), eviction_policy="evict_first")
        y = exp_shifted_or_zero(x.to(tl.float32), row_max) * factor
        total += y
    tl.store(output_ptr, tl.sum(total, axis=0))


def row_by_row(
    kernel: Any, function: Any = merge, block_cols: int | None = None
) -> Softmax:
    """A softmax by a kernel of this module, one row a program.

    Args:
        kernel: such as `two_pass_kernel`.
        function: merges two pairs; the kernel's MERGE.
        block_cols: of a block, for one warp. None takes online's blocks and warps.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        backend.validate(x)
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            n_rows, n_cols = x.shape
            config = online.choose_config(1, n_cols, x.element_size())
            kernel[(n_rows,)](
                *(output, x, *output.stride(), *x.stride(), n_cols),
                BLOCK_COLS=block_cols or config.block_cols,
                MERGE=function,
                num_warps=1 if block_cols else config.num_warps,
            )
        return output

    softmax.__name__ = function.fn.__name__
    return softmax


CONTROLS: dict[str, Softmax] = {
    "online.backwards": row_by_row(backwards_kernel),
    "online.silent": row_by_row(silent_kernel),
}
"""Two kernels that differ in their stores only."""
COUNTED = {
    "online": "online",
    "online.forwards": "forwards",
    "online.unhinted": "unhinted",
    "online.backwards": "step four",
    "online.silent": "no stores",
}
"""Whose DRAM bytes are counted, by provider, and the names of the page's table."""

# ---- the learner's merge -------------------------------------------------------------

NARROW, PAIRS = 16, 64  # columns of a block, and pairs, where a merge is judged
PARTS, ORDERS = 8, 10  # of a row that is cut and merged at random


@triton.jit
def pairs_kernel(
    max_ptr, sum_ptr, other_max_ptr, other_sum_ptr, N: tl.constexpr, MERGE: tl.constexpr
):
    """One program merges N pairs with N others, in place of the first."""
    i = tl.arange(0, N)
    max_a, sum_a = tl.load(max_ptr + i), tl.load(sum_ptr + i)
    max_b, sum_b = tl.load(other_max_ptr + i), tl.load(other_sum_ptr + i)
    both_max, both_sum = MERGE(max_a, sum_a, max_b, sum_b)
    tl.store(max_ptr + i, both_max)
    tl.store(sum_ptr + i, both_sum)


def judge(function: Any) -> None:
    """Says in a sentence whether a learner's merge of two pairs is right.

    The kernel merges single values only, whose sums are 1. So a merge that passes as a
    softmax must also merge the pairs of a row's parts, in random orders and groups.

    Args:
        function: as `kernels.online.merge`.
    """
    softmax = row_by_row(two_pass_kernel, function, NARROW)
    how = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 33}
    found = check.softmax(softmax, **how)  # says itself what is wrong
    if not found:
        return
    right = sum(_in_a_random_order(function, seed) for seed in range(ORDERS))
    said = (
        f"Right in all {found.cases} cases, and for the parts of a row in {ORDERS} "
        "random orders and groupings."
    )
    if right < ORDERS:
        said = (
            "Not yet: a loop over single values is right, but the parts of a row merge "
            f"to its pair in {right} of {ORDERS} random orders only. Are both sums "
            "used, and both moved to the new maximum?"
        )
    print(textwrap.fill(said, 80))


def _in_a_random_order(function: Any, seed: int) -> bool:
    """Whether the shuffled parts of rows, merged in random groups, give their pairs.

    There are PAIRS rows. One part of each row has nothing but -inf.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x = 5 * torch.randn(PARTS, 4, PAIRS, generator=generator, dtype=torch.float64)
    x[0] = -float("inf")
    maxima = x.amax(1)
    sums = exp_of_difference(x, maxima[:, None]).sum(1)
    maxima, sums = (each.to(backend.DEVICE, torch.float32) for each in (maxima, sums))
    parts = list(zip(maxima.clone(), sums.clone(), strict=True))
    rng.shuffle(parts)
    while len(parts) > 1:
        i = rng.randrange(len(parts) - 1)
        pairs_kernel[(1,)](*parts[i], *parts.pop(i + 1), PAIRS, function)
    wanted = x.flatten(0, 1).amax(0)
    total = exp_of_difference(x, wanted).sum((0, 1))
    ((found, found_sum),) = parts
    same = torch.equal(found.cpu(), wanted.float())
    return same and torch.allclose(found_sum.cpu().double(), total, rtol=1e-5, atol=0)


def exp_of_difference(x: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """exp(x - row_max), and 0 where x is -inf."""
    return torch.where(x.isinf(), 0.0, (x - row_max).exp())


# ---- what the compiler makes of it ---------------------------------------------------


def first_loop(ptx: str) -> str:
    """What stands between the first label that is jumped back to, and that jump."""
    return re.search(r"(?sm)^(\$L\w+):(.*?)bra[\w.]*\s+\1;", ptx)[2]


def in_the_first_loop(accumulators: tuple[int, ...]) -> show.Table:
    """What the first loop has for rows of 65536 float32 values, compiled for the H200.

    Args:
        accumulators: a row of the table for each number of running pairs.
    """
    x = torch.empty(1056, 65536, device="meta")
    config = online.choose_config(1056, 65536, x.element_size())
    configs = [dataclasses.replace(config, accumulators=n) for n in accumulators]
    launches = [online.launch_for(x, x, each) for each in configs]
    rows = []
    for n, launch in zip(accumulators, launches, strict=True):
        made = compile.aot(launch, gpu="H200")
        loop = first_loop(made.ptx)
        counts = [loop.count(word) for word in ("bar.sync", "shfl", "ex2")]
        rows.append([n, *counts, made.registers])
    header = ["running pairs", "barriers", "shuffles", "exponentials"]
    return show.table(rows, [*header, "registers of a thread"])


# ---- what L2 holds -------------------------------------------------------------------


def room_in_l2(where: gpu.Gpu) -> float:
    """The float32 values of each row that L2 has room for, by the page's model.

    All of L2 is shared evenly by the rows in progress: one in each program that fits.
    """
    x = torch.empty(1056, 65536, device="meta")
    programs = occupancy.of(online.launch_for(x, x), where).blocks_per_sm
    return where.l2_bytes / (programs * where.sms * 4)


def readings(counted: pd.DataFrame) -> pd.DataFrame:
    """How often a row is read from DRAM: by the model of L2, and as counted.

    Args:
        counted: rows of `dram.online_experiment`.

    Returns:
        By n_cols: the model of `online`, then what was counted, by provider.
    """
    table = _readings(counted)
    room = room_in_l2(gpu.of(counted["gpu"].iloc[0]))
    columns = {"model": [2 - min(1, room / n) for n in table.index]}
    for provider, name in COUNTED.items():
        if provider in table:  # an older record lacks the controls
            columns[name] = table[provider].tolist()
    return pd.DataFrame(columns, index=table.index)


def shares(counted: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """The share of the copy's bandwidth if DRAM's bytes decided, and as measured.

    Args:
        counted: rows of `dram.online_experiment`.
        measured: rows of the chapter's sweep.

    Returns:
        By the n_cols that were measured, NaN where nothing was counted.
    """
    table = record.pivot(measured)[["online"]]
    allowed = 2 / (1 + _readings(counted)["online"])  # the copy reads and writes once
    table.insert(0, "by the bytes counted", allowed.reindex(table.index))
    return table.rename(columns={"online": "measured"})


def _readings(counted: pd.DataFrame) -> pd.DataFrame:
    matrix_bytes = 4 * counted["n_rows"] * counted["n_cols"]
    read = counted.assign(readings=counted["read_bytes"] / matrix_bytes)
    return record.pivot(read, "readings")


def with_warps(num_warps: int) -> Softmax:
    """The kernel in programs of so many warps, 32 bfloat16 values in each thread."""
    sizes = {"block_cols": 1024 * num_warps, "accumulators": 256 * num_warps}
    return functools.partial(variants.changed, num_warps=num_warps, **sizes)


BY_WARPS = {f"online.warps{n}": with_warps(n) for n in (8, 16, 32)}

# ---- two launches --------------------------------------------------------------------


def two_launches(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, in two launches where `online.prepare` wants two.

    Args, returns: as `kernels.online.softmax`.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        online.prepare(output, x, lambda launch: launch)(output, x)
    return output


def in_parts(
    x: torch.Tensor, n_parts: int = 3, config: online.Config | None = None
) -> torch.Tensor:
    """The softmax of every row by two launches, with so many parts of a row.

    Args:
        x: as for `kernels.online.softmax`.
        n_parts: of a row, or as many as it has blocks, if that is less.
        config: of the kernel; None takes blocks of 16 rows and 64 columns, so that
            short rows have several parts, too.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        config = config or online.Config(16, 64, 16, num_warps=1)
        n_blocks = triton.cdiv(x.shape[1], config.block_cols)
        part_blocks = triton.cdiv(n_blocks, min(n_parts, n_blocks))
        n_parts = triton.cdiv(n_blocks, part_blocks)  # none of them is empty
        dtype = torch.promote_types(x.dtype, torch.float32)
        pairs = torch.empty((2, len(x), n_parts), dtype=dtype, device=x.device)
        for step in (1, 2):
            launch = online.launch_for(output, x, config, step)
            grid, scalars = launch.grid[0], launch.scalars[:-1]
            launch = dataclasses.replace(
                launch, grid=(grid, n_parts), scalars=(*scalars, part_blocks)
            )
            launch(output, x, pairs)
    return output
