"""Rows are cut as the kernel cuts them, and the picture's frames say how."""

import pytest
import torch

from benchmarks import spans
from kernels import staged
from kernels.lab import shared
from tests.lab.pictures import assert_fits, boxes, gids, texts
from tests.shared_memory import stand_in

SHAPES = [(5, 4), (2, 1), (3, 6), (8, 4), (9, 3), (15, 6), (16, 6)]


def walked(n_cols: int, n_rows: int) -> list[list[tuple[int, ...]]]:
    """Each row's words and its one value, found value by value."""
    rows = []
    for row in range(n_rows):
        value, end, found = row * n_cols, (row + 1) * n_cols, []
        while value < end:
            size = 2 if value % 2 == 0 and value + 1 < end else 1
            found.append(tuple(range(value, value + size)))
            value += size
        rows.append(found)
    return rows


def framed(figure, frame: str, values: str) -> list[tuple[int, ...]]:
    """What stands within each frame of a kind, by where the boxes are."""
    found = []
    for each in boxes(figure, frame):
        x0, y0, x1, y1 = each.get_bbox().extents
        inside = []
        for box in boxes(figure, values):
            x, y = box.get_center()
            if x0 < x < x1 and y0 < y < y1:
                inside.append(int(box.get_gid().split()[-1]))
        found.append(tuple(inside))
    return found


def assert_drawn_right(n_cols: int, n_rows: int) -> None:
    figure, size = spans.picture(n_cols, n_rows), n_cols * n_rows
    chunks = [tuple(range(at, at + 8)) for at in range(0, size - 7, 8)]
    assert framed(figure, "chunk", "memory") == chunks
    for row, wanted in enumerate(walked(n_cols, n_rows)):
        of_row = f"thread {row} "
        words = [each for each in framed(figure, "word", of_row) if each]
        alone = [each for each in framed(figure, "one", of_row) if each]
        assert sorted(words + alone) == wanted
        assert all(len(each) == 2 for each in words)
        assert len(alone) == n_cols % 2
    wanted = {f"memory {value}" for value in range(size)}
    wanted |= {f"thread {value // n_cols} value {value}" for value in range(size)}
    drawn = gids(figure)
    assert {gid for gid in drawn if gid[-1].isdigit()} == wanted
    assert all(drawn[gid] == 1 for gid in wanted)


@pytest.mark.parametrize(("n_cols", "n_rows"), SHAPES)
def test_the_picture_cuts_rows_as_a_walk_along_them_does(n_cols, n_rows):
    assert_drawn_right(n_cols, n_rows)


