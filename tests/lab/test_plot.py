"""Figures hold the data that they were given, and can be read."""

import math
from itertools import pairwise

import pandas as pd
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from kernels.lab import gpu, plot

SOURCE = "NVIDIA H200 · driver 580 · torch 2.11 · triton 3.6 · recorded 2026-11-21"


def measured(provider, n_cols, p50_us, dtype="float32", n_rows=4096, **key):
    """A row of a record."""
    row = {"provider": provider, "dtype": dtype, "n_rows": n_rows, "n_cols": n_cols}
    row |= {"input": "contiguous", "clock": "device"} | key
    return row | {"p20_us": 0.9 * p50_us, "p50_us": p50_us, "p80_us": 1.25 * p50_us}


def frame(rows):
    """What `record.sweep` returns for these rows."""
    df = pd.DataFrame(rows)
    itemsize = df["dtype"].map({"float32": 4, "bfloat16": 2})
    gigabytes = 2 * df["n_rows"] * df["n_cols"] * itemsize / 1e9
    df["effective_gbps"] = gigabytes / (df["p50_us"] / 1e6)
    shape = ["dtype", "n_rows", "n_cols", "clock"]
    copies = df[df["provider"] == "copy"].set_index(shape)["p50_us"]
    copy = copies.reindex(pd.MultiIndex.from_frame(df[shape])).to_numpy()
    df["share_of_copy"] = copy / df["p50_us"]
    df.attrs["source"] = SOURCE
    return df


@pytest.fixture
def df():
    return frame(
        measured(provider, n_cols, slowness * n_cols, dtype)
        for dtype in ("float32", "bfloat16")
        for n_cols in (64, 1024, 1000)
        for provider, slowness in (("copy", 1.0), ("torch", 2.0), ("program", 1.25))
    )


def line(ax, label):
    (found,) = [each for each in ax.get_lines() if each.get_label() == label]
    return found


def words(ax):
    return [text.get_text() for text in ax.texts]


# ---- figures -------------------------------------------------------------------------


def test_what_is_recorded_lies_behind_what_is_measured(df):
    """Where both are known, and only there; the copy is the yardstick of each."""
    recorded = frame(
        measured(provider, n_cols, slowness * n_cols)
        for n_cols in (64, 1024, 4096)
        for provider, slowness in (("copy", 2.0), ("torch", 2.5), ("online", 9.0))
    )
    plain = [len(ax.get_lines()) for ax in plot.bandwidth(df).axes]
    df.attrs["recorded"] = recorded.assign(gpu="NVIDIA H200").to_dict("list")
    figure = plot.bandwidth(df[df["n_cols"] < 2000], measure="share_of_copy")
    above, below = figure.axes
    assert [len(ax.get_lines()) for ax in figure.axes] == plain
    (behind,) = [each for each in above.collections if isinstance(each, LineCollection)]
    assert behind.get_segments()[0].tolist() == [[64, 0.8], [1024, 0.8]]
    own = line(above, "torch.softmax")
    assert to_hex(behind.get_color()[0]) == to_hex(own.get_color())
    assert behind.zorder < own.zorder
    assert not [each for each in below.collections if isinstance(each, LineCollection)]
    (source,) = [text for text in figure.texts if SOURCE in text.get_text()]
    assert source.get_text() == SOURCE + " · pale: recorded on NVIDIA H200"
    df.attrs["recorded"] = recorded.assign(gpu="H200", clock="events").to_dict("list")
    assert "pale" not in str([text.get_text() for text in plot.bandwidth(df).texts])


def test_bandwidth_has_a_panel_per_dtype_and_a_line_per_provider(df):
    figure = plot.bandwidth(df, title="Softmax")
    upper, lower = figure.axes
    assert upper.get_title(loc="left") == "float32 · M = 4096"
    assert lower.get_title(loc="left") == "bfloat16 · M = 4096"
    assert {text.get_text() for text in figure.texts} == {"Softmax", SOURCE}
    xs, ys = line(upper, "torch.softmax").get_data()
    assert list(xs) == [64, 1000, 1024]
    gbps = 2 * 4096 * 4 / 2.0 / 1e3  # 2·M·N·4 bytes in 2·N µs, whatever N is
    assert ys == pytest.approx([gbps] * 3)
    assert line(upper, "torch.softmax").get_color() == plot.COLOURS["torch"]
    assert line(upper, "copy").get_linestyle() == "--"
    assert upper.get_ylim()[0] == 0
    assert sorted(words(upper)) == ["copy", "program", "torch.softmax"]
    ticks = [tick.get_text() for tick in lower.get_xticklabels()]
    assert ticks == ["64", "", "1024"]  # 1000 would be written over 1024


