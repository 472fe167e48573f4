"""One visual style: measurements as figures, tables, and code shown from its module.

Figures are Matplotlib's, made without `pyplot`: nothing global remembers them, so the
last expression of a cell shows one once, and what it prints as text depends on its size
alone. They stand on a light card of their own, which reads on light and on dark pages.

The colours start from Okabe and Ito's palette, which readers with any common colour
vision tell apart (https://jfly.uni-koeln.de/color/), each darkened until it stands 3:1
against the card (WCAG 2.2, 1.4.11); those that meet in one figure differ in lightness
too. A provider keeps its colour and its marker in every chapter.

Weighed: seaborn and plotly (a large dependency each, and plotly's pages load a script);
pandas for tables (its HTML brings a style of its own).
"""

import ast
import difflib
import html
import inspect
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib import figure as mpl_figure
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import NullLocator

INK, MUTED, GRID, CARD, EDGE = "#1f2430", "#5b6270", "#e2e1dc", "#fbfaf7", "#cfcec8"
WIDTH = 6.6  # inches: 726 pixels at DPI, about the width of a page of the book
DPI = 110
FONT = 9.0  # points, the smallest text of a figure


class Style(NamedTuple):
    """How a provider is drawn: its colour, its marker, its name in a figure."""

    colour: str
    marker: str
    label: str


STYLES: dict[str, Style] = {
    "copy": Style("#6b7280", "", "copy"),
    "torch": Style("#a63a00", "s", "torch.softmax"),
    "torch.compile": Style("#c68300", "D", "torch.compile"),
    "torchscript": Style("#5c4033", "X", "TorchScript"),
    "eager": Style("#c0579a", "v", "eager"),
    "program": Style("#3594d3", "o", "program"),
    "strided": Style("#007a7a", "p", "strided"),
    "meta": Style("#7b5fc9", "h", "meta"),
    "persistent": Style("#00519c", "o", "persistent"),
    "persistent.tiled": Style("#00916e", "^", "persistent, tiled"),
    "persistent.onerow": Style("#333333", "d", "persistent, one row"),
    "persistent.resident": Style("#ad7a00", "D", "persistent, resident"),
    "tiled": Style("#1f8a4c", "^", "tiled"),
    "online": Style("#5b3fb0", "v", "online"),
    "cooperative": Style("#b8336a", "D", "cooperative"),
    "fastest": Style("#0d1b2a", "o", "fastest"),
    "tutorial": Style("#8a8000", "X", "Triton's tutorial"),
    "liger": Style("#2f6b3a", "<", "Liger"),
    "quack": Style("#8c1d5a", ">", "QuACK"),
    "tileops": Style("#4a6fa5", "P", "TileOPs"),
}
COLOURS: dict[str, str] = {name: style.colour for name, style in STYLES.items()}
SPARE = tuple(  # for those who are not in the table
    Style(colour, marker, "")
    for colour, marker in [
        ("#00519c", "o"),
        ("#c68300", "s"),
        ("#00916e", "^"),
        ("#a63a00", "D"),
        ("#7b5fc9", "v"),
        ("#333333", "P"),
        ("#c0579a", "X"),
        ("#3594d3", "p"),
        ("#5c4033", "<"),
        ("#2f6b3a", ">"),
        ("#8c1d5a", "h"),
        ("#4a6fa5", "d"),
    ]
)
AXES = {
    "n_cols": "columns, N",
    "n_rows": "rows, M",
    "effective_gbps": "effective bandwidth, GB/s",
    "share_of_copy": "share of the copy's bandwidth",
    "p50_us": "median time, µs",
}

_CEILING = {
    "color": COLOURS["copy"],
    "linestyle": "--",
    "linewidth": 1.4,
    "zorder": 1.9,
}
_kept: dict[str, Style] = {}  # who has which spare style


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """The styles of those who share a figure, no two of them alike.

    A provider of the table has its own. Another one gets the first spare one that is
    free in this figure, and keeps it in the next ones unless it is taken there.
    """
    names = list(names)
    styles = {name: STYLES[name] for name in names if name in STYLES}
    for name in names:
        if name in STYLES:
            continue
        taken = {style.colour for style in styles.values()}
        wanted = [_kept[name], *SPARE] if name in _kept else [*SPARE]
        free = [style for style in wanted if style.colour not in taken]
        if not free:
            raise ValueError(
                f"names must have at most {len(SPARE)} outside STYLES, got {names}"
            )
        styles[name] = _kept[name] = free[0]._replace(label=name)
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


