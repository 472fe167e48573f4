"""Experiments of chapter `cuda`: what a GPU makes of faulty kernels, and of right ones.

Each function returns rows for `record.observe`. What compute-sanitizer watches runs in
a process of its own, as it would from a terminal:

    compute-sanitizer --tool racecheck python -m benchmarks.cuda_faults no_barrier
"""

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kernels import cuda, meta, strided
from kernels.lab import backend, check, compile, gpu, nvrtc, show
from kernels.lab.record import Unavailable

Rows = list[dict[str, Any]]

BLOCKS = 100_000  # of a race
STRIDES = (1, 2, 4, 8, 16, 32, 33)
READS = 256  # of a lane in banks.cu
LIMIT_S = 200  # for a process
SANITIZER = ("--print-limit", "1", "--report-api-errors", "no", "--show-backtrace=no")


def _floats(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32, device=backend.DEVICE)


def _run(file: str, expression: str, grid: int, block: int, *arguments: Any) -> None:
    nvrtc.require_gpu()
    nvrtc.run(cuda.compile(file, expression), grid, block, *arguments)
    torch.cuda.synchronize()


# ---- faults that show in the result --------------------------------------------------


def butterflies() -> Rows:
    """What each of 32 lanes finds, of the values 31, 30, … 0, at two widths."""
    nvrtc.require_gpu()
    x = _floats(range(31, -1, -1))
    rows = []
    for width in (24, 32):
        maxima, sums = torch.empty_like(x), torch.empty_like(x)
        _run("width.cu", f"widths<{width}>", 1, 32, maxima, sums, x)
        found = zip(maxima.tolist(), sums.tolist(), strict=True)
        rows += [
            {"width": width, "lane": lane, "maximum": maximum, "sum": total}
            for lane, (maximum, total) in enumerate(found)
        ]
    return rows


def reduced(threads: int, value: float, op: str = "Max", wait: bool = True) -> Any:
    """What every thread of BLOCKS blocks finds, where every thread's value is `value`.

    Args:
        threads: of a block.
        value: of every thread.
        op: "Max" or "Sum".
        wait: whether the threads wait between writing and reading shared memory.

    Returns:
        (BLOCKS, threads), float32.
    """
    nvrtc.require_gpu()
    x = torch.full((BLOCKS, threads), value, device=backend.DEVICE)
    output = torch.empty_like(x)
    expression = f"reduce<{op}, {str(wait).lower()}>"
    _run("barrier.cu", expression, BLOCKS, threads, output, x)
    return output


def partial_warps() -> Rows:
    """The maximum of values that are all −1, in blocks of 112 and of 128 threads."""
    rows = []
    for threads in (112, 128):
        found = reduced(threads, -1.0)
        rows.append(
            {
                "threads": threads,
                "expected": -1.0,
                "found": found[0, 0].item(),
                "wrong_blocks": int((found != -1).any(dim=1).sum()),
            }
        )
    return rows


def races() -> Rows:
    """The sum of values that are all 1, with and without the barrier."""
    rows = []
    for wait in (True, False):
        for threads in (128, 1024):
            wrong = (reduced(threads, 1.0, "Sum", wait) != threads).any(dim=1)
            row = {"barrier": wait, "threads": threads, "blocks": BLOCKS}
            rows.append(row | {"wrong_blocks": int(wrong.sum())})
    return rows


def bank_reads() -> Rows:
    """The clock cycles of one read by a warp whose lanes read words `stride` apart."""
    nvrtc.require_gpu()
    cycles, sink = torch.zeros(2, 32, dtype=torch.int32, device=backend.DEVICE)
    rows = []
    for stride in STRIDES:
        for _ in range(2):  # the first brings the code into the cache
            _run("banks.cu", f"banks<{stride}>", 1, 32, cycles, sink)
        rows.append({"stride": stride, "cycles": cycles[0].item() / READS})
    return rows


# ---- right kernels -------------------------------------------------------------------


