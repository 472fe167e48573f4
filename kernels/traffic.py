"""The bytes that softmax's five lines move, predicted; and the time that they need.

Builds on: `kernels.eager`, which is not changed: this chapter only counts.
Changes: nothing that is computed.
Costs: the five lines read 5MN + 2M values and write 3MN + 2M values and M indices. An
    ideal softmax reads MN values and writes MN, as `copy_kernel` does; `empty_kernel`
    moves nothing.
Source: Triton's tutorial 2 for the values; Williams, Waterman, Patterson, "Roofline",
    CACM 52(4), 2009. `benchmarks.dram` counts the same bytes on a GPU.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.lab import meter


@triton.jit
def empty_kernel(input_ptr):
    """One program does nothing: what is timed is a kernel's start and its end.

    Args:
        input_ptr: not used.
    """


@triton.jit
def copy_kernel(output_ptr, input_ptr, n, BLOCK: tl.constexpr):
    """One program copies BLOCK neighbouring values.

    Args:
        output_ptr, input_ptr: the first of n values, which lie side by side.
        n: how many values there are.
        BLOCK: values per program, a power of two.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n  # the last program may have fewer values
    x = tl.load(input_ptr + places, mask=inside)
    tl.store(output_ptr + places, x, mask=inside)


class Line(NamedTuple):
    """What one of the five lines moves.

    Attributes:
        name: a name for the line.
        read, written: values.
        indices: int64 indices written; only `max` writes them.
    """

    name: str
    read: int
    written: int
    indices: int = 0

    def read_bytes(self, itemsize: int) -> int:
        """Bytes read, for values of `itemsize` bytes."""
        return self.read * itemsize

    def written_bytes(self, itemsize: int) -> int:
        """Bytes written, including the indices, for values of `itemsize` bytes."""
        return self.written * itemsize + 8 * self.indices

    def bytes(self, itemsize: int) -> int:
        """Bytes read and written, for values of `itemsize` bytes."""
        return self.read_bytes(itemsize) + self.written_bytes(itemsize)


def predicted(n_rows: int, n_cols: int) -> list[Line]:
    """Predicts what each of the five lines moves; their sum is `meter.naive`.

    Each line reads its inputs once and writes its results once. A row's maximum or sum
    is used N times, but counts as read once: a cache holds it.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    meter.naive(n_rows, n_cols)  # raises for what is no shape
    size = n_rows * n_cols
    return [
        Line("max", size, n_rows, n_rows),
        Line("subtract", size + n_rows, size),
        Line("exp", size, size),
        Line("sum", size, n_rows),
        Line("divide", size + n_rows, size),
    ]


def predicted_us(n_bytes: float, gbps: float) -> float:
    """Returns the time in µs to move `n_bytes` at `gbps` (1e9 bytes per second).

    Raises:
        ValueError: gbps is not positive.
    """
    if not gbps > 0:
        raise ValueError(f"gbps must be a bandwidth in GB/s above 0, got {gbps!r}")
    return n_bytes / gbps / 1e3


def copy(x: torch.Tensor) -> torch.Tensor:
    """Copies a contiguous tensor with `copy_kernel`."""
    output = torch.empty_like(x)
    if n := x.numel():
        copy_kernel[(triton.cdiv(n, 1024),)](output, x, n, BLOCK=1024)
    return output


def empty(x: torch.Tensor) -> None:
    """Launches one program of `empty_kernel`; x isn't touched."""
    empty_kernel[(1,)](x)


def operations(n_rows: int, n_cols: int) -> int:
    """Counts the arithmetic operations of a softmax, whatever kernels compute it.

    Each row takes N - 1 comparisons, N subtractions, N exponentials, N - 1 additions
    and N divisions. An exponential and a division count as one operation each, although
    the GPU spends several instructions on either.
    """
    return n_rows * max(5 * n_cols - 2, 0)


@functools.cache
def _ones(n_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(n_rows, 1, dtype=dtype, device=device)


def _column(x: torch.Tensor) -> torch.Tensor:
    """A column with the shape of a row maximum or a row sum: the second operand."""
    return _ones(x.shape[0], x.dtype, x.device)


LINES: dict[str, Callable[[torch.Tensor], Any]] = {
    "max": lambda x: x.max(dim=1, keepdim=True),
    "subtract": lambda x: x - _column(x),
    "exp": torch.exp,
    "sum": lambda x: x.sum(dim=1, keepdim=True),
    "divide": lambda x: x / _column(x),
}
"""Each of the five lines alone, as a function of a matrix (M, N) of any values."""
