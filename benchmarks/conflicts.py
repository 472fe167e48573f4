"""An experiment with Nsight Compute: the bank conflicts of a transposition's tile.

A notebook observes it, so that its reader needs no profiler:

    from benchmarks import conflicts
    observed = record.observe("layouts_conflicts", conflicts.experiment)

It runs chapter `layouts`' transposition with the tile arranged in each way, under the
profiler. The profiler knows kernels only by their order, so a result with another
number of kernels is refused.
"""

from typing import Any

import torch

from kernels import layouts
from kernels.lab import backend, counters

SIDE = 4096  # rows and columns of the matrix, float32
WAYS = {"Triton's own": "", **{name: name for name in layouts.ARRANGEMENTS}}
"""How the tile lies in shared memory: a name → the argument of `layouts.transpose`."""

METRICS = {
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": "store_passes",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": "load_passes",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "store_conflicts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "load_conflicts",
    "gpu__time_duration.sum": "duration_us",
}
"""Nsight Compute calls a pass through shared memory a wavefront."""


def run() -> None:
    """Transposes a matrix in each of WAYS, for `counters.profile`."""
    x = torch.ones(SIDE, SIDE, device=backend.DEVICE)
    for way in WAYS.values():
        layouts.transpose(x, way)
        with counters.watched():
            layouts.transpose(x, way)


def experiment() -> list[dict[str, Any]]:
    """The passes through shared memory of each transposition, and those beyond need.

    Returns:
        Rows of arrangement, n_rows, n_cols, kernel, and the values of METRICS.

    Raises:
        record.Unavailable: the counters cannot be read here; see `counters.profile`.
        RuntimeError: another number of kernels ran.
    """
    rows = counters.profile(run, METRICS)
    if len(rows) != len(WAYS):
        names = [row["kernel"] for row in rows]
        raise RuntimeError(f"{len(WAYS)} kernels should have run, got {names}")
    return [
        {"arrangement": way, "n_rows": SIDE, "n_cols": SIDE, **row}
        for way, row in zip(WAYS, rows, strict=True)
    ]