def checked() -> Rows:
    """Each kernel, and the choice among them, through the adversarial checker."""
    nvrtc.require_gpu()
    rows = []
    for kernel in (*cuda.KERNELS, None):

        def softmax(x: torch.Tensor, kernel: str | None = kernel) -> torch.Tensor:
            return cuda.softmax(x, kernel=kernel)

        longest = cuda.longest("warp", 4, gpu.here()) if kernel == "warp" else None
        passed = check.softmax(softmax, max_cols=longest)
        name = f"cuda.{kernel}" if kernel else "cuda"
        rows.append({"kernel": name, "cases": passed.cases, "passes": bool(passed)})
    return rows


# ---- beside Triton -------------------------------------------------------------------

COUNTED = {
    "shuffles": r"shfl\.sync\.bfly",
    "barriers": r"bar\.sync",
    "divisions": r"div\.(?:full|rn|approx)|rcp\.",
}
"""What `instructions` counts, as regular expressions."""


def ptx_of(kernel: str, num_warps: int) -> dict[str, str]:
    """The PTX of a kernel and of Triton's, for rows of 1024 float32 values on an H200.

    Args:
        kernel: one of `cuda.KERNELS`.
        num_warps: of Triton's program, `strided.softmax_kernel`.
    """
    x, on = torch.empty(4096, 1024, device="meta"), gpu.named("H200")
    ours = cuda.choose_config(*x.shape, x.dtype, 4, kernel, on=on).compiled
    arguments = strided.softmax_kernel, *meta.arguments(x, x)
    triton = compile.aot(*arguments, gpu=on, num_warps=num_warps)
    return {f"{kernel}.cu": ours.ptx, "Triton": triton.ptx}


def instructions() -> Rows:
    """How many instructions of each kind of COUNTED the kernels have in PTX."""
    return [
        {"kernel": name, "warps": warps}
        | {what: len(re.findall(each, ptx)) for what, each in COUNTED.items()}
        for kernel, warps in (("warp", 1), ("block", 4))
        for name, ptx in ptx_of(kernel, warps).items()
    ]


def across_warps() -> Rows:
    """The PTX that combines the maxima of four warps, line by line: ours and Triton's.

    Returns:
        A row for each line, with a column for each kernel; see `combining`.
    """
    columns = {name: combining(ptx) for name, ptx in ptx_of("block", 4).items()}
    lines = itertools.zip_longest(*columns.values())
    return [dict(zip(columns, line, strict=True)) for line in lines]


def combining(ptx: str) -> list[str]:
    """The lines that combine the warps' maxima, from their store to shared memory on.

    These are stores, barriers, loads, shuffles and maxima. A shuffle's constants
    replace the registers that hold them. Its predicate, which nothing reads, is left
    out.

    Args:
        ptx: of a softmax that first subtracts after its maximum is known.
    """
    constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (-?\d+);", ptx))
    core = re.search(r"[^\n]*st\.shared\.[bf]32.*?(?=\bsub\.)", ptx, re.S)[0]
    kinds = r"(?:@%p\d+ )?(?:(?:st|ld)\.shared\.[bf]32|bar\.|shfl\.|max\.)"
    lines = []
    for line in (" ".join(line.split()) for line in core.splitlines()):
        if re.match(kinds, line):
            if line.startswith("shfl"):
                line = re.sub(r"\|%p\d+", "", line)
                line = re.sub(r"%r\d+", lambda r: constants.get(r[0], r[0]), line)
            lines.append(line)
    return renumbered(lines)


def renumbered(lines: Sequence[str]) -> list[str]:
    """PTX with registers numbered in their order, so that versions differ less.

    Addresses are %a1, %a2, …, whether a compiler keeps them in 32 bits or in 64.
    """
    numbers: dict[str, dict[str, int]] = {}

    def anew(found: re.Match) -> str:
        kind = "a" if found[1] else found[2]
        seen = numbers.setdefault(kind, {})
        number = seen.setdefault(found[2] + found[3], len(seen) + 1)
        return f"{found[1] or ''}%{kind}{number}"

    return [re.sub(r"(\[ ?)?%([a-z]+)(\d+)", anew, line) for line in lines]


def side_by_side(observed: pd.DataFrame) -> show.Code:
    """What `across_warps` found, one kernel's lines beside the other's."""
    columns = [[name, *renumbered(observed[name].fillna(""))] for name in observed]
    pairs = zip(*columns, strict=True)
    return show.Code("\n".join(f"{ours:43}{its}" for ours, its in pairs), "text")


