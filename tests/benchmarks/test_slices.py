"""A row's chunks and words are where the kernel finds them, and the picture says so."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks import slices
from kernels import cooperative, staged, unaligned, windows
from kernels.lab import shared
from tests.helpers import assert_right
from tests.lab.pictures import assert_fits, boxes, gids, texts
from tests.shared_memory import stand_in

SHAPES = [(11, 20, 1), (13, 16, 1), (13, 16, 2), (16, 23, 1), (1, 1, 3), (12, 17, 0)]


def within(figure, frame: str, values: str) -> dict[str, list[int]]:
    """The columns within each frame of a kind, by where the boxes are."""
    found = {}
    for each in boxes(figure, frame):
        x0, y0, x1, y1 = each.get_bbox().extents
        found[each.get_gid()] = inside = []
        for box in boxes(figure, values):
            x, y = box.get_center()
            if x0 < x < x1 and y0 < y < y1:
                inside.append(int(box.get_gid().split()[-1]))
    return found


def assert_drawn_right(n_cols: int, width: int, row: int) -> None:
    """Against a matrix whose values are their own places, cut by NumPy."""
    figure = slices.picture(n_cols, width, row)
    input_place, output_place = row * width, row * n_cols
    found = within(figure, "chunk", "input")
    last = (input_place + n_cols - 1) // 8
    first = (input_place - output_place % 2) // 8
    assert [*found] == [f"chunk {number}" for number in range(first, last + 1)]
    for gid, cols in found.items():
        places = np.array(cols) + input_place
        assert (places // 8 == int(gid.split()[1])).all() and len(places) == 8
    assert {*range(n_cols)} <= {*itertools.chain(*found.values())}
    # All words, and each value that is alone, begin where the output has them.
    expected = {}
    for at in range(output_place // 2 * 2, output_place + n_cols, 2):
        cols = [c - output_place for c in (at, at + 1)]
        own = [col for col in cols if 0 <= col < n_cols]
        name = f"word {at}" if len(own) == 2 else f"alone {own[0]}"
        expected[name] = own
    drawn = within(figure, "word", "output") | within(figure, "alone", "output")
    assert drawn == expected
    held = within(figure, "pair", "held")
    first = min(itertools.chain(*held.values()))
    assert all(
        cols == [first + 2 * int(gid.split()[-1]) + i for i in (0, 1)]
        for gid, cols in held.items()
    )
    # A column is below itself, has the row's colour, and its number in its box.
    for col in range(n_cols):
        xs = [boxes(figure, f"{line} {col}")[0] for line in ("input", "held", "output")]
        assert np.ptp([box.get_x() for box in xs]) < 1e-6
        assert all(box.get_hatch() is None for box in xs)
        assert texts(figure).count(f"{col}") >= 3
    shown = gids(figure)
    assert all(shown[gid] == 1 for gid in shown)
    beside = [box for box in boxes(figure, "output") if box.get_hatch()]
    assert len(beside) == len(boxes(figure, "output")) - n_cols


@pytest.mark.parametrize("shape", SHAPES)
def test_the_picture_shows_where_values_lie(shape):
    assert_drawn_right(*shape)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("words", lambda row, n: [range(at, at + 2) for at in range(0, n, 2)]),
        ("words", lambda row, n: [range(-1, 1)]),
        ("chunks", lambda row, n, w: [range(at, at + 8) for at in range(0, n, 8)]),
        ("chunks", lambda row, n, w: [range(-4, 4)]),  # the last one is missing
    ],
)
def test_a_wrong_cut_is_caught(monkeypatch, name, wrong):
    monkeypatch.setattr(slices, name, wrong)
    with pytest.raises((AssertionError, IndexError)):
        assert_drawn_right(11, 20, 1)


@pytest.mark.parametrize(
    ("n_cols", "width"), [(11, 20), (64, 64), (63, 65), (127, 136)]
)
def test_the_kernel_goes_the_same_way(monkeypatch, n_cols, width):
    """The places in shared memory from which a row's first window is read."""
    memory, first = stand_in(monkeypatch, staged, windows), []

    def load(address, inside, BITS):
        if address.handle.data.ndim == 2:
            first.append(int(address.handle.data.min()))
        return memory.load(address, inside, BITS)

    monkeypatch.setattr(shared, "load", load)
    x = torch.randn(4, width).to(torch.bfloat16)[:, :n_cols]
    y = torch.empty(4, n_cols, dtype=torch.bfloat16)
    windows.launch_for(y, x)(y, x)
    assert_right(y, x)
    # Each row loads two words: one, and the next.
    found = [slices.first_word(row, n_cols, width) for row in range(4)]
    starts = [4 * (each["shift"] // 2) for each in found]
    assert first == [at for start in starts for at in (start, start + 4)]


@pytest.mark.parametrize("shape", [(1, 1, 0), (16, 99, 99), (16, 23, 1), (16, 16, 15)])
def test_every_picture_fits_its_card(shape):
    assert_fits(slices.picture(*shape))


def test_the_text_says_what_the_picture_shows():
    said = slices.alt(11, 20, 1)
    assert said.startswith("Row 1 of the first 11 columns of a matrix 20 values wide")
    assert "place 16 has columns 0 to 3 and 4 other values" in said
    assert "place 24 has columns 4 to 10 and 1 other value." in said
    assert "column 0 alone, columns 1 and 2 from words 2 and 3" in said
    assert "from place 11 on" in said
    assert "columns 0 and 1 from word 0" in slices.alt(12, 16, 2)
    assert "place 8 has 8 other values" in slices.alt(13, 16, 1)


@pytest.mark.parametrize("function", [slices.picture, slices.alt])
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((0, 4, 1), "n_cols must be from 1 to 16 to be drawn, got 0"),
        ((11, 10, 1), "width must be from 11 to 99 to be drawn, got 10"),
        ((11, 20, -1), "row must be from 0 to 99 to be drawn, got -1"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(function, shape, said):
    with pytest.raises(ValueError, match=said):
        function(*shape)


# ---- a learner's way -----------------------------------------------------------------


def right(row, n_cols, width):
    column = -1 if row * n_cols % 2 else 0
    place = row * width + column
    return {"first word": column, "chunk": place // 8, "shift": place % 8}


def wrong(**parts):
    """A function that is right but for some parts."""
    return lambda *args: (
        right(*args)
        | {name.replace("_", " "): part(*args) for name, part in parts.items()}
    )


def test_a_right_way_is_right():
    assert slices.judge(right)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (wrong(first_word=lambda row, n, w: 0), "starts within a word"),
        (wrong(first_word=lambda row, n, w: -(row * w % 2)), "Is that place odd?"),
        (wrong(first_word=lambda row, n, w: -(row % 2)), "Is that place odd?"),
        (wrong(chunk=lambda row, n, w: (row * w - row * n % 2) // 16), "16 bytes"),
        (wrong(first_word=lambda row, n, w: row * n % 2), "before the row"),
        (wrong(chunk=lambda row, n, w: row * n // 8), "`width` values apart"),
        (wrong(chunk=lambda row, n, w: row * w // 8), "not from column 0"),
        (wrong(shift=lambda row, n, w: row * w % 8), "not from column 0"),
        (wrong(shift=lambda row, n, w: ...), ""),
    ],
)
def test_a_wrong_way_gets_its_sentence(function, said):
    verdict = slices.judge(function)
    assert not verdict
    assert said in " ".join(str(verdict).split())


# ---- what is measured and counted ----------------------------------------------------


@pytest.mark.parametrize("n_cols", [781, 1000, 1001])
def test_a_slice_is_aligned_in_the_input_only(n_cols):
    x = slices.sliced(torch.bfloat16, 3, n_cols)
    assert x.shape == (3, n_cols)
    assert x.stride(0) % 8 == 0 and n_cols < x.stride(0) <= n_cols + 8
    assert x.equal(slices.sliced(torch.bfloat16, 3, n_cols))


def test_nan_lies_beside_the_slice_and_not_in_it():
    x = slices.between_nan(3, 11, 20)
    whole = x.as_strided((3, 20), (20, 1))
    assert whole[:, 11:].isnan().all() and not x.isnan().any()


@pytest.mark.parametrize("num_warps", [1, 2, 4])
def test_programs_of_more_warps_are_right(num_warps, monkeypatch):
    stand_in(monkeypatch, staged, windows)
    x = slices.between_nan(3, 781, 787)
    assert_right(slices.with_warps(num_warps)(x), x)


def test_loads_become_wide_and_instructions_stay():
    before, after = (slices.work(each, 781) for each in (unaligned, windows))
    assert (before["load"], after["load"]) == (2, 16)
    assert (before["store"], after["store"]) == (8, 4)
    assert 4 * after["loads"] < before["loads"]
    assert 0.8 < after["instructions"] / before["instructions"] < 1.25


def test_kept_numerators_halve_the_exponentials():
    before, after = (slices.parts(each, 50257) for each in (cooperative, windows))
    assert before["exponentials"] == pytest.approx(2, rel=0.1)
    assert after["exponentials"] == pytest.approx(1, rel=0.1)
    assert (after["warps"], after["values"]) == (1, 2560)


def test_rows_of_another_kind_are_not_counted():
    with pytest.raises(ValueError, match="one program's, got n_cols = 50257"):
        slices.work(windows, 50257)
    with pytest.raises(ValueError, match="shared, got n_cols = 781"):
        slices.parts(windows, 781)
