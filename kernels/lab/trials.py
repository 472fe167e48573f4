"""What the judge runs in another process: a learner's function, on many inputs.

A trial returns an `Outcome`, with a sentence about the first failure. In Triton's
interpreter every access is watched, so that the sentence can name the kernel's line
where one is outside a tensor. Only `kernels.lab.judge` calls trials; it shares the
comparison of answers.

Weighed: `hypothesis` searches for inputs and shrinks them. A learner's kernel takes
seconds in the interpreter, and the inputs that break kernels are known
(`kernels.lab.cases`). So every learner gets the same few.
"""

import contextlib
import linecache
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from kernels.lab import accesses, backend, check, clock, verdict
from kernels.lab.cases import Case
from kernels.lab.guards import GuardAllocations, poison_of, undefined_without_other
from kernels.lab.verdict import label, listed, name_of


@dataclass(frozen=True)
class Outcome:
    """What a trial found.

    Attributes:
        failure: what went wrong, in a sentence; None if nothing did.
        tried: what was tried, in words.
        broken: whether the process cannot use its GPU any more.
    """

    failure: str | None
    tried: str = ""
    broken: bool = False


def run(
    trial: Callable[..., Outcome], sources: dict[str, list[str]], *args: Any
) -> Any:
    """Runs a trial.

    Args:
        trial: what to run.
        sources: for each file or cell of the learner's functions, its lines. Sentences
            quote them, and this process may have no other way to read them.
        args: of the trial.
    """
    for filename, lines in sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    with (
        warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        undefined_without_other(),
    ):
        outcome = trial(*args)
    if not backend.INTERPRETED:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return Outcome(str(error).splitlines()[0], broken=True)
    return outcome


def _refused(error: accesses.OutOfBounds | accesses.Race, function: Callable) -> str:
    """The sentence for an access that the interpreter did not make."""
    if isinstance(error, accesses.Race):
        said = verdict.raised(error, function).removeprefix("Race: ")
        return (
            f"Two programs touch the same memory, and neither waits. {said}. On a GPU "
            "they run at the same time, in any order. Does the program wait for the "
            "other one, by an atomic or by loads with `volatile=True` in a loop?"
        )
    said = verdict.raised(error, function).removeprefix("OutOfBounds: ")
    said = f"An access is out of bounds. {said}."
    if error.meant is None:
        return f"{said} Is it masked, and is its offset right?"
    return (
        f"{said} An element lies at {error.meant}, too large for a signed integer of "
        "32 bits. Did a product overflow?"
    )


@contextlib.contextmanager
def watched() -> Iterator[accesses.Notes]:
    """While active, the interpreter refuses accesses that are wrong on a GPU.

    Yields:
        Notes, to which the kernels' launches add.
    """
    if not backend.INTERPRETED:
        yield accesses.Notes()
        return
    with accesses.at_the_same_time() as notes, accesses.observed(lambda *_: None):
        yield notes


def _explained(said: str, notes: accesses.Notes) -> str:
    """The sentence about a wrong result, with what the notes tell of its cause."""
    if notes.unset:
        return (
            f"{notes.unset[0]} adds to memory that nobody set: `torch.empty` leaves in "
            "it what was there before. `torch.zeros` would do."
        )
    if notes.early:
        said += f" {notes.early[0]}. On a GPU both run at once. Should it wait?"
    return said


# ---- rows ----------------------------------------------------------------------------


def small_rows(
    function: Callable,
    *,
    once: bool = False,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    layouts: Iterable[str] = ("contiguous",),
    max_cols: int | None = None,
    **_: Any,
) -> Outcome:
    """Runs the function on four small matrices, with every access checked.

    Args:
        function: as for `check.rows`.
        once: whether the kernels may read each value once only.
        dtypes, layouts, max_cols: as for `check.rows`, whose other options are ignored.
    """
    dtype, layouts = next(iter(dtypes)), tuple(layouts)
    layout = "contiguous" if "contiguous" in layouts else layouts[0]
    counts: Counter = Counter()
    for n_rows, n_cols in ((3, 5), (2, 8), (4, 13), (18, 3)):
        n_cols = min(n_cols, max_cols or n_cols)
        x = Case(n_rows, n_cols, dtype, layout, ("normal",) * n_rows).input().tensor
        try:
            with accesses.observed(lambda *moved: counts.update(moved[-1])):
                function(x)
        except accesses.OutOfBounds as error:
            return Outcome(_refused(error, function))
        except Exception:
            return Outcome(None)  # `of_rows` finds it, and says more
        if once and (read := counts["read_values"]) > x.numel():
            matrix = f"{verdict.sized(n_rows, n_cols)} matrix"
            return Outcome(
                f"{label(function)} reads {read} values of {matrix}, which holds "
                f"{x.numel()}. Is a value loaded twice, or do several programs do the "
                "same work?"
            )
        counts.clear()
    return Outcome(None)


