"""Hardware counters: what the GPU itself counted while a kernel ran.

Nsight Compute (`ncu`, of the CUDA toolkit) reads them, for each kernel that runs inside
`watched()`, in a Python process of its own. Clocks and caches are left as they are, and
only `watched(emptied=True)` sees to it that the L2 cache holds nothing of use.

Weighed: CUPTI, on which Nsight Compute stands (its Python package cannot set counters
up for a kernel by itself); `torch.profiler` (knows times and launches, no counters).

Source: https://docs.nvidia.com/nsight-compute/NsightComputeCli/
"""

import contextlib
import csv
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernels.lab import backend, bench

METRICS = {
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "written_bytes",
    "gpu__time_duration.sum": "duration_us",
}
_UNITS = {  # of Nsight Compute, as bytes and µs
    **{"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
    **{"nsecond": 1e-3, "usecond": 1, "msecond": 1e3, "second": 1e6},
    **{"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6},
}
NCU = (
    *("ncu", "--target-processes", "all", "--profile-from-start", "off"),
    *("--clock-control", "none", "--cache-control", "none"),
    *("--csv", "--page", "raw", "--print-units", "base"),
    *("--metrics", ",".join(METRICS)),
)


@contextlib.contextmanager
def watched(*, emptied: bool = False) -> Iterator[None]:
    """`profile` reports the kernels that are launched inside.

    Args:
        emptied: whether a gigabyte of other values is read before. Then the L2 cache
            holds nothing that the kernels need, and nothing yet to be written to DRAM.
    """
    if emptied:
        _others().sum()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        yield
        torch.cuda.synchronize()


@functools.cache
def _others() -> torch.Tensor:
    return torch.ones(2**28, device=backend.DEVICE)  # 1 GiB


def profile(function: Callable[[], Any]) -> list[dict[str, Any]]:
    """DRAM bytes and time of every kernel that the function runs inside `watched()`.

    Args:
        function: of a module, called without arguments in a new process.

    Returns:
        A row for each kernel, in order: kernel, read_bytes and written_bytes (from and
        to DRAM), duration_us.

    Raises:
        TypeError: a new process cannot import the function.
        bench.Unavailable: Nsight Compute is not on the PATH, or may not, or cannot,
            read the counters here.
        RuntimeError: the function failed.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise TypeError(
            f"function must be of a module, for a new process to import, got {name} "
            f"of {module}; move it to a file"
        )
    if shutil.which("ncu") is None:
        raise bench.Unavailable("ncu (Nsight Compute) is not on the PATH")
    script = (
        f"from kernels.lab import counters; from {module} import {name}; "
        f"counters.warm_up(); {name}()"
    )
    command = [*NCU, sys.executable, "-c", script]
    done = subprocess.run(
        command,
        cwd=backend.ROOT,
        env=os.environ | {"LC_ALL": "C"},  # numbers with a decimal point
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    errors = re.findall(r"==ERROR== (?!The application)(.*)", said)
    errors += re.findall(r"Failed to initialize the profiler.*", said)
    if errors:
        raise bench.Unavailable(f"ncu cannot profile here: {'; '.join(errors)}")
    if done.returncode:
        raise RuntimeError(f"{module}.{name} failed under ncu: {said[-2000:]}")
    return parse(done.stdout)[1:]  # the first is of warm_up


def warm_up() -> None:
    """Runs a kernel in `watched()`: the profiler charges the first with its start."""
    x = torch.ones(1024, device=backend.DEVICE)
    with watched():
        torch.exp(x)


def parse(text: str) -> list[dict[str, Any]]:
    """The rows of `profile` from what `ncu --csv --page raw` printed.

    Raises:
        ValueError: there is no table in the text, or it lacks one of METRICS.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    missing = [metric for metric in METRICS if not table or metric not in table[0]]
    if missing:
        raise ValueError(
            f"text must be Nsight Compute's table with {missing}, got {text[-300:]!r}"
        )
    units, *rows = table
    return [{"kernel": _bare(row["Kernel Name"]), **_read(row, units)} for row in rows]


def _read(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    values = {
        name: float(row[metric].replace(",", "")) * _UNITS[units[metric]]
        for metric, name in METRICS.items()
    }
    return {
        name: round(value, 3) if name.endswith("us") else round(value)
        for name, value in values.items()
    }


def _bare(signature: str) -> str:
    """A kernel's name without its type, namespaces, template and arguments."""
    for nameless in ("(anonymous namespace)", "<unnamed>"):
        signature = signature.replace(nameless, "")
    return re.split(r"[<(]", signature)[0].split(":")[-1].split()[-1]
