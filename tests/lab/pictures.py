"""Reads a picture back from its artists, for the tests of `draw`.

A box carries in its `gid` what it stands for. It stands where its value says, and it is
as large as its value says.
"""

from collections import Counter

from matplotlib.backends.backend_agg import FigureCanvasAgg
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


def assert_fits(figure: Figure) -> None:
    """No box and no text reaches beyond the card's right or lower margin."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (_, bottom), (right, _) = figure.axes[0].transData.transform(
        [(0, figure.axes[0].get_ylim()[0]), (98, 0)]
    )
    for artist in [*boxes(figure), *figure.axes[0].texts]:
        extent = artist.get_window_extent(renderer)
        assert extent.x1 <= right, artist
        assert extent.y0 > bottom, artist


def read(figure: Figure, start: str) -> str:
    """The one text that starts so."""
    (found,) = [text for text in texts(figure) if text.startswith(start)]
    return found
