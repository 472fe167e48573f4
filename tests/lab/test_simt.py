"""Numba's kernels: right where Numba is installed, shown where it is not."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from kernels import program
from kernels.lab import backend, plot, simt

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba-cuda"
)


def in_a_new_process(*lines: str) -> str:
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=backend.ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_adds_one_element_per_thread(dtype, capsys):
    assert simt.ready() and capsys.readouterr().out == ""
    x = torch.arange(10, dtype=dtype, device=backend.DEVICE)
    output = torch.full((12,), -1, dtype=dtype, device=backend.DEVICE)
    program.add_element[3, 4](*map(simt.array, (output[:10], x, x)))
    assert output.tolist() == [*range(0, 20, 2), -1, -1]


@needs_numba
def test_launch_of_too_few_threads_leaves_the_rest():
    x = torch.ones(10, device=backend.DEVICE)
    output = torch.zeros(10, device=backend.DEVICE)
    program.add_element[2, 4](*map(simt.array, (output, x, x)))
    assert output.tolist() == 8 * [2.0] + [0.0, 0.0]


def test_numba_is_not_imported_before_it_is_needed():
    said = in_a_new_process(
        "import sys", "import kernels.program", "print('numba' in sys.modules)"
    )
    assert said == "False\n"


def test_without_numba_the_kernel_is_shown_and_one_line_says_why():
    said = in_a_new_process(
        "import sys",
        "sys.modules['numba'] = None",  # as if it were not installed
        "from kernels import program",
        "from kernels.lab import plot, simt",
        "print(plot.source(program.add_element))",
        "print(simt.ready())",
        "try:",
        "    program.add_element[3, 4](1, 2, 3)",
        "except RuntimeError as error:",
        "    print(error)",
    )
    shown, _, rest = said.partition("\nNumba is not installed")
    assert shown == str(plot.source(program.add_element))
    assert shown.startswith("@cuda.jit\ndef add_element(")
    assert "pip install numba-cuda\nFalse\nNumba is not installed" in rest


@pytest.mark.parametrize(
    ("tensor", "got"),
    [([1.0], "list"), (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16")],
)
def test_what_numba_cannot_take_is_named(tensor, got):
    with pytest.raises(TypeError, match=f"got {got}"):
        simt.array(tensor)
