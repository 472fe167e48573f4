"""Pictures of tiles draw what the parameters say."""

import pytest

from kernels.lab import draw
from tests.lab.pictures import boxes, gids, read, texts


def test_product_draws_the_bands_of_a_tile_step_by_step():
    figure = draw.product((8, 12, 10), (2, 4, 2), (2, 1), 3)
    wanted = {f"{name} step {i}": 1 for name in "AB" for i in range(5)}
    assert gids(figure) == wanted | {"tile of C": 1}
    (tile,) = boxes(figure, "tile of C")
    for i in range(5):
        (of_a,), (of_b,) = (boxes(figure, f"{name} step {i}") for name in "AB")
        assert (of_a.get_y(), of_a.get_height()) == (tile.get_y(), tile.get_height())
        assert (of_b.get_x(), of_b.get_width()) == (tile.get_x(), tile.get_width())
    filled = {box.get_facecolor() for box in boxes(figure, "A step")}
    assert len(filled) == 2  # one step stands out
    assert "12 tiles of 2 × 4" in read(figure, "12 tiles")
    assert "5 steps of 2 along K; step 3" in read(figure, "12 tiles")


def test_product_cuts_the_blocks_at_the_edges():
    figure = draw.product((7, 9, 5), (4, 4, 2), (1, 2), 2)
    (tile,), (last,) = boxes(figure, "tile of C"), boxes(figure, "A step 2")
    (first,) = boxes(figure, "A step 0")
    assert tile.get_height() == pytest.approx(3 * tile.get_width())
    assert last.get_width() == pytest.approx(first.get_width() / 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((8, 8, 8), (2, 2, 0)), "BLOCK_K must be from 1 to 8"),
        (((9, 8, 8), (1, 2, 2)), "blocks along M must be from 1 to 8"),
        (((8, 8, 8), (2, 2, 2), (4, 0)), "tile's row must be from 0 to 3"),
        (((8, 8, 8), (2, 2, 2), (0, 0), 4), "step must be from 0 to 3"),
    ],
)
def test_product_names_what_it_cannot_draw(arguments, words):
    with pytest.raises(ValueError, match=words):
        draw.product(*arguments)


def test_orders_number_the_tiles_and_count_the_bands():
    figure = draw.orders((9, 9), (1, 3), 9)
    held = gids(figure)
    assert held["0: 10 at 1, 1"] == held["1: 10 at 1, 3"] == 1
    assert sum("at" in gid for gid in held) == 2 * 81
    needed = [[f"{panel}: {name}" for name in "AB"] for panel in (0, 1)]
    counts = [
        [
            sum(gid.startswith(start) and "needed" in gid for gid in held)
            for start in two
        ]
        for two in needed
    ]
    assert counts == [[1, 9], [3, 3]]
    assert {"1 of A + 9 of B = 10 bands", "3 of A + 3 of B = 6 bands"} < {
        *texts(figure)
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((11, 4), (1,), 4), "tiles must be from 1 to 10"),
        (((4, 4), (1, 2, 4), 4), "groups must be from 1 to 2"),
        (((4, 4), (5,), 4), "group_m must be from 1 to 4"),
        (((4, 4), (1,), 17), "programs must be from 1 to 16"),
    ],
)
def test_orders_names_what_it_cannot_draw(arguments, words):
    with pytest.raises(ValueError, match=words):
        draw.orders(*arguments)
