"""Code and small tables, as a notebook's cells show them.

Weighed: `inspect.getsource` alone does not know the function inside a kernel; pandas'
Styler gives its tables random names, which change the output of every run.
"""

import ast
import difflib
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd


class Code:
    """Text in a language: plain in a terminal, highlighted in a notebook."""

    def __init__(self, text: str, language: str) -> None:
        self.text, self.language = text, language

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        fence = "````" if "```" in self.text else "```"
        return f"{fence}{self.language}\n{self.text}\n{fence}"


def source(function: Callable, *, docstring: bool = True) -> Code:
    """The source of a function or a kernel, with its docstring or without.

    Raises:
        TypeError: function is no Python function, or its source cannot be read.
    """
    text = _source(function)
    return Code(text if docstring else _without_docstring(text), "python")


def excerpt(function: Callable, first: str, last: str) -> Code:
    """The lines of a function or a kernel from one that begins with `first`.

    Args:
        function: as for `source`. Its docstring is left out.
        first: how the first line begins, without its indentation.
        last: how the line after the last one begins.

    Raises:
        ValueError: there are no such lines.
    """
    lines = source(function, docstring=False).text.splitlines()
    starts = [line.strip().startswith(first) for line in lines]
    begin = starts.index(True) if any(starts) else len(lines)
    for end in range(begin + 1, len(lines)):
        if lines[end].strip().startswith(last):
            text = textwrap.dedent("\n".join(lines[begin:end]))
            return Code(text.rstrip(), "python")
    raise ValueError(f"function must have lines from {first!r} to {last!r}")


def diff(
    old: Callable,
    new: Callable,
    *,
    indentation: bool = True,
    first: str | None = None,
    last: str | None = None,
    context: int | None = None,
) -> Code:
    """The lines that change from one function or kernel to another, in their context.

    A large change is easier to read in pieces: first and last choose one. Docstrings
    are left out. The language of the text is "diff", for which the book has
    two colours, of removed and of added lines (`course.css`), and JupyterLab, as `make
    lab` starts it, too (`book/labextensions`).

    Args:
        old, new: functions or kernels.
        indentation: False takes a line that is only indented differently for the same
            line, and shows it as `new` has it: a loop is added in one line, and the
            lines that move into it are not changes.
        first, last: how the first line of the piece begins, and how the line after its
            last one begins, without sign and indentation. Removed lines count, too.
            None takes the piece from the function's start, or up to its end.
        context: how many lines that stay are shown before and after those that change;
            "⋮" stands for the others. None shows them all.

    Raises:
        TypeError: as `source`.
        ValueError: no lines begin with first and, after that, with last.
    """
    before, after = (
        _without_docstring(_source(each)).splitlines() for each in (old, new)
    )
    names = [f"{each.__module__}.{each.__name__}" for each in map(_plain, (old, new))]
    compared = [
        [line if indentation else line.strip() for line in text]
        for text in (before, after)
    ]
    n_lines = max(len(before), len(after))
    changes = difflib.unified_diff(*compared, *names, n=n_lines, lineterm="")
    header, lines = [*itertools.islice(changes, 3)][:2], []
    olds, news = iter(before), iter(after)
    for sign in (change[:1] for change in changes):
        old_line = next(olds) if sign != "+" else ""
        lines.append(sign + (old_line if sign == "-" else next(news)))
    lines = _near_changes(_piece(lines, first, last), context)
    return Code("\n".join([*header, *lines]), "diff")


def _piece(lines: list[str], first: str | None, last: str | None) -> list[str]:
    """The lines of a diff from one that begins with `first` to one with `last`."""
    texts = [line[1:].strip() for line in lines]
    begin, end = 0, len(lines)
    try:
        if first is not None:
            begin = next(i for i in range(end) if texts[i].startswith(first))
        if last is not None:
            end = next(i for i in range(begin + 1, end) if texts[i].startswith(last))
    except StopIteration:
        message = f"old and new must have lines from {first!r} to {last!r}"
        raise ValueError(message) from None
    if last is not None and lines[end - 1] == " ":  # an empty line that stays
        end -= 1
    return lines[begin:end]


def _near_changes(lines: list[str], context: int | None) -> list[str]:
    """The lines of a diff that change, and `context` lines around; ⋮ for the others."""
    if context is None:
        return lines
    changes = [i for i, line in enumerate(lines) if line[0] != " "]
    near = [any(abs(i - j) <= context for j in changes) for i in range(len(lines))]
    shown = []
    for line, is_near in zip(lines, near, strict=True):
        if is_near or shown[-1:] != [" ⋮"]:
            shown.append(line if is_near else " ⋮")
    return shown


def _plain(function: Any) -> Any:
    """The Python function inside kernels, autotuners and other wrappers."""
    for inside in ("fn", "py_func", "__wrapped__"):
        if hasattr(function, inside):
            return _plain(getattr(function, inside))
    return function


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(_plain(function))).rstrip()
    except (TypeError, OSError) as error:
        raise TypeError(
            "function must be a Python function or a kernel whose source can be read, "
            f"got {function!r}"
        ) from error


def _without_docstring(text: str) -> str:
    (function,) = ast.parse(text).body
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return text
    lines = text.splitlines()
    return "\n".join(lines[: first.lineno - 1] + lines[first.end_lineno :])


# ---- tables --------------------------------------------------------------------------


class Table(pd.DataFrame):
    """A data frame of text that is shown whole, under a header of one line.

    pandas itself shortens long tables and long cells, and sets the index's name below
    the header.
    """

    def __repr__(self) -> str:
        return self._under_one_header().to_string()

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return self._under_one_header().to_html(border=0)

    def _under_one_header(self) -> pd.DataFrame:
        return self.rename_axis(index=None, columns=self.index.name)


def table(
    rows: Iterable[Sequence[Any]] | pd.DataFrame,
    header: Sequence[Any] | None = None,
    digits: int | None = None,
) -> Table:
    """A small table for a notebook. Its cells are text, the first column is its index.

    Args:
        rows: sequences of cells, or a data frame, such as `record.pivot` returns. None
            (in a data frame also NaN) is shown as a dash.
        header: the names of the columns, with units; None takes the data frame's.
        digits: decimals of all floats; None gives each column as many as its smallest
            float needs to show two significant digits.

    Raises:
        ValueError: header is missing, or a row has not as many cells as it has.
    """
    if isinstance(rows, pd.DataFrame):
        flat = rows.reset_index()
        header = flat.columns if header is None else header
        rows = flat.astype(object).where(flat.notna(), None).itertuples(index=False)
    if header is None:
        raise ValueError("header must name the columns of rows, got None")
    rows, header = [list(row) for row in rows], [str(name) for name in header]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"each row must have {len(header)} cells, as the header has, got {row}"
            )
    columns = [_texts([row[i] for row in rows], digits) for i in range(len(header))]
    index = pd.Index(columns[0], name=header[0], dtype=object)
    frame = Table(dict(enumerate(columns[1:])), index=index, dtype=object)
    frame.columns = header[1:]
    return frame


def _texts(cells: Sequence[Any], digits: int | None) -> list[str]:
    """The cells of a column as text; its floats have the same number of decimals."""
    if digits is None:
        floats = [cell for cell in cells if isinstance(cell, float | np.floating)]
        digits = max((decimals(value, 2) for value in floats), default=0)
    return [
        "–"
        if cell is None
        else f"{cell:.{digits}f}"
        if isinstance(cell, float | np.floating)
        else str(cell)
        for cell in cells
    ]


def decimals(value: float, significant: int) -> int:
    """The decimals that show so many significant digits of a number."""
    if not value or not math.isfinite(value):
        return 0
    return max(0, significant - 1 - math.floor(math.log10(abs(value))))
