"""Chapter `tiled`'s kernel on its way: a tile of rows, wide accesses, two blocks.

from benchmarks import tiles
show.diff(tiles.tile_kernel, tiles.wide_kernel)
show.diff(tiles.wide_kernel, tiles.blocks_kernel)
show.diff(tiles.blocks_kernel, tiled.softmax_kernel)
tiles.judge(my_kernel)
measured = record.sweep("tiled", tiles.STEPS, cases)
observed = record.observe("tiled_copy", tiles.copies)
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import profilers
from kernels import persistent, tiled
from kernels.lab import check, clock, compile, record
from kernels.lab.compile import Compiled
from kernels.lab.launch import (
    SIZES,
    Launch,
    ceil_div,
    constants_of,
    pointer_to,
    row_shift,
)
from kernels.tiled import block_max, exp_shifted

Softmax = Callable[[torch.Tensor], torch.Tensor]


@triton.jit
def tile_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One program computes the softmax of one tile of rows.

    Args:
        output_ptr, input_ptr: the tensors' first elements; columns are adjacent.
        output_row_stride, input_row_stride: elements from one row to the next.
        n_rows, n_cols: the tensors' shape.
        ROWS: rows of the tile, a power of two.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    # The program's number decides its rows. Shapes: (ROWS, 1) and (1, BLOCK_COLS).
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    rows = rows.to(tl.int64)  # row × stride may exceed 2^31
    input_ptrs = input_ptr + rows * input_row_stride

    inside = is_row & (cols < n_cols)
    x = tl.load(input_ptrs + cols, mask=inside, other=-float("inf"))
    row_max = block_max(x)

    numerator = exp_shifted(x, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    factor = 1 / row_sum  # one division a row, then one product a value
    output_ptrs = output_ptr + rows * output_row_stride
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def wide_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """As `tile_kernel`, in accesses of VECTOR elements.

    Args:
        As for `tile_kernel`.
        VECTOR: elements that a thread moves at once; it divides every row's start.
    """
    # The program's number decides its rows. Shapes: (ROWS, 1) and (1, BLOCK_COLS).
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    rows = rows.to(tl.int64)  # row × stride may exceed 2^31
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    n_cols = n_cols // VECTOR * VECTOR
    input_ptrs = input_ptr + rows * (input_row_stride // VECTOR * VECTOR)

    inside = is_row & (cols < n_cols)
    x = tl.load(input_ptrs + cols, mask=inside, other=-float("inf"))
    row_max = block_max(x)

    numerator = exp_shifted(x, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    factor = 1 / row_sum  # one division a row, then one product a value
    output_ptrs = output_ptr + rows * (output_row_stride // VECTOR * VECTOR)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def blocks_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """As `wide_kernel`, with the rest of a row in a second, smaller block.

    Args:
        As for `wide_kernel`.
        REST_COLS: columns of the second block, a power of two; 0 if there is none.
    """
    # The program's number decides its rows. Shapes: (ROWS, 1) and (1, BLOCK_COLS).
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    rows = rows.to(tl.int64)  # row × stride may exceed 2^31
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    n_cols = n_cols // VECTOR * VECTOR
    input_ptrs = input_ptr + rows * (input_row_stride // VECTOR * VECTOR)

    inside = is_row & (cols < n_cols)
    x = tl.load(input_ptrs + cols, mask=inside, other=-float("inf"))
    row_max = block_max(x)
    if REST_COLS:
        rest_cols = BLOCK_COLS + tl.arange(0, REST_COLS)[None, :]
        rest_inside = is_row & (rest_cols < n_cols)
        rest = tl.load(input_ptrs + rest_cols, mask=rest_inside, other=-float("inf"))
        row_max = tl.maximum(row_max, block_max(rest))

    numerator = exp_shifted(x, row_max)
    row_sum = tl.sum(numerator, axis=1)[:, None]
    if REST_COLS:
        row_sum += tl.sum(exp_shifted(rest, row_max), axis=1)[:, None]
    factor = 1 / row_sum  # one division a row, then one product a value
    output_ptrs = output_ptr + rows * (output_row_stride // VECTOR * VECTOR)
    tl.store(output_ptrs + cols, numerator * factor, mask=inside)
    if REST_COLS:
        y = exp_shifted(rest, row_max) * factor
        tl.store(output_ptrs + rest_cols, y, mask=rest_inside)


# ---- launches ------------------------------------------------------------------------


def launch_for(kernel: Any, output: torch.Tensor, x: torch.Tensor) -> Launch:
    """The launch of a kernel of this module, or of `tiled.softmax_kernel`.

    Args:
        kernel: one of them. Without a second block its block is as long as the next
            power of two, and rows and warps are chosen for that length.
        output, x: as for `tiled.launch_for`.
    """
    chosen = tiled.launch_for(output, x)
    if kernel is tiled.softmax_kernel:
        return chosen
    constants = dict(chosen.constants)
    if "REST_COLS" not in kernel.arg_names:
        block, vector = triton.next_power_of_2(x.shape[1]), constants["VECTOR"]
        config = tiled.choose_config(block, x.element_size(), vector)
        constants = dict(constants_of(config))
    constants = {
        name: value
        for name, value in constants.items()
        if name in kernel.arg_names or name == "num_warps"
    }
    grid = (ceil_div(len(x), constants["ROWS"]),)
    return dataclasses.replace(chosen, kernel=kernel, grid=grid, constants=constants)


def softmax_by(kernel: Any) -> Softmax:
    """The softmax of every row, by a kernel of this module; see `launch_for`."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            x = x if x.stride(1) == 1 else x.contiguous()
            launch = launch_for(kernel, output, x)
            kernel[launch.grid](output, x, *launch.scalars, **launch.constants)
        return output

    return softmax


