"""Lanes: whose values have reached which lane by a series of shuffles."""

from collections.abc import Mapping, Sequence

from kernels.lab import models
from kernels.lab.draw.card import (
    BLUE,
    MASKED,
    RULE,
    Picture,
    count,
    plural,
    tint,
)
from kernels.lab.style import Figure

WARP = 32


def heard(ways: Mapping[str, Sequence[int]], lanes: int = WARP) -> Figure:
    """A square for each way to shuffle: row i shows the lanes that lane i has heard of.

    Args:
        ways: name → the distances of its steps; at most 2 ways. See `models.exchanged`.
        lanes: how many of the warp's 32 lanes hold values of the row; the others are
            hatched.
    """
    count("the number of ways", len(ways), 2)
    lanes = count("lanes", lanes, WARP)
    side = 40.0
    step = side / WARP
    pic = Picture(f"Of {plural(lanes, 'lane')}, who hears of whom?", side + 26)
    for panel, (name, distances) in enumerate(ways.items()):
        left, top = 8.0 + 48.5 * panel, 16.5
        own = [frozenset([lane]) for lane in range(WARP)]
        final = models.exchanged(own, distances, frozenset.union)[-1]
        pic.bold(left, 9.5, name)
        for lane, known in enumerate(final):
            for other in range(WARP):
                inside = lane < lanes and other < lanes
                fill = tint(BLUE, 0.75) if other in known else "white"
                look = {"edgecolor": RULE, "linewidth": 0.3}
                if not inside:
                    fill = tint(BLUE, 0.2) if other in known else "white"
                    look |= {"hatch": MASKED}
                place = (left + step * other, top + step * lane, step, step)
                word = "heard" if other in known else "unheard"
                gid = f"{name}: {lane} {other} {word}"
                pic.box(place, "", fill, gid=gid, **look)
        for lane in range(0, WARP, 8):
            pic.quiet(left + step * (lane + 0.5), top - 1.8, f"{lane}")
            pic.quiet(left - 0.8, top + step * (lane + 0.5), f"{lane}", "right")
        wanted = set(range(lanes))
        right = sum(wanted <= known for known in final[:lanes])
        note = f"{right} of {lanes} lanes hear of all {lanes}"
        pic.text(left, top + side + 3, note)
    note = "row: a lane; column: a lane that it has heard of (blue)"
    note += "; hatched: no value of the row" if lanes < WARP else ""
    pic.quiet(8, side + 22.8, note, "left")
    return pic.figure
