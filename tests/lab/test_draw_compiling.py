"""The picture of the stages draws as many lines as each statement becomes."""

import pytest

from kernels.lab import draw
from tests.lab.pictures import boxes, gids, texts

ROWS = [
    ["x = tl.load(input_ptr + cols, mask=inside)", 3, 3, 11, 7, 6],
    ["x = x.to(tl.float32)", 0, 0, 0, 0, 0],
    ["(no statement)", 0, 1, 0, 0, 0],
]


def test_stages_are_as_tall_as_they_have_lines():
    figure = draw.stages(ROWS)
    load, *rest = boxes(figure, "LLVM IR")
    (ptx,) = boxes(figure, "PTX")
    assert not rest
    assert load.get_height() == pytest.approx(15)  # three rows of 5: the longest
    assert ptx.get_height() / load.get_height() == pytest.approx(7 / 11)
    assert gids(figure)["TTGIR 2"] == 1
    assert not boxes(figure, "TTIR 1")


def test_stages_are_named_and_counted():
    shown = texts(draw.stages(ROWS))
    for name in ("TTIR", "TTGIR", "LLVM IR", "PTX", "SASS", "ptxas", "11 lines"):
        assert name in shown
    assert "x = tl.load(input_ptr + col…" in shown


def test_stages_of_one_colour_come_from_one_statement():
    figure = draw.stages(ROWS)
    (statement,) = boxes(figure, "statement 0")
    for name in ("TTIR 0", "SASS 0"):
        (box,) = boxes(figure, name)
        assert box.get_facecolor() == statement.get_facecolor()


@pytest.mark.parametrize(
    "rows",
    [[], [["x", 1, 2, 3]], [["x", 1, 1, 1, 1, -1]], [["x", 0, 0, 0, 0, 0]], ROWS * 7],
)
def test_stages_refuse_what_they_cannot_draw(rows):
    with pytest.raises(ValueError, match="must"):
        draw.stages(rows)
