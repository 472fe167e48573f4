"""Every picture can be read, and is the same each time."""

import functools
import math

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

import kernels
from kernels.lab import draw, gpu, style
from kernels.lab.draw.card import Picture
from tests.lab.pictures import texts

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

STEPS = [(stem, 4400.0) for stem in kernels.CHAPTERS[-12:]]
PEERS = [(name, 4400.0) for name in ("torch", "torch.compile", "liger", "tutorial")]

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
    "reduction of one": lambda: draw.reduction([2], warp_size=1),
    "reduction, idle lanes": lambda: draw.reduction(range(8), warp_size=4),
    "heard": lambda: draw.heard({"xor 1": [1], "xor 16, 1": [16, 1]}, 24),
    "heard by all": lambda: draw.heard({"all": [16, 8, 4, 2, 1]}),
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
    "ladder, whole": lambda: draw.ladder(STEPS, 4300, peers=PEERS, source="here"),
}


@functools.cache
def drawn(name: str) -> style.Figure:
    return PICTURES[name]()


def faults(figure: style.Figure) -> list[str]:
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
    assert faults(drawn(name)) == []


def test_faults_are_found():
    picture = Picture("A title", 40)
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_sees_the_same_each_time(name):
    figure, again = drawn(name), PICTURES[name]()
    assert isinstance(figure, style.Figure)
    assert repr(figure) == repr(again)
    assert "726x" in repr(figure) and "." not in repr(figure)
    assert texts(figure) == texts(again)


def test_the_image_is_the_same_each_time():
    figure, again = draw.coverage(14, 4), draw.coverage(14, 4)
    assert figure._repr_png_() == again._repr_png_()
