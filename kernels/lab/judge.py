"""Judges an exercise in one sentence, whatever the learner's function does.

    judge.chapter("strided", repair="row_max", write="log_softmax")   # the first cell
    judge.rows(log_softmax, lambda x: torch.log_softmax(x, dim=1))    # an exercise
    judge.progress("strided")                                         # the last cell

Every call returns a `Verdict`, which shows one sentence: "Right: …", or what is wrong.
The exercise that is solved is the one with the function's name; `name=` names another.

A function runs in a second process, which is kept for the next call. So an exception,
an endless loop, an access out of bounds, a process or a GPU that breaks are sentences,
too, and the notebook goes on. The function runs in Triton's interpreter first, which
checks every access on small inputs, and then on the GPU, if there is one. So the first
sentence is the same on every machine. What the function prints is not shown.

Weighed: nbgrader and otter-grader collect and grade notebooks for a teacher. Each
exercise needs a cell of assertions, which shows the learner a traceback.
Triton-Puzzles compares one input, in the notebook's own process.
"""

import functools
import linecache
import math
import reprlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from kernels.lab import (
    backend,
    clock,
    description,
    process,
    registration,
    trials,
    verdict,
)
from kernels.lab.cases import FINITE
from kernels.lab.process import Helper
from kernels.lab.progress import chapter, note, progress
from kernels.lab.trials import Outcome, alike, parts_of, shown
from kernels.lab.verdict import label, listed, wrapped

__all__ = [
    "FINITE",
    "Verdict",
    "bandwidth",
    "chapter",
    "formula",
    "guess",
    "operator",
    "progress",
    "registered",
    "rows",
    "softmax",
    "value",
]

LIMIT_S = 120  # for all inputs: 5 s in the interpreter, a GPU's compiler takes longer
FIRST_LIMIT_S = 20  # for the first small inputs

Stage = tuple[str, Callable, float]  # a world, a trial, and its limit in seconds


@dataclass(frozen=True, repr=False)
class Verdict:
    """A judgement: true if the answer is right. It shows its sentence.

    Attributes:
        right: None if nothing was judged, as times are without a GPU.
        sentence: in lines of up to 80 characters.
    """

    right: bool | None
    sentence: str

    def __bool__(self) -> bool:
        return self.right is True

    def __repr__(self) -> str:
        return self.sentence


# ---- functions -----------------------------------------------------------------------


def softmax(function: Callable, **options: Any) -> Verdict:
    """Judges a softmax of a matrix's rows, by `check.softmax`.

    Args:
        function: takes x (n_rows, n_cols) and returns a new tensor like it.
        options: `name`, `limit_s`, `dtypes`, `layouts`, `max_cols`, as for `rows`.
    """
    return rows(function, None, **options)


def rows(
    function: Callable,
    reference: Callable | None,
    *,
    once: bool = False,
    name: str | None = None,
    limit_s: float = LIMIT_S,
    **options: Any,
) -> Verdict:
    """Judges a function of a matrix's rows, by `check.rows`.

    Args:
        function: takes x (n_rows, n_cols) and returns a matrix, or one value a row, or
            a tuple of such.
        reference: the same in PyTorch; it is given x in float64, on the CPU. None means
            a softmax.
        once: whether the kernels may read each value once only.
        name: of the exercise; None means the function's.
        limit_s: the seconds that each run over all inputs may take.
        options: of `check.rows`: `dtypes`, `layouts`, `max_cols`, `values` (such as
            judge.FINITE), `result`, `mistakes`.
    """
    first = functools.partial(trials.small_rows, once=once, **options)
    whole = functools.partial(trials.of_rows, reference=reference, **options)
    return _judged(function, _stages(first, whole, limit_s), name)


