"""Experiments of chapter `meta`: launch options, and the first call of an autotuner.

from benchmarks import options
observed = record.observe("meta_keywords", options.keywords)
observed = record.observe("meta_autotune", options.first_calls)
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner

from kernels import meta
from kernels.lab import backend, clock

COOPERATIVE = {"launch_cooperative_grid": True}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_stages": 1},
    {"enable_fp_fusion": False},
    {"maxnreg": 64},
    {"maxnreg": 32},
    COOPERATIVE,
)
"""The options that `keywords` tries, beside num_warps=4."""


def keywords(
    n_rows: int = 4096, n_cols: int = 8192, n_few: int = 500
) -> Iterator[dict[str, Any]]:
    """The time of chapter `meta`'s launch under each of OPTIONS.

    A cooperative launch of n_rows programs may be refused. It is tried again with
    n_few rows.

    Yields:
        Rows of keyword, programs, us (the median time in µs; None if the launch was
        refused) and error (the reason; None if it was not).

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    x = torch.randn(n_rows, n_cols, device=backend.DEVICE)
    tried = [(x, options) for options in OPTIONS] + [(x[:n_few], COOPERATIVE)]
    for rows, options in tried:
        words = " ".join(f"{name}={value}" for name, value in options.items())
        row = {"keyword": words or "as it is", "programs": len(rows)}
        try:
            us = clock.events_us(partial(meta.launch, num_warps=4, **options), rows)[1]
        except RuntimeError as error:
            yield {**row, "us": None, "error": str(error)}
        else:
            yield {**row, "us": us, "error": None}


def first_calls(n_cols: int = 4096) -> Iterator[dict[str, Any]]:
    """The first call to a new autotuner, and later calls, for few and for many rows.

    Yields:
        Rows of n_rows, first_s (of the first call, in seconds; nothing is on disk, but
        the second row's kernels are in memory since the first), later_us (the median
        time in µs) and num_warps, which the autotuner chose.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    for n_rows in (64, 16384):
        x = torch.randn(n_rows, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
        tuned = meta.autotuned()
        first_s = _first_call_s(x, tuned)
        yield {
            "n_rows": n_rows,
            "first_s": round(first_s, 2),
            "later_us": clock.events_us(meta.launch, x, tuned)[1],
            "num_warps": tuned.best_config.num_warps,
        }


def _first_call_s(x: torch.Tensor, tuned: Autotuner) -> float:
    """The time of `meta.launch` with a cache on disk that is empty, in seconds."""
    with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        return clock.call_us(meta.launch, x, tuned) / 1e6