def test_bandwidth_draws_the_percentiles_as_a_band(df):
    same = df[df["dtype"] == "float32"]
    for measure, low, high in (("effective_gbps", 0.8, 1 / 0.9), ("p50_us", 0.9, 1.25)):
        (ax,) = plot.bandwidth(same, measure=measure).axes
        median = line(ax, "program").get_ydata()[0]
        (band,) = (
            area.get_paths()[0].vertices
            for area in ax.collections
            if to_hex(area.get_facecolor()[0]) == plot.COLOURS["program"]
        )
        shares = [y / median for x, y in band if x == 64]
        assert min(shares) == pytest.approx(low)
        assert max(shares) == pytest.approx(high)


def test_bandwidth_as_a_share_of_the_copy(df):
    same = df[df["dtype"] == "float32"]
    (ax,) = plot.bandwidth(same, measure="share_of_copy").axes
    assert line(ax, "program").get_ydata() == pytest.approx([0.8] * 3)
    assert line(ax, "copy").get_ydata() == pytest.approx([1.0] * 3)


def test_bandwidth_leaves_out_what_has_no_copy(df):
    kept = (df["provider"] != "copy") | (df["n_cols"] != 64)
    df.loc[~kept | (df["n_cols"] == 64), "share_of_copy"] = math.nan
    (ax, _) = plot.bandwidth(df, measure="share_of_copy").axes
    assert list(line(ax, "program").get_xdata()) == [1000, 1024]


def test_bandwidth_over_rows_at_a_constant_size():
    rows = [
        measured("copy", 2**20 // n_rows, 5.0, n_rows=n_rows) for n_rows in (64, 256)
    ]
    (ax,) = plot.bandwidth(frame(rows), x="n_rows").axes
    assert ax.get_title(loc="left") == "float32 · M × N = 1048576"
    assert list(line(ax, "copy").get_xdata()) == [64, 256]


@pytest.mark.parametrize(
    ("other", "column"),
    [
        ({"n_rows": 1}, "n_rows"),
        ({"input": "sliced"}, "input"),
        ({"clock": "events"}, "clock"),
    ],
)
def test_bandwidth_names_what_would_share_a_place(df, other, column):
    rows = df.to_dict("records")
    twice = frame([*rows, measured("program", 64, 1.0, **other)])
    wanted = rf"one measurement of 'program' at each n_cols.*differ in \['{column}'\]"
    with pytest.raises(ValueError, match=wanted):
        plot.bandwidth(twice)


def test_bandwidth_refuses_what_it_cannot_draw(df):
    with pytest.raises(ValueError, match="x must be 'n_cols'"):
        plot.bandwidth(df, x="dtype")
    with pytest.raises(ValueError, match="measure must be"):
        plot.bandwidth(df, measure="speed")
    with pytest.raises(ValueError, match=r"df must hold measurements.*got none"):
        plot.bandwidth(df[df["n_cols"] == 7])


# ---- lines ---------------------------------------------------------------------------


def test_labels_that_would_overlap_are_pushed_apart():
    names = {f"series {i}": {1: 0.0, 2: 1 + i / 1000} for i in range(9)}
    figure = plot.lines(names, xlabel="x", ylabel="y", ceiling=("top", 1.2))
    (ax,) = figure.axes
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in ax.texts]  # without its leader
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 10
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))
    assert boxes[-1].y1 <= figure.bbox.y1
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([1, 5], [1, 5]),
        ([5, 5], [4.5, 5.5]),
        ([5, 5.2, 6.1], [4.55, 5.55, 6.55]),
        ([1, 5, 5, 9], [1, 4.5, 5.5, 9]),
        ([0, 0, 10], [0, 1, 10]),
        ([9.9, 10], [9, 10]),
    ],
)
def test_places_a_gap_apart_within_bounds(wanted, places):
    assert plot._apart(wanted, 1, 0, 10) == pytest.approx(places, abs=1e-4)