def of_rows(function: Callable, reference: Callable | None, **options: Any) -> Outcome:
    """Runs `check.rows`, or `check.softmax` if there is no reference."""
    try:
        with watched() as notes:
            if reference is None:
                summary = check.softmax(function, **options)
            else:
                summary = _of_parts(function, reference, **options)
    except (accesses.OutOfBounds, accesses.Race) as error:
        said = _refused(error, function)
        strided = "between the elements" in said
        return Outcome(f"{said} Does it use the strides of x?" if strided else said)
    if summary.failure is not None:
        return Outcome(_explained(summary.failure.sentence, notes))
    dtypes = [name_of(dtype) for dtype in summary.dtypes]
    return Outcome(
        None,
        f"{summary.cases} matrices of up to {summary.most_rows} rows and "
        f"{summary.most_cols} columns, in {listed(dtypes)}",
    )


def _of_parts(
    function: Callable,
    reference: Callable,
    *,
    mistakes: Mapping[str, Callable] | None = None,
    **options: Any,
) -> check.Summary:
    """Checks a result; if it is a tuple, each part of it, one after the other."""
    probe = reference(torch.zeros(2, 3, dtype=torch.float64))
    if not isinstance(probe, tuple):
        return check.rows(function, reference, mistakes=mistakes, **options)
    for i in range(len(probe)):

        def part(x: torch.Tensor, i: int = i) -> Any:
            result = function(x)
            whole = isinstance(result, tuple | list) and len(result) == len(probe)
            return result[i] if whole else None

        part.__name__ = f"{label(function)}(x)[{i}]"
        known = {said: _part(wrong, i) for said, wrong in (mistakes or {}).items()}
        summary = check.rows(part, _part(reference, i), mistakes=known, **options)
        if summary.failure is not None:
            break
    return summary


def _part(function: Callable, i: int) -> Callable:
    """The function that returns result number i of a function."""
    return lambda *args: _tuple(function(*args))[i]


def _tuple(result: Any) -> tuple:
    if isinstance(result, tuple | list):
        return tuple(result)
    return () if result is None else (result,)


# ---- any operator --------------------------------------------------------------------


def inputs_of(
    inputs: Any, dtypes: Sequence[torch.dtype], seeds: int
) -> Iterator[tuple]:
    """The inputs to try, on the CPU; the same on every machine.

    Args:
        inputs: make(seed), which returns a tensor or a tuple; or a list of cases, each
            a shape or a tuple of shapes, filled with normally distributed numbers.
        dtypes: of the tensors, if inputs is a list.
        seeds: how often to call make, or to fill each case.
    """
    with torch.random.fork_rng(devices=[]):
        if callable(inputs):
            for seed in range(seeds):
                torch.manual_seed(seed)
                made = inputs(seed)
                yield made if isinstance(made, tuple) else (made,)
            return
        for place, case in enumerate(inputs):
            shapes = (case,) if all(isinstance(n, int) for n in case) else case
            for turn in range(seeds):
                torch.manual_seed(1000 * turn + place)
                for dtype in dtypes if not turn else [dtypes[place % len(dtypes)]]:
                    yield tuple(torch.randn(shape).to(dtype) for shape in shapes)


def on_device(value: Any) -> Any:
    """Copies a tensor, strides and all, to where kernels run; returns all else."""
    if not isinstance(value, torch.Tensor) or backend.DEVICE == "cpu":
        return value
    storage = value.untyped_storage().cuda()  # PyTorch 2.11 has no storage.to()
    empty = torch.empty(0, dtype=value.dtype, device=backend.DEVICE)
    view = (storage, value.storage_offset(), value.size(), value.stride())
    return empty.set_(*view)


def describe(args: tuple) -> str:
    """The inputs in words: "3 × 5 and 5 × 7 (float16)"."""
    words, dtypes = [], []
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            words.append(repr(arg))
            continue
        shape = " × ".join(map(str, arg.shape)) or "a scalar"
        shape += " values" if arg.ndim == 1 else ""
        gaps = "" if arg.is_contiguous() else f" with strides {arg.stride()}"
        words.append(shape + gaps)
        dtypes.append(name_of(arg.dtype))
    return f"{listed(words)} ({listed(list(dict.fromkeys(dtypes)))})"


