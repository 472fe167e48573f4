"""Counters: what the GPU itself counted while a kernel ran, and which kernels ran.

`profile` reads hardware counters with Nsight Compute (`ncu`, of the CUDA toolkit). It
runs a function in a Python process of its own, and reports each kernel that runs inside
`watched()` there. Clocks and caches are left as they are, unless asked otherwise.
Reading counters needs a permission that many machines do not give (containers, Colab):
then `profile` raises `Unavailable`, with ncu's own words.

`launched` names the kernels of a call. It uses `torch.profiler`, which needs no
permission.

Weighed: CUPTI, on which Nsight Compute stands (its Python package cannot set counters
up for a kernel by itself); `torch.profiler` for the counters, too (it knows times and
launches only).

Source: https://docs.nvidia.com/nsight-compute/NsightComputeCli/
"""

import contextlib
import csv
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.lab import backend, clock, gpu
from kernels.lab.record import Unavailable

METRICS = {
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "written_bytes",
    "gpu__time_duration.sum": "duration_us",
}
"""What `profile` reads unless told otherwise: Nsight Compute's name → ours."""
_UNITS = {  # of Nsight Compute, as bytes and µs; every other unit stays as it is
    **{"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12},
    **{"nsecond": 1e-3, "usecond": 1, "msecond": 1e3, "second": 1e6},
    **{"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6},
}
NOT_READ = '"nan"'  # a counter that ncu lost, which happens on a busy GPU
TRIES = 3
WARM_UPS = 3  # calls before `launched` looks: by then all is compiled


@contextlib.contextmanager
def watched(*, emptied: bool = False) -> Iterator[None]:
    """`profile` reports the kernels that are launched inside.

    Args:
        emptied: whether the L2 cache is emptied before: it then holds nothing that the
            kernels need, and nothing that must still be written to DRAM. Lines that an
            earlier kernel asked L2 to keep (`evict_last`) outlive reading a gigabyte of
            other values: on an H200 about 8 MB did. So the driver is first asked to
            treat all lines alike. `benchmarks/flush.py` has the controls.
    """
    if emptied:
        torch.cuda.synchronize()
        gpu.driver("cuCtxResetPersistingL2Cache")
        _others().sum()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        yield
        torch.cuda.synchronize()


@functools.cache
def _others() -> torch.Tensor:
    return torch.ones(2**28, device=backend.DEVICE)  # 1 GiB


def profile(
    function: Callable[[], Any],
    metrics: Mapping[str, str] = METRICS,
    *,
    flush: bool = False,
    replay: str = "kernel",
) -> list[dict[str, Any]]:
    """The counters of every kernel that the function runs inside `watched()`.

    Args:
        function: of a module, called without arguments in a new process. It must not
            use `clock`, because this process measures meanwhile.
        metrics: Nsight Compute's name of a metric → the key of its value.
        flush: whether ncu empties the caches before each kernel, by its own means.
        replay: how ncu reads more counters than the GPU has room for at a time: it
            repeats each "kernel", or the whole "application". The first restores
            memory between its passes, but not the L2 cache, so a second pass may find
            there what the first left. The second runs the function for each pass.

    Returns:
        A row for each kernel, in order: kernel, and a value for each metric. Times are
        in µs; bytes and other counts are integers.

    Raises:
        TypeError: a new process cannot import the function.
        ValueError: replay is neither of the two.
        Unavailable: Nsight Compute is not on the PATH, or it may not, or cannot, read
            the counters here, or loses one in each of TRIES runs.
        RuntimeError: the function failed.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or not name.isidentifier():
        raise TypeError(
            "function must be one that a new process can import, got "
            f"{name} of {module}; define it in a file"
        )
    if replay not in ("kernel", "application"):
        raise ValueError(f"replay must be 'kernel' or 'application', got {replay!r}")
    if shutil.which("ncu") is None:
        raise Unavailable("ncu (Nsight Compute) is not on the PATH")
    script = (
        f"from kernels.lab import counters; from {module} import {name}; "
        f"counters.warm_up(); {name}()"
    )
    command = [
        *("ncu", "--target-processes", "all", "--profile-from-start", "off"),
        *("--clock-control", "none", "--cache-control", "all" if flush else "none"),
        *("--replay-mode", replay, "--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join(metrics), sys.executable, "-c", script),
    ]
    paths = [str(backend.ROOT), os.environ.get("PYTHONPATH")]
    env = os.environ | {"LC_ALL": "C"}  # numbers with a decimal point
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    how: dict[str, Any] = {"cwd": backend.ROOT, "env": env}
    for _ in range(TRIES):
        with clock.alone():
            done = subprocess.run(command, capture_output=True, text=True, **how)
        if NOT_READ not in done.stdout:
            break
    said = done.stdout + done.stderr
    errors = re.findall(r"==ERROR== (?!The application)(.*)", said)
    errors += re.findall(r"Failed to initialize the profiler.*", said)
    if errors:
        raise Unavailable(f"ncu cannot profile here: {'; '.join(errors)}")
    if done.returncode:
        raise RuntimeError(f"{module}.{name} failed under ncu: {said[-2000:]}")
    if NOT_READ in done.stdout:
        raise Unavailable(f"ncu could not read a counter in {TRIES} tries: it is 'nan'")
    return parse(done.stdout, metrics)[1:]  # the first is of warm_up


def warm_up() -> None:
    """Runs a kernel in `watched()`: the profiler charges the first with its start."""
    x = torch.ones(1024, device=backend.DEVICE)
    with watched():
        torch.exp(x)


def parse(text: str, metrics: Mapping[str, str] = METRICS) -> list[dict[str, Any]]:
    """The rows of `profile` from what `ncu --csv --page raw` printed.

    Raises:
        ValueError: there is no table in the text, or it lacks a metric.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    missing = [metric for metric in metrics if not table or metric not in table[0]]
    if missing:
        raise ValueError(
            f"text must be Nsight Compute's table with {missing}, got {text[-300:]!r}"
        )
    units, *rows = table
    return [
        {"kernel": _bare(row["Kernel Name"])}
        | {name: _value(row[metric], units[metric]) for metric, name in metrics.items()}
        for row in rows
    ]


def _value(cell: str, unit: str) -> float:
    """Bytes and counts as integers; times in µs and shares with 3 decimals."""
    if cell == "n/a":  # this GPU lacks the counter
        return math.nan
    value = round(float(cell.replace(",", "")) * _UNITS.get(unit, 1), 3)
    return round(value) if unit.endswith("byte") or value.is_integer() else value


def _bare(signature: str) -> str:
    """A kernel's name without its type, namespaces, template and arguments."""
    for nameless in ("(anonymous namespace)", "<unnamed>"):
        signature = signature.replace(nameless, "")
    return re.split(r"[<(]", signature)[0].split(":")[-1].split()[-1]


def launched(function: Callable, *args: Any) -> list[str]:
    """The names of the kernels that one call of `function(*args)` launches, in order.

    Three calls go before the one that is looked at: by then whatever compiles has
    compiled.

    Some processes that called this end in "double free or corruption" after all their
    work. That was seen with PyTorch 2.11, and only where its profiler had been used.

    Raises:
        RuntimeError: kernels are interpreted here: nothing is launched on a GPU.
        Unavailable: the profiler saw no kernel.
    """
    if backend.INTERPRETED:
        raise RuntimeError(
            "kernels run in Triton's interpreter here, so the GPU runs none; "
            "record.observe reads what was recorded on a GPU"
        )
    for _ in range(WARM_UPS):
        function(*args)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        function(*args)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        names = _kernels_of(json.loads(path.read_text()))
    if not names:
        raise Unavailable(
            "torch.profiler saw no kernel: CUPTI, its library, probably fails here"
        )
    return names


def _kernels_of(trace: Mapping[str, Any]) -> list[str]:
    """The kernels of a profiler's trace, in the order in which they started."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    return [event["name"] for event in sorted(kernels, key=lambda event: event["ts"])]