@pytest.mark.parametrize(("n_peers", "thin"), [(4, False), (5, True)])
def test_our_line_lies_above_its_peers_which_are_thin_where_they_are_many(
    n_peers, thin
):
    peers = ["torch", "torch.compile", "tutorial", "liger", "quack"][:n_peers]
    points = pd.DataFrame(1.0, index=[32, 64], columns=["fastest", *peers, "copy"])
    (ax,) = plot.lines(points, xlabel="N", ylabel="share").axes
    ours, copy = line(ax, "fastest"), line(ax, "copy")
    others = [each for each in ax.get_lines() if each not in (ours, copy)]
    assert len(others) == n_peers
    for other in others:
        assert other.get_zorder() < ours.get_zorder()
        assert (other.get_linewidth() < ours.get_linewidth()) == thin
    assert [to_hex(each.get_color()) for each in others] == [
        plot.COLOURS[name] for name in peers
    ]


def test_lines_and_their_ceiling():
    series = {"4 warps": {2: 20.0, 1: 10.0}, "8 warps": {1: 5.0}}
    figure = plot.lines(
        series, xlabel="stages", ylabel="GB/s", log_x=False, ceiling=("peak", 50.0)
    )
    (ax,) = figure.axes
    assert line(ax, "4 warps").get_xydata().tolist() == [[1, 10], [2, 20]]
    assert line(ax, "peak").get_ydata().tolist() == [50, 50]
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 50
    assert ax.get_xscale() == "linear"
    with pytest.raises(ValueError, match="series must map"):
        plot.lines({"empty": {}}, xlabel="", ylabel="")


def test_lines_of_a_data_frame():
    index = pd.Index([32, 64, 128], name="n_cols")
    frame = pd.DataFrame({"tiled": [0.5, None, 0.9], "copy": 1.0}, index=index)
    (ax,) = plot.lines(frame, xlabel="N", ylabel="share").axes
    assert line(ax, "tiled").get_xydata().tolist() == [[32, 0.5], [128, 0.9]]
    assert line(ax, "tiled").get_color() == plot.COLOURS["tiled"]
    assert line(ax, "copy").get_linestyle() == "--"


@pytest.mark.parametrize(
    ("lengths", "without"),
    [([33, 63, 129, 257, 1001, 2049, 8191, 12345], {8191}), ([64, 1000, 1024], {1000})],
)
def test_the_last_length_has_its_number(lengths, without):
    points = {"tiled": dict.fromkeys(lengths, 1.0)}
    (ax,) = plot.lines(points, xlabel="N", ylabel="share").axes
    shown = [tick.get_text() for tick in ax.get_xticklabels()]
    assert shown == ["" if n in without else str(n) for n in lengths]


# ---- bars and shades -----------------------------------------------------------------


def test_bars_carry_their_numbers():
    (ax,) = plot.bars({"copy": 4250.2, "torch": 1960.0, "mine": 0.5}, "GB/s").axes
    assert [bar.get_width() for bar in ax.patches] == [4250.2, 1960.0, 0.5]
    assert words(ax) == ["4250 GB/s", "1960 GB/s", "0.500 GB/s"]
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["copy", "torch.softmax", "mine"]
    assert ax.get_xlim()[0] == 0
    with pytest.raises(ValueError, match="values must map"):
        plot.bars({}, "GB/s")


def test_bars_in_groups_say_which_is_which():
    times = {"max": {"predicted": 64.0, "measured": 66.5}, "exp": {"measured": 139}}
    (ax,) = plot.bars(times, "µs").axes
    assert words(ax) == ["64.0 µs predicted", "66.5 µs measured", "139 µs measured"]
    predicted, measured, again = (to_hex(bar.get_facecolor()) for bar in ax.patches)
    assert measured == again != predicted


