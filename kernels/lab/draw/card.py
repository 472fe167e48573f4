"""The card that every picture stands on, and what the pictures share."""

import math
import operator
from collections.abc import Sequence
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.patches import (
    FancyArrowPatch,
    FancyBboxPatch,
    Patch,
    Polygon,
    Rectangle,
)

from kernels.lab import style
from kernels.lab.gpu import Gpu
from kernels.lab.style import CARD, INK, MUTED

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
RULE, ALERT, WELL = "#9aa0ab", "#a84800", "#00694d"
MASKED = "/////"  # the hatch of an element that is masked off
MONO = {"family": "monospace"}

Place = tuple[float, float, float, float]  # left, top, width, height
Point = tuple[float, float]


def tint(colour: str | int, strength: float = 0.42) -> tuple[float, float, float]:
    """A lighter version of a colour, or of the palette's n-th colour."""
    if isinstance(colour, int):
        colour = PALETTE[colour % len(PALETTE)]
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


CHIP = tint(SKY, 0.14)


class Picture:
    """A card with a title. Its corners are (0, 0), top left, and (100, height)."""

    def __init__(self, title: str, height: float) -> None:
        pixels = round(style.DPI * style.WIDTH * height / 100)
        self.figure = style.figure(pixels / style.DPI)
        self.figure.set_layout_engine("none")
        limits = {"xlim": (0, 100), "ylim": (height, 0)}
        self.axes = self.figure.add_axes((0, 0, 1, 1), **limits)
        self.axes.set_axis_off()
        self.text(2.5, 4.2, title, size=style.FONT + 2, weight="bold")

    def add(self, patch: Patch) -> None:
        """Adds a shape. `add_patch` would fit the limits to it, and they are set."""
        self.axes.add_artist(patch)

    def text(
        self, x: float, y: float, text: str, ha: str = "left", **look: Any
    ) -> None:
        look = {"size": style.FONT, "color": INK} | look
        self.axes.text(x, y, text, ha=ha, va="center", **look)

    def bold(self, x: float, y: float, text: str, ha: str = "left") -> None:
        self.text(x, y, text, ha, weight="bold")

    def quiet(self, x: float, y: float, text: str, ha: str = "center") -> None:
        self.text(x, y, text, ha, color=MUTED)

    def box(
        self, place: Place, text: str = "", fill: Any = "white", **look: Any
    ) -> None:
        """A box with a text in its middle. Its `gid` says what it stands for."""
        x, y, width, height = place
        look = {"edgecolor": CARD, "linewidth": 0.8} | look
        self.add(Rectangle((x, y), width, height, facecolor=fill, **look))
        if text:
            colour = INK if sum(to_rgb(fill)) > 1.5 else "white"
            self.text(x + width / 2, y + height / 2, text, "center", color=colour)

    def outline(self, place: Place, **look: Any) -> None:
        self.box(place, "", "none", **({"edgecolor": INK, "linewidth": 1.1} | look))

    def frame(self, place: Place, fill: Any = "white") -> None:
        """A rounded box for other things to stand in."""
        x, y, width, height = place
        look = {"facecolor": fill, "edgecolor": RULE, "linewidth": 0.8}
        corner, box = (x + 0.6, y + 0.6), "round,pad=0.6"
        self.add(FancyBboxPatch(corner, width - 1.2, height - 1.2, box, **look))

    def cell(self, place: Place, text: str, index: int, masked: bool, gid: str) -> None:
        """A cell in the colour of a program; hatched and empty if masked off."""
        if masked:
            look = {"edgecolor": tint(index, 0.8), "hatch": MASKED}
            self.box(place, "", tint(index, 0.15), gid=f"{gid} masked", **look)
        else:
            self.box(place, text, tint(index, 0.5), edgecolor="white", gid=gid)

    def arrow(self, start: Point, end: Point, ends: str = "-|>") -> None:
        look = {"arrowstyle": ends, "mutation_scale": 9, "linewidth": 0.9}
        look |= {"color": MUTED, "shrinkA": 0, "shrinkB": 0}
        self.add(FancyArrowPatch(start, end, **look))

    def line(self, xs: Sequence, ys: Sequence, color: Any = RULE, **look: Any) -> None:
        self.axes.plot(xs, ys, **({"color": color, "linewidth": 0.8} | look))

    def shape(self, corners: Sequence[Point], fill: Any) -> None:
        self.add(Polygon(corners, facecolor=fill, linewidth=0))

    def bracket(
        self, left: float, right: float, y: float, text: str, side: int
    ) -> None:
        """Names a span from below (side 1) or from above (side −1)."""
        left, right, tip = left + 0.3, right - 0.3, y - 0.9 * side
        self.line((left, left, right, right), (tip, y, y, tip), MUTED)
        self.text((left + right) / 2, y + 2 * side, text, "center")

    def key(self, x: float, y: float, text: str, fill: Any, **look: Any) -> None:
        self.box((x, y - 1.4, 3.4, 2.8), "", fill, **look)
        self.text(x + 4.5, y, text)


# ---- arguments -----------------------------------------------------------------------


def count(name: str, value: Any, most: int | None = None, least: int = 1) -> int:
    """A whole number that the picture has room for; else TypeError or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        what = type(value).__name__
        raise TypeError(f"{name} must be a whole number, got {what}") from None
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits} to be drawn, got {number}")
    return number


def power_of_two(name: str, value: Any, most: int) -> int:
    number = count(name, value, most)
    if number & (number - 1):
        raise ValueError(f"{name} must be a power of two, got {number}")
    return number


def check_gpu(gpu: Any) -> None:
    if not isinstance(gpu, Gpu):
        what = type(gpu).__name__
        raise TypeError(f"gpu must be a Gpu, as gpu.named('H200') gives, got {what}")


def check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


# ---- numbers as text -----------------------------------------------------------------


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short(number: float, base: int = 1000) -> str:
    """1423763 as "1.42 M"."""
    power = 0
    while number >= base and power < 3:
        number, power = number / base, power + 1
    return f"{number:.3g} {' kMG'[power]}".rstrip()


def kibibytes(number: int) -> str:
    """262144 as "256 KiB"."""
    return f"{short(number, 1024)}iB".replace("kiB", "KiB")


def signed(value: float) -> str:
    text = f"{value:.2f}" if value % 1 else f"{value:g}"
    return text.replace("inf", "∞").replace("-", "−")
