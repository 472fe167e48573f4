"""What the checker says: what a function still lacks, what it raised, what went wrong.

`check` finds that a result is wrong. This module looks for a likely cause: it computes
what a known mistake would give for the same row, and names the mistake if its values
are what the function returned. It also reads the source of a function for lines that
are still to be written, before anything runs.
"""

import ast
import functools
import inspect
import math
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from kernels.lab import backend
from kernels.lab.cases import VALUES

Operator = Callable[[torch.Tensor], torch.Tensor]

# ---- what is still to be written -----------------------------------------------------


def unfinished(function: Any) -> tuple[str, int] | None:
    """Finds the first "..." that a learner has still to replace.

    It is looked for in the function, in the kernels and in the functions of the same
    module that it names, and so on. The dots of an index, as in x[..., None], are no
    such place.

    Returns:
        The name of the function or kernel, and the line, counted from its `def` as
        line 1. None if every line is written, or if there is no source to read.
    """
    for each in named(function):
        if (tree := _tree(each)) is None:
            continue
        indices = [node.slice for node in ast.walk(tree) if _is_index(node)]
        allowed = {id(node) for index in indices for node in ast.walk(index)}
        lines = [
            node.lineno - tree.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node.value is ...
            if id(node) not in allowed
        ]
        if lines:
            return each.__name__, min(lines)
    return None


def _is_index(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript)


def _plain(thing: Any) -> types.FunctionType | None:
    """The Python function in a kernel, a partial or an autotuned kernel; else None."""
    for _ in range(10):
        if isinstance(thing, types.FunctionType):
            return thing
        thing = getattr(thing, "fn", None) or getattr(thing, "func", None)
    return None


def named(thing: Any, seen: set | None = None) -> Iterator[types.FunctionType]:
    """The function in a thing, then those that it names; kernels from any module."""
    function, seen = _plain(thing), set() if seen is None else seen
    if function is None or function in seen:
        return
    seen.add(function)
    yield function
    known = function.__globals__ | inspect.getclosurevars(function).nonlocals
    names = [known[name] for name in function.__code__.co_names if name in known]
    names += inspect.getclosurevars(function).nonlocals.values()
    names += [*getattr(thing, "args", ()), *getattr(thing, "keywords", {}).values()]
    for other in names:
        inner = _plain(other)
        if inner and (inner is not other or inner.__module__ == function.__module__):
            yield from named(other, seen)


def _tree(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):  # no source, or part of an expression
        return None
    definitions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return next(definitions, None)


# ---- what was raised -----------------------------------------------------------------


def raised(error: Exception, function: Any) -> str:
    """Describes an exception: its type, the line of the learner's code, its message."""
    cause, line = error, None
    if not hasattr(error, "src") and error.__cause__ is not None:
        cause = error.__cause__  # the interpreter wraps what a kernel raises
    kind = type(cause).__name__
    if hasattr(cause, "src"):  # a CompilationError
        words = cause.error_message or _last_line(str(cause))
        if cause.node is not None and cause.src:
            line = cause.src.splitlines()[cause.node.lineno - 1]
    else:
        words = str(cause)
        files = {each.__code__.co_filename for each in named(function)}
        frames = traceback.extract_tb(error.__traceback__)
        frames += traceback.extract_tb(cause.__traceback__)
        own = [frame.line for frame in frames if frame.filename in files]
        line = own[-1] if own else None
    words = textwrap.shorten((words.strip().splitlines() or [""])[0], 200).rstrip(".")
    said = f"{kind}: {words}" if words else kind
    own_line = line and line.strip()
    if own_line and not own_line.startswith(("raise ", "check.")):
        said += f", in the line `{own_line}`"
    return said


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


