"""Figures of measurements.

A figure takes what `record` returns, a pandas data frame, or plain mappings. Its look
is that of `style`, whose names a notebook also finds here.

Weighed: seaborn and plotly (a large dependency each; plotly's pages load a script).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from kernels.lab.show import decimals
from kernels.lab.style import (
    CARD,
    COLOURS,
    FONT,
    INK,
    MUTED,
    STYLES,
    WIDTH,
    Figure,
    contrast,
    darker,
    figure,
    in_style,
    styles_of,
)

__all__ = [
    "AXES",
    "COLOURS",
    "FONT",
    "INK",
    "STYLES",
    "WIDTH",
    "Figure",
    "bandwidth",
    "bars",
    "contrast",
    "figure",
    "heatmap",
    "lines",
    "roofline",
    "styles_of",
]

AXES = {
    "n_cols": "columns, N",
    "n_rows": "rows, M",
    "effective_gbps": "effective bandwidth, GB/s",
    "share_of_copy": "share of the copy's bandwidth",
    "p50_us": "median time, µs",
}

_CEILING = {"color": COLOURS["copy"], "linestyle": "--", "linewidth": 1.4}
_BARS = ("#5a96d2", "#00519c", "#e16900")  # of no provider
_SHADES = LinearSegmentedColormap.from_list("shades", ["#f3f7fb", "#7db8e0", "#00427a"])
_BEST = "#e69f00"


# ---- lines ---------------------------------------------------------------------------


class _Line(NamedTuple):
    xs: Sequence[float]
    ys: Sequence[float]
    band: tuple[Sequence[float], ...] = ()  # its lower and its upper edge


@in_style
def bandwidth(
    df: pd.DataFrame,
    x: str = "n_cols",
    measure: str = "effective_gbps",
    *,
    title: str | None = None,
) -> Figure:
    """Measurements over the shape: one line per provider, one panel per dtype.

    The band around a line goes from the 20th to the 80th percentile of its timings.
    The copy, the measured ceiling, is dashed. What the record has of the same rows
    (`df.attrs["recorded"]`) lies behind as wide, pale lines.

    Args:
        df: measurements, as `record.sweep` returns them.
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
    rows = df.dropna(subset=[measure])
    if rows.empty:
        raise ValueError(f"df must hold measurements with a {measure}, got none")
    if title is None:
        title = AXES[measure].split(",")[0].capitalize() + " of softmax"
    dtypes = rows["dtype"].unique()
    source, behind = df.attrs.get("source", ""), pd.DataFrame()
    if df.attrs.get("recorded"):
        keys = ["provider", "dtype", "n_rows", "n_cols", "input", "clock"]
        recorded = pd.DataFrame(df.attrs["recorded"])
        behind = rows.loc[rows["provider"] != "copy", keys].merge(recorded, on=keys)
    if len(behind):
        source += f" · pale: recorded on {'/'.join(behind['gpu'].unique())}"
    card = figure(0.9 + 2.7 * len(dtypes), title=title, source=source)
    panels = card.subplots(len(dtypes), sharex=True, squeeze=False)[:, 0]
    for ax, dtype in zip(panels, dtypes, strict=True):
        same = rows[rows["dtype"] == dtype]
        pale = behind[behind["dtype"] == dtype] if len(behind) else same[:0]
        _draw_lines(ax, *(_lines_of(each, x, measure) for each in (same, pale)))
        ax.set_title(" · ".join([dtype, *_shape_facts(same, x)]))
        ax.set_ylabel(AXES[measure])
        _log2_ticks(ax, sorted(rows[x].unique()))
    panels[-1].set_xlabel(AXES[x])
    for ax in panels:
        _label_ends(ax)
    return card


