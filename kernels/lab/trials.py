"""What the judge runs in another process: a learner's function, on many inputs.

`of_rows` and `of_operator` return a sentence about the first failure, or None. Both can
watch every access of Triton's interpreter, so that one outside a tensor is told by the
kernel's line. `kernels.lab.judge` calls them, and nothing else does.

Weighed: `hypothesis` searches for inputs and shrinks them. A learner's kernel takes
seconds in the interpreter, and the inputs that break kernels are known
(`kernels.lab.cases`): so every learner gets the same few.
"""

import contextlib
import io
import linecache
import math
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from kernels.lab import accesses, backend, check, clock, verdict
from kernels.lab.cases import VALUES, Case
from kernels.lab.guards import INTEGER_POISON, POISON, GuardAllocations
from kernels.lab.verdict import name_of

SEEDS = 6


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
    """Runs a trial, with the source of a notebook's functions at hand for sentences."""
    for filename, lines in sources.items():
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        outcome = trial(*args)
    if not backend.INTERPRETED:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return Outcome(str(error).splitlines()[0], broken=True)
    return outcome


def _out_of_bounds(error: Exception, function: Callable) -> str:
    words = verdict.raised(error, function).removeprefix("OutOfBounds: ")
    return (
        f"An access is out of bounds. {words}. Is it masked, and is its offset right?"
    )


# ---- rows ----------------------------------------------------------------------------


def small_rows(function: Callable, options: dict[str, Any]) -> Outcome:
    """Runs the function on three small matrices, with every access checked."""
    layouts, most = options.get("layouts", ("contiguous",)), options.get("max_cols")
    dtype = next(iter(options.get("dtypes", backend.DTYPES)))
    layout = "contiguous" if "contiguous" in layouts else next(iter(layouts))
    name, once = check.label(function), options.get("once", False)
    counts: Counter = Counter()
    for n_rows, n_cols in ((3, 5), (2, 8), (4, 13), (18, 3)):
        n_cols = min(n_cols, most or n_cols)
        x = Case(n_rows, n_cols, dtype, layout, ("normal",) * n_rows).input().tensor
        try:
            with accesses.observed(lambda *moved: counts.update(moved[-1])):
                function(x)
        except accesses.OutOfBounds as error:
            return Outcome(_out_of_bounds(error, function))
        except Exception:
            return Outcome(None)  # the whole trial finds it, and says more
        if once and (read := counts["read_values"]) > x.numel():
            return Outcome(
                f"{name} reads {read} values of {verdict.sized(n_rows, n_cols)} "
                f"matrix, which holds {x.numel()}. Is a value loaded twice, or do "
                "several programs do the same work?"
            )
        counts.clear()
    return Outcome(None)


def of_rows(
    function: Callable, reference: Callable | None, options: dict[str, Any]
) -> Outcome:
    """Runs `check.rows`, or `check.softmax` if there is no reference."""
    options = {key: value for key, value in options.items() if key != "once"}
    with contextlib.redirect_stdout(io.StringIO()):
        if reference is None:
            summary = check.softmax(function, **options)
        else:
            summary = _of_parts(function, reference, options)
    if summary.failure is not None:
        return Outcome(summary.failure.sentence)
    dtypes = [name_of(dtype) for dtype in summary.dtypes]
    return Outcome(
        None,
        f"{summary.cases} matrices of up to {summary.most_rows} rows and "
        f"{summary.most_cols} columns, in {listed(dtypes)}",
    )


def _of_parts(
    function: Callable, reference: Callable, options: dict[str, Any]
) -> check.Summary:
    """Checks each part of a result that is a tuple, one after the other."""
    probe = reference(torch.zeros(2, 3, dtype=torch.float64))
    if not isinstance(probe, tuple):
        return check.rows(function, reference, **options)
    mistakes = options.get("mistakes") or {}
    for i in range(len(probe)):

        def part(x: torch.Tensor, i: int = i) -> Any:
            result = function(x)
            whole = isinstance(result, tuple | list) and len(result) == len(probe)
            return result[i] if whole else None

        part.__name__ = f"{check.label(function)}(x)[{i}]"
        known = {said: _part(wrong, i) for said, wrong in mistakes.items()}
        own = options | {"mistakes": known}
        summary = check.rows(part, _part(reference, i), **own)
        if summary.failure is not None:
            return summary
    return summary


def _part(function: Callable, i: int) -> Callable:
    return lambda x: function(x)[i]


