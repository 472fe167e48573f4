"""NVIDIA's compute-sanitizer sees no stray access: every kernel, one small case each.

The interpreter's meter knows a view's exact elements. The sanitizer sees allocations,
on the GPU itself, where loads are wide and programs run at the same time.
"""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import kernels
from benchmarks import variants
from kernels import cooperative, tiled
from kernels.lab import backend

pytestmark = pytest.mark.gpu

LIMIT_S = 300


@triton.jit
def stray_kernel(output_ptr, BLOCK: tl.constexpr):
    """One program writes a block, whatever room there is."""
    tl.store(output_ptr + tl.arange(0, BLOCK), 0.0)


def stray() -> None:
    output = torch.empty(1000, device=backend.DEVICE)
    stray_kernel[(1,)](output, 4096)
    torch.cuda.synchronize()


def softmaxes() -> Iterator:
    """(function, shape) of every kernel."""
    for stem in kernels.CHAPTERS:
        module = importlib.import_module(f"kernels.{stem}")
        if hasattr(module, "softmax"):
            yield module.softmax, (3, 2049)
    yield variants.three_pass, (3, 2049)
    yield tiled.softmax, (3, 2048)  # rows that are aligned: wide accesses
    yield cooperative.softmax, (2, 40_001)  # several programs for a row


def every_kernel() -> None:
    for softmax, shape in softmaxes():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, device=backend.DEVICE).to(dtype)
            y = softmax(x).double()
            wanted = torch.softmax(x.double(), 1)
            torch.testing.assert_close(y, wanted, rtol=0.02, atol=1e-6)
    torch.cuda.synchronize()


def sanitized(function) -> subprocess.CompletedProcess:
    """Calls a function of this module under memcheck, each tensor an allocation."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("needs NVIDIA's compute-sanitizer")
    here = Path(__file__)
    path = os.pathsep.join([str(here.parent), str(here.parents[1])])
    changed = {"PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    call = f"import {here.stem}; {here.stem}.{function.__name__}()"
    options = ["--tool", "memcheck", "--error-exitcode", "86"]
    return subprocess.run(
        [tool, *options, sys.executable, "-c", call],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_stray_write_is_found():
    done = sanitized(stray)
    assert done.returncode != 0, done.stdout + done.stderr
    assert "Invalid __global__ write" in done.stdout


def test_every_kernel_is_clean():
    done = sanitized(every_kernel)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
