"""The ways that a call can take, step by step, one below the other."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kernels.lab.draw.card import CHIP, Picture, count, tint
from kernels.lab.style import Figure

MOST = 8  # steps that a way has room for
WIDE = 95 / MOST


def ways(title: str, rows: Mapping[str, Sequence[str]]) -> Figure:
    """Draws each way as a line of steps, from left to right.

    A step that several ways have is coloured, with the same colour in each of them.

    Args:
        title: of the picture.
        rows: a way's title → its steps. At most 6 ways; at most 8 steps of two short
            lines each.

    Raises:
        ValueError: there are too many ways or steps, or none.
    """
    n_rows = count("the number of ways", len(rows), 6)
    steps_of_all = [step for steps in rows.values() for step in dict.fromkeys(steps)]
    shared = [step for step, ways in Counter(steps_of_all).items() if ways > 1]
    pic = Picture(title, 9 + 14 * n_rows)
    for i, (what, steps) in enumerate(rows.items()):
        count("the number of steps", len(steps), MOST)
        y = 10 + 14 * i
        pic.bold(2.5, y, what)
        for j, step in enumerate(steps):
            x = 2.5 + WIDE * j
            place = (x, y + 2.2, WIDE - 1.9, 7)
            fill = tint(shared.index(step), 0.3) if step in shared else CHIP
            pic.box(place, step, fill, gid=f"{i} {step}")
            if j:
                pic.arrow((x - 1.9, y + 5.7), (x, y + 5.7))
    return pic.figure
