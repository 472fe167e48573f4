"""Small panels side by side: the same lines for several cases, with marks along x.

`plot` draws panels one below the other, with each line named at its end. Where a case
has few lines and there are many cases, small panels in two columns compare better.

Weighed: seaborn's FacetGrid draws such panels in a style of its own.
"""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from kernels.lab.style import CARD, MUTED, Figure, figure, in_style, styles_of

DASHES = (":", "--", "-.")


@in_style
def lines(
    panels: Mapping[str, Mapping[str, Mapping[float, float]]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
    source: str = "",
) -> Figure:
    """Panels in two columns, each with lines over an x that doubles from tick to tick.

    Args:
        panels: a panel's title → a line's name → {x: y}; x is positive, y starts at 0.
        xlabel, ylabel: what the axes are, with units.
        marks: a mark's name → a panel's title → the x of a grey vertical line; at most
            3 marks.
        title, source: as in `style.figure`.

    Raises:
        ValueError: there are no panels, a panel has no points, or too many marks.
    """
    marks = marks or {}
    every = [points for series in panels.values() for points in series.values()]
    if not all([panels, *panels.values(), *every]):
        raise ValueError(f"panels must map titles to lines, got {dict(panels)!r}")
    if len(marks) > len(DASHES):
        raise ValueError(f"marks must be at most {len(DASHES)}, got {[*marks]}")
    names = dict.fromkeys(name for series in panels.values() for name in series)
    styles, rows = styles_of(names), math.ceil(len(panels) / 2)
    card = figure(1.2 + 2.1 * rows, title=title, source=source)
    grid = card.subplots(rows, 2, squeeze=False)
    for ax, (panel, series) in zip(grid.flat, panels.items(), strict=False):
        for name, points in series.items():
            colour, marker, label = styles[name]
            look = {"color": colour, "marker": marker, "label": label, "markersize": 4}
            pairs = sorted(points.items())
            ax.plot(*zip(*pairs, strict=True), markeredgecolor=CARD, **look)
        for dashes, (mark, places) in zip(DASHES, marks.items(), strict=False):
            look = {"color": MUTED, "linestyle": dashes, "linewidth": 1.4}
            ax.axvline(places[panel], label=mark, zorder=1, **look)
        ax.set(title=panel, ylim=(0, None))
        _double(ax, [x for points in series.values() for x in points])
    for ax in [*grid.flat][len(panels) :]:
        ax.set_visible(False)
    for ax in grid[-1]:
        ax.set_xlabel(xlabel)
    for ax in grid[:, 0]:
        ax.set_ylabel(ylabel)
    grid.flat[len(panels) - 1].legend(loc="upper left", framealpha=0.9)
    return card


def _double(ax: Axes, xs: list[float]) -> None:
    """A log2 axis with a number at every power of two."""
    low, high = math.ceil(math.log2(min(xs))), math.floor(math.log2(max(xs)))
    ticks = [2**power for power in range(low, high + 1)]
    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(ticks, [f"{tick}" for tick in ticks])
