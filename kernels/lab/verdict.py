"""What the checker and the judge say, in sentences.

`unfinished` finds the lines that a learner still has to write, before anything runs.
`raised` describes an exception. A `Failure` says what is wrong with a result.
"""

import ast
import dis
import functools
import inspect
import textwrap
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.lab import backend
from kernels.lab.cases import VALUES

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
    # `inspect.getclosurevars` also takes the names of attributes: those of x.argmax.
    names = [
        step.argval
        for step in dis.get_instructions(function)
        if step.opname == "LOAD_GLOBAL"
    ]
    scope = function.__globals__
    others = [scope[name] for name in dict.fromkeys(names) if name in scope]
    others += inspect.getclosurevars(function).nonlocals.values()
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
    if words == "object of type 'int' has no len()" and _by_triton(cause):
        said += ". The grid is a tuple: `kernel[(n,)](…)`"
    if "get_bf16" in words:
        said += ". Before 3.9, Triton's interpreter lacks numbers in bfloat16. "
        said += "Convert what you load: `.to(tl.float32)`"
    return said


def _by_triton(error: Exception) -> bool:
    """Whether a line of Triton raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "triton" in Path(frames[-1].filename).parts


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


# ---- what is wrong -------------------------------------------------------------------


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
        name, (got, expected) = self.function, told_apart(self.got, self.expected)
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


def told_apart(got: float | str, expected: float | str) -> tuple[str, str]:
    """Two numbers in as few digits, five or more, as show that they differ."""
    for digits in range(5, 18):
        texts = tuple(
            value if isinstance(value, str) else f"{value:.{digits}g}"
            for value in (got, expected)
        )
        if texts[0] != texts[1]:
            break
    return texts
