"""What three details of kernels whose programs share rows are worth.

In each control one of them is taken back. The results stay the same.

| control | without | then |
|---|---|---|
| `packed` | `cooperative.in_lines` | words of two rows may share a line of memory |
| `anywhere` | `cooperative.cut` | parts end anywhere in a line |
| `mixed` | `cooperative.loads_first` | a value may be used before all loads start |

from benchmarks import details
observed = record.observe("cooperative_details", details.times)
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import KernelInterface

from benchmarks import classes
from kernels import cooperative, gradient
from kernels.lab import clock, record
from kernels.lab.launch import Launch
from kernels.lab.record import Case

TURNS = 3
CASES = (
    ("softmax", Case(torch.float32, 23, 3000001)),
    ("softmax", Case(torch.bfloat16, 135, 1000003)),
    ("gradient", Case(torch.bfloat16, 1343, 100003)),
    ("gradient", Case(torch.bfloat16, 535, 250774)),
)
COLUMNS = ["kernel", "dtype", "n_rows", "n_cols", "course", "packed", "anywhere"]
COLUMNS += ["mixed"]


@triton.jit
def packed(n_words):
    """In place of `cooperative.in_lines`."""
    return n_words


@triton.jit
def anywhere(part, start, body, n_parts, BLOCK_COLS, LINE):
    """In place of `cooperative.cut`."""
    return part * BLOCK_COLS, tl.minimum((part + 1) * BLOCK_COLS, body)


@triton.jit
def mixed(n):
    """In place of `cooperative.loads_first`."""
    return n


CONTROLS: dict[str, dict[str, KernelInterface]] = {
    "course": {},
    "packed": {"in_lines": packed},
    "anywhere": {"cut": anywhere},
    "mixed": {"loads_first": mixed},
}
_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline")


def with_helpers(function: Any, helpers: dict[str, KernelInterface]) -> Any:
    """A `@triton.jit` function that calls other helpers, at every depth.

    Args:
        function: a kernel, or a function that kernels call.
        helpers: the name of a helper → what to call instead.
    """
    old = function.fn
    named = {name: old.__globals__.get(name) for name in old.__code__.co_names}
    inner = {
        name: with_helpers(helper, helpers)
        for name, helper in named.items()
        if isinstance(helper, KernelInterface)
    }
    new = classes.copy_of(old, **inner | helpers)
    return triton.jit(new, **{k: v for k, v in vars(function).items() if k in _OPTIONS})


def launches(kernel: str, output: torch.Tensor, *inputs: torch.Tensor) -> dict:
    """The course's launch and the controls', by CONTROLS.

    Args:
        kernel: "softmax" or "gradient".
        output, inputs: as for the chapter's `launch_for`.
    """
    chapter = {"softmax": cooperative, "gradient": gradient}[kernel]
    usual = chapter.launch_for(output, *inputs)
    return {
        name: replace(usual, kernel=with_helpers(usual.kernel, helpers))
        for name, helpers in CONTROLS.items()
    }


def inputs_of(kernel: str, case: Case) -> tuple[torch.Tensor, ...]:
    """x for the softmax, and for the gradient the one for y, and y."""
    x = record.random(*case[:3])
    return (x,) if kernel == "softmax" else (x, torch.softmax(x, 1))


def _call(launch: Launch, output: torch.Tensor, *rest: torch.Tensor) -> Callable:
    return lambda x: launch(output, x, *rest)


def times() -> list[dict[str, Any]]:
    """The GPU's time with each detail, and without.

    All take turns, and each has the median of its TURNS medians.

    Returns:
        Rows of COLUMNS; times in µs.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    clock.require_gpu()
    rows = []
    for kernel, case in CASES:
        x, *rest = inputs_of(kernel, case)
        output, us = torch.empty_like(x), {}
        made = launches(kernel, output, x, *rest)
        for _ in range(TURNS):
            for name, launch in made.items():
                call = _call(launch, output, *rest)
                us.setdefault(name, []).append(clock.device_us(call, x)[1])
        row = [kernel, str(case.dtype).removeprefix("torch."), *case[1:3]]
        row += [round(statistics.median(us[name]), 3) for name in CONTROLS]
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows
