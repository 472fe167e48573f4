"""Draws the figure that sums the course up: every step at one shape, and the peers.

`make record` runs this file on a GPU after the notebooks; it then measures and records.
Run anywhere else, it draws the recorded figures again.

The shape is a case of the benchmark. So a peer that this machine lacks has a row in the
benchmark's record, of the same shape and by the same clock. All steps take the shape: a
row of 32768 values is the longest that one program can hold.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import torch

import kernels
from benchmarks import peers
from kernels.lab import draw, record
from kernels.lab.plot import Figure

CASE = record.Case(torch.bfloat16, 4096, 32768)
# Part II looks under the hood, beside the ladder. `traffic` has no softmax, `residency`
# launches the kernel of `strided`, `gradient` is the backward pass, `operator` makes
# PyTorch know both, `staged` is for short rows, `windows` for rows of a slice and
# `columns` for other dimensions than the last.
BESIDE = (
    *("traffic", "residency", "gradient", "operator", "staged", "windows", "columns"),
    *("debugging", "profiling", "compiler", "layouts", "cuda", "matmul"),
)
STEPS = tuple(stem for stem in kernels.CHAPTERS if stem not in BESIDE)


def steps() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The softmax of each step, by the stem of its chapter."""
    chapters = {stem: importlib.import_module(f"kernels.{stem}") for stem in STEPS}
    return {stem: chapter.softmax for stem, chapter in chapters.items()}


def measured() -> pd.DataFrame:
    """The rows of the figure: of this GPU, or of the record where there is no GPU.

    A peer that is neither here nor recorded is left out.
    """
    others = peers.providers()
    df = record.sweep("ladder", steps() | others, [CASE])
    absent = [name for name in others if name not in set(df["provider"])]
    try:
        benchmark = record.recorded("fastest")
    except ValueError:  # the benchmark was not run yet
        return df
    rows = record.select(
        benchmark,
        provider=absent,
        gpu=df["gpu"].iloc[0],
        clock="device",
        **CASE._asdict(),
    )
    return record.concat([df, rows])


def ladder() -> Figure:
    """The steps and the peers as bars of effective bandwidth, below the copy's.

    A step that is absent from the record is left out.
    """
    df = measured()
    gbps = dict(zip(df["provider"], df["effective_gbps"], strict=True))
    shape = f"{CASE.n_rows} × {CASE.n_cols} values in bfloat16"
    return draw.ladder(
        [(stem, gbps[stem]) for stem in STEPS if stem in gbps],
        gbps["copy"],
        source=f"{shape} · effective bandwidth on {df['gpu'].iloc[0]}",
        peers=[(name, gbps[name]) for name in peers.providers() if name in gbps],
    )


def main() -> None:
    """Writes ladder.svg beside this file, its text as text."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ladder"}):
        target = Path(__file__).with_suffix(".svg")
        ladder().savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
