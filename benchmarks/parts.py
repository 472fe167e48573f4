"""The parts of a row in chapter `unaligned`: its head, its aligned body, its tail.

from benchmarks import parts
parts.picture(13, 4)
parts.judge(my_split)
parts.places(13, 4)
"""

import textwrap
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lab import backend, check, show
from kernels.tiled import exp_shifted
from kernels.unaligned import edge_columns, split_row


def lengths(start: int, n_cols: int, vector: int) -> tuple[int, int, int]:
    """The lengths of a row's head, body and tail.

    Args:
        start: the row's first element, counted from an aligned address.
        n_cols: the length of the row.
        vector: elements of an access.
    """
    head = min(-start % vector, n_cols)
    body = (n_cols - head) // vector * vector
    return head, body, n_cols - head - body


def picture(n_cols: int, vector: int, n_rows: int = 5) -> None:
    """Prints the rows of a contiguous matrix, in groups that an access can move.

    h is an element of the head, B of the body, t of the tail; a dot belongs to the row
    before.
    """
    for row in range(n_rows):
        start = row * n_cols
        head, body, tail = lengths(start, n_cols, vector)
        text = "." * (start % vector) + "h" * head + "B" * body + "t" * tail
        groups = [text[i : i + vector] for i in range(0, len(text), vector)]
        print(f"row {row}:", " ".join(groups))


@triton.jit
def places_kernel(cols_ptr, n_cols, VECTOR: tl.constexpr):
    """One program stores which column of its row each place of the edges holds.

    Args:
        cols_ptr: (n_rows, 2 * VECTOR), int32; -1 where a place holds no column.
        n_cols: of a contiguous matrix.
        VECTOR: elements of an access.
    """
    row = tl.program_id(0)
    head, body = split_row(row * n_cols, n_cols, VECTOR)
    edge = tl.arange(0, 2 * VECTOR)
    cols, exists = edge_columns(edge, head, body, n_cols, VECTOR)
    tl.store(cols_ptr + row * 2 * VECTOR + edge, tl.where(exists, cols, -1))


def places(n_cols: int, vector: int, n_rows: int = 4) -> show.Table:
    """Which column of a row each place of its edges holds, as a kernel stores it.

    Args:
        n_cols, n_rows: of a contiguous matrix.
        vector: elements of an access, a power of two.
    """
    shape = n_rows, 2 * vector
    cols = torch.empty(shape, dtype=torch.int32, device=backend.DEVICE)
    places_kernel[(n_rows,)](cols, n_cols, VECTOR=vector)
    header = [f"{part} {i}" for part in ("h", "t") for i in range(vector)]
    rows = [
        [row, *("." if col < 0 else col for col in found)]
        for row, found in enumerate(cols.tolist())
    ]
    return show.table(rows, ["row", *header])


# ---- the learner's split -------------------------------------------------------------

VECTOR = 4  # of its rows


@triton.jit
def split_softmax_kernel(
    output_ptr,
    input_ptr,
    ends_ptr,
    n_cols,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program computes a row's softmax in the parts that a learner's split names.

    Args:
        output_ptr, input_ptr: of contiguous matrices.
        ends_ptr: (n_rows, 2), int32: gets the lengths of head and body.
        n_cols: the length of a row.
        BLOCK: at least n_cols, a power of two.
        VECTOR: elements of an access.
        SPLIT: takes (row_start, n_cols, VECTOR) and returns the lengths.
    """
    row = tl.program_id(0)
    head, body = SPLIT(row * n_cols, n_cols, VECTOR)
    tl.store(ends_ptr + 2 * row, head)
    tl.store(ends_ptr + 2 * row + 1, body)
    edge, cols = tl.arange(0, 2 * VECTOR), tl.arange(0, BLOCK)
    edge_cols, at_edge = edge_columns(edge, head, body, n_cols, VECTOR)
    edge_places, places = row * n_cols + edge_cols, row * n_cols + head + cols
    edges = tl.load(input_ptr + edge_places, mask=at_edge, other=-float("inf"))
    x = tl.load(input_ptr + places, mask=cols < body, other=-float("inf"))
    row_max = tl.maximum(tl.max(x, axis=0), tl.max(edges, axis=0))
    y, edges = exp_shifted(x, row_max), exp_shifted(edges, row_max)
    row_sum = tl.sum(y, axis=0) + tl.sum(edges, axis=0)
    tl.store(output_ptr + edge_places, edges / row_sum, mask=at_edge)
    tl.store(output_ptr + places, y / row_sum, mask=cols < body)


def split_by(split: Any, ends: list[torch.Tensor]) -> Callable:
    """A softmax of float32 rows in parts, by a learner's split.

    Args:
        split: as for `judge`.
        ends: gets the lengths of head and body of the last call's rows, (n_rows, 2).
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output, (n_rows, n_cols) = torch.empty_like(x), x.shape
        found = torch.zeros(max(n_rows, 1), 2, dtype=torch.int32, device=x.device)
        if x.numel():
            block = triton.next_power_of_2(n_cols)
            split_softmax_kernel[(n_rows,)](
                output, x, found, n_cols, block, VECTOR, split
            )
        ends[:] = [found]
        return output

    softmax.__name__ = split.fn.__name__
    return softmax


def judge(split: Any) -> None:
    """Says in a sentence whether a learner's split gives each row an aligned body.

    Args:
        split: a kernel's function of (row_start, n_cols, VECTOR) that returns the
            lengths of head and body. row_start is counted from an aligned address.
    """
    ends: list[torch.Tensor] = []
    softmax = split_by(split, ends)
    how = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 33}
    found = check.softmax(softmax, **how)  # says itself what is wrong
    if found:
        wrong = _misplaced(softmax, ends)
        right = f"Right in all {found.cases} cases, and every body is aligned."
        print(textwrap.fill(f"Not yet: {wrong}" if wrong else right, 80))


def _misplaced(softmax: Callable, ends: list[torch.Tensor]) -> str:
    """The first row of some matrices whose body could be aligned, or longer."""
    for n_cols in (13, 3, 16, 1):
        softmax(torch.zeros(VECTOR, n_cols, device=backend.DEVICE))
        for row, (head, body) in enumerate(ends[0].tolist()):
            start = row * n_cols
            wanted = lengths(start, n_cols, VECTOR)
            if (head, body) == wanted[:2] or (body == wanted[1] == 0):
                continue
            where = f"row {row} of {n_cols} values starts at element {start}"
            if body and (start + head) % VECTOR:
                what = f"its body at {start + head}, which {VECTOR} does not divide"
                return f"the softmax is right, but {where}, and {what}."
            what = f"head and body have {head} and {body} values"
            return f"the softmax is right, but {where}, and {what}; {wanted[:2]} fit."
    return ""