# ---- the crossing --------------------------------------------------------------------

CROSSING = (
    *(256, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584, 4096),
    *(5120, 6144, 8192),
)
"""The columns at which (a) and (b) are compared."""


def by_pack() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The kernels (a) and (b) with each pack, such as "cuda.warp.8"."""
    return {
        f"cuda.{kernel}.{pack}": functools.partial(
            cuda.softmax, kernel=kernel, pack=pack
        )
        for pack in sorted(cuda.PACKS)
        for kernel in ("warp", "block")
    }


def crossing(warp: Mapping[int, float], block: Mapping[int, float]) -> int | None:
    """The measured columns from which (b) is faster than (a) up to the end.

    Args:
        warp, block: columns → µs of each.

    Returns:
        None if (a) is the faster one, or as fast, at the most columns.
    """
    columns = sorted(warp)
    slower = [n for n in columns if block[n] >= warp[n]]
    return next((n for n in columns if n > max(slower, default=0)), None)


# ---- what the sanitizer says ---------------------------------------------------------


def with_barrier() -> None:
    """The block's reduction as it should be."""
    _reduce_two_blocks(True)


def no_barrier() -> None:
    """The block's reduction without its barrier."""
    _reduce_two_blocks(False)


def _reduce_two_blocks(wait: bool) -> None:
    x, output = _floats([1.0] * 256), _floats([0.0] * 256)
    expression = f"reduce<Sum, {str(wait).lower()}>"
    _run("barrier.cu", expression, 2, 128, output, x)


def softmaxes() -> None:
    """The three kernels on rows that fill their packs, and on rows that do not."""
    for kernel in cuda.KERNELS:
        for n_cols in (40, 2049, 3000):
            for dtype in backend.DTYPES:
                x = torch.randn(3, n_cols, device=backend.DEVICE).to(dtype)
                cuda.softmax(x, kernel=kernel)
    torch.cuda.synchronize()


CALLS = {call.__name__: call for call in (with_barrier, no_barrier, softmaxes)}


def sanitized(tool: str, *names: str) -> Callable[[], Rows]:
    """A function that runs calls under compute-sanitizer and returns what it said.

    Args:
        tool: of compute-sanitizer, such as "racecheck".
        names: of CALLS.

    Returns:
        A function that returns rows of call, finding (the first one, or None), and
        summary. It raises `Unavailable` where the sanitizer is not installed.
    """
    if unknown := [name for name in names if name not in CALLS]:
        raise ValueError(f"names must be among {[*CALLS]}, got {unknown}")
    return lambda: [_sanitized(tool, name) for name in names]


def _sanitized(tool: str, name: str) -> dict[str, Any]:
    found = shutil.which("compute-sanitizer")
    found = found or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        raise Unavailable("compute-sanitizer is not on the PATH")
    rest = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(backend.ROOT), rest)))
    changed = {"PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [found, "--tool", tool, *SANITIZER]
    done = subprocess.run(
        [*command, sys.executable, "-m", "benchmarks.cuda_faults", name],
        cwd=backend.ROOT,
        env=os.environ | changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )
    if "SUMMARY" not in done.stdout or done.returncode:
        last = (done.stdout.strip().splitlines() or ["nothing"])[-1]
        raise Unavailable(f"compute-sanitizer ended with {done.returncode}: {last}")
    return {"tool": tool, "call": name} | read(done.stdout)


def read(said: str) -> dict[str, Any]:
    """The sanitizer's first finding, in one line, and its summary.

    Args:
        said: all that the sanitizer printed.
    """
    lines = [line.removeprefix("=========").strip() for line in said.splitlines()]
    first = re.search(r"(?s)(?:Error|Warning|Invalid).*?(?=\n\n|$)", "\n".join(lines))
    # Addresses in the machine code differ from compiler to compiler.
    finding = (
        re.sub(r"\+0x[0-9a-f]+", "", " ".join(first[0].split())) if first else None
    )
    summary = next(line for line in reversed(lines) if "SUMMARY" in line)
    return {"finding": finding, "summary": summary}


if __name__ == "__main__":
    CALLS[sys.argv[1]]()
