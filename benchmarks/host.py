"""What a call of the course's softmax costs the host, piece by piece.

from benchmarks import host
observed = record.observe("fastest_host", host.pieces)
host.kernels_for(970)  # how many kernels so many row lengths compile

Each piece is a call of its own, timed by the clock `host`, on a matrix so small that
the GPU is done before the host. Pieces of the whole call are not cut out of it, so
their sum is only about the whole.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from kernels import fastest, tiled
from kernels.lab import backend, clock, direct, launch, process

SHAPE = 64, 64
NEW_LENGTHS = range(2049, 2249)
"""Of rows whose length the softmax has not seen; they share a compiled kernel."""


def calls() -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by what a table says of them."""
    x = torch.randn(SHAPE, device=backend.DEVICE)
    y, leaf = torch.empty_like(x), x.clone().requires_grad_()
    through_triton = tiled.launch_for(y, x)
    prepared = launch.CachedLaunch(through_triton)
    ours, native = fastest.softmax, functools.partial(torch.softmax, dim=-1)
    grad = torch.autograd.grad
    return {
        "kernels.softmax": lambda: ours(x),
        "torch.softmax": lambda: native(x),
        "  the output: torch.empty_like": lambda: torch.empty_like(x),
        "  the launch, prepared": lambda: prepared(y, x),
        "the same launch by Triton": lambda: through_triton(y, x),
        "tiled.softmax: chooses, launches anew": lambda: tiled.softmax(x),
        "kernels.softmax, out=": lambda: ours(x, out=y),
        "torch.softmax, out=": lambda: native(x, out=y),
        "kernels.softmax, x needs a gradient": lambda: ours(leaf),
        "torch.softmax, x needs a gradient": lambda: native(leaf),
        "kernels.softmax and its gradient": lambda: grad(
            fastest.softmax(leaf), leaf, x
        ),
        "torch.softmax and its gradient": lambda: grad(native(leaf), leaf, x),
    }


def pieces() -> list[dict[str, Any]]:
    """The host's median time of each of `calls`, and of shapes that are new.

    Returns:
        Rows of call and us.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    clock.require_gpu()
    rows = [(name, clock.host_us(call)[1]) for name, call in calls().items()]
    rows.append(("kernels.softmax, a new length", round(new_length_us(), 3)))
    return [{"call": name, "us": us} for name, us in rows]


def new_length_us() -> float:
    """The median time of the first call for each of NEW_LENGTHS, µs."""
    first, *rest = (
        torch.empty(SHAPE[0], n_cols, device=backend.DEVICE) for n_cols in NEW_LENGTHS
    )
    fastest.softmax(first)  # compiles
    with clock.alone():
        times = [clock.call_us(fastest.softmax, x, wait=False) for x in rest]
        torch.cuda.synchronize()
    return statistics.median(times)


# ---- compilations --------------------------------------------------------------------


def kernels_for(n: int, longest: int = 10**6) -> tuple[int, int]:
    """How many kernels n lengths of one float32 row compile on an H200.

    The lengths are of all orders: as many between 10 and 100 as above longest / 10.

    Args:
        n: how many lengths.
        longest: no length is above it.

    Returns:
        The number for `kernels.softmax`, and the number for the same configurations if
        Triton looked at every integer for a 1 and for multiples of 16, as it does
        unless a kernel forgoes it.
    """
    return process.call_in("compiler", _kernels_for, n, longest)


def _kernels_for(n: int, longest: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(n, generator=generator, dtype=torch.float64)
    ours, theirs = set(), set()
    with patch.object(launch, "sms_and_threads", lambda: (132, 2048)):
        for n_cols in (longest**share).int().tolist():
            y = torch.empty(1, n_cols, device="meta")
            made = fastest._prepare(y, y, 1).launch
            ours.add(direct.key_of(made))
            sizes = [(value == 1, value % 16 == 0) for value in made.scalars]
            theirs.add((made.kernel, *made.constants.items(), *sizes))
    return len(ours), len(theirs)