def listed(words: Sequence[str]) -> str:
    """The words with commas, and "and" before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


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
    """A tensor with its strides, in memory where kernels run; all else as it is."""
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
    options: dict[str, Any],
    first: bool = False,
) -> Outcome:
    """Compares a function of any inputs with its reference.

    Args:
        function: returns a tensor, or a tuple of tensors.
        reference: the same in float64, on the CPU.
        inputs: as for `inputs_of`.
        options: "dtypes", "seeds", "result" (the results' dtype; None means that of the
            first input of real numbers), "roundings" (how many roundings of the inputs
            and of the result an error may be as large as), "mistakes" (for a sentence,
            the function that makes the mistake).
        first: whether to try the first input only.
    """
    name, forms, dtypes, count = check.label(function), set(), [], 0
    for args in inputs_of(inputs, options["dtypes"], options["seeds"]):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        forms.add(tuple((t.shape, t.stride(), t.dtype) for t in tensors))
        dtypes += [name_of(t.dtype) for t in tensors if t.is_floating_point()]
        count += 1
        said = _compared(function, name, reference, args, options)
        if said or first:
            return Outcome(said)
    if len(forms) < 2:
        raise ValueError(
            "the inputs must have more than one shape, got one for all seeds; let "
            "make(seed) choose the shape by the seed"
        )
    words = f", in {listed(list(dict.fromkeys(dtypes)))}" if dtypes else ""
    return Outcome(None, f"{count} inputs of {len(forms)} shapes and dtypes{words}")


def _compared(
    function: Callable,
    name: str,
    reference: Callable,
    args: tuple,
    options: dict[str, Any],
) -> str | None:
    """Calls the function on one input; says what went wrong, if anything."""
    what = describe(args)
    wanted = _tuple(reference(*map(_exact, args)))
    floats = [t.dtype for t in args if _is_real(t)]
    kept = [t.clone() if isinstance(t, torch.Tensor) else t for t in args]
    given = [on_device(arg) for arg in args]
    watch = accesses.observed(lambda *_: None)
    watch = watch if backend.INTERPRETED else contextlib.nullcontext()
    with watch, GuardAllocations() as guards:
        try:
            got = function(*given)
            if not backend.INTERPRETED:
                torch.cuda.synchronize()
        except accesses.OutOfBounds as error:
            return _out_of_bounds(error, function)
        except Exception as error:
            return f"{name} fails with {what}: {verdict.raised(error, function)}."
    if any(guard.damage()[1] for guard in guards.allocated):
        return f"With {what}, {name} writes outside a tensor. Is every store masked?"
    for old, new in zip(kept, given, strict=True):
        if isinstance(old, torch.Tensor) and not _same(old, new.cpu()):
            return f"{name} changes its input, {what}."
    got = _tuple(got)
    if len(got) != len(wanted) or not all(isinstance(g, torch.Tensor) for g in got):
        kinds = listed([type(g).__name__ for g in got]) or "nothing"
        plural = "a tensor" if len(wanted) == 1 else f"{len(wanted)} tensors"
        return f"{name} returns {kinds} for {what}, not {plural}."
    for i, (one, right) in enumerate(zip(got, wanted, strict=True)):
        which = "the result" if len(wanted) == 1 else f"result {i}"
        dtype = options["result"] or (floats[0] if floats else right.dtype)
        dtype = dtype if right.is_floating_point() else right.dtype
        if one.shape != right.shape:
            shapes = (" × ".join(map(str, t.shape)) or "one" for t in (one, right))
            return f"{name} returns {{}} values for {what}, not {{}}.".format(*shapes)
        if one.dtype != dtype:
            names = name_of(one.dtype), name_of(dtype)
            return f"{name} returns {names[0]} for {what}, not {names[1]}."
        moved = _sensitivity(reference, args, i, right, dtype) if floats else 0
        said = _wrong(one, right, moved, dtype, options["roundings"])
        if said:
            words = [f"With {what}, {said[0]} of {which} is {said[1]}."]
            for sentence, mistaken in (options.get("mistakes") or {}).items():
                other = _tuple(mistaken(*map(_exact, args)))[i]
                alike = other.shape == one.shape
                if alike and not _wrong(one, other, moved, dtype, options["roundings"]):
                    words.append(sentence)
                    break
            return " ".join(words)
    return None


def _wrong(
    got: torch.Tensor,
    right: torch.Tensor,
    moved: Any,
    dtype: torch.dtype,
    roundings: float,
) -> tuple[str, str] | None:
    """The first wrong element's place, and its value; None if all are right."""
    found, right = got.detach().cpu().double(), right.double()
    rounded = right.to(dtype).double()
    right = torch.where(rounded.isinf(), rounded, right)
    tolerance = 0.0
    if dtype.is_floating_point:
        eps = check.eps_of(dtype)
        tolerance = roundings * (eps * right.abs().nan_to_num(0, 0, 0) + eps + moved)
    alike = (found == right) | (found.isnan() & right.isnan())
    bad = ~(alike | ((found - right).abs() <= tolerance))
    if not bad.any():
        return None
    place = tuple(bad.nonzero()[0].tolist())
    where = (
        f"element {place[0] if len(place) == 1 else place}" if place else "the value"
    )
    value, wanted = found[place].item(), right[place].item()
    if value == (POISON if dtype.is_floating_point else INTEGER_POISON):
        return where, "never written"
    return where, f"{value:.5g}, not {wanted:.5g}"


