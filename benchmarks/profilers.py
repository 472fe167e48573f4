"""What chapter `profiling` needs around the profilers themselves.

The chapter shows its calls of do_bench, torch.profiler, Proton and Nsight Compute as a
program without this course would write them. What stands here makes them fit the
course: one process measures at a time, and what a machine lacks is read from the record
(`observed`); the output of a profiler becomes rows (`kernel_name`, `proton_rows`,
`ncu_rows`); what Triton prints is kept (`printed`); a program is run again after an
edit (`cache_runs`).
"""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch

from kernels.lab import backend, clock, record

Row = dict[str, Any]


def observed(name: str, function: Callable[[], Iterable[Row]]) -> pd.DataFrame:
    """The rows of `function()`, measured alone on this GPU, or recorded.

    The file is `profiling_<name>`. Where the function fails for want of its tool, a
    printed line says why, and the rows are the recorded ones; see `record.observe`.
    """

    def alone() -> list[Row]:
        try:
            with clock.alone():
                return list(function())
        except (ImportError, OSError, RuntimeError) as error:
            words = (str(error).splitlines() or [""])[0]
            raise record.Unavailable(f"{type(error).__name__}: {words}") from error

    return record.observe(f"profiling_{name}", alone)


@contextlib.contextmanager
def printed(**environment: str) -> Iterator[io.StringIO]:
    """What is printed inside, with these variables of the environment."""
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()) as text,
    ):
        yield text


def after(pause_us: float, function: Callable, *args: Any) -> Any:
    """Keeps the host busy for so many µs, and then calls `function(*args)`."""
    end = time.perf_counter() + pause_us / 1e6
    while time.perf_counter() < end:
        pass
    return function(*args)


def loop_us(call: Callable[[], Any], calls: int = 200) -> float:
    """The host's time for each of many calls, with the wait for the last, µs."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


# ---- what profilers print ------------------------------------------------------------


_OPERATION = re.compile(
    r"(?<![a-z])([a-z]+)_kernel_cuda|(?<![a-z])([a-z]+)_functor|CUDAFunctor_([a-z]+)"
    r"|(?<![A-Za-z])(?!Binary|Unary)([A-Z][a-z]+)Functor|(Max|Min)Ops"
)
_PART = re.compile(r"N?K?(\d+)")  # of a mangled name: its length stands before it


def kernel_name(signature: str) -> str:
    """A kernel's name without its type, namespaces and arguments.

    The operation of a PyTorch kernel, if its template's arguments name it, follows in
    brackets: many of PyTorch's kernels differ in nothing else.

    Args:
        signature: as profilers print it, or as Proton does, which leaves names as the
            C++ compiler mangled them.
    """
    if signature.startswith("_Z"):
        name, rest = "", signature.removeprefix("_Z")
        while part := _PART.match(rest):
            end = part.end() + int(part[1])
            name, rest = rest[part.end() : end], rest[end:]
    else:
        plain = re.sub(r"\(anonymous namespace\)|<unnamed>", "", signature)
        name = re.split(r"[<(]", plain)[0].split(":")[-1].split()[-1]
    told = _OPERATION.search(signature)
    operation = next(filter(None, told.groups())).lower() if told else ""
    return f"{name} ({operation})" if operation else name


def proton_rows(text: str) -> list[Row]:
    """The scopes and the kernels in Proton's file: parents first, then by time.

    Returns:
        A row for each: scope, the outermost one; depth, 0 for that scope; name; calls,
        of all kernels inside; us, their time together; bytes, as the scope was told,
        or None.
    """
    root, *_ = json.loads(text)
    return [
        {"scope": scope["frame"]["name"], **row}
        for scope in root["children"]
        for row in _proton_rows(scope, 0)
    ]


def _proton_rows(node: Mapping[str, Any], depth: int) -> list[Row]:
    children = [_proton_rows(child, depth + 1) for child in node["children"]]
    children.sort(key=lambda rows: -rows[0]["us"])
    inside = [rows[0] for rows in children]
    metrics = node["metrics"]
    us = metrics.get("time (ns)", 0) / 1e3
    own = {
        "depth": depth,
        "name": kernel_name(node["frame"]["name"]),
        "calls": metrics.get("count", 0) + sum(row["calls"] for row in inside),
        "us": us + sum(row["us"] for row in inside),
        "bytes": metrics.get("bytes"),
    }
    return [own, *(row for rows in children for row in rows)]


THREE_KERNELS = """\
import torch
from kernels import profiling