def changed(**changes: Any) -> Softmax:
    """`tiled.softmax` with some fields of its config replaced.

    Args:
        changes: fields of `tiled.Config` and their values, such as rows=1.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            x = x if x.stride(1) == 1 else x.contiguous()
            changed_launch(output, x, **changes)(output, x)
        return output

    return softmax


def changed_launch(output: torch.Tensor, x: torch.Tensor, **changes: Any) -> Launch:
    """`tiled.launch_for`, with some fields of the config replaced.

    Args:
        output, x: as for `tiled.launch_for`.
        changes: fields of `tiled.Config` and their values.
    """
    starts = (t.stride(0) for t in (output, x))
    shifts = (row_shift(t) for t in (output, x))
    size = x.element_size()
    vector = tiled.choose_vector(x.shape[1], size, *starts, *shifts)
    config = tiled.choose_config(x.shape[1], size, vector)
    return tiled.launch_for(output, x, dataclasses.replace(config, **changes))


STEPS: dict[str, Softmax] = {
    "persistent": persistent.softmax,
    "tiled.tile": softmax_by(tile_kernel),
    "tiled.wide": softmax_by(wide_kernel),
    "tiled.blocks": softmax_by(blocks_kernel),
    "tiled.kept": changed(recompute=False),
    "tiled": tiled.softmax,
}
"""From chapter `persistent`'s kernel to chapter `tiled`'s, by the provider's name."""

STEP_NAMES = (
    "persistent",
    "one: tile",
    "two: wide",
    "three: blocks",
    "four: hint",
    "four: 16 bits",
)
"""What a figure calls `STEPS`, in their order."""

TILES: dict[int, Softmax] = {n: changed(rows=n, num_warps=1) for n in (1, 2, 4, 8, 32)}
"""`tiled.softmax` for short rows, by the number of rows in a tile.

A tile of one row needs two columns: Triton compiles no tile of one element.
"""


# ---- what the compiler and the profiler say ------------------------------------------


