"""What the judge runs for an operator that a learner registers with PyTorch.

Such an operator is more than its kernel. Its *fake function* says which shape, dtype
and strides the result has, without computing it. Its gradient is a formula of its own.
A mistake in each of them has a sentence of its own. Only `kernels.lab.judge` calls
this.

Weighed: `torch.library.opcheck` finds a wrong fake function. But it doesn't know which
values are right, and its errors are pages about PyTorch's inside. So it comes last. It
finds what is not compared here, such as a fake function that needs to know a size.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.lab import check, trials, verdict
from kernels.lab.trials import Outcome
from kernels.lab.verdict import label, name_of

OPERATORS = (CustomOpDef, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_numbers = itertools.count()  # PyTorch keeps every name that was registered


UNREGISTERED = "There was no fake impl registered"
INCOMPLETE = (
    "backward must return one value for each input of the operator: a gradient for a "
    "tensor, None for a number"
)
MEANINGS = {
    UNREGISTERED: "the operator has no fake function; register one with register_fake",
    "no autograd formula was registered": (
        "the operator has no gradient; register a formula with register_autograd"
    ),
    "returned an incorrect number of gradients": INCOMPLETE,
    "returned a gradient different than None at position": INCOMPLETE,
    "The output of this custom operator": (
        "the result is an input, or shares its memory; it must be a new tensor"
    ),
}
"""What PyTorch's errors mean for the learner, by a part of their message."""


class _Part:
    """A part of an operator, whose errors lead to lines of the learner's functions."""

    def __init__(self, call: Callable, register: Callable, name: str) -> None:
        self.call, self.__name__ = call, name
        self.fn = register  # where `verdict.named` looks, as in a kernel

    def __call__(self, *args: Any) -> Any:
        try:
            return self.call(*args)
        except RuntimeError as error:
            for words, meaning in MEANINGS.items():
                if words in str(error):
                    raise RuntimeError(meaning) from None
            raise


def of_registered(
    register: Callable,
    reference: Callable,
    inputs: Any,
    *,
    dtypes: Sequence[torch.dtype],
    seeds: int,
    mistakes: Mapping[str, Callable] | None = None,
    gradients: Mapping[str, Callable] | None = None,
) -> Outcome:
    """Compares values, promised shapes and gradients of an operator; then `opcheck`.

    Args:
        register: given a name such as "kernels::judged_1", registers an operator by
            that name, and returns it. The operator returns one tensor.
        reference: the operator in PyTorch, differentiable, in float64, on the CPU.
        inputs, dtypes, seeds, mistakes: as for `trials.of_operator`.
        gradients: the mistakes of gradients. These functions take the inputs and the
            gradient for the result.
    """
    # A name among the course's: then the judge sees the operator's allocations, too.
    try:
        made = register(f"kernels::judged_{next(_numbers)}")
    except Exception as error:
        words = verdict.raised(error, register)
        return Outcome(f"{label(register)} cannot register its operator: {words}.")
    if not isinstance(made, OPERATORS):
        kind = type(made).__name__
        said = f"{label(register)} returns {kind}, not the registered operator."
        return Outcome(f"{said} Does it end in a return?" if made is None else said)
    operator = _Part(made, register, label(register))
    name = f"{label(register)}'s gradient"
    gradient = _Part(functools.partial(_gradient, made), register, name)
    cases = list(trials.inputs_of(inputs, dtypes, seeds))
    found = trials.of_operator(
        operator,
        reference,
        lambda seed: cases[seed],
        dtypes=dtypes,
        seeds=len(cases),
        mistakes=mistakes,
    )
    if found.failure:
        return found
    for args in cases:
        args = tuple(trials.on_device(arg) for arg in args)
        if said := _broken_promise(operator, args):
            return Outcome(said)
    backward = trials.of_operator(
        gradient,
        functools.partial(_gradient, reference),
        lambda seed: (*cases[seed], _like_result(reference, cases[seed])),
        dtypes=dtypes,
        seeds=len(cases),
        mistakes=gradients,
        what="the gradient",
    )
    if backward.failure:
        return Outcome(backward.failure)
    return Outcome(_of_opcheck(made, register, cases[0]), found.tried)


def _broken_promise(operator: Callable, args: tuple) -> str | None:
    """Compares the fake function's result with the operator's; a sentence if wrong."""
    mode, real = FakeTensorMode(), operator(*args)
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with_args = f"With {trials.describe(args)},"
    name = f"the fake function of {label(operator)}"
    try:
        with mode:
            fake = operator(*fakes)
    except Exception as error:
        said = f"{with_args} {name} fails: {verdict.raised(error, operator)}."
        if str(error) == MEANINGS[UNREGISTERED]:
            return said
        return f"{said} It gets tensors that have a shape, strides and no values."
    if not isinstance(fake, torch.Tensor):
        return f"{with_args} {name} returns {type(fake).__name__}, not a tensor."
    if fake.shape != real.shape:
        pair = (" × ".join(map(str, t.shape)) or "one" for t in (fake, real))
        return f"{with_args} {name} promises {{}} values, not {{}}.".format(*pair)
    if fake.dtype != real.dtype:
        pair = name_of(fake.dtype), name_of(real.dtype)
        return f"{with_args} {name} promises {pair[0]}, not {pair[1]}."
    if fake.device != real.device:
        return f"{with_args} {name} promises {fake.device}, not {real.device}."
    if fake.stride() != real.stride():
        return (
            f"{with_args} {name} promises strides {fake.stride()}, and the operator's "
            f"result has {real.stride()}. Compiled code would read wrong elements."
        )
    return None


def _leaves(args: Sequence) -> list:
    """The arguments, with floating-point tensors that need a gradient."""
    return [a.detach().requires_grad_() if check.is_real(a) else a for a in args]


def _gradient(function: Callable, *args: Any) -> tuple[torch.Tensor, ...]:
    """The gradients for floating-point inputs; the last argument is the result's."""
    leaves = _leaves(args[:-1])
    with torch.enable_grad():
        y = function(*leaves)
    asked, kept = list(filter(check.is_real, leaves)), y.detach().clone()
    found = torch.autograd.grad(y, asked, args[-1])
    if not torch.equal(y.nan_to_num(), kept.nan_to_num()):
        raise ValueError("backward changes the operator's result, a saved tensor")
    return found


def _like_result(reference: Callable, args: tuple) -> torch.Tensor:
    """Random numbers of the result's shape, in the first input's dtype."""
    reals = [arg for arg in args if check.is_real(arg)]
    return torch.randn(reference(*args).shape).to(reals[0].dtype)


def _of_opcheck(made: Any, register: Callable, args: tuple) -> str | None:
    """What PyTorch's own check of operators finds, in a sentence."""
    leaves = _leaves([trials.on_device(arg) for arg in args])
    try:
        torch.library.opcheck(made, tuple(leaves))
    except Exception as error:
        words = verdict.raised(error.__cause__ or error, register)
        return f"{label(register)} fails PyTorch's torch.library.opcheck: {words}."
    return None
