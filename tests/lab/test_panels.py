"""Small panels hold the lines and the marks that they were given."""

import pytest

from kernels.lab import panels

ONE = {"warp": {256: 5.0, 1024: 8.0}, "block": {1024: 7.0, 256: 6.0}}
AXES = {"xlabel": "columns, N", "ylabel": "median time, µs"}


def drawn(ax):
    return {
        line.get_label(): [*zip(*line.get_data(), strict=True)]
        for line in ax.get_lines()
    }


def test_each_panel_has_its_lines_and_marks():
    two = {"packs of 1": ONE, "packs of 2": {"warp": {300: 2.0, 600: 9.0}}}
    marks = {"A100": {"packs of 1": 700, "packs of 2": 500}}
    figure = panels.lines(two, **AXES, marks=marks, title="Both", source="H200")
    one, other = figure.axes
    assert (one.get_title(loc="left"), other.get_title(loc="left")) == tuple(two)
    assert drawn(one)["block"] == [(256, 6.0), (1024, 7.0)]
    assert drawn(one)["A100"] == [(700, 0), (700, 1)]
    assert drawn(other)["warp"] == [(300, 2.0), (600, 9.0)]
    assert [tick.get_text() for tick in one.get_xticklabels()] == ["256", "512", "1024"]
    assert one.get_ylim()[0] == 0 and one.get_ylabel() == AXES["ylabel"]
    legend = [text.get_text() for text in other.get_legend().get_texts()]
    assert legend == ["warp", "A100"]


def test_an_odd_panel_leaves_a_place_empty():
    figure = panels.lines({"a": ONE, "b": ONE, "c": ONE}, **AXES)
    assert [ax.get_visible() for ax in figure.axes] == [True] * 3 + [False]
    colours = {ax.get_lines()[0].get_color() for ax in figure.axes[:3]}
    assert len(colours) == 1


@pytest.mark.parametrize("wrong", [{}, {"a": {}}, {"a": ONE, "b": {"warp": {}}}])
def test_panels_without_points_are_refused(wrong):
    with pytest.raises(ValueError, match="panels must map titles to lines"):
        panels.lines(wrong, **AXES)


def test_too_many_marks_are_refused():
    marks = {name: {"a": 512} for name in "1234"}
    with pytest.raises(ValueError, match="marks must be at most 3, got"):
        panels.lines({"a": ONE}, **AXES, marks=marks)
