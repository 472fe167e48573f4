"""Reads a picture back from its artists, for the tests of `draw`.

A box carries in its `gid` what it stands for. It stands where its value says, and it is
as large as its value says.
"""

from collections import Counter

from matplotlib.patches import Rectangle

from kernels.lab.style import Figure


def boxes(figure: Figure, gid: str = "") -> list[Rectangle]:
    """The boxes whose gid starts so, in the order in which they were drawn."""
    patches = figure.axes[0].patches
    return [each for each in patches if (each.get_gid() or "").startswith(gid or " ")]


def gids(figure: Figure) -> Counter:
    return Counter(each.get_gid() for each in figure.axes[0].patches if each.get_gid())


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def read(figure: Figure, start: str) -> str:
    """The one text that starts so."""
    (found,) = [text for text in texts(figure) if text.startswith(start)]
    return found