# ---- what went wrong in a row --------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """A wrong row, and the memory that it was computed from.

    Attributes:
        memory: the buffer that the matrix lies in, NaN around it, float64.
        start: the place of the matrix's first element.
        strides: of the matrix.
        size: of the matrix.
        row: the number of the first wrong row.
        got, expected: this row of the result, and of the right result, float64.
        dtype: of the matrix.
        unwritten: which of the row's elements were never written.
    """

    memory: torch.Tensor
    start: int
    strides: tuple[int, int]
    size: tuple[int, int]
    row: int
    got: torch.Tensor
    expected: torch.Tensor
    dtype: torch.dtype
    unwritten: torch.Tensor

    def at(self, row_stride: int, col_stride: int, n: int) -> torch.Tensor:
        """The n elements that a kernel with these strides takes for the row."""
        places = self.start + self.row * row_stride + torch.arange(n) * col_stride
        inside = (places >= 0) & (places < len(self.memory))
        values = self.memory[places.clamp(0, len(self.memory) - 1)]
        return torch.where(inside, values, math.nan)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The elements of the row."""
        return self.at(*self.strides, self.size[1])

    @functools.cached_property
    def matrix(self) -> torch.Tensor:
        """The whole matrix."""
        return self.memory.as_strided(self.size, self.strides, self.start)

    @functools.cached_property
    def block(self) -> int:
        """The row's length, rounded up to a power of two."""
        return 1 << max(self.size[1] - 1, 0).bit_length()

    def off(self, values: torch.Tensor) -> float:
        """How far these values are from what was found; what is right has 1.

        What is of another size is infinitely far, even if it's nearer than what is
        right: zeros are no reading of a row that was divided by too much.
        """
        sizes = [v[v.isfinite()].abs().sum().item() for v in (self.got, values)]
        if not math.isclose(*sizes, rel_tol=0.2, abs_tol=1e-7):
            return math.inf
        return _distance(self.got, values) / _distance(self.got, self.expected)

    def equals(self, values: torch.Tensor) -> bool:
        """Whether these values are what was found, but for a few roundings."""
        size = values.abs().nan_to_num(0, 0, 0).sum().item()
        return _distance(self.got, values) <= 16 * torch.finfo(self.dtype).eps * size


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    difference = torch.where((a == b) | a.isnan(), 0.0, (a - b).abs())
    return difference.max().item() if difference.numel() else 0.0


def cause(
    evidence: Evidence,
    operator: Operator,
    *,
    softmax: bool,
    mistakes: Mapping[str, Operator] | None = None,
) -> str:
    """Names the likely cause of a wrong row in a sentence; empty if none is known.

    Args:
        evidence: the wrong row.
        operator: computes the right result of a matrix.
        softmax: whether that is a softmax.
        mistakes: for a sentence, the operator that makes the mistake.
    """
    e = evidence
    if e.unwritten.any():
        return _why_unwritten(e)
    if softmax and (said := _why_unshifted(e)):
        return said
    n_cols = e.size[1]

    def of(values: torch.Tensor) -> torch.Tensor:
        rows = values.expand(e.row + 1, -1)  # a result may depend on the row's number
        result = operator(rows)[e.row].reshape(-1).double()
        return result[:n_cols] if e.got.shape == (n_cols,) else result

    for said, mistaken in (mistakes or {}).items():
        if e.equals(mistaken(e.matrix)[e.row].reshape(-1).double()):
            return said
    if e.expected.isnan().any():
        return ""
    fillings = [each for each in (0.0, -math.inf) if not _spoils(e, each, operator)]
    readings = [
        (e.off(of(values)), said) for values, said in _readings(e, fillings, softmax)
    ]
    readings += [(e.off(values), said) for values, said in _halfway(e) if softmax]
    near = [(off, said) for off, said in readings if off < 0.1]
    if near:
        return min(near, key=lambda each: each[0])[1]
    if e.values.isfinite().all() and e.got.isnan().all():
        if softmax and (value := _spoiler(e)):
            return (
                f"NaN lies around the matrix, and another row holds {value}: was "
                "something outside of the row read, or have all rows one maximum?"
            )
        return (
            "NaN lies around the matrix: was something outside of the row read? Or "
            "does a line make NaN, as 0/0 does?"
        )
    return ""


def _why_unwritten(e: Evidence) -> str:
    if e.unwritten.all():
        return "Is there a program for every row?"
    first = int(e.unwritten.nonzero()[0])
    if e.unwritten[first:].all() and first & (first - 1) == 0 and first > 1:
        return (
            f"All columns from {first} on are lost. Does the block have {first} "
            f"elements, fewer than the row's {len(e.unwritten)}?"
        )
    return "Does the mask of the store leave out too much?"


def _why_unshifted(e: Evidence) -> str:
    """Exponentials overflow above the dtype's range, or are all 0 far below 0."""
    if not e.values.isfinite().all() or not e.got.isnan().any():
        return ""
    most = e.values.max().item()
    if most > (11 if e.dtype == torch.float16 else 88):
        return (
            f"The exponential of {most:.5g} is infinite, and inf/inf is NaN. Was the "
            "row's maximum subtracted before the exponential?"
        )
    if most < -80:
        return (
            "All exponentials of the row are 0, and 0/0 is NaN. The largest value is "
            f"{most:.5g}: was a larger number than that subtracted? A masked element "
            "that holds 0 may have won the maximum."
        )
    return ""