def test_bars_of_a_data_frame_have_a_group_per_row():
    shares = {"float32": [0.9, 0.8], "bfloat16": [0.7, None]}
    (ax,) = plot.bars(pd.DataFrame(shares, index=[1000, 1001]), "").axes
    assert words(ax) == ["0.900 float32", "0.700 bfloat16", "0.800 float32"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["1000", "1001"]


def test_a_provider_keeps_its_colour_in_every_group():
    speeds = {"N = 8": {"strided": 1.0, "torch": 2.0}, "N = 9": {"strided": 3.0}}
    (ax,) = plot.bars(speeds, "GB/s").axes
    seen = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert seen == [plot.COLOURS[name] for name in ("strided", "torch", "strided")]


def test_roofline_bends_where_arithmetic_takes_over():
    h200 = gpu.named("H200")
    points = {"persistent": (0.6, 2.5), "matmul": (300.0, 40.0)}
    (ax,) = plot.roofline(h200, points, peak_tflops=67.0, copy_gbps=4250.0).axes
    roof, softmax, matmul, copy = ax.get_lines()
    ridge = roof.get_xdata()[1]
    assert ridge == pytest.approx(67e3 / h200.peak_bandwidth_gbps)
    for intensity, rate in roof.get_xydata():
        memory = intensity * h200.peak_bandwidth_gbps / 1000
        assert rate == pytest.approx(min(67.0, memory))
    assert copy.get_ydata()[-1] == 67.0
    assert softmax.get_xydata().tolist() == [[0.6, 2.5]]
    assert softmax.get_color() == plot.COLOURS["persistent"]
    assert matmul.get_xydata().tolist() == [[300.0, 40.0]]
    assert {"persistent", "matmul", "67 TFLOP/s", "copy: 4250 GB/s"} < set(words(ax))
    counted = {"unit": "10¹²/s", "xlabel": "instructions per byte moved"}
    (ax,) = plot.roofline(h200, points, peak_tflops=30.0, **counted).axes
    assert "30 10¹²/s" in words(ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == (counted["xlabel"], "10¹²/s")
    with pytest.raises(ValueError, match=r"points\['idle'\] must be positive"):
        plot.roofline(h200, {"idle": (1.0, 0.0)}, peak_tflops=67.0)


def test_heatmap_shades_its_values_and_frames_each_columns_best():
    values = [[0.5, 1.0, None], [1.0, 0.25, None]]
    how = {"row_label": "warps", "column_label": "N"}
    (ax,) = plot.heatmap(values, [4, 8], [32, 64, 128], **how).axes
    assert sorted(words(ax)) == ["0.25", "0.50", "1.00", "1.00", "–", "–"]
    framed = [
        (round(patch.get_x() + 0.46), round(patch.get_y() + 0.44))
        for patch in ax.patches
        if not patch.get_fill()
    ]
    assert sorted(framed) == [(0, 1), (1, 0)]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["4", "8"]
    shades = {(p.get_x(), p.get_y()): p for p in ax.patches if p.get_fill()}
    for text in ax.texts:
        x, y = text.get_position()
        if (patch := shades.get((x - 0.5, y - 0.5))) is not None:
            shade = to_hex(patch.get_facecolor())
            assert plot.contrast(to_hex(text.get_color()), shade) >= 4
    assert ax.get_xlabel() == "N · framed: the largest of a column"
    frame = pd.DataFrame(values, [4, 8], [32, 64, 128])
    (same,) = plot.heatmap(frame, **how).axes
    assert words(same) == words(ax)
    assert [tick.get_text() for tick in same.get_xticklabels()] == ["32", "64", "128"]
    with pytest.raises(ValueError, match="2 rows of 3 values"):
        plot.heatmap([[1.0]], [4, 8], [32, 64, 128], **how)


def test_numbers_keep_three_digits_or_their_integer_part():
    numbers = {4250.2: "4250", 66.04: "66.0", 0.5: "0.500", 0.0: "0", 12: "12.0"}
    for number, text in numbers.items():
        assert plot._number(number) == text
    assert plot._number(math.inf) == "inf"