def of_operator(
    function: Callable,
    reference: Callable,
    inputs: Any,
    *,
    dtypes: Sequence[torch.dtype],
    seeds: int,
    mistakes: Mapping[str, Callable] | None = None,
    first: bool = False,
    what: str = "the result",
) -> Outcome:
    """Compares a function of any inputs with its reference.

    Args:
        function: returns a tensor, or a tuple of tensors.
        reference: the same in float64, on the CPU.
        inputs, dtypes, seeds: as for `inputs_of`.
        mistakes: for a sentence, the function that makes the mistake.
        first: whether to try the first input only.
        what: how sentences name a single result.
    """
    forms, names, count = set(), [], 0
    for args in inputs_of(inputs, dtypes, seeds):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        forms.add(tuple((t.shape, t.stride(), t.dtype) for t in tensors))
        names += [name_of(t.dtype) for t in tensors if t.is_floating_point()]
        count += 1
        with watched() as notes:
            got, said = _called(function, args)
        if not said:
            said = _wrong_result(function, reference, args, got, mistakes or {}, what)
            said = said and _explained(said, notes)
        if said or first:
            return Outcome(said)
    if len(forms) < 2:
        raise ValueError(
            "the inputs must have more than one shape, got one for all seeds; let "
            "make(seed) choose the shape by the seed"
        )
    words = f", in {listed(list(dict.fromkeys(names)))}" if names else ""
    return Outcome(None, f"{count} inputs of {len(forms)} shapes and dtypes{words}")


def _called(function: Callable, args: tuple) -> tuple[tuple, str | None]:
    """Calls the function; returns its results, and in a sentence what it did wrong."""
    name, what = label(function), describe(args)
    kept = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    given = [on_device(arg) for arg in args]
    with GuardAllocations() as guards:
        try:
            got = function(*given)
            if not backend.INTERPRETED:
                torch.cuda.synchronize()  # so that a failed launch is reported here
        except (accesses.OutOfBounds, accesses.Race) as error:
            return (), _refused(error, function)
        except Exception as error:
            words = verdict.raised(error, function)
            return (), f"{name} fails with {what}: {words}."
    if any(guard.damage()[1] for guard in guards.allocated):
        said = f"With {what}, {name} writes outside a tensor. Is every store masked?"
        return (), said
    for old, new in zip(kept, given, strict=True):
        if isinstance(old, torch.Tensor) and not _same(old, new.cpu()):
            return (), f"{name} changes its input, {what}."
    return _tuple(got), None


def _wrong_result(
    function: Callable,
    reference: Callable,
    args: tuple,
    got: tuple,
    mistakes: Mapping[str, Callable],
    single: str,
) -> str | None:
    """Compares the results of one input; says what is wrong, if anything."""
    name, what = label(function), describe(args)
    exact = [arg.double() if check.is_real(arg) else arg for arg in args]
    wanted = _tuple(reference(*exact))
    if len(got) != len(wanted) or not all(isinstance(g, torch.Tensor) for g in got):
        kinds = listed([type(g).__name__ for g in got]) or "nothing"
        plural = "a tensor" if len(wanted) == 1 else f"{len(wanted)} tensors"
        return f"{name} returns {kinds} for {what}, not {plural}."
    floats = [arg.dtype for arg in args if check.is_real(arg)]
    for i, (one, right) in enumerate(zip(got, wanted, strict=True)):
        real = right.is_floating_point()
        dtype = floats[0] if floats and real else right.dtype
        if one.shape != right.shape:
            shapes = (" × ".join(map(str, t.shape)) or "one" for t in (one, right))
            return f"{name} returns {{}} values for {what}, not {{}}.".format(*shapes)
        if one.dtype != dtype:
            names = name_of(one.dtype), name_of(dtype)
            return f"{name} returns {names[0]} for {what}, not {names[1]}."
        which = single if len(wanted) == 1 else f"result {i}"
        known = {said: _part(mistaken, i) for said, mistaken in mistakes.items()}
        right = check.in_range(right, dtype)
        said = _wrong_value(which, one, right, _part(reference, i), exact, known)
        if said:
            return f"With {what}, {said}"
    return None


def _wrong_value(
    which: str,
    got: torch.Tensor,
    right: torch.Tensor,
    reference: Callable,
    args: Sequence,
    mistakes: Mapping[str, Callable],
) -> str | None:
    """Names the first wrong element of a result, and a known mistake that makes it."""
    dtype, found = got.dtype, got.detach().cpu().double()
    moved = check.sensitivity(reference, args, right, dtype)

    def differs(other: torch.Tensor) -> torch.Tensor:
        return check.differs(found, other, check.tolerance(other, moved, dtype))

    wrong = differs(right)
    if not wrong.any():
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    where = (
        f"element {place[0] if len(place) == 1 else place}" if place else "the value"
    )
    value = found[place].item()
    is_what = f"is {value:.5g}, not {right[place].item():.5g}"
    if value == poison_of(dtype):
        is_what = "is never written"
    said = f"{where} of {which} {is_what}."
    for sentence, mistaken in mistakes.items():
        other = check.in_range(mistaken(*args), dtype)
        if other.shape == found.shape and not differs(other).any():
            return f"{said} {sentence}"
    return said


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


# ---- formulas ------------------------------------------------------------------------


