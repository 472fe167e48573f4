"""Code is shown as its module has it, and tables print the same for every pandas."""

import re

import numpy as np
import pandas as pd
import pytest
import triton
import triton.language as tl
from IPython.core.interactiveshell import InteractiveShell

from kernels.lab import show

# ---- code ----------------------------------------------------------------------------


@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    """Doubles a block."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 2 * x)


@triton.jit
def triple(x_ptr, BLOCK: tl.constexpr):
    """Triples it."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 3 * x)


def test_source_shows_a_kernel_as_its_module_has_it():
    shown = show.source(double)
    text = repr(shown)
    assert text.startswith("@triton.jit\ndef double(x_ptr, BLOCK: tl.constexpr):")
    assert '"""Doubles a block."""' in text
    assert text.endswith("2 * x)")
    assert shown._repr_markdown_() == f"```python\n{text}\n```"
    tuned = triton.heuristics({"BLOCK": lambda args: 8})(double)
    assert repr(show.source(tuned)) == text


def test_source_without_its_docstring_keeps_every_other_line():
    text = repr(show.source(double))
    shorter = repr(show.source(double, docstring=False))
    assert shorter == text.replace('    """Doubles a block."""\n', "")


@pytest.mark.parametrize("unreadable", [len, 3])
def test_source_refuses_what_has_none(unreadable):
    with pytest.raises(TypeError, match="source can be read, got"):
        show.source(unreadable)


def test_a_fence_is_longer_than_those_inside():
    assert show.Code("```", "python")._repr_markdown_().startswith("````python\n```\n")


def test_diff_shows_what_changes_and_no_docstrings():
    shown = show.diff(double, triple)
    assert repr(shown).splitlines() == [
        f"--- {__name__}.double",
        f"+++ {__name__}.triple",
        " @triton.jit",
        "-def double(x_ptr, BLOCK: tl.constexpr):",
        "+def triple(x_ptr, BLOCK: tl.constexpr):",
        "     offsets = tl.arange(0, BLOCK)",
        "     x = tl.load(x_ptr + offsets)",
        "-    tl.store(x_ptr + offsets, 2 * x)",
        "+    tl.store(x_ptr + offsets, 3 * x)",
    ]
    assert shown._repr_markdown_().startswith("```diff\n---")
    assert repr(show.diff(double, double)) == ""


def once(x):
    y = 2 * x
    return y


def often(x):
    for _ in range(3):
        y = 2 * x

    return y


def test_a_diff_may_ignore_that_lines_move_into_a_loop():
    assert len(repr(show.diff(once, often)).splitlines()) == 9
    assert repr(show.diff(once, often, indentation=False)).splitlines()[2:] == [
        "-def once(x):",
        "+def often(x):",
        "+    for _ in range(3):",
        "         y = 2 * x",
        "+",
        "     return y",
    ]


def test_a_diff_may_be_shown_in_pieces():
    def piece(**options) -> list[str]:
        return repr(show.diff(double, triple, **options)).splitlines()[2:]

    whole = piece()
    assert piece(first="def double") == whole[1:]  # a removed line
    assert piece(first="def triple", last="x = ") == whole[2:4]
    assert piece(last="offsets") + piece(first="offsets") == whole


def test_a_piece_of_a_diff_ends_with_no_empty_line_that_stays():
    def longer(x):
        y = 3 * x

        return y

    shown = repr(show.diff(often, longer, last="return")).splitlines()
    assert shown[2:] == [
        "-def often(x):",
        "-    for _ in range(3):",
        "-        y = 2 * x",
        "+def longer(x):",
        "+    y = 3 * x",
    ]


@pytest.mark.parametrize("texts", [("no such", None), (None, "no such"), ("x =", "of")])
def test_a_piece_of_a_diff_needs_its_lines(texts):
    first, last = texts
    with pytest.raises(ValueError, match=f"from {first!r} to {last!r}"):
        show.diff(double, triple, first=first, last=last)


def add(x):
    y = x
    z = y
    x = z
    return x + 1


def subtract(x):
    y = x
    z = y
    x = z
    return x - 1


def test_a_diff_may_leave_out_lines_that_stay():
    def lines(context: int) -> list[str]:
        return repr(show.diff(add, subtract, context=context)).splitlines()[2:]

    whole = repr(show.diff(add, subtract)).splitlines()[2:]
    assert lines(2) == whole
    assert lines(1) == [*whole[:3], " ⋮", *whole[4:]]
    assert lines(0) == [*whole[:2], " ⋮", *whole[5:]]
    assert repr(show.diff(add, add, context=0)) == ""


