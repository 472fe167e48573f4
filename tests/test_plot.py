"""Figures hold the data they were given, tables and code their text."""

import math
from itertools import pairwise

import pytest
import triton
import triton.language as tl
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.colors import to_hex
from matplotlib.text import Text

from kernels.lab import bench, gpu, plot

SOURCE = "NVIDIA H200 · driver 580 · torch 2.11 · triton 3.6 · recorded 2026-11-21"
PROVENANCE = ("NVIDIA H200", "580", "2.11", "3.6", "2026-11-21", "abc1234")


def measured(provider, n_cols, p50_us, dtype="float32", n_rows=4096):
    times = 0.9 * p50_us, p50_us, 1.25 * p50_us
    return bench.Measurement(provider, dtype, n_rows, n_cols, *times, *PROVENANCE)


@pytest.fixture
def results():
    some = [
        measured(provider, n_cols, slowness * n_cols, dtype)
        for dtype in ("float32", "bfloat16")
        for n_cols in (64, 1024, 1000)
        for provider, slowness in (("copy", 1.0), ("torch", 2.0), ("program", 1.25))
    ]
    return bench.Results(some, SOURCE)


def line(ax, label):
    (found,) = [one for one in ax.get_lines() if one.get_label() == label]
    return found


def words(ax):
    return [text.get_text() for text in ax.texts]


# ---- the style -----------------------------------------------------------------------


def test_every_provider_is_told_apart_by_colour_and_by_marker():
    styles = list(plot.STYLES.values())
    assert len({style.colour for style in styles}) == len(styles)
    assert len({(style.marker, style.label) for style in styles}) == len(styles)
    assert plot.COLOURS["persistent"] == plot.STYLES["persistent"].colour


@pytest.mark.parametrize("style", [*plot.STYLES.values(), *plot.SPARE])
def test_lines_and_their_labels_stand_out_from_the_card(style):
    assert plot.contrast(style.colour, plot.CARD) >= 3
    assert plot.contrast(plot._darker(style.colour), plot.CARD) >= 4.5


def test_contrast_is_that_of_wcag():
    assert plot.contrast("#000000", "#ffffff") == pytest.approx(21)
    assert plot.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_unknown_providers_get_styles_of_their_own_and_keep_them():
    first = plot.styles_of(["copy", "mine", "persistent", "yours"])
    assert len({style.colour for style in first.values()}) == 4
    assert first["mine"].label == "mine"
    assert plot.styles_of(["yours"])["yours"] == first["yours"]
    assert plot.styles_of(["persistent"])["persistent"] == first["persistent"]
    with pytest.raises(ValueError, match="outside STYLES"):
        plot.styles_of(map(str, range(len(plot.SPARE) + 1)))


def test_a_notebook_shows_a_figure_once_and_its_text_depends_on_its_size():
    figure = plot.bars({"copy": 2.0}, "GB/s")
    shell = InteractiveShell.instance()
    data, metadata = shell.display_formatter.format(figure)
    assert set(data) == {"text/plain", "image/png"}
    assert data["text/plain"] == repr(plot.bars({"copy": 3.0}, "GB/s"))
    width = int.from_bytes(data["image/png"][16:20], "big")  # of the PNG's header
    assert metadata["image/png"]["width"] == plot.WIDTH * plot.DPI
    assert width == 4 * plot.WIDTH * plot.DPI // 3  # sharper than it is shown


def test_the_card_has_its_title_at_the_left_and_its_source_at_the_right():
    card = plot.figure(title="A title " * 20, source=SOURCE)
    card.draw_without_rendering()
    title, source = card.texts
    assert "\n" in title.get_text()
    for text in (title, source):
        box = text.get_window_extent()
        assert box.x0 > 0
        assert box.x1 < card.bbox.x1
        assert text.get_fontsize() >= 9
    assert source.get_text() == SOURCE


# ---- figures -------------------------------------------------------------------------


def test_bandwidth_has_a_panel_per_dtype_and_a_line_per_provider(results):
    figure = plot.bandwidth(results, title="Softmax")
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


def test_bandwidth_draws_the_percentiles_as_a_band(results):
    some = results.select(dtype="float32")
    for measure, low, high in (("effective_gbps", 0.8, 1 / 0.9), ("p50_us", 0.9, 1.25)):
        (ax,) = plot.bandwidth(some, measure=measure).axes
        median = line(ax, "program").get_ydata()[0]
        (band,) = (
            area.get_paths()[0].vertices
            for area in ax.collections
            if to_hex(area.get_facecolor()[0]) == plot.COLOURS["program"]
        )
        shares = [y / median for x, y in band if x == 64]
        assert min(shares) == pytest.approx(low)
        assert max(shares) == pytest.approx(high)


