"""The squares of lanes that have heard of each other."""

import pytest

from kernels.lab import draw
from tests.lab.pictures import texts


def known(figure, way):
    """lane → the lanes that it has heard of, by the boxes of the picture."""
    found = {lane: set() for lane in range(32)}
    for box in figure.axes[0].patches:
        name, _, place = (box.get_gid() or "").partition(": ")
        if name == way and place.endswith(" heard"):
            lane, other, _ = place.split()
            found[int(lane)].add(int(other))
    return found


def test_a_square_shows_which_lanes_have_heard_of_which():
    figure = draw.heard(
        {"halves of 24": (12, 6, 3, 1), "halves of 32": (16, 8, 4, 2, 1)}, 24
    )
    halves = [set(range(16)), set(range(16, 32))]
    assert known(figure, "halves of 24") == {i: halves[i // 16] for i in range(32)}
    assert known(figure, "halves of 32") == {i: set(range(32)) for i in range(32)}
    assert "0 of 24 lanes hear of all 24" in texts(figure)
    assert "24 of 24 lanes hear of all 24" in texts(figure)


def test_before_any_shuffle_a_lane_knows_itself():
    figure = draw.heard({"none": ()}, 1)
    assert known(figure, "none") == {lane: {lane} for lane in range(32)}
    assert "1 of 1 lanes hear of all 1" in texts(figure)


def test_what_has_no_room_is_refused():
    with pytest.raises(ValueError, match="number of ways must be from 1 to 2"):
        draw.heard({"a": (), "b": (), "c": ()})
    with pytest.raises(ValueError, match="lanes must be from 1 to 32"):
        draw.heard({"a": ()}, 33)
    with pytest.raises(ValueError, match="leads to lane 63"):
        draw.heard({"a": (32,)})