def test_an_excerpt_is_the_lines_between_two_beginnings():
    said = show.excerpt(double, "x = tl.load", "tl.store").text
    assert said == "x = tl.load(x_ptr + offsets)"
    assert show.excerpt(double, "def double", "x =").text.count("\n") == 1


@pytest.mark.parametrize("texts", [("no such text", "x ="), ("def ", "no such text")])
def test_an_excerpt_needs_its_lines(texts):
    with pytest.raises(ValueError, match=r"from '.*' to '.*'"):
        show.excerpt(double, *texts)


# ---- tables --------------------------------------------------------------------------

ROWS = [["copy", 32, 4250.4], ["a<b", 1024, 7.25], ["none", 1, None]]


def test_a_table_is_a_frame_indexed_by_its_first_column():
    table = show.table(ROWS, ["provider", "N", "GB/s"])
    assert isinstance(table, pd.DataFrame)
    assert table.index.name == "provider" and list(table.index) == [
        row[0] for row in ROWS
    ]
    assert list(table["GB/s"]) == ["4250.4", "7.2", "–"]


def test_a_table_as_text_and_as_html():
    """Both are written down here: all versions of pandas must print them."""
    table = show.table(ROWS[:2], ["provider", "N", "GB/s"])
    assert [line.rstrip() for line in repr(table).splitlines()] == [
        "provider     N    GB/s",
        "copy        32  4250.4",
        "a<b       1024     7.2",
    ]
    assert re.sub(r"\n\s*", "", table._repr_html_()) == (
        '<table class="dataframe"><thead><tr style="text-align: right;">'
        "<th>provider</th><th>N</th><th>GB/s</th></tr></thead><tbody>"
        "<tr><th>copy</th><td>32</td><td>4250.4</td></tr>"
        "<tr><th>a&lt;b</th><td>1024</td><td>7.2</td></tr></tbody></table>"
    )


def test_a_notebook_shows_a_table_as_text_and_html():
    table = show.table(ROWS, ["provider", "N", "GB/s"])
    data, _ = InteractiveShell.instance().display_formatter.format(table)
    assert data == {"text/plain": repr(table), "text/html": table._repr_html_()}


@pytest.mark.parametrize(
    ("digits", "texts"),
    [(None, ["0.500", "12.000", "0.013", "nan", "–", "7", "True"]), (1, None)],
)
def test_floats_of_a_column_have_the_same_decimals(digits, texts):
    column = [0.5, np.float32(12), 0.0126, float("nan"), None, 7, True]
    table = show.table([["x", cell] for cell in column], ["name", "value"], digits)
    texts = texts or ["0.5", "12.0", "0.0", "nan", "–", "7", "True"]
    assert list(table["value"]) == texts


def test_a_table_is_shown_whole():
    header = [f"column {i}" for i in range(40)]
    table = show.table([["x" * 90, *range(39)]] * 90, header)
    assert len(repr(table).splitlines()) == 91
    assert table._repr_html_().count("<td>38</td>") == 90
    for shown in (repr(table), table._repr_html_()):
        assert "x" * 90 in shown and "..." not in shown


def test_columns_may_share_a_name_and_an_index_have_none():
    table = show.table([["a", 0.5, 100.0]], ["", "bytes", "bytes"])
    assert table.iloc[0].tolist() == ["0.50", "100"]
    assert repr(table).splitlines()[0].split() == ["bytes", "bytes"]


def test_a_table_of_a_data_frame():
    frame = pd.DataFrame(
        {"copy": [1.0, 1.0], "tiled": [0.94321, None]},
        index=pd.Index([32, 64], name="columns"),
    )
    table = show.table(frame, digits=2)
    assert table.index.name == "columns" and list(table.index) == ["32", "64"]
    assert table.to_numpy().tolist() == [["1.00", "0.94"], ["1.00", "–"]]
    renamed = show.table(frame, ["N", "copy", "ours"])
    assert list(renamed.columns) == ["copy", "ours"]


def test_pandas_options_stay_as_they_are():
    names = ["display.max_colwidth", "display.max_rows", "display.width"]
    before = [pd.get_option(name) for name in names]
    table = show.table(ROWS, ["provider", "N", "GB/s"])
    assert repr(table) and table._repr_html_()
    assert [pd.get_option(name) for name in names] == before


def test_rows_and_header_must_agree():
    with pytest.raises(ValueError, match=r"must have 2 cells.*got \[1\]"):
        show.table([[1]], ["a", "b"])
    with pytest.raises(ValueError, match="header must name the columns"):
        show.table([[1]])


def test_decimals_show_so_many_significant_digits():
    values = [4250.2, 66.04, 0.5, 0.0126, 0.0, float("inf")]
    assert [show.decimals(value, 3) for value in values] == [0, 1, 3, 4, 0, 0]