def test_bandwidth_as_a_share_of_the_copy(results):
    (ax,) = plot.bandwidth(
        results.select(dtype="float32"), measure="share_of_copy"
    ).axes
    assert line(ax, "program").get_ydata() == pytest.approx([0.8] * 3)
    assert line(ax, "copy").get_ydata() == pytest.approx([1.0] * 3)


def test_bandwidth_over_rows_at_a_constant_size():
    some = [
        measured("copy", 2**20 // n_rows, 5.0, n_rows=n_rows) for n_rows in (64, 256)
    ]
    (ax,) = plot.bandwidth(bench.Results(some, SOURCE), x="n_rows").axes
    assert ax.get_title(loc="left") == "float32 · M × N = 1048576"
    assert list(line(ax, "copy").get_xdata()) == [64, 256]


def test_bandwidth_refuses_what_it_cannot_draw(results):
    twice = bench.Results([*results, measured("copy", 64, 1.0, n_rows=1)], SOURCE)
    with pytest.raises(ValueError, match="several measurements of 'copy'"):
        plot.bandwidth(twice)
    with pytest.raises(ValueError, match="x must be 'n_cols'"):
        plot.bandwidth(results, x="dtype")
    with pytest.raises(ValueError, match="measure must be"):
        plot.bandwidth(results, measure="speed")
    with pytest.raises(ValueError, match="got none"):
        plot.bandwidth(results.select(n_cols=7))


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
        ([5, 5.2, 6.1], [4.4333, 5.4333, 6.4333]),
        ([0, 0, 10], [0, 1, 10]),
        ([9.9, 10], [9, 10]),
    ],
)
def test_places_a_gap_apart_within_bounds(wanted, places):
    assert plot._apart(wanted, 1, 0, 10) == pytest.approx(places, abs=1e-4)


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


def test_points_stay_apart_and_keep_what_shares_an_x():
    pairs = {"float32": [(3, 0.2), (64, 0.9), (64, 1.0)], "bfloat16": [(0.5, 0.1)]}
    card = plot.points(pairs, xlabel="KiB", ylabel="share", ceiling=("copy", 1.1))
    (ax,) = card.axes
    *clouds, ceiling = ax.get_lines()
    assert [cloud.get_xydata().tolist() for cloud in clouds] == [
        [list(map(float, pair)) for pair in some] for some in pairs.values()
    ]
    assert {cloud.get_linestyle() for cloud in clouds} == {"None"}
    assert len({cloud.get_marker() for cloud in clouds}) == 2
    assert list(ax.get_xticks()) == [2.0**power for power in range(-1, 7)]
    assert list(ceiling.get_ydata()) == [1.1, 1.1] and ax.get_ylim()[1] > 1.1
    names = [text.get_text() for text in card.legends[0].get_texts()]
    assert names == ["float32", "bfloat16", "copy"]
    for wrong in ({}, {"float32": []}):
        with pytest.raises(ValueError, match="points"):
            plot.points(wrong, xlabel="KiB", ylabel="share")


def test_a_plane_shows_who_is_where_on_equal_axes():
    panels = {
        "float32": {"tiled": [(32, 2**20), (2048, 64)], "quack": [(2**22, 1)]},
        "bfloat16": {"quack": [(1000, 3)], "torch": []},
    }
    card = plot.plane(panels, xlabel="N", ylabel="M", title="Who", source="here")
    left, right = card.axes
    assert [ax.get_title("left") for ax in card.axes] == [*panels]
    tiled, quack = left.get_lines()
    assert tiled.get_xydata().tolist() == [[32, 2**20], [2048, 64]]
    assert quack.get_color() == right.get_lines()[0].get_color()
    assert quack.get_color() == plot.COLOURS["quack"]
    assert left.get_xlim() == right.get_xlim() and left.get_ylim() == right.get_ylim()
    ticks = [tick.get_text() for tick in left.get_xticklabels()]
    assert ticks == ["32", "512", "8k", "128k", "2M"]
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert names == ["tiled", "QuACK"]  # and not who is nowhere
    for empty in ({}, {"float32": {"tiled": []}}):
        with pytest.raises(ValueError, match="panels must map titles to points"):
            plot.plane(empty, xlabel="N", ylabel="M")


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


def test_a_provider_keeps_its_colour_in_every_group():
    speeds = {"N = 8": {"strided": 1.0, "torch": 2.0}, "N = 9": {"strided": 3.0}}
    (ax,) = plot.bars(speeds, "GB/s").axes
    seen = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    assert seen == [plot.COLOURS[name] for name in ("strided", "torch", "strided")]


