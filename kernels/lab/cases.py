"""The matrices that the checker tries, from plain ones to those that break kernels.

Widths just below, at and just above powers of two; every layout that a matrix can have;
rows of huge, equal, infinite and missing numbers. The inputs are the same on every
machine.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.lab import backend
from kernels.lab.guards import Guarded

COLUMNS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(255, 256, 257, 511, 512, 513, 781, 1023, 1024, 1025, 1823),
    *(2047, 2048, 2049, 4095, 4096, 4097),
)
# In the interpreter, 1823 rows take nearly half of the time. 263 are two tiles of 128
# and more, and many for each of the 4 programs that a persistent kernel has there.
ROWS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63),
    263 if backend.INTERPRETED else 1823,
)

MARGIN = 16  # columns of poison on each side of a sliced row

# For a shape: the strides, and the first element's offset from an aligned address.
LAYOUTS: dict[str, Callable[[int, int], tuple[tuple[int, int], int]]] = {
    "contiguous": lambda n_rows, n_cols: ((max(n_cols, 1), 1), 0),
    "sliced": lambda n_rows, n_cols: ((n_cols + 2 * MARGIN, 1), MARGIN),
    "transposed": lambda n_rows, n_cols: ((1, max(n_rows, 1)), 0),
    "broadcast": lambda n_rows, n_cols: ((0, 1), 0),
    "offset": lambda n_rows, n_cols: ((max(n_cols, 1), 1), 1),
}

INF = float("inf")


def _put(row: torch.Tensor, where: slice, value: float) -> torch.Tensor:
    row[where] = value
    return row


# Kinds of rows, and how to make each from normally distributed numbers.
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda row: row,
    "ramp from 0 to -100": lambda row: torch.linspace(0, -100, len(row)).to(row),
    "constant": lambda row: torch.full_like(row, 3.25),
    "shifted by +1e4": lambda row: 8 * row + 1e4,
    "shifted by -1e4": lambda row: 8 * row - 1e4,
    "around 100": lambda row: 8 * row + 100,  # exp overflows: float32 from 89 up
    "around -1000": lambda row: row - 1000,  # zeros of padding would be the maximum
    "±60000": lambda row: 60000 * row.sign(),  # their difference overflows float16
    "one -inf": lambda row: _put(row, slice(1), -INF),
    "many -inf": lambda row: _put(row, slice(None, None, 2), -INF),
    "only -inf": lambda row: torch.full_like(row, -INF),
    "one +inf": lambda row: _put(row, slice(len(row) // 2, len(row) // 2 + 1), INF),
    "one NaN": lambda row: _put(row, slice(-1, None), float("nan")),
}

FINITE = tuple(kind for kind in VALUES if not kind.endswith(("inf", "NaN")))
"""The kinds of rows that hold finite numbers only."""


@dataclass(frozen=True)
class Case:
    """One matrix: its size, dtype and layout, and the kind of each of its rows."""

    n_rows: int
    n_cols: int
    dtype: torch.dtype
    layout: str
    kinds: tuple[str, ...]  # one for each row
    seed: int = 0

    def input(self) -> Guarded:
        """Makes the matrix, with NaN before, after and between its rows."""
        seed = 10_000 * self.n_rows + self.n_cols + 10**9 * self.seed
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.n_rows, self.n_cols, generator=generator)
        for row, kind in zip(values, self.kinds, strict=True):
            row.copy_(VALUES[kind](row))
        size = (self.n_rows, self.n_cols)
        strides, offset = LAYOUTS[self.layout](*size)
        where = {"dtype": self.dtype, "device": backend.DEVICE}
        guarded = Guarded(size, strides, poison=float("nan"), offset=offset, **where)
        first = guarded.tensor[:1] if self.layout == "broadcast" else guarded.tensor
        first.copy_(values[: len(first)])
        return guarded


def plan(
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[str],
    max_cols: int | None,
    values: Sequence[str] = tuple(VALUES),
    *,
    seeds: bool = False,
) -> list[Case]:
    """Returns the inputs to try, from plain to odd.

    Not every combination is tried. Each row costs milliseconds in the interpreter, and
    each new width, dtype or alignment costs a compilation on a GPU. So every dtype and
    layout meets every kind of row at one small shape, and the many shapes take dtypes
    and layouts in turns.

    Args:
        dtypes, layouts: to be tried.
        max_cols: the longest row; None means 4097 columns.
        values: the kinds of rows.
        seeds: whether each case has random numbers of its own.
    """
    columns = [n for n in COLUMNS if max_cols is None or n <= max_cols]
    if max_cols is not None:
        columns = sorted({*columns, max_cols})
    width = min(10, columns[-1])
    kind = itertools.cycle(values)
    cases = []

    def add(n_rows: int, n_cols: int, dtype: torch.dtype, layout: str) -> None:
        alike = layout == "broadcast"
        kinds = [next(kind)] * n_rows if alike else itertools.islice(kind, n_rows)
        seed = len(cases) if seeds else 0
        cases.append(Case(n_rows, n_cols, dtype, layout, tuple(kinds), seed))

    for dtype, layout in itertools.product(dtypes, layouts):  # every kind of row
        if layout == "broadcast":
            for _ in values:
                add(2, width, dtype, layout)
        else:
            add(len(values), width, dtype, layout)
        add(0, width, dtype, layout)
    for i, n_cols in enumerate(columns):  # dtypes and layouts in turns
        for turn in (0, 1):
            dtype = dtypes[(i + turn) % len(dtypes)]
            add(2, n_cols, dtype, layouts[(i + 2 * turn) % len(layouts)])
    for n_rows in ROWS:
        add(n_rows, width, dtypes[0], layouts[0])
    return list(dict.fromkeys(cases))