def _lines_of(df: pd.DataFrame, x: str, measure: str) -> dict[str, _Line]:
    """One line per provider, the copy last; all measurements are of one dtype."""
    lines = {}
    sign = 1 if measure == "p50_us" else -1  # bandwidths are over a time
    for name in sorted(df["provider"].unique(), key=lambda name: name == "copy"):
        rows = df[df["provider"] == name].sort_values(x)
        if rows[x].duplicated().any():
            keys = [k for k in ("n_rows", "n_cols", "input", "clock") if k in rows]
            several = [key for key in keys if key != x and rows[key].nunique() > 1]
            raise ValueError(
                f"df must have one measurement of {name!r} at each {x}, got several "
                f"that differ in {several}: choose with record.select(…)"
            )
        ys = rows[measure]
        edges = [ys * (rows[p] / rows["p50_us"]) ** sign for p in ("p20_us", "p80_us")]
        lines[name] = _Line(list(rows[x]), list(ys), tuple(map(list, edges)))
    return lines


def _shape_facts(df: pd.DataFrame, x: str) -> list[str]:
    """What all shapes have in common: the other dimension, or the size."""
    other, letter = ("n_rows", "M") if x == "n_cols" else ("n_cols", "N")
    sizes = df["n_rows"] * df["n_cols"]
    if df[other].nunique() == 1:
        return [f"{letter} = {df[other].iloc[0]}"]
    return [f"M × N = {sizes.iloc[0]}"] if sizes.nunique() == 1 else []