def test_roofline_bends_where_arithmetic_takes_over():
    h200 = gpu.named("H200")
    points = {"persistent": (0.6, 2.5), "matmul": (300.0, 40.0)}
    (ax,) = plot.roofline(h200, points, peak_tflops=67.0, copy_gbps=4250.0).axes
    roof, copy, softmax, matmul = ax.get_lines()
    ridge = roof.get_xdata()[1]
    assert ridge == pytest.approx(67e3 / h200.peak_bandwidth_gbps)
    for intensity, rate in roof.get_xydata():
        memory = intensity * h200.peak_bandwidth_gbps / 1000
        assert rate == pytest.approx(min(67.0, memory))
    assert copy.get_ydata()[-1] == 67.0
    assert softmax.get_xydata().tolist() == [[0.6, 2.5]]
    assert softmax.get_color() == plot.COLOURS["persistent"]
    assert matmul.get_xydata().tolist() == [[300.0, 40.0]]
    assert {"persistent", "matmul", "67 TFLOP/s"} < set(words(ax))
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
    assert framed == [(0, 1), (1, 0)]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["4", "8"]
    shades = {(p.get_x(), p.get_y()): p for p in ax.patches if p.get_fill()}
    for text in ax.texts:
        x, y = text.get_position()
        if (patch := shades.get((x - 0.5, y - 0.5))) is not None:
            shade = to_hex(patch.get_facecolor())
            assert plot.contrast(to_hex(text.get_color()), shade) >= 4
    with pytest.raises(ValueError, match="2 rows of 3 values"):
        plot.heatmap([[1.0]], [4, 8], [32, 64, 128], **how)


# ---- tables and code -----------------------------------------------------------------


def test_a_table_is_aligned_text_and_plain_html():
    rows = [["copy", 32, 4250.4], ["a<b", 1024, 7.25], ["none", 1, None]]
    table = plot.table(rows, ["provider", "N", "GB/s"])
    assert repr(table).splitlines() == [
        "provider     N    GB/s",
        "────────  ────  ──────",
        "copy        32  4250.4",
        "a<b       1024     7.2",
        "none         1       –",
    ]
    page = table._repr_html_()
    assert '<td style="text-align: left">a&lt;b</td>' in page
    assert '<th style="text-align: right">GB/s</th>' in page
    assert "color" not in page
    assert repr(plot.table(rows, "abc", digits=0)).endswith("–")
    assert repr(plot.table([], ["N"])) == "N\n─"
    with pytest.raises(ValueError, match="2 cells"):
        plot.table([[1]], ["a", "b"])


def test_numbers_keep_three_digits_or_their_integer_part():
    numbers = [4250.2, 66.04, 0.5, 0.0, 12, math.inf]
    assert [plot._number(n) for n in numbers] == [
        "4250",
        "66.0",
        "0.500",
        "0",
        "12.0",
        "inf",
    ]


@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    """Doubles a block."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 2 * x)


@triton.jit
def triple(x_ptr, BLOCK: tl.constexpr):
    """Triples it."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 3 * x)


def test_source_shows_a_kernel_as_its_module_has_it():
    shown = plot.source(double)
    text = repr(shown)
    assert text.startswith("@triton.jit\ndef double(x_ptr, BLOCK: tl.constexpr):")
    assert '"""Doubles a block."""' in text
    assert text.endswith("2 * x)")
    assert shown._repr_markdown_() == f"```python\n{text}\n```"
    tuned = triton.heuristics({"BLOCK": lambda args: 8})(double)
    assert repr(plot.source(tuned)) == text


def test_source_refuses_what_has_none():
    with pytest.raises(TypeError, match="source can be read"):
        plot.source(len)
    with pytest.raises(TypeError, match="source can be read"):
        plot.source(3)


def test_a_fence_is_longer_than_those_inside():
    assert plot.Code("```", "python")._repr_markdown_().startswith("````python\n```\n")


def test_diff_shows_what_changes_and_no_docstrings():
    shown = plot.diff(double, triple)
    assert repr(shown).splitlines() == [
        f"--- {__name__}.double",
        f"+++ {__name__}.triple",
        " @triton.jit",
        "-def double(x_ptr, BLOCK: tl.constexpr):",
        "+def triple(x_ptr, BLOCK: tl.constexpr):",
        "     offsets = tl.arange(0, BLOCK)",
        "     x = tl.load(x_ptr + offsets)",
        "-    tl.store(x_ptr + offsets, 2 * x)",
        "+    tl.store(x_ptr + offsets, 3 * x)",
    ]
    assert shown._repr_markdown_().startswith("```diff\n---")
    assert repr(plot.diff(double, double)) == ""