def _spoiler(e: Evidence) -> str:
    """What another row holds that would spoil this row, if all had one maximum."""
    rows, cols = (torch.arange(n) for n in e.size)
    row_stride, col_stride = e.strides
    places = e.start + rows[:, None] * row_stride + cols * col_stride
    most = e.memory[places].max().item()  # NaN, if any element is NaN
    if math.isnan(most):
        return "NaN"
    return f"{most:.5g}" if most - e.values.max().item() > 80 else ""


def _spoils(e: Evidence, filling: float, operator: Operator) -> bool:
    """Whether masked elements of this value would spoil an earlier row, too.

    The earlier rows are right, so the masked elements don't hold this value.
    """
    n_cols, before = e.size[1], e.matrix[: e.row]
    if not e.row:
        return False
    padded = torch.nn.functional.pad(before, (0, e.block - n_cols), value=filling)
    right, found = (operator(x).reshape(e.row, -1).double() for x in (before, padded))
    found = found[:, : right.shape[1]]
    spoilt = (found - right).abs() > 0.1 * right.abs().amax(1, keepdim=True)
    return bool((spoilt | (found.isnan() & ~right.isnan())).any())


def _readings(
    e: Evidence, fillings: Iterable[float], softmax: bool
) -> Iterator[tuple[torch.Tensor, str]]:
    """The values that a mistake would take for the row, and what to say of it."""
    n_cols = e.size[1]
    row_stride, col_stride = e.strides
    if e.row and row_stride != n_cols:
        yield (
            e.at(n_cols, col_stride, n_cols),
            "The kernel took the elements that follow the row before. From a row to "
            f"the next it is x.stride(0) elements: {row_stride} here, not {n_cols}.",
        )
    if col_stride != 1:
        for rows_apart in {row_stride, n_cols}:
            yield (
                e.at(rows_apart, 1, n_cols),
                "The kernel took neighbours in memory. From a column to the next it is "
                f"x.stride(1) elements: {col_stride} here, not 1.",
            )
    if e.block == n_cols:
        return
    yield (
        e.at(*e.strides, e.block),
        f"The {e.block - n_cols} elements after the row took part. A block of "
        f"{e.block} is longer than the row: does the load have a mask?",
    )
    for filling in fillings:
        padded = torch.nn.functional.pad(e.values, (0, e.block - n_cols), value=filling)
        yield padded, _masked(e, filling, softmax)


def _masked(e: Evidence, filling: float, softmax: bool) -> str:
    count = e.block - e.size[1]
    elements = "A masked element" if count == 1 else "Masked elements"
    if softmax and filling == 0:
        if e.values.max() < 0:
            return (
                f"{elements} took part in the maximum and in the sum, as 0. Which "
                "value never wins a maximum?"
            )
        return (
            f"{elements} took part in the sum: they held 0, and exp(0 - maximum) is "
            "above 0. Which value has the exponential 0?"
        )
    return (
        f"This is the result of a row of {e.block} elements, of which the last "
        f"{count} hold {filling:g}. {elements} took part. Which value changes nothing?"
    )


def _halfway(e: Evidence) -> Iterator[tuple[torch.Tensor, str]]:
    """What the row holds on the way to its softmax."""
    shifted = e.values - e.values.max()
    yield shifted.exp(), "That is exp(x - maximum). Was it divided by the row's sum?"
    yield shifted, "That is x - maximum. Was the exponential taken?"


# ---- what is said --------------------------------------------------------------------


class Fault(StrEnum):
    """What can be wrong with a function."""

    UNFINISHED = "still has lines to be written"
    RAISED = "raised an exception"
    NO_TENSOR = "did not return a tensor"
    SHAPE = "wrong shape"
    DTYPE = "wrong dtype"
    DEVICE = "wrong device"
    INPUT = "modified its input"
    ALIAS = "returned memory of its input"
    STRAY = "wrote outside a tensor"
    UNWRITTEN = "left output unwritten"
    NAN = "NaN where a number is right"
    NOT_NAN = "a number where NaN is right"
    VALUE = "wrong value"
    SUM = "row does not sum to 1"


