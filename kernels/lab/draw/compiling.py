"""The line of stages from Python to machine code, and what each makes of a kernel."""

from collections.abc import Sequence
from typing import Any

from kernels.lab.draw.card import GREY, MONO, RULE, Picture, count, tint
from kernels.lab.style import INK, Figure

STAGES = (  # its name, who makes it, and what it adds
    ("TTIR", "front end", "blocks,\ntypes"),
    ("TTGIR", "MLIR", "layouts,\npipeline"),
    ("LLVM IR", "MLIR, LLVM", "one\nthread"),
    ("PTX", "LLVM", "NVIDIA's\nnames"),
    ("SASS", "ptxas", "registers,\norder"),
)
TEXT = 28  # characters of a statement that there is room for


def stages(rows: Sequence[Sequence[Any]]) -> Figure:
    """How many lines each statement of a kernel becomes, from stage to stage.

    Above each column: the stage, who makes it, and what it adds. A statement's lines
    have the colour of the statement.

    Args:
        rows: (statement, lines of TTIR, of TTGIR, of LLVM IR, of PTX, of SASS), as
            `stages.Trace.counts` returns them; at most 20.

    Raises:
        TypeError, ValueError: rows are no such rows.
    """
    n_rows = count("the number of statements", len(rows), 20)
    for row in rows:
        if len(row) != 1 + len(STAGES):
            raise ValueError(
                f"rows must have a statement and {len(STAGES)} counts, got {row!r}"
            )
        for number in row[1:]:
            count("a number of lines", number, least=0)
    totals = [sum(row[1 + i] for row in rows) for i in range(len(STAGES))]
    most = count("the number of lines of the longest stage", max(totals))
    top, pitch = 22.0, 5.0
    high = pitch * n_rows
    pic = Picture("One kernel, from stage to stage", top + high + 7)
    pic.bold(2.5, 10, "Python")
    pic.text(2.5, 13.4, "you")
    pic.quiet(2.5, 17.6, "statements; Triton reads\nthem as a syntax tree", "left")
    for i, (text, *_) in enumerate(rows):
        place = (2.5, top + pitch * i, 35.5, pitch - 0.8)
        pic.box(place, "", _colour(i, n_rows), edgecolor="white", gid=f"statement {i}")
        shown = text if len(text) <= TEXT else text[: TEXT - 1] + "…"
        pic.text(3.2, top + pitch * i + pitch / 2 - 0.4, shown, **MONO)
    for i, (name, maker, adds) in enumerate(STAGES):
        left, middle = 41.8 + 11.5 * i, 46.3 + 11.5 * i
        pic.bold(middle, 10, name, "center")
        pic.text(middle, 13.4, maker, "center")
        pic.quiet(middle, 17.6, adds)
        before = STAGES[i - 1][0] if i else ""
        gap = middle - 11.5 + _half(before), middle - _half(name)
        tip = (gap[0] + gap[1]) / 2 + 1.1 if i else gap[1] - 0.8
        pic.arrow((tip - 2.2, 10), (tip, 10))
        y = top
        for j, row in enumerate(rows):
            tall = high * row[1 + i] / most
            if not tall:
                continue
            gid = f"{name} {j}"
            place = (left, y, 9, tall)
            pic.box(place, "", _colour(j, n_rows), edgecolor="white", gid=gid)
            if tall > 2.6:
                pic.text(middle, y + tall / 2, f"{row[1 + i]}", "center")
            y += tall
        pic.line((left, left + 9), (y + 0.2, y + 0.2), RULE)
        pic.text(middle, y + 2.2, f"{totals[i]} lines", "center", weight="bold")
    pic.text(
        2.5, top + high + 3.4, "colour: the statement a line comes from", color=INK
    )
    return pic.figure


def _half(name: str) -> float:
    """About half the width of a stage's name."""
    return 0.68 * len(name)


def _colour(index: int, n_rows: int) -> Any:
    """A statement's colour; the last row, which is no statement, is grey."""
    if index == n_rows - 1:
        return tint(GREY, 0.35)
    return tint(index, 0.55 if index < 7 else 0.28)
