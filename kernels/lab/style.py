"""The course's look: colours, providers' styles, and the card that a figure stands on.

A figure is made without `pyplot`, so the last expression of a cell shows it once. It
stands on a light card of its own, which reads on light and on dark pages. Importing
this module changes none of Matplotlib's settings: the style holds inside the course's
own figures only.

A provider keeps its colour and its marker in every chapter. Each colour has a contrast
of at least 3:1 to the card (WCAG 2.2, 1.4.11). Providers that share a figure differ for
readers with any common colour vision (simulated as by Machado, Oliveira and Fernandes,
2009).

Weighed: Matplotlib's style sheets (they hold globally, or need a `with` in every cell).
"""

import functools
import io
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyBboxPatch

INK, MUTED, GRID, CARD, EDGE = "#1f2430", "#5b6270", "#e2e1dc", "#fbfaf7", "#cfcec8"
WIDTH = 6.6  # inches: 726 pixels at DPI, about the width of a page of the book
DPI = 110
FONT = 9.0  # points, the smallest text of a figure

STYLE = {
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.edgecolor": EDGE,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "xtick.color": EDGE,
    "ytick.color": EDGE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
}


class Style(NamedTuple):
    """How a provider is drawn: its colour, its marker, its name in a figure."""

    colour: str
    marker: str
    label: str


STYLES: dict[str, Style] = {
    "copy": Style("#6b7280", "", "copy"),
    "torch": Style("#a63a00", "s", "torch.softmax"),
    "torch.compile": Style("#d27800", "D", "torch.compile"),
    "torchscript": Style("#5a2d3c", "X", "TorchScript"),
    "eager": Style("#964ba5", "v", "eager"),
    "program": Style("#1e96e1", "o", "program"),
    "strided": Style("#0f5a78", "p", "strided"),
    "meta": Style("#7869e1", "h", "meta"),
    "persistent": Style("#00519c", "o", "persistent"),
    "persistent.tiled": Style("#3c964b", "^", "persistent, tiled"),
    "persistent.onerow": Style("#003c1e", "d", "persistent, one row"),
    "persistent.resident": Style("#785a0f", "D", "persistent, resident"),
    "tiled": Style("#3c0078", "^", "tiled"),
    "unaligned": Style("#879600", "P", "unaligned"),
    "staged": Style("#b41ef0", "o", "staged"),
    "windows": Style("#3c00f0", "o", "windows"),
    "columns": Style("#0000a5", "o", "columns"),
    "online": Style("#784bb4", "v", "online"),
    "online.three_pass": Style("#d25aa5", "s", "online, three passes"),
    "online.per_block": Style("#00694b", "h", "online, per block"),
    "online.forwards": Style("#5a87f0", ">", "online, forwards"),
    "online.unhinted": Style("#a5870f", "d", "online, unhinted"),
    "cooperative": Style("#b42d5a", "D", "cooperative"),
    "fastest": Style("#0d1b2a", "o", "fastest"),
    "gradient": Style("#0d1b2a", "o", "gradient"),  # fastest's: the same product
    "tutorial": Style("#00a578", "X", "Triton's tutorial"),
    "liger": Style("#004b5a", "<", "Liger"),
    "quack": Style("#691e0f", ">", "QuACK"),
    "tileops": Style("#2d69c3", "P", "TileOPs"),
}
COLOURS: dict[str, str] = {name: style.colour for name, style in STYLES.items()}
SPARE = tuple(  # for names that STYLES does not have
    Style(colour, marker, "")
    for colour, marker in [
        ("#00519c", "o"),
        ("#e16900", "s"),
        ("#00a578", "^"),
        ("#960f5a", "D"),
        ("#a578e1", "v"),
        ("#004b00", "P"),
        ("#875a0f", "X"),
        ("#2d0069", "p"),
        ("#3c0f00", "<"),
        ("#00001e", ">"),
    ]
)
_given: dict[str, Style] = {}  # the spare style that a name was given


