"""Two ways to cut adjacent rows in chapter `staged`: in chunks, and row by row.

Also judges a learner's cut of a row, and counts what the compiled kernel does.

    from benchmarks import spans
    spans.picture(5, 4)
    print(spans.alt(5, 4))
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks import edges
from kernels import staged
from kernels.lab import judge as judges
from kernels.lab import style
from kernels.lab.draw.card import MASKED, Picture, Place, count, plural, tint
from kernels.lab.style import MUTED

CHUNK = 8  # values of 16 bits in 16 bytes
MOST_COLS, MOST_ROWS = 16, 6  # that a picture has room for
LEFT, ROOM, GAP, HIGH = 15.0, 82.0, 1.3, 4.8
LABEL = {"size": style.FONT + 2}  # larger than usual: a phone halves the picture
NUMBER = {"size": style.FONT + 3.5}


def chunks(n_values: int) -> list[range]:
    """The values of a span in chunks of 16 bytes; the last ones may fill no chunk."""
    starts = range(0, n_values, CHUNK)
    return [range(start, min(start + CHUNK, n_values)) for start in starts]


def accesses(row: int, n_cols: int) -> list[range]:
    """What a thread takes of its row in shared memory: words of two, and one value.

    Args:
        row: of the tile.
        n_cols: the length of a row.

    Returns:
        The values of each access, in the order of memory. A word starts at an even
        place. The one value is the row's first or last; only odd rows have it.
    """
    begin, end = row * n_cols, (row + 1) * n_cols
    starts = sorted({begin, *range(begin + begin % 2, end, 2)})
    return [range(*ends) for ends in itertools.pairwise([*starts, end])]


def parts(row: int, n_cols: int) -> dict[str, int | None]:
    """A row's first word and lone value, by place, and how many words it has."""
    cut = accesses(row, n_cols)
    words, ones = ([part for part in cut if len(part) == size] for size in (2, 1))
    one = ones[0].start if ones else None
    return {"first word": words[0].start, "words": len(words), "one": one}


def judge(found: Callable[[int, int], dict]) -> judges.Verdict:
    """Says in a sentence whether a learner's function of (row, n_cols) is `parts`."""
    cases = [(row, n_cols) for n_cols in (5, 7, 6, 33) for row in (0, 1, 2, 5)]
    return judges.formula(found, parts, cases, mistakes=MISTAKES)


MISTAKES = {
    "In a row of even length, no value is alone: None.": lambda row, n_cols: {
        "one": (row + 1) * n_cols - 1 if row * n_cols % 2 == 0 else row * n_cols
    },
    "Words start at even places of the tile.": lambda row, n_cols: {
        "first word": row * n_cols
    },
    "Which end of a row is alone depends on where it starts.": lambda row, n_cols: {
        "one": (row + 1) * n_cols - 1
    },
    "The last word would be half the next row's.": lambda row, n_cols: {
        "words": (n_cols + 1) // 2
    },
}


def work(n_cols: int) -> dict[str, float]:
    """`edges.counts` of the kernel on bfloat16 rows.

    Raises:
        ValueError: the kernel takes no rows of this length.
    """
    x = torch.empty(4096, n_cols, dtype=torch.bfloat16, device="meta")
    if not staged.fits(x, x):
        raise ValueError(
            f"the kernel takes 2 to {staged.LONGEST} columns, no multiple of 8: "
            f"got {n_cols}"
        )
    return edges.counts(staged.launch_for(x, x), n_cols)