def operator(
    function: Callable,
    reference: Callable,
    inputs: Callable | Sequence,
    *,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    seeds: int | None = None,
    mistakes: Mapping[str, Callable] | None = None,
    name: str | None = None,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Judges a function of any inputs.

    An error may be as large as 16 roundings of the inputs and of the result, in 16 bits
    as 4.

    Args:
        function: takes the inputs and returns a new tensor, or a tuple of tensors.
        reference: the same in PyTorch; it is given real numbers in float64, on the CPU.
        inputs: a list of cases, each a tuple of shapes, one for each input (or one
            shape); they are filled with normally distributed numbers. Or make(seed),
            which returns a tuple of CPU tensors and numbers, of a shape that depends on
            the seed; it may call `torch.randn`, which is seeded.
        dtypes: of the inputs, if `inputs` is a list.
        seeds: how often each case is filled (2), or make is called (6).
        mistakes: for a sentence, the function that makes the mistake.
        name, limit_s: as for `rows`.

    Raises:
        ValueError: all inputs have one shape.
    """
    cases = _cases(inputs, dtypes, seeds)
    whole = functools.partial(
        trials.of_operator, reference=reference, mistakes=mistakes, **cases
    )
    first = functools.partial(whole, first=True)
    return _judged(function, _stages(first, whole, limit_s), name)


def registered(
    register: Callable,
    reference: Callable,
    inputs: Callable | Sequence,
    *,
    dtypes: Iterable[torch.dtype] = backend.DTYPES,
    seeds: int | None = None,
    mistakes: Mapping[str, Callable] | None = None,
    gradients: Mapping[str, Callable] | None = None,
    name: str | None = None,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Judges an operator that is registered with `torch.library`.

    Compares its values, what its fake function promises (shape, dtype and strides), and
    its gradients. Then `torch.library.opcheck` tries it.

    Args:
        register: takes a name such as "kernels::judged_1", registers an operator by
            that name, and returns it. The operator returns one new tensor.
        reference: the operator in PyTorch, differentiable; it is given real numbers in
            float64, on the CPU.
        inputs, dtypes, seeds, mistakes: as for `operator`.
        gradients: for a sentence, the function that makes the mistake in the gradient.
            It takes the inputs and the gradient for the result.
        name, limit_s: as for `rows`.

    Raises:
        ValueError: all inputs have one shape.
    """
    whole = functools.partial(
        registration.of_registered,
        reference=reference,
        mistakes=mistakes,
        gradients=gradients,
        **_cases(inputs, dtypes, seeds),
    )
    return _judged(register, _stages(None, whole, limit_s), name)


def _cases(
    inputs: Callable | Sequence, dtypes: Iterable[torch.dtype], seeds: int | None
) -> dict[str, Any]:
    """What the trials of an operator are told of its inputs; see `operator`."""
    if not callable(inputs) and len(inputs) < 2:
        raise ValueError(f"inputs must have two shapes or more, got {inputs!r}")
    seeds = seeds or (6 if callable(inputs) else 2)
    return {"inputs": inputs, "dtypes": tuple(dtypes), "seeds": seeds}


def bandwidth(
    function: Callable,
    inputs: Callable | Sequence,
    *,
    at_least: float = 0.8,
    dtype: torch.dtype = torch.float32,
    name: str | None = None,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """Judges a function's effective bandwidth, as a share of a copy's.

    Args:
        function: reads its inputs once and writes its results once.
        inputs: one case, as for `operator`: a shape, a tuple of shapes, or make(seed).
        at_least: the share of the copy's bandwidth that is right.
        dtype: of the inputs, if they are shapes.
        name, limit_s: as for `rows`.
    """
    name = name or label(function)
    if said := _unready(function):
        return _noted(name, False, said)
    if not clock.can_measure():
        why = (
            "kernels run in Triton's interpreter here"
            if backend.INTERPRETED
            else "COURSE_MEASURE=recorded is set"
        )
        return _noted(name, None, f"Not judged: times need a GPU, and {why}.")
    trial = functools.partial(trials.bandwidth, inputs=inputs, dtype=dtype)
    found = _run("compiler", trial, function, name, limit_s)
    if isinstance(found, Outcome):
        return _noted(name, False, found.failure)
    own, copy = found
    said = (
        f"{name} reaches an effective bandwidth of {own:,.0f} GB/s, "
        f"{100 * own / copy:.0f} % of the copy's {copy:,.0f} GB/s"
    )
    if own >= at_least * copy:
        return _noted(name, True, f"Right: {said}.")
    return _noted(name, False, f"Not yet: {said}; {100 * at_least:.0f} % is enough.")


# ---- answers and guesses -------------------------------------------------------------


def value(answer: Any, want: Any) -> Verdict:
    """Judges the answer to a question: a number, a word, or a tuple, list or dict.

    Args:
        answer: the learner's; `...` and None mean that there is none yet.
        want: the right one. Let an instrument compute it, so that no cell shows it.
    """
    parts, wanted = parts_of(answer), parts_of(want)
    open_parts = [key for key, part in parts.items() if part is None or part is ...]
    if open_parts:
        of = f" ({open_parts[0]})" if len(wanted) > 1 and open_parts[0] != "" else ""
        return _verdict(False, f'Not yet: replace the "..." by your answer{of}.')
    if parts.keys() != wanted.keys():
        said = f"Not yet: {len(wanted)} values are asked for, got {shown(answer)}."
        return _verdict(False, said)
    wrong = [key for key in wanted if not alike(parts[key], wanted[key])]
    if not wrong:
        return _verdict(True, f"Right: {shown(answer)}.")
    of = f" for {wrong[0]}" if len(wanted) > 1 else ""
    if of and isinstance(answer, list | tuple):
        of = f" at place {wrong[0] + 1} of {len(wanted)}"
    return _verdict(False, f"Not yet: {shown(parts[wrong[0]])}{of} is not right.")


def formula(
    function: Callable,
    reference: Callable,
    cases: Sequence[tuple],
    *,
    mistakes: Mapping[str, Callable] | None = None,
    within: float = 1e-9,
    name: str | None = None,
    limit_s: float = FIRST_LIMIT_S,
) -> Verdict:
    """Judges a function that returns numbers or words, such as a count of bytes.

    Args:
        function: returns a number, a word, or a tuple, list or dict of such.
        reference: returns the right ones.
        cases: the arguments of each call, a tuple; two calls or more.
        mistakes: for a sentence, the function that makes the mistake.
        within: how far a number may be from the right one, as a share of it.
        name: of the exercise; None means the function's.
        limit_s: the seconds that it may take.

    Raises:
        ValueError: there is only one case.
    """
    if len(cases) < 2:
        raise ValueError(f"cases must hold two calls or more, got {cases!r}")
    trial = functools.partial(
        trials.of_formula,
        reference=reference,
        cases=list(cases),
        mistakes=mistakes or {},
        within=within,
    )
    return _judged(function, [("interpreter", trial, limit_s)], name)


def guess(
    guessed: Any, found: Any, unit: str = "", *, of: str = "", within: float = 1.5
) -> Verdict:
    """Says in a sentence how near guesses were. It is true if all are near enough.

    Args:
        guessed: numbers by name, or a list, or one number; `...` is no guess. What
            `found` doesn't name is left out.
        found: what was measured or counted, likewise; None where nothing was.
        unit: of both, such as "copies".
        of: what the names count, such as "columns", if they are numbers.
        within: the factor that a guess may be off; 1 asks for the number itself.
    """
    guesses = parts_of(guessed)
    right = {key: value for key, value in parts_of(found).items() if _is_number(value)}
    factors = {
        key: _factor(guesses[key], value)
        for key, value in right.items()
        if _is_number(guesses.get(key))
    }
    if not right:
        return _verdict(None, "Nothing was found that a guess can be compared with.")
    if not factors:
        odd = [guesses[key] for key in right if guesses.get(key) not in (None, ...)]
        what = (
            f"{reprlib.repr(odd[0])} is not a number"
            if odd
            else "write down a number for each"
        )
        return _verdict(None, f"No guess yet: {what}.")
    near = sum(factor <= within for factor in factors.values())
    how = "right" if within == 1 else f"within a factor of {within:g}"
    worst = max(factors, key=factors.__getitem__)
    name = f"{worst} {of}".strip()
    both = f"guessed {_short(guesses[worst])}, found {_short(right[worst])} {unit}"
    both = both.rstrip()
    if len(right) == 1:
        said = f"{name}: {both}" if name else f"G{both[1:]}"
        return _verdict(bool(near), f"{said}, {'' if near else 'not '}{how}.")
    count = len(factors)
    said = f"{near} of {count} {'guess' if count == 1 else 'guesses'} "
    said += f"{'is' if 1 in (near, count) else 'are'} {how}"
    if near < count:
        said += f"; furthest off: {name} ({both})"
    if missing := [str(key) for key in right if key not in factors]:
        said += f"; no guess for {listed(missing)}"
    return _verdict(near == len(right), f"{said}.")


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _factor(a: float, b: float) -> float:
    """By which factor the larger one is larger; infinite if one of them is 0."""
    if math.isclose(a, b):
        return 1.0
    return max(a / b, b / a) if a > 0 and b > 0 else math.inf


def _short(number: float) -> str:
    number = float(number)  # a fraction knows no such format before Python 3.12
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _noted(name: str, right: bool | None, sentence: str) -> Verdict:
    """The verdict of an exercise, which counts for the progress."""
    note(name, right)
    return _verdict(right, sentence)


def _verdict(right: bool | None, sentence: str) -> Verdict:
    return Verdict(right, wrapped(sentence))


# ---- the process ---------------------------------------------------------------------


@functools.cache
def _helper(world: str) -> Helper:
    return Helper(world, hide_gpu=world == "interpreter")


def _stages(first: Callable | None, whole: Callable, limit_s: float) -> Iterator[Stage]:
    """The trials in the interpreter, where it works; the whole one on a GPU."""
    if _interpreter_works():
        if first is not None:
            yield "interpreter", first, min(limit_s, FIRST_LIMIT_S)
        yield "interpreter", whole, limit_s
    if not backend.INTERPRETED:
        yield "compiler", whole, limit_s


def _judged(function: Any, stages: Iterable[Stage], name: str | None) -> Verdict:
    """Runs one trial after another, and says what the first one found that fails."""
    name = name or label(function)
    if said := _unready(function):
        return _noted(name, False, said)
    for world, trial, limit_s in stages:
        outcome = _run(world, trial, function, name, limit_s)
        if outcome.failure:
            return _noted(name, False, outcome.failure)
    return _noted(name, True, f"Right: {name} passes {outcome.tried}.")


def _interpreter_works() -> bool:
    """Whether Triton's interpreter works with this NumPy; without a GPU it must."""
    try:
        description.require_interpreter()
    except RuntimeError:
        if backend.INTERPRETED:
            raise
        return False
    return True


def _unready(function: Any) -> str:
    """What a function lacks before it can be called; empty if nothing."""
    if function is None or function is ...:
        return 'Not yet: the function is still "...".'
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"function must be a function to judge, got {kind}")
    gap = verdict.unfinished(function)
    return f"Not yet: {gap}." if gap else ""


def _run(
    world: str, trial: Callable, function: Callable, name: str, limit_s: float
) -> Any:
    """Runs a trial in the process of a world.

    Returns:
        What the trial returns; an `Outcome` where the function cannot be sent, doesn't
        end, or breaks the process.
    """
    helper = _helper(world)
    helper.call(int)  # starts the process, which doesn't count for the limit
    try:
        process.dumps(function)
    except Exception as error:
        said = f"cannot be sent to the process that judges it: {error}."
        return Outcome(f"Not yet: {name} {said}")
    try:
        args = trial, _sources(function), function
        outcome = helper.call(trials.run, args, limit_s=limit_s)
    except TimeoutError:
        said = f"did not end within {limit_s:g} s. Does one of its loops never end?"
        return Outcome(f"Not yet: {name} {said}")
    except RuntimeError:
        if helper.process is not None:  # the trial raised it
            raise
        return Outcome(f"Not yet: {name} {_end(helper.exit_code)}")
    if isinstance(outcome, Outcome) and outcome.broken:
        helper.stop()
        return Outcome(
            f"Not yet: {name} breaks its process's use of the GPU "
            f"({outcome.failure}). Is an access not masked, or an offset wrong?"
        )
    return outcome


def _sources(function: Callable) -> dict[str, list[str]]:
    """The lines of the files, or of the notebook's cells, of a learner's functions."""
    files = {each.__code__.co_filename for each in verdict.named(function)}
    return {file: linecache.getlines(file) for file in files}


def _end(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code == -signal.SIGSEGV:
        return (
            "ends its process by an access to memory that isn't its own. Is an access "
            "not masked, or an offset wrong?"
        )
    if exit_code == -signal.SIGKILL:
        return "is ended by the system, probably as it needs too much memory."
    if exit_code is not None and exit_code < 0:
        return f"ends its process (signal {-exit_code})."
    return "ends its process, as sys.exit does. It should return its result."