def in_style(function: Callable) -> Callable:
    """Decorates a function that makes parts of a figure: the style holds within it.

    A picture calls hundreds. `mpl.rc_context` saves all of Matplotlib's settings, and
    takes three times as long.
    """

    @functools.wraps(function)
    def styled(*args: Any, **kwargs: Any) -> Any:
        before = {name: mpl.rcParams[name] for name in STYLE}
        if before == STYLE:  # a function in style has called this one
            return function(*args, **kwargs)
        mpl.rcParams.update(STYLE)
        try:
            return function(*args, **kwargs)
        finally:
            mpl.rcParams.update(before)

    return styled


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """The styles of names that share a figure, each with a colour of its own.

    A provider in STYLES has its own style. Any other name gets the first spare style
    that is free in this figure, and keeps it in later figures where it is free.

    Raises:
        ValueError: too few spare styles are free.
    """
    names = list(names)
    styles = {name: STYLES[name] for name in names if name in STYLES}
    for name in names:
        if name in STYLES:
            continue
        taken = {style.colour for style in styles.values()}
        wanted = [_given[name], *SPARE] if name in _given else [*SPARE]
        free = [style for style in wanted if style.colour not in taken]
        if not free:
            raise ValueError(
                f"at most {len(SPARE)} names may be without a style, got {names}"
            )
        styles[name] = _given[name] = free[0]._replace(label=name)
    return styles


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21, as WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in to_rgb(colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def darker(colour: str) -> str:
    """The colour for text, which is thinner than a line."""
    return to_hex([0.78 * part for part in to_rgb(colour)])


# ---- the card ------------------------------------------------------------------------


class _CourseAxes(Axes):
    """Axes that give the course's style to what is drawn on them."""


class Figure(mpl_figure.Figure):
    """A Matplotlib figure in the course's style, which a notebook shows by itself."""

    @in_style
    def add_subplot(self, *where: Any, **look: Any) -> Axes:
        return super().add_subplot(*where, **{"axes_class": _CourseAxes} | look)

    @in_style
    def add_axes(self, *where: Any, **look: Any) -> Axes:
        return super().add_axes(*where, **{"axes_class": _CourseAxes} | look)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The image at a higher resolution than it is shown in, and its shown size."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=4 / 3 * DPI, metadata={"Software": None})
        width, height = (round(inches * DPI) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


# Matplotlib reads its settings when a line, a text or a tick is made. Some ticks are
# made only when the figure is drawn.
for _class, _names in (
    (_CourseAxes, "plot axhline axvline errorbar scatter bar_label text annotate"),
    (_CourseAxes, "set_title set_xticks set_yticks legend grid tick_params"),
    (Figure, "draw legend suptitle supxlabel supylabel text"),
):
    for _name in _names.split():
        setattr(_class, _name, in_style(getattr(_class, _name)))


def keep_images(formatters: Mapping[str, Any]) -> None:
    """Lets a notebook show our figures by `_repr_png_` whatever a cell imports.

    With `matplotlib.pyplot`, IPython registers an image of its own for all figures.
    What is registered for our class comes first.
    """
    formatters["image/png"].for_type(Figure, Figure._repr_png_)


if "IPython" in sys.modules and (_shell := sys.modules["IPython"].get_ipython()):
    keep_images(_shell.display_formatter.formatters)


@in_style
def figure(
    height: float = 3.6, *, title: str = "", source: str = "", width: float = WIDTH
) -> Figure:
    """An empty card, with its title at the top left and its source at the bottom right.

    Args:
        height, width: inches. A figure of another width than the page's is scaled to
            the page in the book, and its text with it.
        title: what is plotted.
        source: where the numbers are from, such as `df.attrs["source"]`.
    """
    card = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    card.get_layout_engine().set(w_pad=0.14, h_pad=0.1, hspace=0.06)
    card.patch.set_alpha(0)
    inset, radius = 0.02, 0.12
    edge = inset + radius
    card.add_artist(
        FancyBboxPatch(
            (edge, edge),
            width - 2 * edge,
            height - 2 * edge,
            boxstyle=f"round,pad={radius}",
            transform=card.dpi_scale_trans,
            facecolor=CARD,
            edgecolor=EDGE,
            linewidth=0.8,
            zorder=-1,
        )
    )
    if title:
        lines = "\n".join(textwrap.wrap(title, int(width * 11)))
        place = {"x": 0.14 / width, "ha": "left"}
        card.suptitle(lines, fontsize=FONT + 2, fontweight="bold", **place)
    if source:
        place = {"x": 1 - 0.14 / width, "ha": "right"}
        card.supxlabel(source, fontsize=FONT, color=MUTED, **place)
    return card
