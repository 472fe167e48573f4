"""What the checker says: what is missing, what was raised, what is wrong and why.

`check` finds that a result is wrong. This module looks for a likely cause: it computes
the result that each known mistake would give for the same row, and names the mistake
whose values are what the function returned. It also finds the lines that a learner
still has to write, by reading a function's source before anything runs.
"""

import ast
import functools
import inspect
import math
import textwrap
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from kernels.lab import backend
from kernels.lab.cases import VALUES

Operator = Callable[[torch.Tensor], torch.Tensor]

# ---- what is still to be written -----------------------------------------------------


class Gap(NamedTuple):
    """A line that still holds "...", counted from the `def` of its function as line 1.

    As text it is the end of a sentence.
    """

    function: str
    line: int

    def __str__(self) -> str:
        return f'line {self.line} of {self.function} still has "..." in it'


def unfinished(function: Any) -> Gap | None:
    """Finds the first "..." that the learner still has to replace.

    Reads the source of the function, and of everything that `named` finds from there.
    The "..." of an index, as in x[..., None], is code and doesn't count.

    Returns:
        None if every line is written, or if there is no source to read.
    """
    for each in named(function):
        if (tree := _tree(each)) and (lines := _lines_with_dots(tree)):
            return Gap(each.__name__, min(lines) - tree.lineno + 1)
    return None


def named(thing: Any, seen: set | None = None) -> Iterator[types.FunctionType]:
    """Yields the function inside `thing`, then the functions that it names, and so on.

    Kernels count wherever they are defined, other functions only in the same module.

    Args:
        thing: a function, a kernel, an autotuned kernel or a partial of one.
        seen: the functions that were yielded already.
    """
    function, seen = _plain(thing), set() if seen is None else seen
    if function is None or function in seen:
        return
    seen.add(function)
    yield function
    scope = inspect.getclosurevars(function)
    others = [*scope.globals.values(), *scope.nonlocals.values()]
    others += [*getattr(thing, "args", ()), *getattr(thing, "keywords", {}).values()]
    for other in others:
        inner = _plain(other)
        if inner and (inner is not other or inner.__module__ == function.__module__):
            yield from named(other, seen)


def _plain(thing: Any) -> types.FunctionType | None:
    """The Python function in a kernel, a partial or an autotuned kernel; else None."""
    for _ in range(10):
        if isinstance(thing, types.FunctionType):
            return thing
        thing = getattr(thing, "fn", None) or getattr(thing, "func", None)
    return None


def _tree(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or part of an expression
        return None
    definitions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return next(definitions, None)


def _lines_with_dots(tree: ast.FunctionDef) -> list[int]:
    """The lines that hold "..." outside of an index."""
    indices = [n.slice for n in ast.walk(tree) if isinstance(n, ast.Subscript)]
    allowed = {id(node) for index in indices for node in ast.walk(index)}
    dots = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value is ...)
    return [node.lineno for node in dots if id(node) not in allowed]


# ---- what was raised -----------------------------------------------------------------


def raised(error: Exception, function: Any) -> str:
    """Describes an exception: its type, its message, the line of the learner's code."""
    cause = error
    if not hasattr(error, "src") and error.__cause__ is not None:
        cause = error.__cause__  # the interpreter wraps what a kernel raises
    if hasattr(cause, "src"):
        words, line = _of_compiler(cause)
    else:
        words, line = str(cause), _own_line([error, cause], function)
    words = textwrap.shorten((words.strip().splitlines() or [""])[0], 200).rstrip(".")
    kind = type(cause).__name__
    said = f"{kind}: {words}" if words else kind
    if line and not line.startswith(("raise ", "check.")):
        said += f", in the line `{line}`"
    return said


def _of_compiler(error: Any) -> tuple[str, str]:
    """The message of Triton's CompilationError, and the kernel's line."""
    words = error.error_message or (str(error).strip().splitlines() or [""])[-1]
    if error.node is None or not error.src:
        return words, ""
    return words, error.src.splitlines()[error.node.lineno - 1].strip()


def _own_line(errors: Iterable[Exception], function: Any) -> str:
    """The last line of a traceback that is in the files of the learner's functions."""
    files = {each.__code__.co_filename for each in named(function)}
    frames = [f for e in errors for f in traceback.extract_tb(e.__traceback__)]
    own = [frame.line for frame in frames if frame.filename in files]
    return (own[-1] or "").strip() if own else ""