def _sensitivity(
    reference: Callable, args: tuple, i: int, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """How far the result moves, in each row, if the inputs are rounded."""
    eps = check.eps_of(dtype)
    nudged = [_exact(arg) for arg in args]
    for k, arg in enumerate(nudged):
        if _is_real(arg):
            signs = 1 - 2.0 * (torch.arange(arg.numel()).reshape(arg.shape) % 3 % 2)
            nudged[k] = arg * (1 + eps * signs)
    moved = _tuple(reference(*nudged))[i].double() - right.double()
    return check.row_maximum(moved.abs().nan_to_num(0, 0, 0))


def _tuple(result: Any) -> tuple:
    if isinstance(result, tuple | list):
        return tuple(result)
    return () if result is None else (result,)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _exact(value: Any) -> Any:
    return value.double() if _is_real(value) else value


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
    """Compares what a function returns with the right answers, call by call.

    Args: as for `judge.formula`.
    """
    name = check.label(function)
    for args in cases:
        words = [name_of(a) if isinstance(a, torch.dtype) else str(a) for a in args]
        call = f"{name}({', '.join(words)})"
        try:
            got = function(*args)
        except Exception as error:
            return Outcome(f"{call} fails: {verdict.raised(error, function)}.")
        want = reference(*args)
        found, right = parts_of(got), parts_of(want)
        if found.keys() != right.keys():
            count = "one value is" if len(right) == 1 else f"{len(right)} values are"
            return Outcome(f"{call} returns {shown(got)}; {count} asked for.")
        wrong = [key for key in right if not alike(found[key], right[key], within)]
        if not wrong:
            continue
        key = wrong[0]
        which = f"should return, for {key}," if isinstance(key, str) and key else ""
        which = which or "should be"
        said = f"{call} {which} {shown(right[key])}, not {shown(found[key])}."
        said = f"Value {key} of {said}" if isinstance(key, int) else said
        for sentence, wrongly in mistakes.items():
            if alike(found[key], parts_of(wrongly(*args)).get(key), within):
                return Outcome(f"{said} {sentence}")
        return Outcome(said)
    return Outcome(None, f"{len(cases)} calls")


def parts_of(answer: Any) -> dict[Any, Any]:
    """An answer's parts by their names or places; "" is the name of a single one."""
    if hasattr(answer, "to_dict"):  # of pandas
        answer = answer.to_dict()
    if isinstance(answer, Mapping):
        return dict(answer)
    if isinstance(answer, list | tuple):
        return dict(enumerate(answer))
    return {"": answer}


def alike(a: Any, b: Any, within: float) -> bool:
    if isinstance(a, Real) and isinstance(b, Real):
        return math.isclose(a, b, rel_tol=max(within, 1e-9), abs_tol=0)
    if isinstance(a, str) and isinstance(b, str):
        return a.strip().lower() == b.strip().lower()
    return type(a) is type(b) and a == b


def shown(answer: Any) -> str:
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
        return Outcome(f"{check.label(function)} fails: {words}.")
    tensors = [t for t in (*args, *results) if isinstance(t, torch.Tensor)]
    n_bytes = sum(len(accesses.View(t)) * t.element_size() for t in tensors)
    largest = max(tensors, key=torch.Tensor.nelement)
    x = torch.empty(largest.shape, dtype=largest.dtype, device=backend.DEVICE)
    copy_us = clock.device_us(torch.Tensor.copy_, torch.empty_like(x), x)[1]
    return n_bytes / us / 1e3, 2 * x.nelement() * x.element_size() / copy_us / 1e3


def wrapped(sentence: str) -> str:
    """A sentence in lines of up to 80 characters."""
    return textwrap.fill(" ".join(sentence.split()), 80, break_long_words=False)


__all__ = ["VALUES", "Outcome", "bandwidth", "of_operator", "of_rows", "run"]
