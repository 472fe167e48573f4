"""A judge of keys: which calls of a softmax may share a prepared launch?

A `Launch` holds everything that a call passes to its kernel, but the tensors. So two
calls may share one exactly if the launches that `fastest.prepare` makes for them are
equal. A key is wrong if it is the same for two calls whose launches differ. It is
useless if it differs for two calls that differ only in an address and in values.

from benchmarks import keys
print(keys.judge(my_key))
"""

import itertools
import textwrap
from collections.abc import Callable, Hashable

import torch

from kernels import fastest
from kernels.lab import backend, verdict
from kernels.lab.launch import Launch

Key = Callable[[torch.Tensor, int], Hashable]
"""Returns what decides the launch of a call with x and dim."""

FIRST, AGAIN = "a 96 × 96 float32 matrix", "another such matrix"
WHY = {  # an attribute of a launch → what a call must do if it differs
    "kernel": "run another kernel",
    "grid": "launch another number of programs",
    "pointers": "run a kernel for another dtype or alignment",
    "scalars": "pass other sizes or strides",
    "constants": "run a kernel for other constants",
}


def calls() -> dict[str, tuple[torch.Tensor, int]]:
    """The calls of the judge: a description → x and dim."""
    make = lambda *shape: torch.zeros(shape, device=backend.DEVICE)  # noqa: E731
    x = make(96, 96)
    return {
        FIRST: (x, 1),
        AGAIN: (make(192, 96).fill_(1)[96:], 1),  # elsewhere in its storage
        "one of 95 rows": (make(95, 96), 1),
        "one of 95 columns": (make(96, 95), 1),
        "one of bfloat16": (x.bfloat16(), 1),
        "one of float16": (x.half(), 1),
        "such a matrix with dim=0": (x, 0),
        "the left half of a wider one": (make(96, 192)[:, :96], 1),
        "the left third of a wider one": (make(96, 288)[:, :96], 1),
        "such a matrix that starts 4 bytes further on": (
            make(96 * 96 + 1)[1:].view(96, 96),
            1,
        ),
    }


def launch_of(x: torch.Tensor, dim: int) -> Launch:
    """The launch that the course's softmax prepares for a call."""
    return fastest.prepare(torch.empty(x.shape, dtype=x.dtype, device=x.device), x, dim)


def judge(key: Key) -> str:
    """Says in a sentence or two which calls a key mixes up or needlessly keeps apart.

    A function that still has "..." in it, raises, or returns no key gets a sentence
    too. Lines have at most 80 characters.
    """
    return textwrap.fill(_judgement(key), 80)


def _judgement(key: Key) -> str:
    name = key.__name__
    if place := verdict.unfinished(key):
        return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
    made = calls()
    try:
        found = {words: key(*call) for words, call in made.items()}
    except Exception as error:
        return f"{name} fails: {verdict.raised(error, key)}"
    try:
        is_one = {
            (a, b): hash(found[a]) == hash(found[b]) and bool(found[a] == found[b])
            for a, b in itertools.combinations(made, 2)
        }
    except (TypeError, RuntimeError):
        return (
            f"{name} returns {found[FIRST]!r:.40}, which cannot be a key of a dict: "
            "return sizes, strides, numbers, dtypes, or a tuple of such."
        )
    launches = {words: launch_of(*call).launch for words, call in made.items()}
    for (a, b), one in is_one.items():
        if one and (why := difference(launches[a], launches[b])):
            return (
                f"Wrong: {name} is the same for {a} and for {b}. The second call would "
                f"get the first one's launch, but must {why}."
            )
    if not is_one[FIRST, AGAIN]:
        return (
            f"Useless: {name} differs for {FIRST} and for {AGAIN}, whose launches are "
            "equal. A launch would be prepared for every new tensor."
        )
    return (
        f"Right: {name} keeps apart the calls whose launches differ, and finds the "
        f"launch again for a tensor of the same form; {len(made)} calls tried."
    )


def difference(a: Launch, b: Launch) -> str:
    """What the second of two launches must do differently; "" if they are equal."""
    return next(
        (why for name, why in WHY.items() if vars(a)[name] != vars(b)[name]), ""
    )
