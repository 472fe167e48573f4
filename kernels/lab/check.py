"""The adversarial checker: tries a softmax on inputs that break softmaxes.

A kernel that is right on one random matrix may still read a neighbour's memory, write
past a row's end or lose a NaN. `check.softmax` tries plain inputs first, then odd ones.
It stops at the first input that goes wrong and says what it found.

Values are compared with PyTorch's softmax of the same rounded input, in float64. This
comparison alone would miss much, so three traps are set as well:

- Guard bands. Input and output lie inside larger buffers that must stay as they are. To
  give the output such a buffer, `torch.empty_like` and its kin are intercepted while
  the function runs. (Code from `torch.compile` allocates by other means, so its output
  has no guard bands.)
- Poison around the input: NaN, which spoils every sum that it enters.
- Poison in the output: 54272, until the function overwrites it. All three dtypes hold
  54272 exactly. It is too large for a softmax. And it is wrong even where NaN is right,
  so that an element that nobody wrote is always seen.

Weighed: `torch.testing.assert_close` compares values, and NVIDIA's compute-sanitizer
finds accesses outside an allocation, on a GPU. Neither knows which inputs to try.
"""

import functools
import itertools
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from kernels.lab import backend, models
from kernels.lab.guards import POISON, GuardAllocations, Guarded

Softmax = Callable[[torch.Tensor], torch.Tensor]

# ---- what is tried -------------------------------------------------------------------

COLUMNS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    *(255, 256, 257, 511, 512, 513, 781, 1023, 1024, 1025, 1823),
    *(2047, 2048, 2049, 4095, 4096, 4097),
)
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 781, 1823)

MARGIN = 16  # columns of poison on each side of a sliced row

# For a shape: the strides, and the first element's offset from an aligned address.
LAYOUTS: dict[str, Callable[[int, int], tuple[tuple[int, int], int]]] = {
    "contiguous": lambda n_rows, n_cols: ((max(n_cols, 1), 1), 0),
    "sliced": lambda n_rows, n_cols: ((n_cols + 2 * MARGIN, 1), MARGIN),
    "transposed": lambda n_rows, n_cols: ((1, max(n_rows, 1)), 0),
    "broadcast": lambda n_rows, n_cols: ((0, 1), 0),
    "offset": lambda n_rows, n_cols: ((max(n_cols, 1), 1), 1),
}

INF = float("inf")


def _put(row: torch.Tensor, where: slice, value: float) -> torch.Tensor:
    row[where] = value
    return row