def picture(n_cols: int, n_rows: int = 4) -> Figure:
    """Draws the same values twice: as a program copies them, and as threads take them.

    A box is a value, with its place in memory in it, in the colour of its row.

    Args:
        n_cols: the length of a row of 16-bit values, from 2 to 16.
        n_rows: adjacent rows, at most 6.

    Raises:
        ValueError: the picture has no room for the rows.
    """
    n_cols, n_rows = _shape(n_cols, n_rows)
    wide = min(9.5, (ROOM - GAP * (n_cols // 2)) / max(n_cols, CHUNK))
    copied = chunks(n_cols * n_rows)
    middle = 15 + 9 * len(copied)
    title = f"{plural(n_rows, 'row')} of {n_cols} values, cut in two ways"
    pic = Picture(title, middle + 6.2 * n_rows + 13)
    _text(pic, 2.5, 10, "copied in chunks of 16 bytes", weight="bold")
    for line, values in enumerate(copied):
        y, whole = 16 + 9 * line, len(values) == CHUNK
        _text(pic, 2.5, y + HIGH / 2, f"chunk {line}" if whole else "no chunk")
        for place, value in enumerate(values):
            x, row = LEFT + wide * place, value // n_cols
            if value % n_cols == 0:
                _text(pic, x + 0.4, y - 1.9, f"row {row}", color=MUTED)
            look = {"fill": tint(row), "gid": f"memory {value}"}
            _value(pic, (x, y, wide, HIGH), value, **look)
        if whole:
            place = (LEFT, y, CHUNK * wide, HIGH)
            pic.outline(place, linewidth=2.2, gid="chunk")
        else:
            x = LEFT + wide * len(values) + 1
            _text(pic, x, y + HIGH / 2, "one by one", color=MUTED)
    _text(pic, 2.5, middle + 3, "computed by one thread a row", weight="bold")
    for row in range(n_rows):
        x, y = LEFT, middle + 6 + 6.2 * row
        _text(pic, 2.5, y + HIGH / 2, f"thread {row}")
        for values in accesses(row, n_cols):
            alone, left = len(values) == 1, x
            for value in values:
                look = {"fill": tint(row), "gid": f"thread {row} value {value}"}
                look |= _alone(row) if alone else {}
                _value(pic, (x, y, wide, HIGH), value, **look)
                x += wide
            frame = {"linewidth": 1.4, "linestyle": ":"} if alone else {"linewidth": 2}
            gid = "one" if alone else "word"
            pic.outline((left, y, x - left, HIGH), gid=gid, **frame)
            x += GAP
    y = middle + 6.2 * n_rows + 8.8
    pic.outline((LEFT, y - 1.6, 5, 3.2), linewidth=2)
    _text(pic, LEFT + 6.2, y, "a word: two values")
    if n_cols % 2:
        pic.box((56, y - 1.6, 5, 3.2), "", **_alone(7))
        pic.outline((56, y - 1.6, 5, 3.2), linewidth=1.4, linestyle=":")
        _text(pic, 62.2, y, "one value, alone")
    return pic.figure


def alt(n_cols: int, n_rows: int = 4) -> str:
    """The alternative text of `picture(n_cols, n_rows)`, for the cell's metadata."""
    n_cols, n_rows = _shape(n_cols, n_rows)
    copied = [
        f"chunk {i} is {_words(values)}"
        if len(values) == CHUNK
        else f"no chunk has {_words(values)}"
        for i, values in enumerate(chunks(n_cols * n_rows))
    ]
    taken = [
        f"thread {row} takes {', '.join(map(_words, accesses(row, n_cols)))}"
        for row in range(n_rows)
    ]
    what = f"{plural(n_rows, 'row')} of {n_cols} values, numbered as in memory, twice."
    above = f"Above, in frames of {CHUNK}, wherever a row starts: {', '.join(copied)}."
    below = "Below, a row in each line, in frames of two that start at even places: "
    return f"{what} {above} {below}{'; '.join(taken)}."


def _shape(n_cols: int, n_rows: int) -> tuple[int, int]:
    n_cols = count("n_cols", n_cols, MOST_COLS, least=2)
    return n_cols, count("n_rows", n_rows, MOST_ROWS)


def _words(values: range) -> str:
    """8 to 15, 2 and 3, or 4 alone."""
    if len(values) == 1:
        return f"{values[0]} alone"
    return f"{values[0]} {'and' if len(values) == 2 else 'to'} {values[-1]}"


def _alone(row: int) -> dict[str, Any]:
    """How the one value of a row is drawn."""
    return {"fill": tint(row, 0.15), "hatch": MASKED, "edgecolor": tint(row, 0.5)}


def _text(pic: Picture, x: float, y: float, text: str, **look: Any) -> None:
    pic.text(x, y, text, **(LABEL | look))


def _value(pic: Picture, place: Place, value: int, **look: Any) -> None:
    """A box in the colour of its row, with a number that a phone shows, too."""
    x, y, wide, high = place
    pic.box(place, **look)
    pic.text(x + wide / 2, y + high / 2, f"{value}", "center", **NUMBER)
