"""Pictures of programs draw what the parameters say."""

import math
from collections import Counter

import pytest

from kernels.lab import draw, meter
from tests.lab.pictures import boxes, gids, read, texts

M, N = 1823, 781
EAGER = [
    ("max", M * N, M),
    ("sub", M * N + M, M * N),
    ("exp", M * N, M * N),
    ("sum", M * N, M),
    ("div", M * N + M, M * N),
]
FUSED = [("softmax_kernel", M * N, M * N)]

# ---- launches and blocks -------------------------------------------------------------


def test_launch_places_what_fits_and_lets_the_rest_wait():
    figure = draw.launch("add", 20, sms=4, per_sm=3)
    held = Counter(gid for gid in gids(figure) if " holds " in gid)
    assert held == Counter(f"SM {p % 4} holds {p}" for p in range(12))
    white = [box for box in boxes(figure, "program") if box.get_fc() == (1, 1, 1, 1)]
    assert [box.get_gid() for box in white] == [f"program {p}" for p in range(12, 20)]
    assert "waiting: 8 (white)" in read(figure, "20 programs")
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
        "thread's element": 14,
        "program": 4,
        "block's element": 14,
        "block's element masked": 2,
    }
    with pytest.raises(ValueError, match="block must be a power of two, got 3"):
        draw.thread_and_program(14, 3)
    with pytest.raises(ValueError, match="padded length must be from 1 to 24"):
        draw.thread_and_program(25, 8)


# ---- what fusing saves ---------------------------------------------------------------


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
    # A small matrix stays in the caches, so the figure speaks of memory, not of DRAM.
    assert read(figure, "Every kernel reads its input") and "memory" in texts(figure)
    assert not any("DRAM" in text for text in texts(figure))


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


# ---- the ladder ----------------------------------------------------------------------


def test_ladder_draws_bandwidths_to_scale():
    figure = draw.ladder([("eager", 700), ("mine", 4200)], 3500, source="measured here")
    low, high = boxes(figure, "step")
    assert high.get_width() / low.get_width() == pytest.approx(6)
    shown = {"eager", "mine", "700 GB/s · 20%", "4,200 GB/s · 120%", "measured here"}
    assert shown <= set(texts(figure)) and "others" not in texts(figure)
    (ceiling,) = figure.axes[0].lines
    at = ceiling.get_xdata()[0] - low.get_x()
    assert at == pytest.approx(5 * low.get_width())


def test_ladder_sets_the_peers_apart():
    steps = [("eager", 700), ("fastest", 4200)]
    peers = [("torch", 2000), ("quack", 4000)]
    figure = draw.ladder(steps, 4300, peers=peers)
    ours, theirs = boxes(figure, "step"), boxes(figure, "peer")
    assert [box.get_gid() for box in theirs] == ["peer: torch", "peer: quack"]
    assert {"the course", "others", "torch.softmax", "QuACK"} <= set(texts(figure))
    pitch = ours[1].get_y() - ours[0].get_y()
    assert theirs[0].get_y() - ours[1].get_y() > 1.5 * pitch
    per_gbps = {
        box.get_width() / gbps for box, (_, gbps) in zip(theirs, peers, strict=True)
    }
    assert max(per_gbps) == pytest.approx(ours[0].get_width() / 700)


@pytest.mark.parametrize(
    ("steps", "peers", "message"),
    [
        ([("eager", 0)], [], "bandwidth of eager must be positive"),
        ([("eager", 1)], [("quack", -1)], "bandwidth of quack must be positive"),
        ([], [], "number of steps must be from 1 to 12"),
        ([("eager", 1)], [("torch", 1)] * 9, "number of peers must be from 0 to 8"),
    ],
)
def test_ladder_of_something_else(steps, peers, message):
    with pytest.raises(ValueError, match=message):
        draw.ladder(steps, 3500, peers=peers)