def widest(made: Compiled, kind: str) -> int:
    """The bytes that a thread moves by a kernel's widest access.

    Args:
        kind: "ld" for loads, "st" for stores.
    """
    found = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.b(\d+)\b", made.ptx)
    return max((int(n or 1) * int(bits) // 8 for n, bits in found), default=0)


def widths(n_cols: int, stride: int | None = None) -> dict[str, int]:
    """The bytes of a load by chapter `persistent`'s kernel, and by `wide_kernel`.

    Args:
        n_cols: of bfloat16 rows.
        stride: from row to row; None means that rows follow without gaps.
    """
    stride, dtype = stride or n_cols, torch.bfloat16
    x = torch.empty(4096, stride, dtype=dtype, device="meta")[:, :n_cols]
    config = persistent.choose_config(n_cols, 2, persistent.starts_aligned(x))
    strides, pointer = (stride, 1, stride, 1), pointer_to(x)
    before = (pointer, pointer, *strides, 4096, n_cols)
    wide = launch_for(wide_kernel, x, x)
    launches = [(persistent.softmax_kernel, before, config.constants), wide]
    old, new = (widest(made, "ld") for made in compile.aot_all(launches))
    return {"persistent": old, "VECTOR": wide.constants["VECTOR"], "wide": new}


def exponentials(kernel: Any, n_cols: int) -> int:
    """How many exponentials one program computes for one row of bfloat16 values.

    Args:
        kernel: of this module.
        n_cols: the length of contiguous rows; long ones have a tile for each.
    """
    x = torch.empty(4096, n_cols, dtype=torch.bfloat16, device="meta")
    made = compile.aot(launch_for(kernel, x, x))
    return made.count(r"ex2\.") * 32 * made.num_warps


def copies(n_bytes: int = 2**28) -> list[dict[str, Any]]:
    """What the GPU runs for `clone` and for `abs`, of bfloat16 matrices of n_bytes.

    Returns:
        Rows of call, n_cols, runs (the kernel's or the copy's name), us and gbps.

    Raises:
        RuntimeError: nothing is timed here.
        record.Unavailable: torch.profiler does not work here.
    """
    clock.require_gpu()
    rows = []
    for call in (torch.clone, torch.abs):
        for n_cols in (8192, 8200):
            x = record.random(torch.bfloat16, n_bytes // 2 // n_cols, n_cols)
            us = clock.device_us(call, x)[1]
            row = {"call": f"x.{call.__name__}()", "n_cols": n_cols}
            row |= {"runs": runs(call, x), "us": us}
            rows.append(row | {"gbps": 2 * x.nbytes / us / 1e3})
    return rows


def runs(function: Callable, x: torch.Tensor) -> str:
    """The name of what the GPU runs for function(x), as torch.profiler reports it.

    Raises:
        record.Unavailable: torch.profiler does not work here.
    """
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=cuda, acc_events=True) as profiler:
            function(x)
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise record.Unavailable(str(error)) from error
    names = [e.key for e in profiler.key_averages() if e.self_device_time_total]
    return " + ".join(
        name if name.startswith("Mem") else profilers.kernel_name(name)
        for name in names
    )


# ---- the learner's kernel ------------------------------------------------------------

ROWS = 4  # of its tiles


def launched(kernel: Any) -> Softmax:
    """A softmax by a learner's kernel, for contiguous matrices.

    Args:
        kernel: takes (output_ptr, input_ptr, n_rows, n_cols, BLOCK, VECTOR). Its tiles
            have ROWS rows.
    """
    kernel = unspecialised(kernel)

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        if x.numel():
            n_rows, n_cols = x.shape
            block = triton.next_power_of_2(n_cols)
            vector = tiled.choose_vector(n_cols, x.element_size())
            grid = (triton.cdiv(n_rows, ROWS),)
            kernel[grid](output, x, n_rows, n_cols, block, vector)
        return output

    softmax.__name__ = kernel.fn.__name__
    return softmax


def unspecialised(kernel: Any) -> Any:
    """A kernel as for `launched`, whose sizes are no constants where they are 1.

    In a kernel for one column, `tl.multiple_of(n, VECTOR)` would raise an error that
    says nothing of the learner's line: Triton puts a constant in the place of a 1.
    """
    return triton.jit(kernel.fn, do_not_specialize=[2, 3])  # n_rows and n_cols


def judge(kernel: Any) -> None:
    """Says in a sentence whether a learner's kernel is right, and how wide it loads.

    Args:
        kernel: as for `launched`.
    """
    how = {"dtypes": [torch.bfloat16], "layouts": ["contiguous"], "max_cols": 1032}
    found = check.softmax(launched(kernel), **how)  # says itself what is wrong
    if not found:
        return
    x = compile.pointer(torch.bfloat16)
    made = compile.aot(kernel, x, x, 4096, 1000, 1024, 8)
    loads, stores = widest(made, "ld"), widest(made, "st")
    said = (
        f"Right in all {found.cases} cases. In rows of 1000 bfloat16 values, a thread "
        f"loads {loads} bytes at once and stores {stores}."
    )
    if min(loads, stores) < 16:
        said = f"Not yet: {said} The compiler cannot see what VECTOR divides."
        said = said.replace("yet: Right", "yet: right")
    print(textwrap.fill(said, 80))
