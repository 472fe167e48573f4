"""The adversarial checker: tries a function of rows on inputs that break kernels.

A kernel that is right on one random matrix may still read a neighbour's memory, write
past a row's end or lose a NaN. `check.softmax` tries plain inputs first, then odd ones.
It stops at the first input that goes wrong and says what it found, and the likely cause
where `causes` can tell. `check.rows` does the same for any other function of rows.

Values are compared with PyTorch's softmax of the same rounded input, in float64. This
comparison alone would miss much, so three traps are set as well:

- Guard bands. Input and output lie inside larger buffers, which must not change. To
  give the output such a buffer, `torch.empty_like` and its kin are intercepted while
  the function runs. (Code from `torch.compile` allocates by other means, so its output
  has no guard bands.)
- Poison around the input: NaN, which makes every sum NaN that it enters.
- Poison in the output: 54272, until the function overwrites it. All three dtypes hold
  54272 exactly. It is too large for a softmax, and it is wrong even where NaN is right.
  So an element that was never written is always seen.

Weighed: `torch.testing.assert_close` compares values, and NVIDIA's compute-sanitizer
finds accesses outside an allocation, on a GPU. Neither knows which inputs to try.
"""

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lab import accesses, backend, causes, models, verdict
from kernels.lab.cases import LAYOUTS, VALUES, Case, plan
from kernels.lab.causes import Operator
from kernels.lab.guards import GuardAllocations, Guarded, poison_of
from kernels.lab.verdict import Failure, Fault, Summary, label, name_of

__all__ = [
    "LAYOUTS",
    "VALUES",
    "Fault",
    "Summary",
    "rows",
    "shuffles",
    "softmax",
]

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
# The allowed error of any other function, see `tolerance`. In 16 bits it is smaller: 16
# eps of bfloat16 are an eighth of a value, and a quarter where bfloat16 truncates.
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4}
ROUNDINGS_OTHERWISE = 16


def eps_of(dtype: torch.dtype) -> float:
    """The dtype's gap between 1 and the next number; twice that where it truncates.

    Integers are exact: 0.
    """
    if not dtype.is_floating_point:
        return 0.0
    truncates = backend.INTERPRETED and dtype == torch.bfloat16
    return torch.finfo(dtype).eps * (TRUNCATION if truncates else 1)


def is_real(value: Any) -> bool:
    """Whether it is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def in_range(right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The right result in float64, infinite where the dtype has no such number."""
    rounded = right.to(dtype).double()
    return torch.where(rounded.isinf(), rounded, right.double())


