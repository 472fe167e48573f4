"""What a call of the course's softmax costs the host, piece by piece.

from benchmarks import host
observed = record.observe("operator_host", host.pieces)
host.steps()  # a softmax and its gradient, beside the peers'
host.kernels_for(970)  # how many kernels so many row lengths compile

Each piece of a repeated call is a call of its own, timed by the clock `host`, on a
matrix so small that the GPU is done before the host. So the pieces' sum is not exactly
the whole call's time. The calls take turns: if the host is slow for a second, all are.

The first call of a new length happens once, so its pieces are timed inside it: each
function of PIECES gets a stopwatch, which is stopped while another one runs. Starting
and stopping them takes some tenths of a µs each, in the piece around. So the whole call
is timed for other lengths, without a stopwatch; the difference is the last row. The two
take turns: if the host is slow for some ms, both are.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch

from benchmarks import training
from kernels import fastest, tiled, unaligned
from kernels import operator as registered
from kernels.lab import backend, clock, direct, launch, operator, process, record

SHAPE = 64, 64
NEW_LENGTHS = range(2049, 2449)
"""Lengths of rows that the softmax has not seen; nearly all share three kernels."""
ROUNDS = 9  # so often each repeated call is timed
TURN = 20  # so many lengths are timed in pieces, then as many whole, and so on
WHOLE = "kernels.softmax, a new length"
PIECES = {
    "new length: see whether PyTorch traces it": [(operator, "is_plain")],
    "new length: check the input": [(operator, "validate")],
    "new length: allocate the output": [(torch, "empty_like")],
    "new length: see where rows start": [(unaligned, "alignment")],
    "new length: choose the kernel": [(fastest, "choose")],
    "new length: choose its configuration": [
        *((fastest, "_config_of_few"), (fastest, "in_smaller_tiles")),
    ],
    "new length: make the Launch": [(tiled, "launch_for"), (unaligned, "launch_for")],
    "new length: make it a cached launch": [(direct.CachedLaunch, "__init__")],
    "new length: the rest of prepare": [(registered.rules(), "prepare")],
    "new length: find the compiled kernel": [(direct, "launch_to_find")],
    "new length: launch it": [(direct.CachedLaunch, "__call__")],
    "new length: the rest of the operator": [(operator.Rules, "run")],
}
"""The functions that the first call of a new length calls, by what a table says."""
REST = "new length: the rest of the call"
STOPWATCHES = "new length: the stopwatches, in all of these"


def calls() -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by what a table says of them."""
    x = torch.randn(SHAPE, device=backend.DEVICE)
    y, leaf = torch.empty_like(x), x.clone().requires_grad_()
    prepared = fastest.prepare(y, x, 1)
    through_triton = prepared.launch
    ours, native = fastest.softmax, functools.partial(torch.softmax, dim=-1)
    return {
        "kernels.softmax": lambda: ours(x),
        "torch.softmax": lambda: native(x),
        "  the output: torch.empty_like": lambda: torch.empty_like(x),
        "  the launch, prepared": lambda: prepared(y, x),
        "the same launch by Triton": lambda: through_triton(y, x),
        "kernels.softmax, out=": lambda: ours(x, out=y),
        "torch.softmax, out=": lambda: native(x, out=y),
        "kernels.softmax, x needs a gradient": lambda: ours(leaf),
        "torch.softmax, x needs a gradient": lambda: native(leaf),
    }


def pieces() -> list[dict[str, Any]]:
    """The host's median time of each of `calls`, and of shapes that are new.

    Returns:
        Rows of call and us.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    clock.require_gpu()
    rows = [*in_turns(calls()).items()]
    with clock.alone():
        rows += new_lengths().items()
        torch.cuda.synchronize()  # nothing of this runs while another process measures
    return [{"call": name, "us": round(us, 3)} for name, us in rows]


def steps() -> pd.DataFrame:
    """The host's time for a softmax and its gradient at SHAPE, ours and the peers'.

    Returns:
        Rows of `record.sweep`, the fastest first, without the copy and the stream.
    """
    case = record.Case(torch.float32, *SHAPE, "pair")
    how = {"inputs": training.INPUTS, "verify": training.verify}
    rows = record.sweep("operator_step", training.steps(), [case], clock="host", **how)
    rows = rows[~rows["provider"].isin(["copy", training.STREAM])]
    return rows.sort_values("p50_us")


def in_turns(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median of each call's ROUNDS times by the clock `host`, µs."""
    rounds = [
        {name: clock.host_us(call)[1] for name, call in calls.items()}
        for _ in range(ROUNDS)
    ]
    return {name: statistics.median(us[name] for us in rounds) for name in calls}


