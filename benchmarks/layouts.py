"""Experiments of chapter `strided`: what alignment is worth, and what layouts cost.

from benchmarks import layouts
observed = record.observe("strided_causes", layouts.causes)
observed = record.observe("strided_layouts", layouts.times)
observed = record.observe("strided_sectors", layouts.sectors)
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch
import triton
import triton.language as tl

from kernels import program, strided
from kernels.lab import backend, clock, compile, counters, ptx

SECTOR = 32  # bytes


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Divides each row by the root of the mean of its squares: RMSNorm, in PyTorch."""
    return x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()


@triton.jit
def eights_kernel(output_ptr, input_ptr, n_eights, BLOCK_COLS: tl.constexpr):
    """One program computes the softmax of one row whose length is a multiple of 8.

    It is the kernel of chapter `program`, except for its first lines.

    Args:
        output_ptr, input_ptr: first elements of contiguous (n_rows, n_cols) tensors.
        n_eights: n_cols / 8.
        BLOCK_COLS: n_cols rounded up to a power of two.
    """
    n_cols = n_eights * 8  # now the compiler knows that 8 divides n_cols
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    # Masked elements hold -inf, which changes no maximum and, as 0, no sum.
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    # tl.exp takes no 16-bit values, and a sum in 16 bits would lose small terms.
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    # The store converts y to the output's dtype.
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


# ---- alignment, gaps and masks, one at a time ----------------------------------------