def use_style() -> None:
    """Sets Matplotlib's defaults to the course's style (done on import)."""
    mpl.rcParams.update(
        {
            "figure.dpi": DPI,
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
    )


use_style()


class Figure(mpl_figure.Figure):
    """A Matplotlib figure that a notebook shows by itself, at twice its resolution."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=4 / 3 * DPI, metadata={"Software": None})
        width, height = (round(inches * DPI) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


def figure(
    height: float = 3.6, *, title: str = "", source: str = "", width: float = WIDTH
) -> Figure:
    """An empty card, with its title at the top left and its source at the bottom right.

    Args:
        height, width: inches. A figure of another width than the page's is scaled to
            it in the book, and its text with it.
        title: what is plotted.
        source: where the numbers are from, such as `Results.source`.
    """
    card = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    card.get_layout_engine().set(w_pad=0.14, h_pad=0.1, hspace=0.06)
    card.patch.set_alpha(0)
    inset, radius = 0.02, 0.12
    card.add_artist(
        FancyBboxPatch(
            (inset + radius, inset + radius),
            width - 2 * (inset + radius),
            height - 2 * (inset + radius),
            boxstyle=f"round,pad={radius}",
            transform=card.dpi_scale_trans,
            facecolor=CARD,
            edgecolor=EDGE,
            linewidth=0.8,
            zorder=-1,
        )
    )
    if title:
        lines = textwrap.wrap(title, int(width * 11))
        place = {"x": 0.14 / width, "ha": "left", "fontsize": FONT + 2}
        card.suptitle("\n".join(lines), fontweight="bold", **place)
    if source:
        place = {"x": 1 - 0.14 / width, "ha": "right", "fontsize": FONT}
        card.supxlabel(source, color=MUTED, **place)
    return card


# ---- lines ---------------------------------------------------------------------------


class _Line(NamedTuple):
    xs: list[float]
    ys: list[float]
    band: tuple[list[float], ...] | None = None


def bandwidth(
    results: Any,
    x: str = "n_cols",
    measure: str = "effective_gbps",
    *,
    title: str | None = None,
) -> Figure:
    """Measurements over the shape, one line per provider, one panel per dtype.

    The band around a line goes from the 20th to the 80th percentile of its timings.
    The copy, the measured ceiling, is dashed.

    Args:
        results: a `bench.Results`.
        x: "n_cols" or "n_rows".
        measure: "effective_gbps", "share_of_copy" or "p50_us".
        title: what is plotted; None states the measure.

    Raises:
        ValueError: no measurements, an unknown x or measure, or two measurements of one
            provider and dtype at the same x.
    """
    if x not in ("n_cols", "n_rows"):
        raise ValueError(f"x must be 'n_cols' or 'n_rows', got {x!r}")
    if measure not in ("effective_gbps", "share_of_copy", "p50_us"):
        raise ValueError(
            "measure must be 'effective_gbps', 'share_of_copy' or 'p50_us', "
            f"got {measure!r}"
        )
    if not len(results):
        raise ValueError("results must hold a measurement, got none")
    dtypes = list(dict.fromkeys(one.dtype for one in results))
    if title is None:
        title = AXES[measure].split(",")[0].capitalize() + " of softmax"
    card = figure(0.9 + 2.7 * len(dtypes), title=title, source=results.source)
    panels = card.subplots(len(dtypes), sharex=True, squeeze=False)[:, 0]
    for ax, dtype in zip(panels, dtypes, strict=True):
        some = results.select(dtype=dtype)
        _draw_lines(ax, _lines_of(some, x, measure))
        ax.set_title(" · ".join([dtype, *_shape_facts(some, x)]))
        ax.set_ylabel(AXES[measure])
        _log2_ticks(ax, sorted({getattr(one, x) for one in results}))
    panels[-1].set_xlabel(AXES[x])
    for ax in panels:
        _label_ends(ax)
    return card


def _lines_of(results: Any, x: str, measure: str) -> dict[str, _Line]:
    """One line per provider, the copy last; all measurements are of one dtype."""
    lines = {}
    sign = 1 if measure == "p50_us" else -1  # the others are over a time
    names = list(dict.fromkeys(one.provider for one in results))
    for name in sorted(names, key=lambda name: name == "copy"):
        some = sorted(results.select(provider=name), key=lambda one: getattr(one, x))
        xs = [getattr(one, x) for one in some]
        if len(set(xs)) < len(xs):
            raise ValueError(
                f"results has several measurements of {name!r} ({some[0].dtype}) at "
                f"one {x}: choose with results.select(…)"
            )
        ys = [results.measure(one, measure) for one in some]
        band = tuple(
            [
                y * (getattr(one, p) / one.p50_us) ** sign
                for y, one in zip(ys, some, strict=True)
            ]
            for p in ("p20_us", "p80_us")
        )
        lines[name] = _Line(xs, ys, band)
    return lines


def _shape_facts(results: Any, x: str) -> list[str]:
    """What is the same for all shapes: the other dimension, or the size."""
    other, letter = ("n_rows", "M") if x == "n_cols" else ("n_cols", "N")
    others = {getattr(one, other) for one in results}
    sizes = {one.n_rows * one.n_cols for one in results}
    if len(others) == 1:
        return [f"{letter} = {others.pop()}"]
    return [f"M × N = {sizes.pop()}"] if len(sizes) == 1 else []


def lines(
    series: Mapping[str, Mapping[float, float]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    source: str = "",
    log_x: bool = True,
    ceiling: tuple[str, float] | None = None,
) -> Figure:
    """Lines of any origin, in the same style.

    Args:
        series: name → {x: y}. A provider's name brings its colour and marker.
        xlabel, ylabel: what the axes are, with units.
        title, source: as in `figure`.
        log_x: whether x doubles from tick to tick; y always starts at 0.
        ceiling: (label, y) of a dashed horizontal line.

    Raises:
        ValueError: there are no series, or one is empty.
    """
    if not series or not all(series.values()):
        raise ValueError(f"series must map names to points, got {dict(series)!r}")
    card = figure(title=title, source=source)
    ax = card.subplots()
    data = {
        name: _Line(*(list(part) for part in zip(*sorted(points.items()), strict=True)))
        for name, points in series.items()
    }
    _draw_lines(ax, data)
    xs = sorted({x for line in data.values() for x in line.xs})
    if log_x:
        _log2_ticks(ax, xs)
    if ceiling:
        name, y = ceiling
        ax.plot([xs[0], xs[-1]], [y, y], label=name, **_CEILING)
        ax.set_ylim(0, max(ax.get_ylim()[1], 1.08 * y))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _label_ends(ax)
    return card


def points(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    source: str = "",
    ceiling: tuple[str, float] | None = None,
) -> Figure:
    """Points of any origin, where the question is whether they fall on one curve.

    Args:
        series: name → (x, y) pairs; x is positive, its axis doubles from tick to tick.
        xlabel, ylabel: what the axes are, with units; y starts at 0.
        title, source: as in `figure`.
        ceiling: (label, y) of a dashed horizontal line.

    Raises:
        ValueError: there are no series, or one is empty.
    """
    if not series or not all(series.values()):
        raise ValueError(f"series must map names to points, got {dict(series)!r}")
    card = figure(title=title, source=source)
    ax = card.subplots()
    for name, (colour, marker, label) in styles_of(series).items():
        xs, ys = zip(*series[name], strict=True)
        look = {"linestyle": "", "markeredgecolor": CARD, "alpha": 0.8}
        ax.plot(xs, ys, marker=marker or "o", color=colour, label=label, **look)
    xs, ys = zip(*(pair for pairs in series.values() for pair in pairs), strict=True)
    low, high = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    _log2_ticks(ax, [2.0**power for power in range(low, max(high, low + 1) + 1)])
    if ceiling:
        name, y = ceiling
        ax.plot([2.0**low, 2.0**high], [y, y], label=name, **_CEILING)
    ax.set_ylim(0, 1.08 * max(*ys, ceiling[1] if ceiling else 0))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    card.legend(loc="outside right upper")  # where no point can be
    return card


def plane(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    source: str = "",
) -> Figure:
    """Maps of a plane of two sizes: who is where, in panels side by side.

    Args:
        panels: title → name → (x, y) pairs, all positive; both axes double from mark to
            mark, and are the same for all panels. A name keeps its colour and marker.
        xlabel, ylabel: what the axes are.
        title, source: as in `figure`.

    Raises:
        ValueError: there are no points.
    """
    panels = {
        panel: {name: some for name, some in series.items() if some}
        for panel, series in panels.items()
    }
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    pairs = [
        pair for series in panels.values() for some in series.values() for pair in some
    ]
    if not pairs:
        raise ValueError(f"panels must map titles to points, got {panels!r}")
    card = figure(4.1, title=title, source=source)
    axes = card.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (panel, series) in zip(axes, panels.items(), strict=True):
        ax.set(title=panel, xlabel=xlabel, xscale="log", yscale="log")
        for name, some in series.items():
            colour, marker, label = styles_of(names)[name]
            xs, ys = zip(*some, strict=True)
            look = {"linestyle": "", "markeredgecolor": CARD, "markersize": 6.5}
            ax.plot(xs, ys, marker=marker or "o", color=colour, label=label, **look)
        ax.grid(True, axis="both")
    axes[0].set_ylabel(ylabel)
    for axis, sizes in zip(
        (axes[0].xaxis, axes[0].yaxis), zip(*pairs, strict=True), strict=True
    ):
        low = math.floor(math.log2(min(sizes)))
        high = math.ceil(math.log2(max(sizes)))
        ticks = [2.0**power for power in range(low, high + 1, 4)]
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(ticks, map(_short, ticks))
    found = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in axes]
    handles = {label: handle for pairs in found for handle, label in pairs}
    where = {"loc": "upper right", "framealpha": 1}  # no matrix is that large
    axes[-1].legend(handles.values(), handles.keys(), **where)
    return card


def _short(size: float) -> str:
    """A size in powers of 1024: 2048 is 2k, 4194304 is 4M."""
    for power, letter in ((20, "M"), (10, "k")):
        if size >= 2**power:
            return f"{size / 2**power:.10g}{letter}"
    return f"{size:.10g}"


def _draw_lines(ax: Axes, lines: Mapping[str, _Line]) -> None:
    styles = styles_of(lines)
    for name, line in lines.items():
        colour, marker, label = styles[name]
        edge = {"markeredgecolor": CARD, "markeredgewidth": 0.7}
        how = {"color": colour, "marker": marker, **edge}
        how = _CEILING if name == "copy" else how
        ax.plot(line.xs, line.ys, label=label, **how)
        if line.band:
            ax.fill_between(line.xs, *line.band, color=colour, alpha=0.15, linewidth=0)
    ax.set_ylim(0, 1.06 * max(max(line.ys) for line in lines.values()))


def _log2_ticks(ax: Axes, xs: Sequence[float]) -> None:
    """A log2 axis with a tick at each x of the data, numbered where there is room."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    digits = max(len(f"{x:.10g}") for x in xs)
    apart = math.log2(xs[-1] / xs[0]) * 0.68 * FONT * (digits + 1) / (40 * FONT)
    shown: list[float] = []
    for x in sorted(xs, key=lambda x: (not math.log2(x).is_integer(), x)):
        if all(abs(math.log2(x / other)) > apart for other in shown):
            shown.append(x)
    ax.set_xticks(xs, [f"{x:.10g}" if x in shown else "" for x in xs])


def _label_ends(ax: Axes) -> None:
    """Names each line at its right end; pushes apart the names that would overlap."""
    ax.figure.draw_without_rendering()  # the layout decides how high the panel is
    low, high = ax.get_ylim()
    point = (high - low) / (ax.get_window_extent().height * 72 / ax.figure.dpi)
    ends = sorted(ax.get_lines(), key=lambda line: line.get_ydata()[-1])
    wanted = [line.get_ydata()[-1] for line in ends]
    places = _apart(wanted, 1.35 * FONT * point, low, high)
    right = max(line.get_xdata()[-1] for line in ends)
    for line, y, place in zip(ends, wanted, places, strict=True):
        x, colour = line.get_xdata()[-1], line.get_color()
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.7,
            "relpos": (0, 0.5),
            "shrinkA": 0,
            "shrinkB": 4,
        }
        ax.annotate(
            line.get_label(),
            xy=(x, y),
            xytext=(1.03, place),
            textcoords=ax.get_yaxis_transform(),
            color=_darker(colour),
            va="center",
            annotation_clip=False,
            arrowprops=leader if abs(place - y) > 2 * point or x < right else None,
        )