# Kinds of rows, and how to make each from normally distributed numbers.
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda row: row,
    "ramp from 0 to -100": lambda row: torch.linspace(0, -100, len(row)).to(row),
    "constant": lambda row: torch.full_like(row, 3.25),
    "shifted by +1e4": lambda row: 8 * row + 1e4,
    "shifted by -1e4": lambda row: 8 * row - 1e4,
    "around 100": lambda row: 8 * row + 100,  # exp overflows: float32 from 89 up
    "around -1000": lambda row: row - 1000,  # zeros of padding would be the maximum
    "±60000": lambda row: 60000 * row.sign(),  # their difference overflows float16
    "one -inf": lambda row: _put(row, slice(1), -INF),
    "many -inf": lambda row: _put(row, slice(None, None, 2), -INF),
    "only -inf": lambda row: torch.full_like(row, -INF),
    "one +inf": lambda row: _put(row, slice(len(row) // 2, len(row) // 2 + 1), INF),
    "one NaN": lambda row: _put(row, slice(-1, None), float("nan")),
}


@dataclass(frozen=True)
class _Case:
    n_rows: int
    n_cols: int
    dtype: torch.dtype
    layout: str
    kinds: tuple[str, ...]  # one for each row

    def input(self) -> Guarded:
        generator = torch.Generator().manual_seed(10_000 * self.n_rows + self.n_cols)
        values = torch.randn(self.n_rows, self.n_cols, generator=generator)
        for row, kind in zip(values, self.kinds, strict=True):
            row.copy_(VALUES[kind](row))
        size = (self.n_rows, self.n_cols)
        strides, offset = LAYOUTS[self.layout](*size)
        where = {"dtype": self.dtype, "device": backend.DEVICE}
        guarded = Guarded(size, strides, poison=float("nan"), offset=offset, **where)
        first = guarded.tensor[:1] if self.layout == "broadcast" else guarded.tensor
        first.copy_(values[: len(first)])
        return guarded


def _plan(
    dtypes: Sequence[torch.dtype], layouts: Sequence[str], max_cols: int | None
) -> list[_Case]:
    """Returns the inputs to try, from plain to odd.

    Not every combination is tried. Each row costs milliseconds in the interpreter, and
    each new width, dtype or alignment costs a compilation on a GPU. So every dtype and
    layout meets every kind of row at one small shape, and the many shapes take dtypes
    and layouts in turns.
    """
    columns = [n for n in COLUMNS if max_cols is None or n <= max_cols]
    if max_cols is not None:
        columns = sorted({*columns, max_cols})
    width = min(10, columns[-1])
    kind = itertools.cycle(VALUES)
    cases = []

    def add(n_rows: int, n_cols: int, dtype: torch.dtype, layout: str) -> None:
        alike = layout == "broadcast"
        kinds = [next(kind)] * n_rows if alike else itertools.islice(kind, n_rows)
        cases.append(_Case(n_rows, n_cols, dtype, layout, tuple(kinds)))

    for dtype, layout in itertools.product(dtypes, layouts):  # every kind of row
        if layout == "broadcast":
            for _ in VALUES:
                add(2, width, dtype, layout)
        else:
            add(len(VALUES), width, dtype, layout)
        add(0, width, dtype, layout)
    for i, n_cols in enumerate(columns):  # dtypes and layouts in turns
        for turn in (0, 1):
            dtype = dtypes[(i + turn) % len(dtypes)]
            add(2, n_cols, dtype, layouts[(i + 2 * turn) % len(layouts)])
    for n_rows in ROWS:
        add(n_rows, width, dtypes[0], layouts[0])
    return list(dict.fromkeys(cases))


# ---- what is demanded ----------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from the float64 softmax of the same input.

    All in units of eps, the dtype's gap between 1 and the next number.

    Attributes:
        relative: allowed error of a value, as a share of the value.
        absolute: allowed error of a value beside that share.
        total: allowed distance of a row's sum from 1.
    """

    relative: float
    absolute: float
    total: float


# Rounding a number to a dtype errs by at most eps/2, as a share of the number. A result
# in float32 that is rounded once to float16 or bfloat16 errs by no more. Eager lines
# round four times, and the rounding of d = max(x) - x is multiplied by d when the
# exponential is taken: (d + 3) eps/2 in all. That exceeds 4 eps only where d is above
# 5, and there by a share of exp(-d), for which eps/256 is enough. In float32 each step
# of the exponential and of a long sum adds its own rounding: 16 eps. In the sum of a
# row of float16 or bfloat16, errors of both signs cancel, so the sum is held to 2 eps.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(relative=16, absolute=1 / 256, total=16),
    torch.float16: Tolerance(relative=4, absolute=1 / 256, total=2),
    torch.bfloat16: Tolerance(relative=4, absolute=1 / 256, total=2),
}
TRUNCATION = 2  # truncating errs by up to eps, rounding by up to eps/2


def _eps(dtype: torch.dtype) -> float:
    truncates = backend.INTERPRETED and dtype == torch.bfloat16
    return torch.finfo(dtype).eps * (TRUNCATION if truncates else 1)


class Fault(StrEnum):
    """What can be wrong with a softmax."""

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
        row, col: the place of the first wrong element; None where there is no place.
        wrong: the number of wrong elements, or of rows if a row's sum is wrong.
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

    def __str__(self) -> str:
        n_rows, n_cols = self.shape
        lines = [
            f"{self.function}: {self.fault}",
            f"  input     {n_rows} × {n_cols}, {_name(self.dtype)}, {self.layout}",
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
            f"  dtypes   {', '.join(map(_name, self.dtypes))}",
            f"  layouts  {', '.join(self.layouts)}",
            f"  values   {kinds}",
        ]
        if backend.INTERPRETED and torch.bfloat16 in self.dtypes:
            lines.append(
                "The interpreter converts float32 to bfloat16 by truncation, not by "
                "rounding, so bfloat16's tolerance is doubled here."
            )
        return "\n".join(lines)

    __repr__ = __str__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.5g}"


# ---- the check -----------------------------------------------------------------------


def softmax(
    function: Softmax,
    *,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    layouts: Iterable[str] = tuple(LAYOUTS),
    max_cols: int | None = None,
) -> Summary:
    """Tries a softmax over the rows of a matrix on more than 150 adversarial inputs.

    Prints the first failure, if there is one. Exceptions of the function are failures
    too and are not raised. The inputs are the same on every machine.

    Args:
        function: takes x (n_rows, n_cols) and returns its softmax along dim 1 in a new
            tensor of the same shape, dtype and device.
        dtypes: the dtypes of x to try: float32, float16, bfloat16.
        layouts: the layouts of x to try: "contiguous", "sliced" (columns of a wider
            matrix), "transposed", "broadcast" (one row, repeated) and "offset" (at an
            address that is not a multiple of 16 bytes).
        max_cols: the longest row that the function takes; None means any length.

    Returns:
        A summary, which is true if all inputs passed.

    Raises:
        TypeError: the function is not callable.
        ValueError: a dtype or a layout is unknown, there is none, or max_cols is below
            1.
    """
    if not callable(function):
        raise TypeError(
            f"function must be callable on a matrix, got {type(function).__name__}"
        )
    dtypes = _chosen("dtypes", dtypes, backend.DTYPES)
    layouts = _chosen("layouts", layouts, tuple(LAYOUTS))
    if max_cols is not None and max_cols < 1:
        raise ValueError(f"max_cols must be at least 1 or None, got {max_cols}")
    cases = _plan(dtypes, layouts, max_cols)
    name = _name_of(function)
    failures = (_failure(function, name, case) for case in cases)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        failure = next(filter(None, failures), None)  # NumPy warns of inf - inf
    if failure is not None:
        print(failure)
    most_rows = max(case.n_rows for case in cases)
    most_cols = max(case.n_cols for case in cases)
    return Summary(name, len(cases), dtypes, layouts, most_rows, most_cols, failure)


def _chosen(argument: str, chosen: Iterable, known: tuple) -> tuple:
    chosen = tuple(dict.fromkeys(chosen))
    if not chosen or not set(chosen) <= set(known):
        raise ValueError(f"{argument} must be among {known}, got {chosen}")
    return chosen


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, torch.jit.ScriptFunction):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def _failure(function: Softmax, name: str, case: _Case) -> Failure | None:
    """Calls the function on one input, and returns what went wrong, if anything."""
    kinds = tuple(dict.fromkeys(case.kinds))
    fail = functools.partial(
        Failure,
        function=name,
        shape=(case.n_rows, case.n_cols),
        dtype=case.dtype,
        layout=case.layout,
        values=", ".join(kinds) if len(kinds) < 4 else f"{len(kinds)} kinds of rows",
    )
    trap = case.input().arm()
    x = trap.tensor
    with GuardAllocations() as guards:
        try:
            output = function(x)
            if x.is_cuda:
                torch.cuda.synchronize()  # so that a failed launch is reported here
        except Exception as error:
            words = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
            return fail(fault=Fault.RAISED, got=words, expected="a tensor")

    if not isinstance(output, torch.Tensor):
        kind = type(output).__name__
        return fail(fault=Fault.NO_TENSOR, got=kind, expected="a tensor")
    for fault, describe in _ALIKE.items():
        got, expected = describe(output), describe(x)
        if got != expected:
            return fail(fault=fault, got=got, expected=expected)

    modified, stray = trap.damage()
    if modified:
        return fail(fault=Fault.INPUT, got="other values in x", expected="x as it was")
    if stray:
        return fail(fault=Fault.STRAY, **_stray("the input", trap, stray))
    storage = output.untyped_storage().data_ptr()
    if x.numel() and storage == x.untyped_storage().data_ptr():
        return fail(fault=Fault.ALIAS, got="a view of x", expected="memory of its own")
    for allocated in guards.allocated:
        _, stray = allocated.damage()
        if stray:
            own = storage == allocated.buffer.untyped_storage().data_ptr()
            what = "the output" if own else "another tensor"
            return fail(fault=Fault.STRAY, **_stray(what, allocated, stray))

    return _wrong_value(fail, case, x, output)


_ALIKE: dict[Fault, Callable[[torch.Tensor], str]] = {
    Fault.SHAPE: lambda t: " × ".join(map(str, t.shape)),
    Fault.DTYPE: lambda t: _name(t.dtype),
    Fault.DEVICE: lambda t: str(t.device),
}


def _stray(what: str, trap: Guarded, offsets: list[int]) -> dict[str, str]:
    more = f" and {len(offsets) - 1} more" if len(offsets) > 1 else ""
    expected = f"writes to elements only, the last at offset {trap.last}"
    return {
        "got": f"a write at offset {offsets[0]} of {what}{more}",
        "expected": expected if trap.tensor.numel() else "no write, as it is empty",
    }


def _wrong_value(
    fail: Callable[..., Failure], case: _Case, x: torch.Tensor, output: torch.Tensor
) -> Failure | None:
    """Compares with the softmax of x in float64, and returns the first difference."""
    expected = torch.softmax(x.cpu().double(), dim=1)
    got = output.detach().cpu().double()
    allowed, eps = TOLERANCES[case.dtype], _eps(case.dtype)
    tolerance = eps * (allowed.relative * expected + allowed.absolute)

    def differ(values: torch.Tensor) -> torch.Tensor:
        near = (values - expected).abs() <= tolerance
        return ~(near | (values.isnan() & expected.isnan()))

    wrong = differ(got)
    sums = got.sum(dim=1, keepdim=True)
    off = ((sums - 1).abs() > eps * allowed.total) & (case.n_cols > 0)
    spoilt = differ(got / sums) | expected.isnan() | (got == POISON)
    only_scaled = off & ~spoilt.any(dim=1, keepdim=True)
    bad_rows = off.flatten() | wrong.any(dim=1)
    if not bad_rows.any():
        return None
    row = bad_rows.nonzero()[0].item()
    fail = functools.partial(fail, values=case.kinds[row], row=row)
    if only_scaled[row] or not wrong[row].any():
        return fail(
            fault=Fault.SUM,
            got=sums[row].item(),
            expected=1.0,
            tolerance=eps * allowed.total,
            wrong=int(off.sum()),
        )
    col = wrong[row].nonzero()[0].item()
    found, right = got[row, col].item(), expected[row, col].item()
    if found == POISON:
        fault = Fault.UNWRITTEN
    elif math.isnan(found):
        fault = Fault.NAN
    elif math.isnan(right):
        fault = Fault.NOT_NAN
    else:
        fault = Fault.VALUE
    unwritten = f"{POISON:.0f}, which was there before the call"
    return fail(
        fault=fault,
        col=col,
        got=unwritten if fault is Fault.UNWRITTEN else found,
        expected=right,
        tolerance=None if math.isnan(right) else tolerance[row, col].item(),
        wrong=int(wrong.sum()),
    )


# ---- shuffles ------------------------------------------------------------------------


def shuffles(distances: Sequence[int], lanes: int = 32) -> str:
    """Says whether shuffles bring the value of every lane to every lane, exactly once.

    Args:
        distances: of each step, as for `models.exchanged` on a warp of 32 lanes.
        lanes: the first so many lanes hold values; the others hold the identity.

    Raises:
        ValueError: lanes is not from 1 to 32, or a distance leads out of the warp.
    """
    if lanes not in range(1, 33):
        raise ValueError(f"lanes must be from 1 to 32, got {lanes!r}")
    own = [Counter([lane]) for lane in range(32)]
    final = models.exchanged(own, distances, lambda a, b: a + b)[-1]
    for lane, heard in enumerate(final[:lanes]):
        never = [other for other in range(lanes) if not heard[other]]
        twice = [other for other in range(lanes) if heard[other] > 1]
        if never:
            count = f"{len(never)} of the {lanes} lanes"
            return (
                f"Not yet: lane {lane} never hears of {count}, such as lane {never[0]}."
            )
        if twice:
            times = f"{heard[twice[0]]} times of lane {twice[0]}"
            return (
                f"Not yet: lane {lane} hears {times}. A maximum is right, a sum is not."
            )
    return f"Right: each of the {lanes} lanes hears of all {lanes} exactly once."