# ---- what went wrong in a row --------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """A wrong row, and the memory that it was computed from.

    Attributes:
        memory: the buffer around the matrix, float64, with NaN outside the matrix.
        start: the place of the matrix's first element in the buffer.
        strides, size, dtype: of the matrix.
        row: the number of the first wrong row.
        got, expected: this row of the result and of the right result, float64.
        unwritten: for each element of this row of the result, whether the function
            never wrote it.
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
        """The n elements that a kernel with these strides reads for the row."""
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
        """The distance of these values from the result, in units of the error.

        The error is the distance of the right values from the result. Values whose
        absolute sum differs by more than 20 % are infinitely far: zeros are near a row
        that was divided by too much, but don't explain it.
        """
        sizes = [v[v.isfinite()].abs().sum().item() for v in (self.got, values)]
        if not math.isclose(*sizes, rel_tol=0.2, abs_tol=1e-7):
            return math.inf
        return _distance(self.got, values) / _distance(self.got, self.expected)

    def equals(self, values: torch.Tensor) -> bool:
        """Whether the result has these values, up to 16 roundings."""
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
    for said, mistaken in (mistakes or {}).items():
        if e.equals(mistaken(e.matrix)[e.row].reshape(-1).double()):
            return said
    if e.expected.isnan().any():
        return ""
    return _likeliest_reading(e, operator, softmax) or _why_nan(e, softmax)


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


def _why_nan(e: Evidence, softmax: bool) -> str:
    """NaN in every element of the result of a finite row."""
    if not e.values.isfinite().all() or not e.got.isnan().all():
        return ""
    if softmax and (value := _spoiler(e)):
        return (
            f"NaN lies around the matrix, and another row holds {value}: was "
            "something outside of the row read, or have all rows one maximum?"
        )
    return (
        "NaN lies around the matrix: was something outside of the row read? Or "
        "does a line make NaN, as 0/0 does?"
    )


def _spoiler(e: Evidence) -> str:
    """The value of another row that would spoil this row, if all had one maximum."""
    most = e.matrix.max().item()  # NaN, if any element is NaN
    if math.isnan(most):
        return "NaN"
    return f"{most:.5g}" if most - e.values.max().item() > 80 else ""


def _likeliest_reading(e: Evidence, operator: Operator, softmax: bool) -> str:
    """Names the mistake whose result is nearest to what was found, if it is near."""
    n_cols = e.size[1]

    def result_of(values: torch.Tensor) -> torch.Tensor:
        rows = values.expand(e.row + 1, -1)  # a result may depend on the row's number
        result = operator(rows)[e.row].reshape(-1).double()
        return result[:n_cols] if e.got.shape == (n_cols,) else result

    fillings = [each for each in (0.0, -math.inf) if not _spoils(e, each, operator)]
    results = [
        (result_of(values), said) for values, said in _readings(e, fillings, softmax)
    ]
    results += _halfway(e) if softmax else []
    offs = [(e.off(values), said) for values, said in results]
    near = [(off, said) for off, said in offs if off < 0.1]
    return min(near, key=lambda each: each[0])[1] if near else ""


def _spoils(e: Evidence, filling: float, operator: Operator) -> bool:
    """Whether masked elements of this value would make an earlier row wrong.

    The earlier rows are right. So if they would, this value isn't the cause.
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
    """Yields the values that each mistake would read as the row, and its sentence."""
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
    """The sentence for masked elements that took part with this value."""
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
    """Yields the steps on the way to a softmax, and the sentence for stopping there."""
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
        shape, dtype, layout: of the input.
        got, expected: numbers, or words where the fault is not a number.
        row, col: the place of the first wrong element; None where there is no place,
            and col where the result has one value a row.
        kind: the kind of the wrong row, of `cases.VALUES`; empty where row is None.
        cause: the likely cause, in a sentence; empty if none is known.
    """

    function: str
    fault: Fault
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    got: float | str = ""
    expected: float | str = ""
    row: int | None = None
    col: int | None = None
    kind: str = ""
    cause: str = ""

    @property
    def sentence(self) -> str:
        """What is wrong and the likely cause, in lines of up to 80 characters."""
        name, got, expected = self.function, _number(self.got), _number(self.expected)
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        matrix = f"{sized(*self.shape)} matrix ({name_of(self.dtype)}{layout})"
        place = "its value" if self.col is None else f"column {self.col}"
        row = f"Row {self.row} ({self.kind}) of {matrix} is wrong:"
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
    failure: Failure | None = None

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
        """Shows nothing in a notebook after a failure: its sentence is printed."""
        if self.failure is None:
            raise NotImplementedError  # IPython falls back on __repr__


# ---- words ---------------------------------------------------------------------------


def label(function: Any) -> str:
    """The name of a function, or of what a partial or a scripted function calls."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.jit.ScriptFunction):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def sized(n_rows: int, n_cols: int) -> str:
    """A matrix's size with its article, such as "an 8 × 3"."""
    article = "an" if str(n_rows)[0] == "8" or n_rows in (11, 18) else "a"
    return f"{article} {n_rows} × {n_cols}"


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without its module's, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def listed(words: Sequence[str]) -> str:
    """The words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def wrapped(sentence: str) -> str:
    """A sentence in lines of up to 80 characters; no word is cut."""
    return textwrap.fill(" ".join(sentence.split()), 80, break_long_words=False)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"
