"""The picture of ways shows every step in its place, and shared steps in one colour."""

import pytest

from kernels.lab import draw
from tests.lab.pictures import boxes, gids, texts

ROWS = {"short": ["ask", "launch"], "long": ["ask", "make", "keep", "launch"]}


def test_each_way_has_its_steps_in_their_order():
    figure = draw.ways("Two ways", ROWS)
    assert list(gids(figure)) == [
        f"{i} {s}" for i, way in enumerate(ROWS) for s in ROWS[way]
    ]
    for i, steps in enumerate(ROWS.values()):
        places = [boxes(figure, f"{i} {step}")[0].get_xy() for step in steps]
        assert places == sorted(places)
        assert len({y for _, y in places}) == 1
    assert {"Two ways", "short", "long", "keep"} <= set(texts(figure))


def test_steps_of_several_ways_have_a_colour():
    figure = draw.ways("Two ways", ROWS)
    colours = {gid: boxes(figure, gid)[0].get_facecolor() for gid in gids(figure)}
    assert colours["0 launch"] == colours["1 launch"] != colours["1 make"]
    assert colours["0 ask"] == colours["1 ask"] != colours["0 launch"]
    assert colours["1 make"] == colours["1 keep"] != colours["1 ask"]


@pytest.mark.parametrize("rows", [{}, {"none": []}, {"long": [*"abcdefghi"]}])
def test_ways_refuse_what_they_cannot_draw(rows):
    with pytest.raises(ValueError, match="must be from 1 to"):
        draw.ways("Too many", rows)