def of_formula(
    function: Callable,
    reference: Callable,
    cases: Sequence[tuple],
    mistakes: Mapping[str, Callable],
    within: float,
) -> Outcome:
    """Compares what a function returns with the right answers; see `judge.formula`."""
    name = label(function)
    for args in cases:
        call = f"{name}({', '.join(map(_in_a_call, args))})"
        try:
            got = function(*args)
        except Exception as error:
            return Outcome(f"{call} fails: {verdict.raised(error, function)}.")
        want = reference(*args)
        if got is None and want is not None:
            return Outcome(f"{call} returns None. Is its `return` missing?")
        found, right = parts_of(got), parts_of(want)
        if found.keys() != right.keys():
            count = "one value is" if len(right) == 1 else f"{len(right)} values are"
            return Outcome(f"{call} returns {shown(got)}; {count} asked for.")
        wrong = [key for key in right if not alike(found[key], right[key], within)]
        if not wrong:
            continue
        key = wrong[0]
        named = isinstance(key, str) and key
        should = f"should return, for {key}," if named else "should be"
        answers = shown(right[key]), shown(found[key])
        if answers[0] == answers[1]:  # "3" is not 3, and six digits may hide the rest
            answers = repr(right[key]), repr(found[key])
        said = f"{call} {should} {answers[0]}, not {answers[1]}."
        said = f"Value {key} of {said}" if isinstance(key, int) else said
        for sentence, wrongly in mistakes.items():
            mistaken = parts_of(wrongly(*args)).get(key)
            if mistaken is not None and alike(found[key], mistaken, within):
                return Outcome(f"{said} {sentence}")
        return Outcome(said)
    return Outcome(None, f"{len(cases)} calls")


def _in_a_call(arg: Any) -> str:
    """An argument in words: a tensor by its shape and dtype, a function by its name."""
    if isinstance(arg, torch.dtype):
        return name_of(arg)
    if isinstance(arg, torch.Tensor):
        return describe((arg,))
    if isinstance(arg, list):
        return f"[{', '.join(map(_in_a_call, arg))}]"
    return label(arg) if callable(arg) else str(arg)


# ---- answers -------------------------------------------------------------------------


def parts_of(answer: Any) -> dict[Any, Any]:
    """An answer's parts by their names or places; "" is the name of a single one."""
    if hasattr(answer, "to_dict"):  # a Series
        answer = answer.to_dict()
    answer = _of_python(answer)
    if isinstance(answer, Mapping):
        return {name: _of_python(part) for name, part in answer.items()}
    if isinstance(answer, list | tuple):
        return dict(enumerate(map(_of_python, answer)))
    return {"": answer}


def _of_python(answer: Any) -> Any:
    """NumPy's and PyTorch's numbers and lists of numbers as Python's."""
    few = getattr(answer, "ndim", 2) < 2 and hasattr(answer, "tolist")
    return answer.tolist() if few else answer


def alike(a: Any, b: Any, within: float = 0.0) -> bool:
    """Whether two answers are equal; numbers up to `within` as a share of them."""
    if isinstance(a, Real) and isinstance(b, Real):
        return math.isclose(a, b, rel_tol=max(within, 1e-9), abs_tol=0)
    if isinstance(a, str) and isinstance(b, str):
        return a.strip().lower() == b.strip().lower()
    return type(a) is type(b) and a == b


def shown(answer: Any) -> str:
    """An answer in words: six digits of a fraction, commas in a whole number."""
    if isinstance(answer, float):
        return f"{answer:.6g}"
    whole = isinstance(answer, int) and not isinstance(answer, bool)
    return f"{answer:,}" if whole else str(answer)


# ---- bandwidth -----------------------------------------------------------------------


def bandwidth(
    function: Callable, inputs: Any, dtype: torch.dtype
) -> tuple[float, float] | Outcome:
    """The effective bandwidths of the function and of a copy, GB/s, on a GPU."""
    cases = inputs if callable(inputs) else [inputs]
    args = [on_device(arg) for arg in next(inputs_of(cases, [dtype], 1))]
    try:
        results = _tuple(function(*args))
        us = clock.device_us(function, *args)[1]
    except Exception as error:
        words = verdict.raised(error, function)
        return Outcome(f"{label(function)} fails: {words}.")
    tensors = [t for t in (*args, *results) if isinstance(t, torch.Tensor)]
    n_bytes = sum(len(accesses.View(t)) * t.element_size() for t in tensors)
    largest = max(tensors, key=torch.Tensor.nelement)
    x = torch.empty(largest.shape, dtype=largest.dtype, device=backend.DEVICE)
    copy_us = clock.device_us(torch.Tensor.copy_, torch.empty_like(x), x)[1]
    return n_bytes / us / 1e3, 2 * x.nelement() * x.element_size() / copy_us / 1e3