def _apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places nearest to those wanted (sorted), a gap apart, within low and high."""
    groups: list[tuple[float, int]] = []  # (centre, members) of those pushed together
    for place in wanted:
        centre, members = place, 1
        while True:
            half = gap * (members - 1) / 2
            centre = max(min(centre, high - half), low + half)
            if (
                not groups
                or centre - half - gap >= groups[-1][0] + gap * (groups[-1][1] - 1) / 2
            ):
                break
            other, others = groups.pop()
            centre = (centre * members + other * others) / (members + others)
            members += others
        groups.append((centre, members))
    return [
        centre + gap * (i - (members - 1) / 2)
        for centre, members in groups
        for i in range(members)
    ]


def _darker(colour: str) -> str:
    """The colour as text needs it, which is thinner than a line."""
    return to_hex([0.78 * part for part in to_rgb(colour)])


# ---- other figures -------------------------------------------------------------------


def bars(
    values: Mapping[str, float | Mapping[str, float]],
    unit: str,
    *,
    title: str = "",
    source: str = "",
) -> Figure:
    """A few values as horizontal bars from 0, each with its number beside it.

    Args:
        values: name → value, or name → {what: value} for bars in groups, such as
            {"eager": {"predicted": 640.0, "measured": 711.0}}.
        unit: of all values, such as "GB/s".
        title, source: as in `figure`.

    Raises:
        ValueError: there are no values.
    """
    groups = {
        name: value if isinstance(value, Mapping) else {"": value}
        for name, value in values.items()
    }
    if not groups or not all(groups.values()):
        raise ValueError(f"values must map names to numbers, got {dict(values)!r}")
    series = list(dict.fromkeys(what for group in groups.values() for what in group))
    n_bars = sum(len(group) + 0.5 for group in groups.values())
    card = figure(0.55 + 0.27 * n_bars + 0.3 * bool(source), title=title, source=source)
    ax = card.subplots()
    y, ticks = 0.0, []
    for name, group in groups.items():
        ticks.append(y + (len(group) - 1) / 2)
        for what, value in group.items():
            colour = _bar_colour(name, what, series)
            ax.barh(y, value, height=0.86, color=colour)
            text = " ".join(filter(None, (_number(value), unit, what)))
            ax.annotate(
                text, (value, y), (4, 0), textcoords="offset points", va="center"
            )
            y += 1
        y += 0.5
    ax.set_yticks(ticks, [STYLES[n].label if n in STYLES else n for n in groups])
    ax.set_ylim(y - 0.8, -0.7)
    largest = max(value for group in groups.values() for value in group.values())
    longest = len(f"{_number(largest)} {unit} ") + max(map(len, series))
    ax.set_xlim(0, (largest or 1) * (1 + 0.017 * longest))
    ax.xaxis.set_visible(False)
    ax.spines[["bottom"]].set_visible(False)
    ax.grid(False)
    return card


def _bar_colour(name: str, what: str, series: Sequence[str]) -> str:
    if what in COLOURS:
        return COLOURS[what]
    if what:
        return ("#a9b4c0", COLOURS["persistent"], COLOURS["torch"])[
            series.index(what) % 3
        ]
    return COLOURS.get(name, COLOURS["program"])


def roofline(
    gpu: Any,
    points: Mapping[str, tuple[float, float]],
    *,
    peak_tflops: float,
    copy_gbps: float | None = None,
    title: str = "",
    source: str = "",
) -> Figure:
    """The roof over all kernels, memory's slope and arithmetic's flat, and some below.

    Args:
        gpu: a `gpu.Gpu`, for its name and its peak bandwidth.
        points: name → (operations per byte moved, TFLOP/s reached).
        peak_tflops: the GPU's peak arithmetic rate for these operations, TFLOP/s.
        copy_gbps: the bandwidth that a copy reaches, GB/s, drawn dashed.
        title, source: as in `figure`.

    Raises:
        ValueError: a point is not positive: a logarithmic axis cannot show it.

    Source:
        Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
    """
    for name, point in points.items():
        if min(point) <= 0:
            raise ValueError(f"points[{name!r}] must be positive, got {point}")
    slope = gpu.peak_bandwidth_gbps / 1000
    ridge = peak_tflops / slope
    left = min([0.25, *(intensity / 2 for intensity, _ in points.values())])
    right = max(
        4 * intensity for intensity in (ridge, *(p[0] for p in points.values()))
    )
    lowest = min([left * slope, *(rate for _, rate in points.values())])
    card = figure(4.0, title=title, source=source)
    ax = card.subplots()
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    ax.set_ylim(lowest / 2, 3 * peak_tflops)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.10g}")
        axis.set_minor_locator(NullLocator())
    ax.grid(True, axis="both")
    roof = [left * slope, peak_tflops, peak_tflops]
    ax.plot([left, ridge, right], roof, color=INK)
    words = f"{gpu.name}: {gpu.peak_bandwidth_gbps:g} GB/s"
    if copy_gbps is not None:
        reach = 1000 * peak_tflops / copy_gbps
        ax.plot([left, reach], [left * copy_gbps / 1000, peak_tflops], **_CEILING)
        words += f" (dashed: the copy's {copy_gbps:.0f})"
    styles = styles_of(points)
    for name, (intensity, rate) in points.items():
        colour, marker, label = styles[name]
        ax.plot([intensity], [rate], marker or "o", color=colour, markersize=8)
        ax.annotate(
            label,
            (intensity, rate),
            (8, -3),
            textcoords="offset points",
            va="top",
            color=_darker(colour),
        )
    ax.set_xlabel("arithmetic intensity, operations per byte moved")
    ax.set_ylabel("TFLOP/s")
    above = {"textcoords": "offset points", "va": "bottom", "rotation_mode": "anchor"}
    ax.annotate(
        f"{peak_tflops:g} TFLOP/s", (right, peak_tflops), (-4, 4), ha="right", **above
    )
    card.draw_without_rendering()  # the layout decides how steep the slope looks
    ends = ax.transData.transform([(left, left * slope), (ridge, peak_tflops)])
    angle = math.degrees(math.atan2(*(ends[1] - ends[0])[::-1]))
    middle = math.sqrt(left * ridge)
    ax.annotate(
        words, (middle, middle * slope), (-3, 5), ha="center", rotation=angle, **above
    )
    return card


_SHADES = LinearSegmentedColormap.from_list("shades", ["#f3f7fb", "#7db8e0", "#00427a"])


def heatmap(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    source: str = "",
    digits: int = 2,
) -> Figure:
    """Numbers over two choices, as shades and figures; each column's best is framed.

    Args:
        values: one sequence per row; the largest is the darkest. None stays blank.
        rows, columns: what the rows and the columns are, such as warps and N.
        row_label, column_label: the names of the two choices.
        title, source: as in `figure`.
        digits: decimal places.

    Raises:
        ValueError: values is not of len(rows) × len(columns).
    """
    if [len(row) for row in values] != [len(columns)] * len(rows) or not len(rows):
        raise ValueError(
            f"values must have {len(rows)} rows of {len(columns)} values, got rows of "
            f"{[len(row) for row in values]}"
        )
    card = figure(1.05 + 0.32 * len(rows), title=title, source=source)
    ax = card.subplots()
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0), max(known, default=1)
    for j in range(len(columns)):
        best = max((row[j] for row in values if row[j] is not None), default=None)
        for i, row in enumerate(values):
            if row[j] is None:
                ax.text(j, i, "–", ha="center", va="center", color=MUTED)
                continue
            share = (row[j] - low) / (high - low) if high > low else 1.0
            shade = to_hex(_SHADES(share))
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=shade, linewidth=0))
            ax.text(
                j,
                i,
                f"{row[j]:.{digits}f}",
                ha="center",
                va="center",
                color=max(INK, "#ffffff", key=lambda ink: contrast(ink, shade)),
                fontweight="bold" if row[j] == best else "normal",
            )
            if row[j] == best:
                frame = Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False)
                frame.set(edgecolor="#e69f00", linewidth=1.8)
                ax.add_patch(frame)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(range(len(columns)), map(str, columns))
    ax.set_yticks(range(len(rows)), map(str, rows))
    ax.set_xlabel(column_label)
    ax.set_ylabel(row_label)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(False)
    return card


# ---- tables --------------------------------------------------------------------------


class Table:
    """Rows under a header: aligned as text, a plain table as HTML."""

    def __init__(
        self,
        rows: Iterable[Sequence[Any]],
        header: Sequence[Any],
        digits: int | None = None,
    ) -> None:
        self.header = [str(name) for name in header]
        self.rows = [list(row) for row in rows]
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"each row must have {len(self.header)} cells, as the header has, "
                    f"got {row!r}"
                )
        self._right = [
            all(isinstance(row[i], int | float | None) for row in self.rows)
            and any(row[i] is not None for row in self.rows)
            for i in range(len(self.header))
        ]
        columns = zip(*self.rows, strict=True)
        texts = [_column(column, digits) for column in columns]
        self._text = [list(row) for row in zip(*texts, strict=True)]

    def __repr__(self) -> str:
        every = [self.header, *self._text]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._right, strict=True)
            ).rstrip()
            for row in every
        ]
        lines.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        sides = ["right" if right else "left" for right in self._right]

        def line(cells: list[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )

        head = f"<thead><tr>{line(self.header, 'th')}</tr></thead>"
        body = "\n".join(f"<tr>{line(row, 'td')}</tr>" for row in self._text)
        return f"<table>\n{head}\n<tbody>\n{body}\n</tbody>\n</table>"


def table(
    rows: Iterable[Sequence[Any]], header: Sequence[Any], *, digits: int | None = None
) -> Table:
    """A table that a notebook shows.

    Args:
        rows: each a sequence of cells. Text stands to the left, numbers to the right; a
            column's floats have as many decimals as its smallest needs for two digits;
            None is a dash.
        header: the columns' names, with units.
        digits: decimal places of all floats.

    Raises:
        ValueError: a row is longer or shorter than the header.
    """
    return Table(rows, header, digits)


def _column(cells: Sequence[Any], digits: int | None) -> list[str]:
    """Cells as text: None is a dash, all floats have the same number of decimals."""
    if digits is None:
        sizes = [abs(cell) for cell in cells if isinstance(cell, float) and cell]
        digits = max((_decimals(size, 2) for size in sizes), default=0)
    return [
        "–"
        if cell is None
        else f"{cell:.{digits}f}"
        if isinstance(cell, float)
        else str(cell)
        for cell in cells
    ]


def _number(value: float) -> str:
    """A number with three significant digits, or all of its integer part."""
    return f"{value:.{_decimals(abs(value), 3) if value else 0}f}"


def _decimals(size: float, significant: int) -> int:
    if not math.isfinite(size):
        return 0
    return max(0, significant - 1 - math.floor(math.log10(size)))


# ---- code ----------------------------------------------------------------------------


class Code:
    """Text in a language: as it is, or highlighted by a notebook."""

    def __init__(self, text: str, language: str) -> None:
        self.text, self.language = text, language

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        fence = "````" if "```" in self.text else "```"
        return f"{fence}{self.language}\n{self.text}\n{fence}"


def source(function: Callable) -> Code:
    """The source of a function or a kernel, read from its module, docstring and all.

    Raises:
        TypeError: its source cannot be found: it is not a Python function.
    """
    return Code(_source(function), "python")


def diff(old: Callable, new: Callable) -> Code:
    """What changes from one function or kernel to the next, docstrings left out.

    Raises:
        TypeError: as `source`.
    """
    texts = [_without_docstring(_source(one)).splitlines() for one in (old, new)]
    names = [f"{_plain(one).__module__}.{_plain(one).__name__}" for one in (old, new)]
    changes = difflib.unified_diff(*texts, *names, n=max(map(len, texts)), lineterm="")
    return Code("\n".join(line for line in changes if line[:2] != "@@"), "diff")


def _plain(function: Any) -> Any:
    """The Python function inside kernels, autotuners and other wrappers."""
    for inside in ("fn", "py_func", "__wrapped__"):
        if hasattr(function, inside):
            return _plain(getattr(function, inside))
    return function


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(_plain(function))).rstrip()
    except (TypeError, OSError) as error:
        raise TypeError(
            "function must be a Python function or a kernel whose source can be read, "
            f"got {function!r}"
        ) from error


def _without_docstring(text: str) -> str:
    (function,) = ast.parse(text).body
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return text
    lines = text.splitlines()
    return "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :])