@in_style
def lines(
    series: Mapping[str, Mapping[float, float]] | pd.DataFrame,
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
        series: name → {x: y}, or a data frame with a column per line over its index. A
            provider's name brings its colour and marker.
        xlabel, ylabel: what the axes are, with units.
        title, source: as in `figure`.
        log_x: whether x doubles from tick to tick; y always starts at 0.
        ceiling: (label, y) of a dashed horizontal line.

    Raises:
        ValueError: there are no series, or one is empty.
    """
    drawn = {}
    for name, points in series.items():
        pairs = sorted((x, y) for x, y in points.items() if not pd.isna(y))
        drawn[name] = _Line(*zip(*pairs, strict=True)) if pairs else None
    if not drawn or None in drawn.values():
        raise ValueError(f"series must map names to points, got {dict(series)!r}")
    card = figure(title=title, source=source)
    ax = card.subplots()
    _draw_lines(ax, drawn)
    xs = sorted({x for line in drawn.values() for x in line.xs})
    if log_x:
        _log2_ticks(ax, xs)
    _draw_ceiling(ax, xs, ceiling)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    _label_ends(ax)
    return card


def _draw_lines(
    ax: Axes, lines: Mapping[str, _Line], behind: Mapping[str, _Line] | None = None
) -> None:
    """Draws each line in its style. Our product's line lies above all others.

    Where it has more than four peers, which cross it, theirs are thin.
    """
    styles, behind = styles_of(lines), behind or {}
    ours = [name for name in lines if styles[name].colour == COLOURS["fastest"]]
    many = ours and len(set(lines) - {"copy", *ours}) > 4
    for name, line in behind.items():
        ways = [list(zip(line.xs, line.ys, strict=True))]
        look = {"linewidths": 5, "alpha": 0.25, "zorder": 1.5, "capstyle": "round"}
        look |= {"colors": styles[name].colour}
        ax.add_collection(LineCollection(ways, **look), autolim=False)
    for name, line in lines.items():
        colour, marker, label = styles[name]
        look = {"color": colour, "marker": marker}
        look |= {"markeredgecolor": CARD, "markeredgewidth": 0.7}
        if name == "copy":
            look = _CEILING | {"zorder": 1.9}
        elif name in ours:
            look["zorder"] = 2.5
        elif many:
            look |= {"linewidth": 1.0, "markersize": 4}
        ax.plot(line.xs, line.ys, label=label, **look)
        if line.band:
            ax.fill_between(line.xs, *line.band, color=colour, alpha=0.15, linewidth=0)
    ys = itertools.chain(*(line.ys for line in [*lines.values(), *behind.values()]))
    ax.set_ylim(0, 1.06 * max(ys))


def _draw_ceiling(
    ax: Axes, xs: Sequence[float], ceiling: tuple[str, float] | None
) -> None:
    if ceiling:
        label, y = ceiling
        ax.plot([xs[0], xs[-1]], [y, y], label=label, zorder=1.9, **_CEILING)
        ax.set_ylim(0, max(ax.get_ylim()[1], 1.08 * y))


def _log2_ticks(ax: Axes, xs: Sequence[float]) -> None:
    """A log2 axis with a tick at each x of the data, numbered where there is room.

    The last x has its number first, then powers of two have theirs.
    """
    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    digits = max(len(f"{x:.10g}") for x in xs)
    apart = math.log2(xs[-1] / xs[0]) * 0.68 * (digits + 1) / 40
    shown: list[float] = []
    for x in sorted(xs, key=lambda x: (x != xs[-1], not math.log2(x).is_integer(), x)):
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
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7}
        leader |= {"relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 4}
        ax.annotate(
            line.get_label(),
            xy=(x, y),
            xytext=(1.03, place),
            textcoords=ax.get_yaxis_transform(),
            color=darker(colour),
            va="center",
            annotation_clip=False,
            arrowprops=leader if abs(place - y) > 2 * point or x < right else None,
        )


def _apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted (sorted), at least a gap apart, within low and high."""
    steps = [gap * i for i in range(len(wanted))]
    closed = [place - step for place, step in zip(wanted, steps, strict=True)]
    upwards = itertools.accumulate(closed, max)
    downwards = reversed([*itertools.accumulate(reversed(closed), min)])
    middles = [(up + down) / 2 for up, down in zip(upwards, downwards, strict=True)]
    highest = high - steps[-1]
    return [
        max(min(middle, highest), low) + step
        for middle, step in zip(middles, steps, strict=True)
    ]


# ---- the roofline --------------------------------------------------------------------


@in_style
def roofline(
    gpu: Any,
    points: Mapping[str, tuple[float, float]],
    *,
    peak_tflops: float,
    copy_gbps: float | None = None,
    unit: str = "TFLOP/s",
    xlabel: str = "arithmetic intensity, operations per byte moved",
    title: str = "",
    source: str = "",
) -> Figure:
    """The bound of memory (a slope) and of arithmetic (flat), and kernels below them.

    Args:
        gpu: a `gpu.Gpu`, for its name and its peak bandwidth.
        points: name → (operations per byte moved, TFLOP/s reached).
        peak_tflops: the GPU's peak arithmetic rate for these operations, TFLOP/s.
        copy_gbps: the bandwidth that a copy reaches, GB/s, drawn dashed.
        unit, xlabel: other words, where something else than operations is counted, such
            as 10¹² instructions per second.
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
    intensities, rates = zip(*points.values(), strict=True)
    left, right = min(0.25, min(intensities) / 2), 4 * max(ridge, *intensities)
    card = figure(4.0, title=title, source=source)
    ax = card.subplots()
    ax.set(xscale="log", yscale="log", xlim=(left, right))
    ax.set_ylim(min(left * slope, *rates) / 2, 3 * peak_tflops)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:.10g}")
        axis.set_minor_locator(NullLocator())
    ax.grid(True, axis="both")
    ax.plot([left, ridge, right], [left * slope, peak_tflops, peak_tflops], color=INK)
    near = {"textcoords": "offset points"}
    for name, (colour, marker, label) in styles_of(points).items():
        point = points[name]
        ax.plot(*point, marker or "o", color=colour, markersize=8)
        ax.annotate(label, point, (8, -3), va="top", color=darker(colour), **near)
    ax.set(xlabel=xlabel, ylabel=unit)
    near |= {"ha": "right", "rotation_mode": "anchor"}
    ax.annotate(f"{peak_tflops:g} {unit}", (right, peak_tflops), (-4, 5), **near)
    card.draw_without_rendering()  # the layout decides how steep the slope looks
    ends = ax.transData.transform([(left, left * slope), (ridge, peak_tflops)])
    near["rotation"] = math.degrees(math.atan2(*(ends[1] - ends[0])[::-1]))
    words = f"{gpu.name}: {gpu.peak_bandwidth_gbps:g} GB/s"
    ax.annotate(words, (ridge, peak_tflops), (-9, 1), **near)
    if copy_gbps is not None:
        reach = 1000 * peak_tflops / copy_gbps
        ax.plot([left, reach], [left * copy_gbps / 1000, peak_tflops], **_CEILING)
        words = f"copy: {copy_gbps:.0f} GB/s"
        ax.annotate(words, (reach, peak_tflops), (2, -8), va="top", **near)
    return card


# ---- bars and shades -----------------------------------------------------------------


@in_style
def bars(
    values: Mapping[str, float | Mapping[str, float]] | pd.DataFrame,
    unit: str,
    *,
    title: str = "",
    source: str = "",
) -> Figure:
    """A few values as horizontal bars from 0, each with its number beside it.

    Args:
        values: name → value, or name → {what: value} for bars in groups, such as
            {"eager": {"predicted": 640.0, "measured": 711.0}}, or a data frame whose
            rows are the groups.
        unit: of all values, such as "GB/s".
        title, source: as in `figure`.

    Raises:
        ValueError: there are no values.
    """
    if isinstance(values, pd.DataFrame):
        values = {name: row.dropna().to_dict() for name, row in values.iterrows()}
    groups = {
        str(name): value if isinstance(value, Mapping) else {"": value}
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
            colour = COLOURS.get(what or name, _BARS[series.index(what) % len(_BARS)])
            ax.barh(y, value, height=0.86, color=colour)
            text = " ".join(filter(None, (_number(value), unit, what)))
            place = {"textcoords": "offset points", "va": "center"}
            ax.annotate(text, (value, y), (4, 0), **place)
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


def _number(value: float) -> str:
    """A number with three significant digits, or all of its integer part."""
    return f"{value:.{decimals(value, 3)}f}"


@in_style
def heatmap(
    values: Sequence[Sequence[float | None]] | pd.DataFrame,
    rows: Sequence[Any] | None = None,
    columns: Sequence[Any] | None = None,
    *,
    row_label: str,
    column_label: str,
    title: str = "",
    source: str = "",
    digits: int = 2,
) -> Figure:
    """Numbers over two choices, as shades and figures; each column's largest is framed.

    Args:
        values: one sequence per row, or a data frame. The largest is the darkest; None
            stays blank.
        rows, columns: what the rows and the columns are, such as warps and N; None
            takes the data frame's.
        row_label, column_label: the names of the two choices.
        title, source: as in `figure`.
        digits: decimal places.

    Raises:
        ValueError: values is not of len(rows) × len(columns).
    """
    if isinstance(values, pd.DataFrame):
        rows = values.index if rows is None else rows
        columns = values.columns if columns is None else columns
        values = values.to_numpy(dtype=float).tolist()
    if [len(row) for row in values] != [len(columns)] * len(rows) or not len(rows):
        raise ValueError(
            f"values must have {len(rows)} rows of {len(columns)} values, got rows of "
            f"{[len(row) for row in values]}"
        )
    card = figure(1.15 + 0.32 * max(len(rows), 4), title=title, source=source)
    ax = card.subplots()
    table = pd.DataFrame(values, dtype=float)
    low, high = table.min(axis=None), table.max(axis=None)
    middle = {"ha": "center", "va": "center"}
    for i, j in itertools.product(range(len(rows)), range(len(columns))):
        value = table.iat[i, j]
        if pd.isna(value):
            ax.text(j, i, "–", color=MUTED, **middle)
            continue
        shade = to_hex(_SHADES((value - low) / (high - low) if high > low else 1.0))
        ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=shade, linewidth=0))
        colour = max(INK, "#ffffff", key=lambda ink: contrast(ink, shade))
        text = ax.text(j, i, f"{value:.{digits}f}", color=colour, **middle)
        if value == table[j].max():
            text.set_fontweight("bold")
            frame = Rectangle((j - 0.46, i - 0.44), 0.92, 0.88, fill=False)
            frame.set(edgecolor=_BEST, linewidth=1.8)
            ax.add_patch(frame)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(range(len(columns)), map(str, columns))
    ax.set_yticks(range(len(rows)), map(str, rows))
    framed = "framed: the largest of a column"
    ax.set_xlabel(" · ".join(filter(None, (column_label, framed))))
    ax.set_ylabel(row_label)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(False)
    return card