x = torch.randn(4096, 4096, device="cuda")
for _ in range(3):
    torch.exp(x), profiling.slow_softmax(x), profiling.softmax(x)
"""
"""A program for `run_ncu`."""


NCU_LINES = {
    "Duration": "duration, µs",
    "DRAM Throughput": "DRAM, % of its peak",
    "dram__bytes_read.sum": "read from DRAM, MB",
    "L2 Cache Throughput": "L2, % of its peak",
    "L2 Hit Rate": "L2 hits, %",
    "Registers Per Thread": "registers of a thread",
    "Achieved Occupancy": "warps, % of 64",
    "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio": (
        "bytes used of a sector's 32"
    ),
}
"""Metrics of ncu that the chapter reads, and what a table calls them."""


def run_ncu(options: Sequence[str], script: str) -> list[Row]:
    """The rows of `ncu_rows` for a Python program under `ncu --csv`.

    Args:
        options: of ncu, besides those that choose the form of its output.
        script: the program's text. It finds the course.

    Raises:
        record.Unavailable: ncu is not on the PATH, or it may not read the counters.
    """
    if shutil.which("ncu") is None:
        raise record.Unavailable("ncu (Nsight Compute) is not on the PATH")
    command = ["ncu", "--csv", "--page", "details", "--print-units", "base"]
    command += [*options, sys.executable, "-c"]
    paths = [str(backend.ROOT), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [*command, script],
        cwd=backend.ROOT,
        env=os.environ
        | {"LC_ALL": "C", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    if errors := re.findall(r"==ERROR== (?!The application)(.*)", said):
        raise record.Unavailable(f"ncu cannot profile here: {'; '.join(errors)}")
    return ncu_rows(done.stdout)


_UNITS = {"ns": (1e-3, "µs"), "nsecond": (1e-3, "µs"), "byte": (1e-6, "MB")}


def ncu_rows(text: str) -> list[Row]:
    """The metrics in what `ncu --csv --page details` printed.

    Returns:
        A row for each metric of each launch: launch, counted from 0; kernel; metric;
        unit, µs for times and MB for bytes; value.

    Raises:
        ValueError: there is no table in the text.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = [
        {
            "launch": int(row["ID"]),
            "kernel": kernel_name(row["Kernel Name"]).split()[0],
            "metric": row["Metric Name"],
            "unit": _UNITS.get(row["Metric Unit"], (1, row["Metric Unit"]))[1],
            "value": float(row["Metric Value"].replace(",", ""))
            * _UNITS.get(row["Metric Unit"], (1, ""))[0],
        }
        for row in csv.DictReader(lines)
        if re.fullmatch(r"[\d,.]+", row.get("Metric Value") or "")
    ]
    if not rows:
        raise ValueError(f"text must have ncu's table, got {text[-300:]!r}")
    return rows


# ---- the cache of compiled kernels ---------------------------------------------------

PROGRAM = """\
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)  # the columns
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, 2 * x, mask=i < n)


triton.knobs.compilation.listener = lambda *, cache_hit, **_: print(cache_hit)
signature = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(double_kernel, signature, {"BLOCK": 128})
triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
"""
"""Compiles a kernel without running it, and prints whether it was found on disk."""


def cache_runs(
    edits: Mapping[str, tuple[str, str]], variables: Mapping[str, Mapping[str, str]]
) -> tuple[list[Row], list[str]]:
    """Runs `PROGRAM` after each edit, every time in a new Python, with one cache.

    Args:
        edits: what a run is called → a text of the program, and what replaces it.
        variables: what a run is called → environment variables for it.

    Returns:
        For each run: run; kernel, "compiled" or "found"; on_disk, the kernels in the
        cache afterwards. And the names of the files of one kernel.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        program, cache = Path(folder, "program.py"), Path(folder, "cache")
        for name, (old, new) in edits.items():
            program.write_text(PROGRAM.replace(old, new))
            done = subprocess.run(
                [sys.executable, str(program)],
                env=os.environ
                | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
                | variables.get(name, {}),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(f"{name} failed: {done.stderr[-500:]}")
            kernel = {"True": "found", "False": "compiled"}[done.stdout.strip()]
            found = [*cache.glob("*/*.cubin")]
            rows.append({"run": name, "kernel": kernel, "on_disk": len(found)})
        files = sorted(path.name for path in found[0].parent.iterdir())
    return rows, files