@pytest.mark.parametrize("n_cols", [2, 5, 7, 10, 15])
def test_the_kernel_takes_these_words_and_values(monkeypatch, n_cols):
    """Of a thread, only the loads from shared memory are looked at, not the copies."""
    memory, loads = stand_in(monkeypatch, staged), set()

    def load(address, inside, BITS):
        places, where = address.handle.data // 2, inside.handle.data.astype(bool)
        if places.ndim == 2:  # words or values, rows
            for (_, row), place in zip(
                zip(*where.nonzero(), strict=True), places[where], strict=True
            ):
                loads.add((row, *range(place, place + int(BITS) // 16)))
        return memory.load(address, inside, BITS)

    monkeypatch.setattr(shared, "load", load)
    staged.softmax(torch.zeros(4, n_cols, dtype=torch.bfloat16))
    for row in range(4):
        taken = {tuple(values) for values in spans.accesses(row, n_cols)}
        assert {access[1:] for access in loads if access[0] == row} == taken


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("accesses", lambda row, n: [range(row * n, row * n + n)]),
        (  # words from where the row starts, even or odd
            "accesses",
            lambda row, n: [
                range(at, min(at + 2, row * n + n))
                for at in range(row * n, row * n + n, 2)
            ],
        ),
        ("accesses", lambda row, n: [*map(range, (0, 2), (2, 4))]),  # row 0's words
        ("chunks", lambda size: [range(at, at + 5) for at in range(0, size, 5)]),
    ],
)
def test_a_wrong_split_is_caught(monkeypatch, name, wrong):
    monkeypatch.setattr(spans, name, wrong)
    with pytest.raises(AssertionError):
        assert_drawn_right(5, 4)


def test_one_value_differs_by_its_hatch_not_by_its_colour_alone():
    drawn = boxes(spans.picture(5, 4), "thread")
    hatched = [int(box.get_gid().split()[-1]) for box in drawn if box.get_hatch()]
    assert hatched == [4, 5, 14, 15]


def test_each_row_is_named_where_it_starts_in_memory():
    figure = spans.picture(5, 4)
    by_value = {box.get_gid(): box.get_x() for box in boxes(figure, "memory")}
    named = {each.get_text(): each.get_position()[0] for each in figure.axes[0].texts}
    for row in range(4):
        assert 0 <= named[f"row {row}"] - by_value[f"memory {5 * row}"] < 1
    assert {"chunk 0", "chunk 1", "no chunk", "thread 3"} <= {*texts(figure)}


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", range(2, 17))
def test_every_picture_fits_its_card(n_cols):
    for n_rows in (1, 6):
        assert_fits(spans.picture(n_cols, n_rows))


def test_the_text_names_rows_and_values():
    said = spans.alt(5, 4)
    assert said.startswith("4 rows of 5 values, numbered as in memory, twice.")
    assert "chunk 0 is 0 to 7, chunk 1 is 8 to 15, no chunk has 16 to 19." in said
    assert "thread 0 takes 0 and 1, 2 and 3, 4 alone; thread 1 takes 5 alone," in said
    assert said.endswith("thread 3 takes 15 alone, 16 and 17, 18 and 19.")


@pytest.mark.parametrize("function", [spans.picture, spans.alt])
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 4), "n_cols must be from 2 to 16 to be drawn, got 1"),
        ((17, 4), "n_cols must be from 2 to 16 to be drawn, got 17"),
        ((5, 0), "n_rows must be from 1 to 6 to be drawn, got 0"),
        ((5, 7), "n_rows must be from 1 to 6 to be drawn, got 7"),
    ],
)
def test_rows_that_cannot_be_drawn_are_refused(function, shape, said):
    with pytest.raises(ValueError, match=said):
        function(*shape)


def test_half_a_value_is_refused():
    with pytest.raises(TypeError, match="n_cols must be a whole number, got float"):
        spans.picture(2.5)


# ---- a learner's cut, and the compiled kernel ----------------------------------------


def right(row, n_cols):
    begin, odd = row * n_cols, row * n_cols % 2
    one = None if n_cols % 2 == 0 else begin if odd else begin + n_cols - 1
    return {"first word": begin + odd, "words": n_cols // 2, "one": one}


def wrong(**parts):
    """A function that is right but for one part."""
    return lambda row, n_cols: (
        right(row, n_cols)
        | {name.replace("_", " "): part(row, n_cols) for name, part in parts.items()}
    )


def test_a_right_cut_is_right():
    assert spans.judge(right)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (wrong(first_word=lambda row, n: row * n), "even places"),
        (wrong(one=lambda row, n: (row + 1) * n - 1), "where it starts"),
        (wrong(words=lambda row, n: (n + 1) // 2), "the next row's"),
        (
            lambda row, n: (
                right(row, n) | ({"one": (row + 1) * n - 1} if n % 2 == 0 else {})
            ),
            "even length",
        ),
        (lambda row, n: right(row, n) | {"one": ...}, ""),
    ],
)
def test_a_wrong_cut_gets_its_sentence(function, said):
    verdict = spans.judge(function)
    assert not verdict
    assert said in " ".join(str(verdict).split())


def test_threads_of_a_row_exchange_nothing():
    found = spans.work(33)
    assert found["shuffles"] == 0
    assert 10 < found["instructions"] < 25


@pytest.mark.parametrize("n_cols", [1, 8, 64, 65])
def test_lengths_of_other_kernels_are_not_counted(n_cols):
    with pytest.raises(ValueError, match=f"got {n_cols}"):
        spans.work(n_cols)