def access(
    kernel: Any, dtype: torch.dtype, *numbers: int, aligned: bool = True
) -> dict[str, str]:
    """What the first load and the first store of a warp touch, from the compiled code.

    Args:
        kernel: takes the pointers of output and input, these numbers, and BLOCK_COLS.
        dtype: of both tensors.
        numbers: of the launch; the program is that of row 1.
        aligned: whether both tensors start at a multiple of 16 bytes.

    Returns:
        "load" and "store", each with the bytes of a lane and how much of the sectors
        that the warp touches is used, such as "16 B, 100 %".
    """
    pointer = compile.pointer(dtype, aligned)
    made = compile.aot(kernel, pointer, pointer, *numbers, BLOCK_COLS=BLOCK_COLS)
    start = 0 if aligned else dtype.itemsize
    passed = [number for number in numbers if number != 1]  # 1 is compiled in
    found = ptx.accesses(made, start, start, *passed, program=(1, 0, 0), space="global")
    said = {}
    for kind, name in (("ld", "load"), ("st", "store")):
        first = next(each for each in found if each.kind == kind)
        lanes = [int(a) for a in first.addresses[:32] if a != ptx.OFF]
        ends = [end for a in lanes for end in (a, a + first.n_bytes - 1)]
        touched = SECTOR * len({end // SECTOR for end in ends})
        share = len(lanes) * first.n_bytes / touched
        said[name] = f"{first.n_bytes} B, {100 * share:.3g} %"
    return said


N_ROWS, BLOCK_COLS = 32768, 1024
CASES = (  # n_cols, row stride of the input, row stride of the output
    (1008, 1008, 1008),  # everything is a multiple of 16
    (1008, 1009, 1009),  # rows start anywhere
    (1001, 1001, 1001),  # … and the mask ends anywhere
    (1001, 1008, 1001),  # rows of the input are aligned
    (1001, 1008, 1008),  # all rows are aligned
    (1000, 1000, 1000),  # a multiple of 8, which the compiler does not know
)


def causes() -> Iterator[dict[str, Any]]:
    """The bandwidth of the kernel on rows of about 1000 values, case by case.

    Where the compiler cannot know that 8 divides the length, two more kernels run: that
    of chapter `program`, and the same kernel with that knowledge.

    Yields:
        Rows of case ("1001: 1008 → 1001" for 1001 columns, the row stride of the input
        and that of the output), dtype and gbps, the effective bandwidth in GB/s.

    Raises:
        RuntimeError: nothing is timed here.
    """
    for dtype in (torch.float32, torch.bfloat16):
        make = partial(torch.randn, dtype=dtype, device=backend.DEVICE)
        for n_cols, stride, output_stride in CASES:
            x = make(N_ROWS, stride)[:, :n_cols]
            y = make(N_ROWS, output_stride)[:, :n_cols]
            scalars = output_stride, 1, stride, 1, n_cols
            kernels = {"": (strided.softmax_kernel, scalars)}
            if n_cols == 1000:
                kernels[", program"] = program.softmax_kernel, (n_cols,)
                kernels[", eights"] = eights_kernel, (n_cols // 8,)
            for words, (kernel, numbers) in kernels.items():
                launch = kernel[(N_ROWS,)]
                _, us, _ = clock.device_us(launch, y, x, *numbers, BLOCK_COLS)
                yield {
                    "case": f"{n_cols}: {stride} → {output_stride}{words}",
                    "dtype": str(dtype).removeprefix("torch."),
                    "gbps": round(2 * x.nbytes / us / 1e3),
                }


# ---- the same values in five layouts -------------------------------------------------


def views(n_rows: int, n_cols: int) -> dict[str, torch.Tensor]:
    """Matrices (n_rows, n_cols) of float32, each by the name of its layout."""
    x = torch.randn(n_rows * (n_cols + 32), device=backend.DEVICE)
    dense = x[: n_rows * n_cols].view(n_rows, n_cols)
    return {
        "contiguous": dense,
        "sliced": x.view(n_rows, n_cols + 32)[:, 16:-16],
        "offset": x[1 : n_rows * n_cols + 1].view(n_rows, n_cols),
        "transposed": dense.view(n_cols, n_rows).t(),
        "broadcast": dense[:1].expand(n_rows, n_cols),
    }


def times(n_rows: int = 16384, n_cols: int = 2048) -> list[dict[str, Any]]:
    """The time of `strided.softmax` for each layout, and of a copy.

    A transposed matrix appears three times: with a transposed result, which is what
    `strided.softmax` returns; with a contiguous result; and copied into order first.
    A contiguous matrix appears with a transposed result, too.

    Returns:
        Rows of call and us, the median time in µs.

    Raises:
        RuntimeError: nothing is timed here.
    """
    calls = one_kernel_each(n_rows, n_cols)
    inputs = views(n_rows, n_cols)
    x = inputs["transposed"]
    calls["transposed, copied first"] = lambda: strided.softmax(x.contiguous())
    calls["copy"] = inputs["contiguous"].clone
    return [{"call": name, "us": clock.device_us(f)[1]} for name, f in calls.items()]


def one_kernel_each(n_rows: int, n_cols: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The calls that are one launch: of each layout, and with each other's result."""
    inputs = views(n_rows, n_cols)
    calls = {name: partial(strided.softmax, view) for name, view in inputs.items()}
    calls["transposed, result not"] = partial(into_rows, inputs["transposed"])
    calls["contiguous, result not"] = partial(into_columns, inputs["contiguous"])
    return calls


def in_copies(
    observed: pd.DataFrame, guess: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """The guessed and the measured time of each layout, in copies.

    Args:
        observed: what `times` returned.
        guess: the name of a call → copies.
    """
    us = observed.set_index("call")["us"]
    measured = us.drop("copy") / us["copy"]
    bars = {}
    for name in measured.index:
        bars[name] = {"guessed": guess[name]} if name in guess else {}
        bars[name]["measured"] = measured[name]
    return bars


# ---- how many sectors they move ------------------------------------------------------

COUNTED = (16384, 2048)
METRICS = {
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "loaded",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "stored",
    "lts__t_sectors_srcunit_tex_op_read.sum": "l2_read",
    "lts__t_sectors_srcunit_tex_op_write.sum": "l2_written",
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_written_bytes",
    "gpu__time_duration.sum": "duration_us",
}
"""Sectors that the loads and stores of all warps touch, sectors that L2 gives to the
SMs and takes from them, and bytes that DRAM gives to L2 and takes from it."""


def run_sectors() -> None:
    """Runs `one_kernel_each` for `counters.profile`."""
    for call in one_kernel_each(*COUNTED).values():
        call()
        with counters.watched(emptied=True):
            call()


def sectors() -> list[dict[str, Any]]:
    """How many sectors each call of `one_kernel_each` moves, and where.

    Returns:
        Rows of call, n_rows, n_cols, kernel, and the values of METRICS.

    Raises:
        record.Unavailable: the counters cannot be read here; see `counters.profile`.
        RuntimeError: another number of kernels ran.
    """
    rows = counters.profile(run_sectors, METRICS, replay="application")
    calls = [*one_kernel_each(2, 2)]
    if len(rows) != len(calls):
        names = [row["kernel"] for row in rows]
        raise RuntimeError(f"{len(calls)} kernels should have run, got {names}")
    shape = dict(zip(("n_rows", "n_cols"), COUNTED, strict=True))
    return [
        {"call": call, **shape, **row} for call, row in zip(calls, rows, strict=True)
    ]


def in_matrices(observed: pd.DataFrame) -> pd.DataFrame:
    """Of each call, the bytes moved at each place over the bytes of one matrix.

    Args:
        observed: what `sectors` returned.
    """
    counted = observed.set_index("call")
    matrix = 4 * counted["n_rows"] * counted["n_cols"]
    moved = counted[[name for name in METRICS.values() if name != "duration_us"]].copy()
    moved[["loaded", "stored", "l2_read", "l2_written"]] *= SECTOR
    return moved.div(matrix, axis=0)


def into_rows(x: torch.Tensor) -> torch.Tensor:
    """As `strided.softmax`, but the result is contiguous, whatever x's strides."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _into(output, x)
    return output


def into_columns(x: torch.Tensor) -> torch.Tensor:
    """As `strided.softmax`, but the result is transposed, whatever x's strides."""
    output = torch.empty(x.shape[::-1], dtype=x.dtype, device=x.device).t()
    _into(output, x)
    return output


def _into(output: torch.Tensor, x: torch.Tensor) -> None:
    numbers = *output.stride(), *x.stride(), x.shape[1]
    block_cols = triton.next_power_of_2(x.shape[1])
    strided.softmax_kernel[(x.shape[0],)](output, x, *numbers, block_cols)
