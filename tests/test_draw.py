"""The pictures draw what the parameters say, and can be read.

What a picture says is read back from its artists: a box carries in its `gid` what it
stands for, and stands where, and is as large as, its value says.
"""

import math
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from kernels.lab import compile, draw, gpu, meter, occupancy, plot

M, N = 1823, 781
EAGER = [
    ("max", M * N, M),
    ("sub", M * N + M, M * N),
    ("exp", M * N, M * N),
    ("sum", M * N, M),
    ("div", M * N + M, M * N),
]
FUSED = [("softmax_kernel", M * N, M * N)]
X = torch.arange(24.0).reshape(4, 6)
ROW = [-3.0, -1.5, -2.25, -4.0, -2.0]
H200 = gpu.named("H200")

PICTURES = {
    "fusion": lambda: draw.fusion(EAGER, FUSED),
    "fusion of two": lambda: draw.fusion([("exp", 8, 8), ("add", 16, 8)], EAGER[:1]),
    "memory H200": lambda: draw.memory_hierarchy(H200),
    "memory RTX 4090": lambda: draw.memory_hierarchy(gpu.named("RTX 4090")),
    "memory T4": lambda: draw.memory_hierarchy(gpu.named("T4")),
    "launch": lambda: draw.launch("softmax_kernel", 20),
    "launch of few": lambda: draw.launch("add", 2, sms=1, per_sm=1),
    "launch of many": lambda: draw.launch("add", 48, sms=8, per_sm=6),
    "coverage": lambda: draw.coverage(14, 4),
    "coverage by one": lambda: draw.coverage(20, 1),
    "coverage, long": lambda: draw.coverage(60, 16),
    "coverage of rows": lambda: draw.coverage((24, 13), 16),
    "coverage, persistent": lambda: draw.coverage((10, 13), (2, 16), programs=3),
    "coverage by tiles": lambda: draw.coverage((7, 13), (4, 8)),
    "threads": lambda: draw.thread_and_program(14, 4),
    "threads, many": lambda: draw.thread_and_program(23, 8),
    "threads, ones": lambda: draw.thread_and_program(24, 1),
    "mask": lambda: draw.mask(ROW, 8),
    "mask of nothing": lambda: draw.mask([0.5] * 8, 8, others=[0.0, 1.5, -1e4]),
    "contiguous": lambda: draw.strides(X, "Contiguous"),
    "transposed": lambda: draw.strides(X.t(), "Transposed"),
    "offset": lambda: draw.strides(torch.arange(96).as_strided((8, 10), (10, 1), 16)),
    "broadcast": lambda: draw.strides(torch.arange(6.0).expand(4, 6), "Broadcast"),
    "aligned or not": lambda: draw.coalescing(0, 781 * 4),
    "vectors": lambda: draw.coalescing(0, 16, vector=4),
    "strided": lambda: draw.coalescing(128 * 999, itemsize=2, stride=16),
    "layout": lambda: draw.block_layout(1024),
    "layout, long": lambda: draw.block_layout(
        2**16, warps_per_cta=32, warp=31, lane=31
    ),
    "layout, copies": lambda: draw.block_layout(64, warps_per_cta=8, lane=20),
    "layout, one": lambda: draw.block_layout(1, threads_per_warp=1, lane=0),
    "reduction": lambda: draw.reduction(range(-8, 8), warp_size=4),
    "reduction in one": lambda: draw.reduction([3, -1.5, 4, 1], warp_size=4),
    "reduction by one": lambda: draw.reduction([2, 1], warp_size=1),
    "occupancy": lambda: draw.occupancy(H200, num_warps=4, registers=48, shared=2048),
    "occupancy, small": lambda: draw.occupancy(
        H200, num_warps=1, registers=0, shared=0
    ),
    "occupancy, none": lambda: draw.occupancy(
        H200, num_warps=32, registers=255, shared=2048
    ),
    "schedule": lambda: draw.schedule(21, 8),
    "schedule, uneven": lambda: draw.schedule(30, 6, speeds=[1, 1, 0.75, 1, 1, 1]),
    "schedule, long": lambda: draw.schedule(120, 16, duration=[1, 2] * 60, start=0),
    "pipeline": lambda: draw.pipeline(),
    "pipeline, deep": lambda: draw.pipeline((1, 4, 8), iterations=8, load=9),
    "rereading": lambda: draw.rereading(8, 5),
    "rereading, long": lambda: draw.rereading(16, 32),
    "rereading, one": lambda: draw.rereading(1, 1),
    "sharing": lambda: draw.sharing(5, 3, 5),
    "sharing, all fit": lambda: draw.sharing(6, 8, 8, patience=3),
    "ladder": lambda: draw.ladder([("eager", 700), ("program", 4300)], 4200),
    "ladder, sourced": lambda: draw.ladder([("mine", 9.0)], 10, source="here · today"),
}


