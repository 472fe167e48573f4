"""NVIDIA's compute-sanitizer sees no stray access and no race in any kernel.

The kernels in CUDA C++ are tried in `tests/benchmarks/test_cuda_faults.py`.

The interpreter's meter knows a view's exact elements. The sanitizer sees allocations,
on the GPU itself, where loads are wide and programs run at the same time. It also sees
threads of a program that read in shared memory what others write, and do not wait.
"""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import kernels
from benchmarks import variants
from kernels import columns, cooperative, fastest, staged, tiled, windows
from kernels.lab import backend, shared
from tests.fakes import FakeKernel
from tests.helpers import assert_right

LIMIT_S = 300


@triton.jit
def stray_kernel(output_ptr, BLOCK: tl.constexpr):
    """One program writes a block, whatever room there is."""
    tl.store(output_ptr + tl.arange(0, BLOCK), 0.0)


def stray() -> None:
    output = torch.empty(1000, device=backend.DEVICE)
    stray_kernel[(1,)](output, 4096)
    torch.cuda.synchronize()


@triton.jit
def racing_kernel(output_ptr, BLOCK: tl.constexpr):
    """Threads read what others write to shared memory, and nobody waits."""
    address, place = shared.reserve(4 * BLOCK), tl.arange(0, BLOCK)
    shared.store(address + 4 * place, place, place >= 0)
    other = shared.load(address + 4 * (BLOCK - 1 - place), place >= 0, 32)
    tl.store(output_ptr + place, other)


def racing() -> None:
    output = torch.empty(1024, dtype=torch.int32, device=backend.DEVICE)
    racing_kernel[(1,)](output, 1024)
    torch.cuda.synchronize()


def softmaxes() -> Iterator[tuple[Callable, tuple[int, int]]]:
    """(function, shape) of every kernel."""
    for stem in kernels.CHAPTERS:
        module = importlib.import_module(f"kernels.{stem}")
        if hasattr(module, "softmax") and stem != "cuda":
            yield module.softmax, (3, 2049)
    yield variants.three_pass, (3, 2049)
    yield tiled.softmax, (3, 2560)  # wide accesses, two blocks
    yield staged.softmax, (131, 33)  # in bfloat16, a last tile with values left over
    for n_cols in (781, 20_001):  # a row of a slice, and its parts
        yield of_a_slice, (3, n_cols)
    for n_cols in (40_000, 40_001):  # several programs for a row
        yield cooperative.softmax, (2, n_cols)
    for shape in ((72, 30), (64, 300)):  # columns that a block holds; parts, both wide
        yield in_columns, shape


def of_a_slice(x: torch.Tensor) -> torch.Tensor:
    """The softmax of x, whose rows lie in a wider matrix and start elsewhere there."""
    wide = torch.nn.functional.pad(x, (1, 2))
    return windows.softmax(wide[:, 1:-2])


def in_columns(x: torch.Tensor) -> torch.Tensor:
    """The softmax of x's rows, which are the columns of a contiguous matrix."""
    return columns.softmax(x.t().contiguous(), dim=0).t()


def every_kernel() -> None:
    # Less than 8 apart: eager softmax rounds x - max to bfloat16, and from 8 on that
    # alone may err by more than the tolerance.
    generator = torch.Generator(backend.DEVICE).manual_seed(0)
    for softmax, shape in softmaxes():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.rand(shape, generator=generator, device=backend.DEVICE)
            x = (7 * x).to(dtype)
            assert_right(softmax(x), x)
    torch.cuda.synchronize()


def sanitized(
    function: Callable[[], None], check: str = "memcheck"
) -> subprocess.CompletedProcess:
    """Calls a function of this module under a tool, each tensor an allocation."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("needs NVIDIA's compute-sanitizer")
    changed = {"PYTHONPATH": str(backend.ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    name = function.__name__
    call = f"import kernels; from {__name__} import {name}; {name}()"
    options = ["--tool", check, "--error-exitcode", "86"]
    return subprocess.run(
        [tool, *options, sys.executable, "-c", call],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.gpu
def test_a_stray_write_is_found():
    done = sanitized(stray)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "Invalid __global__ write" in done.stdout


@pytest.mark.gpu
def test_every_kernel_is_clean():
    done = sanitized(every_kernel)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


@pytest.mark.gpu
def test_a_race_is_found():
    done = sanitized(racing, "racecheck")
    assert done.returncode != 0, done.stdout + done.stderr
    assert "hazard" in done.stdout


@pytest.mark.gpu
def test_no_kernel_has_a_race():
    done = sanitized(every_kernel, "racecheck")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 hazards displayed" in done.stdout


def test_every_kernel_is_among_them(monkeypatch):
    modules = [importlib.import_module(f"kernels.{stem}") for stem in kernels.CHAPTERS]
    found = {}
    for module in (*modules, variants):
        for name, kernel in list(vars(module).items()):
            if name in ("softmax_kernel", "three_pass_kernel"):
                found.setdefault(kernel, FakeKernel(kernel))
                monkeypatch.setattr(module, name, found[kernel])
    monkeypatch.setattr(kernels.operator.rules(), "launches", {})
    fastest.known.clear()
    for softmax, _ in softmaxes():
        for dtype in (torch.float32, torch.bfloat16):
            softmax(torch.ones(2, 33, dtype=dtype, device=backend.DEVICE))
    homes = {kernel: inspect.getmodule(kernel.fn).__name__ for kernel in found}
    assert {"kernels.tiled", "kernels.unaligned"} <= set(homes.values())
    assert [homes[kernel] for kernel, spy in found.items() if not spy.calls] == []