def new_lengths(
    n_rows: int = SHAPE[0], lengths: Iterable[int] = NEW_LENGTHS
) -> dict[str, float]:
    """Median times of first calls, µs: of the whole call, and of its pieces.

    Args:
        n_rows: of each matrix.
        lengths: that no call has had; more than TURN + 1.

    Returns:
        The time of the WHOLE call; of each of PIECES without those that it calls; of
        REST, what is left of a call in pieces; and what the STOPWATCHES add to a call.
    """
    first, *others = (torch.empty(n_rows, n, device=backend.DEVICE) for n in lengths)
    fastest.softmax(first)  # compiles
    taken: list[dict[str, float]] = []
    turns = itertools.cycle([_in_pieces, _whole])
    for start in range(0, len(others), TURN):
        taken += next(turns)(others[start : start + TURN])
    us = {
        name: statistics.median(each[name] for each in taken if name in each)
        for name in (WHOLE, *PIECES, REST, STOPWATCHES)
    }
    us[STOPWATCHES] -= us[WHOLE]
    return us


def _whole(matrices: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """The time of the call for each matrix."""
    softmax = fastest.softmax
    return [{WHOLE: clock.call_us(softmax, x, wait=False)} for x in matrices]


def _in_pieces(matrices: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """The times of the call's pieces for each matrix."""
    taken, watch, inside = [], {}, [0.0]
    with contextlib.ExitStack() as stack:
        for name, places in PIECES.items():
            for place in places:
                stack.enter_context(_stopwatch(*place, watch, name, inside))
        for x in matrices:
            watch.update(dict.fromkeys(PIECES, 0.0))
            whole = clock.call_us(fastest.softmax, x, wait=False)
            rest = whole - sum(watch.values())
            taken.append({**watch, REST: rest, STOPWATCHES: whole})
    return taken


@contextlib.contextmanager
def _stopwatch(
    owner: Any,
    attribute: str,
    watch: dict[str, float],
    name: str,
    inside: list[float],
) -> Iterator[None]:
    """While active, watch[name] grows by the time of each call of a function, µs.

    Time in functions with stopwatches of their own is not counted. inside has, for each
    function that is being called, how much of its time that is.
    """
    function = getattr(owner, attribute)

    def timed(*args: Any, **how: Any) -> Any:
        inside.append(0.0)
        start = time.perf_counter()
        try:
            return function(*args, **how)
        finally:
            us = 1e6 * (time.perf_counter() - start)
            watch[name] += us - inside.pop()
            inside[-1] += us

    with patch.object(owner, attribute, timed):
        yield


# ---- compilations --------------------------------------------------------------------


def kernels_for(n: int, longest: int = 10**6) -> tuple[int, int]:
    """How many kernels n different lengths of one float32 row compile on an H200.

    The lengths are of all orders of magnitude, and no length is there twice.

    Args:
        n: how many lengths; at most longest / 2.
        longest: no length is above it.

    Returns:
        The number for `kernels.softmax`, and the number for the same configurations if
        Triton looked at every integer for a 1 and for multiples of 16, as it does
        unless a kernel forgoes it.
    """
    return process.call_in("compiler", _kernels_for, n, longest)


def _kernels_for(n: int, longest: int) -> tuple[int, int]:
    ours, theirs = set(), set()
    with patch.object(launch, "sms_and_threads", lambda: (132, 2048)):
        for n_cols in some_lengths(n, longest):
            y = torch.empty(1, n_cols, device="meta")
            made = fastest.prepare(y, y, 1).launch
            ours.add(direct.key_of(made))
            sizes = [(value == 1, value % 16 == 0) for value in made.scalars]
            theirs.add((made.kernel, *made.constants.items(), *sizes))
    return len(ours), len(theirs)


def some_lengths(n: int, longest: int = 10**6) -> list[int]:
    """n different lengths from 1 to longest; see `kernels_for`. Always the same ones.

    Raises:
        ValueError: n is above longest / 2.
    """
    if 2 * n > longest:
        raise ValueError(f"n must be at most longest / 2, {longest // 2}, got {n}")
    generator = torch.Generator().manual_seed(0)
    found: dict[int, None] = {}  # in the order in which they are drawn
    while len(found) < n:
        share = torch.rand((), generator=generator, dtype=torch.float64)
        found[int(longest**share)] = None
    return [*found]
