"""Descriptors: which tensors they fit, and launches that are called with tensors."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, compile, descriptors
from kernels.lab.descriptors import DescriptorLaunch


@triton.jit
def copy_kernel(output_desc, input_desc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """One program copies one block, zeros where the input ends."""
    start = [tl.program_id(0) * ROWS, tl.program_id(1) * COLS]
    output_desc.store(start, input_desc.load(start))


def launch_of(output, x):
    forms = descriptors.described((output, x), ((4, 8), (4, 8)))
    return DescriptorLaunch(copy_kernel, (2, 2), (), {"ROWS": 4, "COLS": 8}, forms)


def numbers(n_rows, n_cols, stride, offset=0):
    flat = torch.arange(n_rows * stride + offset, dtype=torch.float32)
    return flat.as_strided((n_rows, n_cols), (stride, 1), offset)


@pytest.mark.parametrize(
    ("x", "right"),
    [
        (numbers(5, 12, 12), True),
        (numbers(5, 11, 12), True),
        (numbers(5, 12, 13), False),  # rows start anywhere
        (numbers(5, 8, 12, 1), False),  # the first row starts anywhere
        (numbers(5, 8, 12, 4), True),
        (numbers(8, 8, 8).t(), False),
        (numbers(0, 8, 8), False),
        (numbers(8, 8, 8)[0], False),
        (torch.empty(4, 4, device="meta"), True),
        (torch.empty(4, 4, dtype=torch.float16, device="meta"), False),
    ],
)
def test_fits_matrices_with_aligned_rows(x, right):
    assert descriptors.fits(x) == right
    assert descriptors.fits(x, numbers(4, 4, 4)) == right


def test_a_launch_is_made_without_memory_and_called_with_tensors():
    x = numbers(7, 16, 16).to(backend.DEVICE)[:, :14]
    y = torch.zeros(8, 16, device=backend.DEVICE)
    ghosts = torch.empty(8, 16, device="meta"), torch.empty(7, 16, device="meta")
    launch = launch_of(ghosts[0], ghosts[1][:, :14])
    assert launch == launch_of(y, x)
    launch(y, x)
    assert torch.equal(y[:7, :14], x)
    assert not y[7:].any() and not y[:, 14:].any()


def test_a_launch_is_compiled_for_any_gpu():
    x = torch.empty(8, 16, device="meta")
    loads = {
        gpu: compile.aot(launch_of(x, x), gpu=gpu).count(r"cp\.async\.bulk\.tensor")
        for gpu in ("T4", "A100", "H200", "RTX 5090")
    }
    assert loads == {"T4": 0, "A100": 0, "H200": 2, "RTX 5090": 2}
