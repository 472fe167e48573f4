"""An experiment of chapter `traffic`: what the first calls of a function cost.

from benchmarks import calls
observed = record.observe("traffic_first_calls", calls.first_calls)
"""

import statistics
from typing import Any

import torch

from kernels import eager
from kernels.lab import backend, clock, process

CALLS, UNTYPICAL = 30, 4  # calls of each function; the first of them, to be left out


def first_calls() -> list[dict[str, Any]]:
    """The first calls of functions in a new process, by the wall clock.

    Returns:
        Rows of provider, n_rows, n_cols, first_us, second_us, and later_us, which is
        the median of the calls from the fifth on, all in µs.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    clock.require_gpu()
    return process.call_apart(_first_calls)


def _first_calls(n_rows: int = 2048, n_cols: int = 2048) -> list[dict[str, Any]]:
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    functions = {
        "torch": lambda x: torch.softmax(x, dim=1),
        "eager": eager.five_lines,
        "matmul": lambda x: x @ x.T,
        "torch.compile": eager.compiled(eager.five_lines),
    }
    rows = []
    for name, function in functions.items():
        with clock.alone():
            times = [clock.call_us(function, x) for _ in range(CALLS)]
        chosen = {"first_us": times[0], "second_us": times[1]}
        chosen["later_us"] = statistics.median(times[UNTYPICAL:])
        shape = {"provider": name, "n_rows": n_rows, "n_cols": n_cols}
        rows.append(shape | {key: round(us, 1) for key, us in chosen.items()})
    return rows