@dataclass(frozen=True)
class Failure:
    """The first case that went wrong.

    Attributes:
        function: the name of the function that was tried.
        fault: what is wrong.
        shape, dtype, layout: what the input was like.
        values: the kind of the failing row, or the kinds of the input's rows.
        got, expected: numbers, or words where the fault is not a number.
        tolerance: how far got may be from expected; None if no distance is allowed.
        row, col: the place of the first wrong element; None where there is no place,
            and col where the result has one value a row.
        wrong: the number of wrong elements, or of rows if a row's sum is wrong.
        cause: the likely cause, in a sentence; empty if none is known.

    As text it is a report of several lines. `sentence` is what the checker prints.
    """

    function: str
    fault: Fault
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    values: str
    got: float | str
    expected: float | str
    tolerance: float | None = None
    row: int | None = None
    col: int | None = None
    wrong: int = 0
    cause: str = ""

    @property
    def sentence(self) -> str:
        """What is wrong and the likely cause, in lines of up to 80 characters."""
        name, got, expected = self.function, _number(self.got), _number(self.expected)
        n_rows, n_cols = self.shape
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        matrix = f"{sized(n_rows, n_cols)} matrix ({name_of(self.dtype)}{layout})"
        place = "its value" if self.col is None else f"column {self.col}"
        row = f"Row {self.row} ({self.values}) of {matrix} is wrong:"
        said = {
            Fault.UNFINISHED: f"Not yet: {got}.",
            Fault.RAISED: f"{name} fails with {matrix}: {got}.",
            Fault.NO_TENSOR: f"{name} returns {got} for {matrix}, not a tensor.",
            Fault.SHAPE: f"{name} returns {got} values for {matrix}, not {expected}.",
            Fault.DTYPE: f"{name} returns {got} for {matrix}, not {expected}.",
            Fault.DEVICE: f"{name} returns a tensor on {got} for one on {expected}.",
            Fault.INPUT: f"{name} changes its input, {matrix}.",
            Fault.ALIAS: f"{name} returns the memory of its input, {matrix}.",
            Fault.STRAY: f"With {matrix}, {name} makes {got}, which is outside. "
            "Does every store have a mask?",
            Fault.UNWRITTEN: f"{row} {place} was never written.",
            Fault.SUM: f"{row} its values sum to {got}, not to {expected}.",
        }.get(self.fault, f"{row} {place} is {got}, not {expected}.")
        return textwrap.fill(f"{said} {self.cause}".strip(), 80)

    def __str__(self) -> str:
        n_rows, n_cols = self.shape
        lines = [
            f"{self.function}: {self.fault}",
            f"  input     {n_rows} × {n_cols}, {name_of(self.dtype)}, {self.layout}",
            f"  values    {self.values}",
        ]
        if self.row is not None:
            column, parts = "", n_rows
            if self.col is not None:
                column, parts = f", column {self.col}", n_rows * n_cols
            place = f"row {self.row}{column}"
            lines.append(f"  first at  {place}: {self.wrong} of {parts} wrong")
        lines.append(f"  got       {_number(self.got)}")
        lines.append(f"  expected  {_number(self.expected)}")
        if self.tolerance is not None:
            lines[-1] += f" ± {self.tolerance:.2g}"
        return "\n".join(lines)


@dataclass(frozen=True)
class Summary:
    """What was tried. It is true if all inputs passed.

    Attributes:
        function: the name of the function that was tried.
        cases: the number of inputs, those after a failure included.
        dtypes, layouts: of the inputs.
        most_rows, most_cols: the largest sizes of the inputs.
        failure: the first failure; None if all inputs passed.
    """

    function: str
    cases: int
    dtypes: tuple[torch.dtype, ...]
    layouts: tuple[str, ...]
    most_rows: int
    most_cols: int
    failure: Failure | None = field(default=None)

    def __bool__(self) -> bool:
        return self.failure is None

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.function} fails: {self.failure.fault}"
        kinds = textwrap.fill(", ".join(VALUES), 76).replace("\n", "\n" + 11 * " ")
        lines = [
            f"{self.function} passes all {self.cases} cases",
            f"  shapes   0 to {self.most_rows} rows, 0 to {self.most_cols} columns",
            f"  dtypes   {', '.join(map(name_of, self.dtypes))}",
            f"  layouts  {', '.join(self.layouts)}",
            f"  values   {kinds}",
        ]
        if backend.INTERPRETED and torch.bfloat16 in self.dtypes:
            said = (
                "The interpreter converts float32 to bfloat16 by truncation, not by "
                "rounding, so bfloat16's tolerance is doubled here."
            )
            lines.append(textwrap.fill(said, 80))
        return "\n".join(lines)

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        """Shows nothing in a notebook after a failure, which is printed already."""
        if self.failure is None:
            raise NotImplementedError  # IPython falls back on __repr__


def sized(n_rows: int, n_cols: int) -> str:
    """A matrix's size with its article, such as "an 8 × 3"."""
    article = "an" if str(n_rows)[0] == "8" or n_rows in (11, 18) else "a"
    return f"{article} {n_rows} × {n_cols}"


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, without its module's."""
    return str(dtype).removeprefix("torch.")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