def boxes(figure: plot.Figure, gid: str = "") -> list[Rectangle]:
    """The boxes whose gid starts so, in the order in which they were drawn."""
    patches = figure.axes[0].patches
    return [one for one in patches if (one.get_gid() or "").startswith(gid or " ")]


def gids(figure: plot.Figure) -> Counter:
    return Counter(one.get_gid() for one in figure.axes[0].patches if one.get_gid())


def texts(figure: plot.Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def read(figure: plot.Figure, start: str) -> str:
    """The one text that starts so."""
    (found,) = [text for text in texts(figure) if text.startswith(start)]
    return found


# ---- every picture -------------------------------------------------------------------


def faults(figure: plot.Figure) -> list[str]:
    """Texts that are too small, leave the card or their box, or cover each other."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    card, found, seen = figure.bbox.padded(-6), [], []
    patches = [one for one in figure.axes[0].patches if isinstance(one, Rectangle)]
    extents = [(one, one.get_window_extent()) for one in patches]
    for text in figure.axes[0].texts:
        name, extent = text.get_text(), text.get_window_extent()
        if not name:
            continue
        if text.get_size() < 9:
            found.append(f"{name!r} is of {text.get_size()} points")
        if extent.x0 < card.x0 or extent.x1 > card.x1:
            found.append(f"{name!r} leaves the card")
        if extent.y0 < card.y0 or extent.y1 > card.y1:
            found.append(f"{name!r} leaves the card")
        x, y = text.get_transform().transform(text.get_position())
        for box, around in extents:
            centre = (around.x0 + around.x1) / 2, (around.y0 + around.y1) / 2
            inside = math.dist(centre, (x, y)) < 0.1
            if inside and extent.width > around.width + 0.5:
                found.append(f"{name!r} is wider than its box {box.get_gid()!r}")
        for other, there in seen:
            apart_x = min(extent.x1, there.x1) - max(extent.x0, there.x0) < 0.5
            apart_y = min(extent.y1, there.y1) - max(extent.y0, there.y0) < 0.5
            if not (apart_x or apart_y):
                found.append(f"{name!r} covers {other!r}")
        seen.append((name, extent))
    return found


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_read(name):
    assert faults(PICTURES[name]()) == []


def test_faults_are_found():
    picture = draw._Picture("A title", 40)
    assert faults(picture.figure) == []
    picture.text(50, 20, "one text")
    picture.text(55, 20, "another")
    picture.text(95, 30, "too far to the right")
    picture.text(10, 30, "small", size=8)
    picture.box((10, 35, 4, 4), "wide for this", gid="box")
    assert faults(picture.figure) == [
        "'another' covers 'one text'",
        "'too far to the right' leaves the card",
        "'small' is of 8.0 points",
        "'wide for this' is wider than its box 'box'",
    ]


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_sees_the_same_each_time(name):
    figure, again = PICTURES[name](), PICTURES[name]()
    assert isinstance(figure, plot.Figure)
    assert repr(figure) == repr(again)
    assert "726x" in repr(figure) and "." not in repr(figure)
    assert texts(figure) == texts(again)


def test_the_image_is_the_same_each_time():
    figure, again = draw.coverage(14, 4), draw.coverage(14, 4)
    assert figure._repr_png_() == again._repr_png_()


# ---- where the values go -------------------------------------------------------------


def test_fusion_arrows_are_as_wide_as_values_are_many():
    figure = draw.fusion(EAGER, FUSED)
    (one,) = boxes(figure, "eager sub read")
    for chain, operations in (("eager", EAGER), ("fused", FUSED)):
        for name, *values in operations:
            for kind, count in zip(("read", "written"), values, strict=True):
                (arrow,) = boxes(figure, f"{chain} {name} {kind}")
                share = arrow.get_width() / one.get_width()
                assert share == pytest.approx(count / (M * N + M))
    assert read(figure, "eager: ") == (
        "eager: 5 kernels move 11.4 M values; fused: 1 kernel moves 2.85 M, "
        "4.0 times fewer"
    )


def test_fusion_takes_what_the_meter_counts():
    ops = [meter.Op(name, None, read, written) for name, read, written in EAGER]
    counted = meter.Traffic(tuple(ops))
    figure = draw.fusion(counted, FUSED)
    assert texts(figure) == texts(draw.fusion(EAGER, FUSED))


@pytest.mark.parametrize(
    ("eager", "error", "message"),
    [
        ("max", TypeError, "eager must be a meter.Traffic or a list.*got str"),
        (3, TypeError, "eager must be a meter.Traffic or a list.*got int"),
        ([], ValueError, "eager must be .* got \\[\\]"),
        ([("max", 1)], ValueError, r"\('max', 1\)"),
        ([("max", 0, 0)], ValueError, "values that a chain moves.*at least 1.*got 0"),
        (EAGER * 2, ValueError, "number of kernels must be from 1 to 8.*got 11"),
    ],
)
def test_fusion_of_something_else(eager, error, message):
    with pytest.raises(error, match=message):
        draw.fusion(eager, FUSED)


def test_memory_states_the_facts_of_the_gpu():
    figure = draw.memory_hierarchy(H200)
    assert "Memory of the NVIDIA H200" in texts(figure)
    assert {"SM 0", f"SM {H200.sms - 1}", "256 KiB per SM"} <= set(texts(figure))
    assert f"{H200.shared_per_sm // 1024} KiB per SM" in texts(figure)
    assert f"{H200.l2_bytes // 2**20} MiB, on the chip" in texts(figure)
    assert f"{H200.peak_bandwidth_gbps:,.0f} GB/s peak" in texts(figure)


# ---- programs ------------------------------------------------------------------------


def test_launch_places_what_fits_and_lets_the_rest_wait():
    figure = draw.launch("add", 20, sms=4, per_sm=3)
    held = Counter(gid for gid in gids(figure) if " holds " in gid)
    assert held == Counter(f"SM {p % 4} holds {p}" for p in range(12))
    white = [box for box in boxes(figure, "program") if box.get_fc() == (1, 1, 1, 1)]
    assert [box.get_gid() for box in white] == [f"program {p}" for p in range(12, 20)]
    assert "8 (white) wait for one to end" in read(figure, "20 programs")
    assert gids(draw.launch("add", 5, sms=4, per_sm=3))["SM 1 free"] == 2


@pytest.mark.parametrize(
    ("shape", "block", "rows", "cols"),
    [(14, 4, 1, 4), (16, 4, 1, 4), ((6, 13), 16, 1, 16), ((7, 13), (4, 8), 4, 8)],
)
def test_coverage_gives_each_program_its_lanes(shape, block, rows, cols):
    n_rows, n_cols = (1, shape) if isinstance(shape, int) else shape
    wanted = Counter()
    grid = math.ceil(n_rows / rows), math.ceil(n_cols / cols)
    for row in range(grid[0] * rows):
        for col in range(grid[1] * cols):
            masked = row >= n_rows or col >= n_cols
            program = row // rows * grid[1] + col // cols
            wanted[f"program {program}{' masked' if masked else ''}"] += 1
    figure = draw.coverage(shape, block)
    assert gids(figure) == wanted
    for box in boxes(figure, "program"):
        assert bool(box.get_hatch()) == box.get_gid().endswith("masked")


def test_coverage_by_programs_that_loop():
    figure = draw.coverage((5, 3), (1, 4), programs=2)
    assert gids(figure) == {
        "program 0": 9,
        "program 0 masked": 3,
        "program 1": 6,
        "program 1 masked": 2,
    }
    ys = {box.get_y() for box in boxes(figure, "program 0")}
    first = min(ys)
    assert sorted(round((y - first) / 3) for y in ys) == [0, 2, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 4), ValueError, "shape's columns must be at least 1.*got 0"),
        ((14.0, 4), TypeError, "shape's columns must be a whole number, got float"),
        (((1, 2, 3), 4), ValueError, r"shape must be a length or .*got \(1, 2, 3\)"),
        ((781, 1024), ValueError, "padded columns must be from 1 to 64.*got 1024"),
        (((100, 4), 4), ValueError, "padded rows must be from 1 to 24.*got 100"),
    ],
)
def test_coverage_of_something_else(arguments, error, message):
    with pytest.raises(error, match=message):
        draw.coverage(*arguments)


def test_no_more_programs_than_blocks():
    with pytest.raises(ValueError, match=r"programs must be from 1 to 4.*got 5"):
        draw.coverage(16, 4, programs=5)


def test_a_thread_takes_one_element_and_a_program_a_block():
    assert gids(draw.thread_and_program(14, 4)) == {
        "thread": 14,
        "thread masked": 2,
        "element": 14,
        "program": 4,
        "lane": 14,
        "lane masked": 2,
    }
    with pytest.raises(ValueError, match="block must be a power of two, got 3"):
        draw.thread_and_program(14, 3)
    with pytest.raises(ValueError, match="padded length must be from 1 to 24"):
        draw.thread_and_program(25, 8)


# ---- one row -------------------------------------------------------------------------


def test_mask_computes_what_the_padding_does():
    figure = draw.mask(ROW, 8)
    assert gids(figure)["−∞ loaded"] == 5
    assert gids(figure)["0 loaded masked"] == 3
    assert [text for text in texts(figure) if "in all" in text] == [
        "1.00 in all: right",
        f"{sum(math.exp(x) for x in ROW) / (3 + sum(map(math.exp, ROW))):.2f} "
        "in all: wrong",
    ]
    assert [text for text in texts(figure) if "max =" in text] == [
        "max = −1.50",
        "max = 0",
    ]


def test_no_padding_cannot_be_wrong():
    figure = draw.mask([1.0, 2.0], 2, others=[0.0])
    assert "1.00 in all: right" in texts(figure) and "masked" not in texts(figure)


@pytest.mark.parametrize(
    ("row", "block", "message"),
    [
        ([1.0, math.inf], 8, "row must be one row of finite numbers"),
        ([[1.0]], 8, "row must be one row of finite numbers"),
        ([], 8, "row's length must be from 1 to 8.*got 0"),
        ([1.0] * 5, 4, "row's length must be from 1 to 4.*got 5"),
        ([1.0], 6, "block_cols must be a power of two, got 6"),
        ([1.0], 16, "block_cols must be from 1 to 8.*got 16"),
    ],
)
def test_mask_of_something_else(row, block, message):
    with pytest.raises(ValueError, match=message):
        draw.mask(row, block)


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.t(),
        X[:, 1:5],
        X[1:, ::2],
        X[2:],
        torch.arange(6.0).expand(4, 6),
        torch.arange(6.0)[:, None].expand(6, 3),
        torch.arange(8).as_strided((3, 4), (2, 1)),
    ],
    ids=[
        "contiguous",
        "transposed",
        "sliced",
        "step",
        "offset",
        "rows",
        "columns",
        "overlap",
    ],
)
def test_strides_put_each_element_where_torch_has_it(tensor):
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    memory.copy_(torch.arange(len(memory)))  # so that an element's value is its cell
    figure = draw.strides(tensor)
    cells = {}
    for box in boxes(figure, "cell"):
        cell, places = box.get_gid().removeprefix("cell ").split(":")
        cells |= dict.fromkeys(places.split(), int(cell))
    n_rows, n_cols = tensor.shape
    wanted = {
        f"{row},{col}": int(tensor[row, col])
        for row in range(n_rows)
        for col in range(n_cols)
    }
    assert cells == wanted
    assert len(boxes(figure, "cell")) == len(memory)
    assert f"strides ({tensor.stride(0)}, {tensor.stride(1)})" in texts(figure)


def test_cells_with_several_elements_are_named():
    figure = draw.strides(torch.arange(6.0).expand(4, 6))
    assert {"∗,0", "∗,5"} <= set(texts(figure))
    assert "2,∗" in texts(draw.strides(torch.arange(6.0)[:, None].expand(6, 3)))
    assert "2×" in texts(draw.strides(torch.arange(8).as_strided((3, 4), (2, 1))))


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        ([[1.0]], TypeError, "tensor must be a torch.Tensor, got list"),
        (torch.ones(3), ValueError, r"tensor must be 2-D, got shape \(3,\)"),
        (torch.ones(9, 2), ValueError, "tensor's rows must be from 1 to 8.*got 9"),
        (torch.ones(2, 0), ValueError, "tensor's columns must be from 1 to 10.*got 0"),
        (torch.ones(97)[:4].view(2, 2), ValueError, "storage's elements.*got 97"),
    ],
)
def test_strides_of_something_else(tensor, error, message):
    with pytest.raises(error, match=message):
        draw.strides(tensor)


# ---- inside a program ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "options", "sectors"),
    [
        (0, {}, 4),
        (4, {}, 5),
        (32, {}, 4),
        (781 * 4, {}, 5),
        (0, {"vector": 4}, 16),
        (16, {"vector": 4}, 17),
        (0, {"itemsize": 2}, 2),
        (0, {"stride": 8}, 32),
        (0, {"stride": 2}, 8),
    ],
)
def test_coalescing_counts_the_sectors(start, options, sectors):
    figure = draw.coalescing(start, **options)
    assert gids(figure)["sector touched"] == sectors
    each = options.get("itemsize", 4) * options.get("vector", 1)
    used = f"{100 * 32 * each / (32 * sectors):.3g}% of it used"
    assert f"{sectors} sectors of 32 bytes fetched, {used}" in texts(figure)
    first = boxes(figure, "used")[0].get_x() - boxes(figure, "sector")[0].get_x()
    sector = boxes(figure, "sector")[0].get_width()
    assert first / sector * 32 == pytest.approx(start % 128)


def test_coalescing_refuses_what_the_hardware_refuses():
    with pytest.raises(ValueError, match=r"multiple of the 16 bytes.*misaligned"):
        draw.coalescing(781 * 4, vector=4)
    with pytest.raises(ValueError, match=r"vector must be from 1 to 4.*got 8"):
        draw.coalescing(0, vector=8)
    with pytest.raises(ValueError, match=r"first lane to the last.*got 1244"):
        draw.coalescing(0, stride=10)
    with pytest.raises(
        ValueError, match=r"number of starts must be from 1 to 4.*got 0"
    ):
        draw.coalescing()


@pytest.mark.parametrize("block", [128, 512, 1024, 4096])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_a_block_layout_holds_every_element_equally_often(block, warps):
    held = Counter()
    for warp in range(warps):
        for lane in range(32):
            held.update(draw.elements_of(block, warp, lane, warps_per_cta=warps))
    assert sorted(held) == list(range(block))
    assert set(held.values()) == {max(128 * warps // block, 1)}


def test_block_layout_shows_one_lane():
    assert draw.elements_of(1024, 1, 2) == [136, 137, 138, 139, 648, 649, 650, 651]
    figure = draw.block_layout(1024, warp=1, lane=2)
    shown = [box.get_gid() for box in boxes(figure, "element")]
    assert shown == [f"element {e}" for e in draw.elements_of(1024, 1, 2)]
    assert gids(figure)["warp 3"] == 2
    with pytest.raises(ValueError, match=r"lane must be from 0 to 31.*got 32"):
        draw.block_layout(1024, lane=32)
    with pytest.raises(ValueError, match="block_cols must be a power of two, got 781"):
        draw.block_layout(781)


@triton.jit
def owners(output_ptr, BLOCK: tl.constexpr):
    """Writes, for each element of a block, the number of a thread that holds it."""
    offsets = tl.arange(0, BLOCK)
    assembly: tl.constexpr = "{ mov.u32 $0, %tid.x; add.u32 $0, $0, $1; }"
    thread = tl.inline_asm_elementwise(
        assembly, "=r,r", [offsets * 0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(output_ptr + offsets, thread)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "warps"), [(1024, 4), (512, 1), (4096, 8)])
def test_the_block_layout_is_the_compilers(block, warps):
    output = torch.empty(block, dtype=torch.int32, device="cuda")
    owners[(1,)](output, BLOCK=block, num_warps=warps)
    for warp in range(warps):
        for lane in range(32):
            mine = draw.elements_of(block, warp, lane, warps_per_cta=warps)
            assert set(output[mine].tolist()) == {32 * warp + lane}


@pytest.mark.parametrize("warp_size", [1, 2, 4, 8, 16])
def test_reduction_ends_with_the_maximum(warp_size):
    values = [3, -1, 4, 1, -5, 9, 2, 6, 5, 3, -5, 8, 9, 7, 11, 3]
    figure = draw.reduction(values, warp_size=warp_size)
    assert "11" in texts(figure)[-1]
    assert gids(figure)["result"] == 1
    steps = {gid.split(":")[0] for gid in gids(figure)}
    shuffles = [name for name in steps if name.startswith("shuffle")]
    assert len(shuffles) == math.log2(warp_size)
    shared = boxes(figure, "shared memory")
    assert len(shared) == (16 // warp_size if warp_size < 16 else 0)


def test_reduction_of_something_else():
    with pytest.raises(ValueError, match="number of values must be a power of two"):
        draw.reduction([1, 2, 3])
    with pytest.raises(ValueError, match=r"warp_size must be from 1 to 4.*got 8"):
        draw.reduction([1, 2, 3, 4])


# ---- residency and time --------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        {"num_warps": 4, "registers": 48, "shared": 2048},
        {"num_warps": 1, "registers": 20, "shared": 0},
        {"num_warps": 8, "registers": 32, "shared": 60000},
        {"num_warps": 16, "registers": 40, "shared": 0},
        {"num_warps": 32, "registers": 255, "shared": 0},
    ],
)
def test_occupancy_fills_the_budgets_and_none_overflows(use):
    result = occupancy.resident(H200, **use)
    figure = draw.occupancy(H200, **use)
    for name, limit in result.limits.items():
        used = boxes(figure, f"used: {name}")
        assert len(used) == result.blocks_per_sm
        (budget,) = boxes(figure, f"budget: {name}")
        assert sum(box.get_width() for box in used) <= budget.get_width() + 1e-9
        assert f"room for {limit}" in texts(figure)
    assert read(figure, "NVIDIA H200").endswith(f"what binds: {result.limit}")
    bold = [t.get_text() for t in figure.axes[0].texts if t.get_weight() == "bold"]
    assert bold[1:] == [result.limit, f"room for {result.limits[result.limit]}"]


def test_pictures_of_a_gpu_need_one():
    with pytest.raises(TypeError, match=r"gpu must be a Gpu, .* got str"):
        draw.memory_hierarchy("H200")
    with pytest.raises(TypeError, match=r"gpu must be a Gpu, .* got str"):
        draw.occupancy("H200", num_warps=4, registers=32, shared=0)
    with pytest.raises(ValueError, match="num_warps must be at least 1, got 0"):
        draw.occupancy(H200, num_warps=0, registers=32, shared=0)


def test_a_list_schedule_keeps_every_slot_busy():
    durations = [1 + (7 * i % 5) / 4 for i in range(40)]
    plan = draw.list_schedule(durations, 6)
    assert [end - start for _, start, end in plan] == pytest.approx(durations)
    ends = [0.0] * 6
    for slot, start, end in plan:
        assert start == ends[slot] == min(ends)
        ends[slot] = end
    assert max(end for *_, end in draw.list_schedule([1.0] * 9, 4)) == 3


def test_persistent_programs_take_every_slots_th_row():
    plan = draw.stride_schedule([1.0, 5.0, 1.0, 1.0, 1.0], 2, start=0.5)
    assert [slot for slot, *_ in plan] == [0, 1, 0, 1, 0]
    assert plan[-1] == (0, 2.5, 3.5)
    assert plan[3] == (1, 5.5, 6.5)


def test_schedule_draws_its_plans_to_scale():
    figure = draw.schedule(22, 8, start=0.2)
    for name, starts, end, each in (
        ("one program per row", 22, 3.6, 1.2),
        ("persistent", 8, 3.2, 1.0),
    ):
        rows, idle = boxes(figure, f"{name}: row"), boxes(figure, f"{name}: idle")
        assert len(rows) == 22 and len(idle) == 8
        assert gids(figure)[f"{name}: start"] == starts
        scale = idle[0].get_width() / end
        assert rows[0].get_width() == pytest.approx(scale)
        step = rows[8].get_x() - rows[0].get_x()
        assert step == pytest.approx(scale * each)
        starting = boxes(figure, f"{name}: start")
        used = sum(box.get_width() for box in rows + starting) / scale
        share = f"{1 - used / (8 * end):.0%}"
        assert f"ends at {end:.3g}; {share} idle" in texts(figure)


def test_a_slow_slot_gets_fewer_rows_only_where_rows_are_not_dealt_out_in_advance():
    speeds = [1.0, 0.5, 1.0]
    queue = draw.list_schedule([1.0] * 10, 3, speeds=speeds)
    dealt = draw.stride_schedule([1.0] * 10, 3, speeds=speeds)
    assert [sum(slot == 1 for slot, *_ in plan) for plan in (queue, dealt)] == [2, 3]
    assert [max(end for *_, end in plan) for plan in (queue, dealt)] == [4, 6]
    assert all(end - begin == 2 for slot, begin, end in queue + dealt if slot == 1)
    figure = draw.schedule(10, 3, start=0, speeds=speeds)
    assert "1, at ×0.5" in texts(figure)
    assert f"ends at 6; {1 - (4 + 6 + 3) / 18:.0%} idle" in texts(figure)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"speeds": [1, 1]}, ValueError, "speeds must be 4, one per slot, got 2"),
        ({"speeds": [1, 1, 0, 1]}, ValueError, "speeds must be positive"),
        ({"n_rows": 0}, ValueError, "n_rows must be from 1 to 120.*got 0"),
        ({"slots": 17}, ValueError, "slots must be from 1 to 16.*got 17"),
        ({"duration": [1.0]}, ValueError, "duration must be one time or 9, got 1"),
        ({"duration": 0}, ValueError, "duration or start must be positive"),
        ({"start": -1}, ValueError, "duration or start must be positive.*-1"),
        ({"start": "1"}, TypeError, "duration or start must be a number, got str"),
    ],
)
def test_schedule_of_something_else(arguments, error, message):
    with pytest.raises(error, match=message):
        draw.schedule(**({"n_rows": 9, "slots": 4} | arguments))


@pytest.mark.parametrize(
    ("stages", "ends"), [(1, [4.5, 9, 13.5]), (2, [4.5, 9, 13.5]), (3, [4.5, 6, 9])]
)
def test_pipelined_loops_wait_for_their_loads(stages, ends):
    plan = draw.pipelined(3, stages, 3.0, 1.0, 0.5)
    assert [end for *_, end in plan] == ends
    for issued, begin, _ in plan:
        assert begin >= issued + 3
    for early, (issued, _, _) in zip(plan, plan[max(stages - 1, 1) :], strict=False):
        assert issued == early[2]  # its buffer is free when that iteration has ended


@triton.jit
def rows_kernel(
    output_ptr,
    input_ptr,
    n_rows,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_COLS)
    for row in tl.range(tl.program_id(0), n_rows, 64, num_stages=STAGES):
        places = row * n_cols + cols
        x = tl.load(input_ptr + places, mask=cols < n_cols, other=-float("inf"))
        z = tl.exp(x - tl.max(x, 0))
        tl.store(output_ptr + places, z / tl.sum(z, 0), mask=cols < n_cols)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_pipeline_is_the_compilers(stages):
    """Loads before the loop, and the order within it, are those of the picture."""
    x = compile.pointer(torch.float32)
    compiled = compile.aot(
        rows_kernel, x, x, 1824, 1024, BLOCK_COLS=1024, STAGES=stages
    )
    signs = {"async_copy_global": "issue", "async_wait": "wait"}
    signs |= {"tt.load": "load", "tt.store": "store"}

    def steps(part: str) -> list[str]:
        lines = part.splitlines()
        return [step for line in lines for sign, step in signs.items() if sign in line]

    before, loop = compiled.ttgir.split("scf.for")
    assert steps(before) == ["issue"] * (stages - 1)
    wanted = ["wait", "store", "issue"] if stages > 1 else ["load", "store"]
    assert steps(loop.split("scf.yield")[0]) == wanted


def test_the_default_layout_is_the_compilers():
    x = compile.pointer(torch.float32)
    compiled = compile.aot(rows_kernel, x, x, 1824, 1024, BLOCK_COLS=1024, STAGES=1)
    layout = "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4]"
    assert f"#ttg.blocked<{{{layout}" in compiled.ttgir


def test_pipeline_draws_its_plan_to_scale():
    figure = draw.pipeline((1, 3), iterations=4, load=3, compute=1, store=0.5)
    assert texts(figure).count("4 iterations: 18") == 1
    assert texts(figure).count("4 iterations: 10.5") == 1
    loads = boxes(figure, "3 stages: load")
    scale = loads[0].get_width() / 3
    starts = [(box.get_x() - loads[0].get_x()) / scale for box in loads]
    assert starts == pytest.approx([0, 0, 4.5, 6])
    with pytest.raises(ValueError, match="load must be positive and finite, got 0"):
        draw.pipeline(load=0)
    with pytest.raises(ValueError, match="panels must be from 1 to 4"):
        draw.pipeline(())


@pytest.mark.parametrize("capacity", [1, 3, 7, 8, 9])
def test_a_cache_gives_back_what_was_used_last(capacity):
    once = list(range(8))
    held = min(capacity, 8)
    assert draw.cached([*once, *once], capacity) == [False] * 8 + [held == 8] * 8
    backwards = draw.cached([*once, *once[::-1]], capacity)
    assert backwards == [False] * 8 + [True] * held + [False] * (8 - held)
    used_anew = draw.cached([0, 1, 0, 2, 0, 1], 2)
    assert used_anew == [False, False, True, False, True, False]


def test_rereading_draws_what_the_cache_holds():
    figure = draw.rereading(8, 5)
    assert "0 of 8 again from the cache" in texts(figure)
    assert "5 of 8 again from the cache" in texts(figure)
    drawn = gids(figure)
    assert sum(drawn[f"forwards: from memory again {block}"] for block in range(8)) == 8
    assert [drawn[f"backwards: from the cache {block}"] for block in range(8)] == [
        *(0, 0, 0, 1, 1, 1, 1, 1)
    ]
    with pytest.raises(ValueError, match="n_blocks must be from 1 to 16"):
        draw.rereading(17, 5)


ROWS, PARTS = 5, 3
IN_ORDER = [(row, part) for row in range(ROWS) for part in range(PARTS)]
BY_PART = [(row, part) for part in range(PARTS) for row in range(ROWS)]


def test_waiting_programs_end_if_their_slots_are_enough():
    for order in (IN_ORDER, BY_PART):
        plan = draw.waiting_schedule(order, ROWS * PARTS)
        assert {one[1:] for one in plan} == {(0, 1, 1, 1.5)}
    plan = draw.waiting_schedule(IN_ORDER, PARTS)  # a row at a time
    assert plan[-1] == (2, 6, 7, 7, 7.5)
    waits = [one for one in draw.waiting_schedule(IN_ORDER, 5) if one[2] < one[3]]
    assert len(waits) == 8 and max(one[-1] for one in waits) == 7.5


def test_waiting_programs_are_stuck_if_no_row_is_whole():
    for order, slots in ((BY_PART, ROWS), (IN_ORDER, PARTS - 1)):
        plan = draw.waiting_schedule(order, slots)
        assert all(one[3] == one[4] == math.inf for one in plan)
        assert [one[0] for one in plan] == [*range(slots), *[-1] * (15 - slots)]
    assert draw.waiting_schedule(BY_PART, 2 * ROWS + 1)[-1][-1] < math.inf


def test_patience_ends_under_any_schedule():
    for order in (IN_ORDER, BY_PART):
        for slots in range(1, 8):
            plan = draw.waiting_schedule(order, slots, patience=1.0)
            assert all(one[-1] < math.inf for one in plan)
    plan = draw.waiting_schedule(BY_PART, ROWS, patience=1.0)
    assert plan[0] == (0, 0, 1, 2, 4.5)  # loads, waits, reads the row, stores
    assert plan[-1] == (4, 9, 10, 10, 10.5)  # its partners have published


def test_sharing_draws_its_schedules():
    figure = draw.sharing(5, 3, 5)
    wanted = {"ends at 7.5", "never ends: 5 of 15 programs began", "ends at 10.5"}
    assert wanted <= set(texts(figure))
    drawn = gids(figure)
    assert drawn["in order: 1.0 waits"] == drawn["in order: 4.2 stores"] == 1
    assert not any("alone" in gid for gid in drawn if "patience" not in gid)
    assert drawn["all first parts first, with patience: 0.0 alone"] == 1
    assert drawn["all first parts first: 4.0 waits"] == 1
    assert not any(gid.startswith("all first parts first: 0.1") for gid in drawn)
    with pytest.raises(ValueError, match="number of programs must be from 1 to 48"):
        draw.sharing(7, 7, 8)


def test_ladder_draws_bandwidths_to_scale():
    figure = draw.ladder([("eager", 700), ("mine", 4200)], 3500, source="measured here")
    short, long = boxes(figure, "step")
    assert long.get_width() / short.get_width() == pytest.approx(6)
    assert {"700 GB/s · 20%", "4,200 GB/s · 120%", "measured here"} <= set(
        texts(figure)
    )
    (ceiling,) = figure.axes[0].lines
    assert ceiling.get_xdata()[0] - short.get_x() == pytest.approx(
        5 * short.get_width()
    )
    with pytest.raises(ValueError, match="bandwidth of eager must be positive"):
        draw.ladder([("eager", 0)], 3500)
    with pytest.raises(ValueError, match="number of steps must be from 1 to 12"):
        draw.ladder([], 3500)
