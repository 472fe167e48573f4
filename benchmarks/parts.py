"""The parts of a row in chapter `unaligned`: its head, its aligned body, its tail.

from benchmarks import parts
parts.picture(13, 4)
parts.holding({"step three": edges.held(edges.beside_kernel, 257)}, 8)
parts.judge(my_split)
"""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from matplotlib.figure import Figure

from kernels.lab import backend, check
from kernels.lab.draw.card import (
    GREY,
    MASKED,
    ORANGE,
    RULE,
    SKY,
    YELLOW,
    Picture,
    Place,
    count,
    power_of_two,
    tint,
)
from kernels.lab.style import CARD, INK, MUTED
from kernels.tiled import exp_shifted
from kernels.unaligned import edge_columns

FILLS = {"head": tint(ORANGE), "body": tint(SKY, 0.35), "tail": tint(YELLOW, 0.5)}


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


def picture(n_cols: int, vector: int) -> Figure:
    """Draws rows of a contiguous matrix, cut into head, body and tail.

    A box is an element, with its column in it. Four rows, or `vector` if that is less,
    are enough: the next one lies as the first.

    Args:
        n_cols: the length of a row, at most 20.
        vector: elements of an access, a power of two, at most 8.
    """
    n_cols, vector = count("n_cols", n_cols, 20), power_of_two("vector", vector, 8)
    n_rows = min(vector, 4)
    gap, n_places = 0.9, n_cols + vector - 1
    wide = min(5.0, (85 - gap * (n_places // vector)) / n_places)
    title = f"Rows of {n_cols} values, accesses of {vector}"
    pic, key = Picture(title, 16 + 11 * n_rows), 12 + 11 * n_rows
    for row in range(n_rows):
        start, y = row * n_cols, 11.5 + 11 * row
        before, ends = start % vector, lengths(start, n_cols, vector)
        names = [name for name, n in zip(FILLS, ends, strict=True) for _ in range(n)]
        pic.text(2.5, y + 2.2, f"row {row}")
        for place in range(before + n_cols):
            col, group = place - before, place // vector
            x = 12 + wide * place + gap * group
            if place % vector == 0:
                pic.quiet(x + wide / 2, y - 1.7, str(start + col))
            name = names[col] if col >= 0 else ""
            gid = f"{name} {start + col}" if name else "before"
            text = str(col) if name else ""
            pic.box((x, y, wide, 4.4), text, FILLS.get(name, CARD), gid=gid)
            if not name:
                pic.outline((x, y, wide, 4.4), edgecolor=RULE, linestyle=":")
            elif name == "body" and place % vector == vector - 1:
                left = x - (vector - 1) * wide
                pic.outline((left, y, vector * wide, 4.4), linewidth=1.8)
    for x, name in zip((12, 26, 61), FILLS, strict=True):
        frame = {"edgecolor": INK, "linewidth": 1.8} if name == "body" else {}
        text = "body; a frame is one access" if name == "body" else name
        pic.key(x, key, text, FILLS[name], **frame)
    pic.key(74, key, "the row before", CARD, edgecolor=RULE, linestyle=":")
    return pic.figure


def holding(
    steps: Mapping[str, tuple[int, Mapping[str, Sequence[Sequence[int]]]]], vector: int
) -> Figure:
    """Draws what the threads of a warp hold of one row: of its edges and of its body.

    A box is a value that the thread holds, a frame is a run of neighbours, which the
    thread takes in a turn. Edges that another thread holds, too, are hatched in all but
    the first.

    Args:
        steps: name → what `edges.held` returns; at most 2 steps, of at least 8 threads.
        vector: elements of an access, at most 8. Places from there on are the tail's.
    """
    count("the number of steps", len(steps), 2)
    vector = power_of_two("vector", vector, 8)
    high, wide, shown = 2.1, 4.75, 7
    longest = max(len(held["body"][0]) for _, held in steps.values())
    top = {"edges": 16.5, "body": 22 + vector * high}
    bottom = top["body"] + longest * high
    pic = Picture("What threads hold of a row", bottom + 11)
    for left, (name, (n_rows, held)) in zip((8.5, 57), steps.items(), strict=False):
        threads = [*range(shown), len(held["body"]) - 1]
        pic.bold(left, 10, name)
        for part, seen in (("edges", set()), ("body", set())):
            for column, thread in enumerate(threads):
                x = left + wide * (column + 0.6 * (column == shown))
                y, values = top[part], held[part][thread]
                pic.quiet(x + wide / 2, top["edges"] - 2.2, f"{thread}")
                is_copy = not seen.isdisjoint(values)
                seen |= {*values}
                ends = "head", "tail"
                for value in values:
                    kind = ends[value >= vector] if part == "edges" else part
                    look = {"gid": f"{name}: {thread} {kind} {value}"}
                    fill = FILLS[kind]
                    if is_copy:
                        look |= {"hatch": MASKED, "gid": f"{look['gid']} copy"}
                        look["edgecolor"], fill = tint(GREY, 0.5), tint(GREY, 0.12)
                    pic.box((x, y, wide, high), "", fill, **look)
                    y += high
                _frames(pic, (x, top[part], wide, high), values, is_copy)
                if column == 0 and part == "body" and len(values) > vector:
                    for turn in range(len(values) // vector):
                        y = top[part] + (turn + 0.5) * vector * high
                        pic.quiet(left - 1, y, f"turn {turn}", "right")
            middle = top[part] + len(held[part][0]) * high / 2
            pic.text(left + wide * (shown + 0.3), middle, "…", "center")
        body, edges = (len(held[part][0]) for part in ("body", "edges"))
        text = f"a thread holds {n_rows} rows × ({edges} + {body})"
        pic.text(left, bottom + 3, text)
    pic.quiet(7.5, top["edges"] - 2.2, "thread", "right")
    for part, y in top.items():
        pic.text(7.5, y + 4 * high, part, "right")
    keys = {"body": FILLS["body"], "head": FILLS["head"], "tail": FILLS["tail"]}
    for x, (name, fill) in zip((8.5, 24, 39), keys.items(), strict=True):
        pic.key(x, bottom + 7.6, name, fill)
    look = {"hatch": MASKED, "edgecolor": tint(GREY, 0.5)}
    pic.key(57, bottom + 7.6, "a copy of another thread's", tint(GREY, 0.12), **look)
    return pic.figure


def _frames(pic: Picture, first: Place, values: Sequence[int], quiet: bool) -> None:
    """Frames each run of neighbours below each other, with its first and last value."""
    x, y, wide, high = first
    gaps = (i for i in range(1, len(values)) if values[i] != values[i - 1] + 1)
    for begin, end in itertools.pairwise([0, *gaps, len(values)]):
        place = (x, y + begin * high, wide, (end - begin) * high)
        look = {"edgecolor": RULE, "linewidth": 0.8} if quiet else {"linewidth": 1.2}
        pic.outline(place, **look)
        numbers = dict.fromkeys([values[begin], values[end - 1]])
        text = "\n–\n".join(map(str, numbers))
        middle = place[1] + place[3] / 2
        pic.text(x + wide / 2, middle, text, "center", color=MUTED if quiet else INK)


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
