"""Draws the figure that sums the course up: every step at one shape, beside the copy.

`make record` runs it on a GPU after the notebooks, where it measures and records. Run
anywhere else, it draws the recorded figures again.
"""

from pathlib import Path

import matplotlib as mpl
import torch

from kernels import eager, meta, persistent, program, strided
from kernels.lab import bench, draw
from kernels.lab.plot import Figure

SHAPE, DTYPE = (16384, 32768), torch.bfloat16
STEPS = {
    "eager": eager.softmax,
    "torchscript": lambda x: eager.scripted(eager.five_lines)(x),
    "torch": lambda x: torch.softmax(x, dim=1),
    "torch.compile": lambda x: eager.compiled(eager.five_lines)(x),
    "program": program.softmax,
    "strided": strided.softmax,
    "meta": meta.softmax,
    "persistent": persistent.softmax,
}


def ladder() -> Figure:
    """Measures the steps, or reads their record, and draws them."""
    results = bench.sweep("ladder", STEPS, [SHAPE], [DTYPE])
    steps = [(step, results.value(provider=step)) for step in STEPS]
    n_rows, n_cols = SHAPE
    gpu = results.source.split(" · ")[0]
    source = f"{n_rows} × {n_cols} values in bfloat16 · effective bandwidth on {gpu}"
    return draw.ladder(steps, results.value(provider="copy"), source=source)


def main() -> None:
    """Writes ladder.svg beside this file, its text as text."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ladder"}):
        target = Path(__file__).with_suffix(".svg")
        ladder().savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