def sensitivity(
    operator: Callable, args: Sequence, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """How far the result moves if the arguments change by a rounding.

    Args:
        operator: returns the right result of the arguments.
        args: tensors and numbers; floating-point tensors are changed, in float64.
        right: the right result.
        dtype: the one that the change rounds to.

    Returns:
        For each element of `right`, the largest distance in its row. Elements that are
        infinite or NaN have no distance.
    """
    eps, nudged = eps_of(dtype), list(args)
    for i, arg in enumerate(args):
        if is_real(arg):
            signs = 1 - 2.0 * (torch.arange(arg.numel()).reshape(arg.shape) % 3 % 2)
            nudged[i] = arg * (1 + eps * signs)
    moved = (operator(*nudged).double() - right).abs().nan_to_num(0, 0, 0)
    if moved.ndim < 2 or not moved.numel():
        return moved
    return moved.amax(tuple(range(1, moved.ndim)), keepdim=True).expand_as(moved)


def tolerance(
    right: torch.Tensor, moved: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """How far a result may be from `right`; `moved` is the result's `sensitivity`."""
    eps, roundings = eps_of(dtype), ROUNDINGS.get(dtype, ROUNDINGS_OTHERWISE)
    return roundings * (eps * right.abs().nan_to_num(0, 0, 0) + eps + moved)


def differs(
    found: torch.Tensor, right: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Which elements are wrong: farther away than allowed, or NaN in one of the two."""
    alike = (found == right) | (found.isnan() & right.isnan())
    return ~(alike | ((found - right).abs() <= allowed))


# ---- the check -----------------------------------------------------------------------


def softmax(
    function: Operator,
    *,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    layouts: Iterable[str] = tuple(LAYOUTS),
    max_cols: int | None = None,
) -> Summary:
    """Tries a softmax over the rows of a matrix on more than 150 adversarial inputs.

    Prints the first failure, if there is one, in a sentence that names the likely cause
    where it can be told. Lines that are still "..." are failures, and exceptions of the
    function too: they are not raised. The inputs are the same on every machine.

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
    return _try(function, _SOFTMAX, dtypes, layouts, max_cols)


def rows(
    function: Operator,
    reference: Operator,
    *,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    layouts: Iterable[str] = tuple(LAYOUTS),
    max_cols: int | None = None,
    values: Iterable[str] = tuple(VALUES),
    result: torch.dtype | None = None,
    mistakes: Mapping[str, Operator] | None = None,
) -> Summary:
    """Tries any function of the rows of a matrix, such as RMSNorm or log-softmax.

    As `softmax` does, with the same sentences. Rows have at least one column, and each
    matrix has random numbers of its own. An error may be as large as 16 roundings of x
    and of the result, in 16 bits as 4.

    Args:
        function: takes x (n_rows, n_cols) and returns a new tensor on its device: a
            matrix, or a vector with one value a row.
        reference: computes the right result of x in float64, on the CPU; its first
            dimension is that of x.
        dtypes, layouts, max_cols: as for `softmax`.
        values: the kinds of rows to try, of `VALUES`; `cases.FINITE` are those without
            infinities and NaN.
        result: the dtype that the function returns; None means x's.
        mistakes: for a sentence, a function of x in float64 that makes the mistake. The
            sentence is said if it returns what the function did for the wrong row.

    Returns:
        A summary, which is true if all inputs passed.

    Raises:
        TypeError, ValueError: as for `softmax`.
    """
    wanted = _Wanted(reference, dtype=result, mistakes=mistakes)
    return _try(function, wanted, dtypes, layouts, max_cols, values)


@dataclass(frozen=True)
class _Wanted:
    """What a function should compute, and how near its values must be."""

    operator: Operator
    softmax: bool = False
    dtype: torch.dtype | None = None  # of the result, if it isn't x's
    mistakes: Mapping[str, Operator] | None = None

    def tolerance(
        self, x: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.softmax:
            allowed = TOLERANCES[dtype]
            return eps_of(dtype) * (allowed.relative * right + allowed.absolute)
        return tolerance(right, sensitivity(self.operator, (x,), right, dtype), dtype)


_SOFTMAX = _Wanted(lambda x: torch.softmax(x, dim=1), softmax=True)


def _try(
    function: Operator,
    wanted: _Wanted,
    dtypes: Iterable[torch.dtype],
    layouts: Iterable[str],
    max_cols: int | None,
    values: Iterable[str] = tuple(VALUES),
) -> Summary:
    if not callable(function):
        raise TypeError(
            "function must be a function that takes a matrix, got "
            f"{type(function).__name__}"
        )
    dtypes = _chosen("dtypes", dtypes, backend.DTYPES)
    layouts = _chosen("layouts", layouts, tuple(LAYOUTS))
    if max_cols is not None and max_cols < 1:
        raise ValueError(f"max_cols must be at least 1 or None, got {max_cols}")
    values = _chosen("values", values, tuple(VALUES))
    cases = plan(dtypes, layouts, max_cols, values, seeds=not wanted.softmax)
    if not wanted.softmax:
        cases = [case for case in cases if case.n_cols]
    name = label(function)
    failures = (_failure(function, name, wanted, case) for case in cases)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        failure = _unfinished(function, name, cases[0])
        failure = failure or next(filter(None, failures), None)  # inf - inf warns
    if failure is not None:
        print(failure.sentence)
    most_rows = max(case.n_rows for case in cases)
    most_cols = max(case.n_cols for case in cases)
    return Summary(name, len(cases), dtypes, layouts, most_rows, most_cols, failure)


def _unfinished(function: Operator, name: str, case: Case) -> Failure | None:
    if (gap := verdict.unfinished(function)) is None:
        return None
    return Failure(
        function=name,
        fault=Fault.UNFINISHED,
        shape=(case.n_rows, case.n_cols),
        dtype=case.dtype,
        layout=case.layout,
        got=str(gap),
    )


def _chosen(argument: str, chosen: Iterable, known: tuple) -> tuple:
    chosen = tuple(dict.fromkeys(chosen))
    if not chosen or not set(chosen) <= set(known):
        raise ValueError(f"{argument} must be among {known}, got {chosen}")
    return chosen


def _failure(
    function: Operator, name: str, wanted: _Wanted, case: Case
) -> Failure | None:
    """Calls the function on one input, and returns what went wrong, if anything."""
    fail = functools.partial(
        Failure,
        function=name,
        shape=(case.n_rows, case.n_cols),
        dtype=case.dtype,
        layout=case.layout,
    )
    trap = case.input().arm()
    x = trap.tensor
    with GuardAllocations() as guards:
        try:
            output = function(x)
            if x.is_cuda:
                torch.cuda.synchronize()  # so that a failed launch is reported here
        except (accesses.OutOfBounds, accesses.Race):
            raise  # the judge watches accesses, and has a sentence of its own
        except Exception as error:
            return fail(fault=Fault.RAISED, got=verdict.raised(error, function))
    if not isinstance(output, torch.Tensor):
        return fail(fault=Fault.NO_TENSOR, got=type(output).__name__)
    right = wanted.operator(x.cpu().double())
    like = right.to(x.device, wanted.dtype or x.dtype)
    return (
        _wrong_form(fail, output, like)
        or _wrong_write(fail, trap, guards, output)
        or _wrong_value(fail, wanted, case, trap, output, in_range(right, like.dtype))
    )


_FORM: dict[Fault, Callable[[torch.Tensor], str]] = {
    Fault.SHAPE: lambda t: " × ".join(map(str, t.shape)),
    Fault.DTYPE: lambda t: name_of(t.dtype),
    Fault.DEVICE: lambda t: str(t.device),
}


def _wrong_form(
    fail: Callable[..., Failure], output: torch.Tensor, like: torch.Tensor
) -> Failure | None:
    """Compares the result's shape, dtype and device with those of `like`."""
    for fault, describe in _FORM.items():
        got, expected = describe(output), describe(like)
        if got != expected:
            return fail(fault=fault, got=got, expected=expected)
    return None


def _wrong_write(
    fail: Callable[..., Failure],
    trap: Guarded,
    guards: GuardAllocations,
    output: torch.Tensor,
) -> Failure | None:
    """Finds what was written to the input, and outside of any tensor."""
    modified, stray = trap.damage()
    if modified:
        return fail(fault=Fault.INPUT)
    if stray:
        return fail(fault=Fault.STRAY, got=_stray("the input", stray))
    storage = output.untyped_storage().data_ptr()
    if trap.tensor.numel() and storage == trap.buffer.untyped_storage().data_ptr():
        return fail(fault=Fault.ALIAS)
    for allocated in guards.allocated:
        _, stray = allocated.damage()
        if stray:
            own = storage == allocated.buffer.untyped_storage().data_ptr()
            what = "the output" if own else "another tensor"
            return fail(fault=Fault.STRAY, got=_stray(what, stray))
    return None


def _stray(what: str, offsets: list[int]) -> str:
    more = f" and {len(offsets) - 1} more" if len(offsets) > 1 else ""
    return f"a write at offset {offsets[0]} of {what}{more}"


def _wrong_value(
    fail: Callable[..., Failure],
    wanted: _Wanted,
    case: Case,
    trap: Guarded,
    output: torch.Tensor,
    right: torch.Tensor,
) -> Failure | None:
    """Compares with the right result in float64, and returns the first wrong row."""
    got, dtype = output.detach().cpu().double(), output.dtype
    if not got.numel():
        return None
    one_each = got.ndim == 1  # a vector: one value a row
    allowed = wanted.tolerance(trap.tensor.cpu().double(), right, dtype)
    got, right, allowed = (
        part.reshape(case.n_rows, -1) for part in (got, right, allowed)
    )
    wrong, sums = differs(got, right, allowed), got.sum(dim=1)
    off = torch.zeros(case.n_rows, dtype=torch.bool)
    if wanted.softmax:
        off = (sums - 1).abs() > eps_of(dtype) * TOLERANCES[dtype].total
    bad_rows = off | wrong.any(dim=1)
    if not bad_rows.any():
        return None

    poison = poison_of(dtype)
    # A store at another row's place spoils that row, and leaves its own unwritten.
    lost = bad_rows & (got == poison).all(dim=1)
    first = bad_rows.nonzero()[0].item()
    row = lost.nonzero()[0].item() if lost.any() else first
    unwritten = got[row] == poison
    evidence = causes.Evidence(
        memory=trap.buffer.cpu().double(),
        start=trap.start,
        strides=trap.tensor.stride(),
        size=(case.n_rows, case.n_cols),
        row=row,
        got=got[row],
        expected=right[row],
        dtype=case.dtype,
        unwritten=unwritten,
    )
    known = {"softmax": wanted.softmax, "mistakes": wanted.mistakes}
    cause = causes.cause(evidence, wanted.operator, **known)
    if row > first:
        cause += " Does each store at its own place?"
    fail = functools.partial(fail, row=row, kind=case.kinds[row], cause=cause)

    scaled = differs(got[row] / sums[row], right[row], allowed[row])
    scaled |= right[row].isnan() | unwritten
    if not wrong[row].any() or (off[row] and not scaled.any()):  # a common factor
        return fail(fault=Fault.SUM, got=sums[row].item(), expected=1.0)
    col = wrong[row].nonzero()[0].item()
    found, expected = got[row, col].item(), right[row, col].item()
    if found == poison:
        fault = Fault.UNWRITTEN
    elif math.isnan(found):
        fault = Fault.NAN
    elif math.isnan(expected):
        fault = Fault.NOT_NAN
    else:
        fault = Fault.VALUE
    return fail(
        fault=fault, col=None if one_each else col, got=found, expected=expected
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
