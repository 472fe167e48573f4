"""Experiments of chapter `strided`: what alignment is worth, and what layouts cost.

from benchmarks import layouts
observed = record.observe("strided_causes", layouts.causes)
observed = record.observe("strided_layouts", layouts.times)
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import strided
from kernels.lab import backend, clock


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
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    # A masked lane holds -inf: it changes neither the maximum nor, as 0, the sum.
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    # tl.exp takes no 16-bit values, and a sum in 16 bits would lose small terms.
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    # The store converts y to the output's dtype.
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


# ---- alignment, gaps and masks, one at a time ----------------------------------------

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
                kernels[", eights"] = eights_kernel, (n_cols // 8,)
            for words, (kernel, numbers) in kernels.items():
                launch = kernel[(N_ROWS,)]
                _, us, _ = clock.events_us(launch, y, x, *numbers, BLOCK_COLS)
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

    Returns:
        Rows of call and us, the median time in µs.

    Raises:
        RuntimeError: nothing is timed here.
    """
    inputs = views(n_rows, n_cols)
    calls = {name: partial(strided.softmax, view) for name, view in inputs.items()}
    x = inputs["transposed"]
    calls["transposed, result not"] = partial(into_rows, x)
    calls["transposed, copied first"] = lambda: strided.softmax(x.contiguous())
    calls["copy"] = inputs["contiguous"].clone
    return [{"call": name, "us": clock.events_us(f)[1]} for name, f in calls.items()]


def into_rows(x: torch.Tensor) -> torch.Tensor:
    """As `strided.softmax`, but the result is contiguous, whatever x's strides."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_cols = triton.next_power_of_2(x.shape[1])
    strided.softmax_kernel[(x.shape[0],)](
        output, x, *output.stride(), *x.stride(), x.shape[1], block_cols
    )
    return output
