"""Numba's kernels: right where Numba is installed, shown where it is not."""

import importlib.util
import os

import pytest
import torch

from kernels import program
from kernels.lab import backend, show, simt
from tests import forks

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba-cuda"
)


def in_a_new_process(*lines: str) -> str:
    strict = "import warnings; warnings.simplefilter('error')"
    code = "\n".join((strict, *lines))
    done = forks.python(code, env=dict(os.environ), cwd=backend.ROOT)
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
        "from kernels.lab import show, simt",
        "print(show.source(program.add_element))",
        "print(simt.ready())",
        "try:",
        "    program.add_element[3, 4](1, 2, 3)",
        "except RuntimeError as error:",
        "    print(error)",
    )
    shown, _, rest = said.partition("\nNumba is not installed")
    assert shown == str(show.source(program.add_element))
    assert shown.startswith("@cuda.jit\ndef add_element(")
    assert "pip install numba-cuda\nFalse\nNumba is not installed" in rest


NUMBA = """
import sys, types
cuda = types.ModuleType("numba.cuda")
cuda.is_available = lambda: {available}
def jit(fn):
    raise {error}
cuda.jit = jit
numba = types.ModuleType("numba")
numba.cuda = cuda
sys.modules |= {{"numba": numba, "numba.cuda": cuda}}
from kernels import program
from kernels.lab import simt
print(simt.ready())
try:
    program.add_element[3, 4](1, 2, 3)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("available", "error", "sentence"),
    [
        (
            True,
            r"OSError('\n[222] Call to cuLinkAddData: UNSUPPORTED_PTX\nlog')",
            "Numba cannot run a kernel (OSError: [222] Call to cuLinkAddData: "
            "UNSUPPORTED_PTX), so its kernel is shown and not run here; a CUDA toolkit "
            "no newer than the driver would do, such as the one of pip install "
            "'numba-cuda[cu12]'",
        ),
        (
            False,
            "SystemExit",
            "Numba finds no GPU or no CUDA toolkit, so its kernel is shown and not run "
            "here; pip install 'numba-cuda[cu13]' brings a toolkit",
        ),
    ],
    ids=["unsupported PTX", "no toolkit"],
)
def test_numba_that_cannot_run_a_kernel_is_one_sentence(available, error, sentence):
    said = in_a_new_process(NUMBA.format(available=available, error=error))
    assert said == f"{sentence}\nFalse\n{sentence}\n"


def test_error_is_told_in_one_line():
    assert simt._first_line(OSError("\n  the PTX\nand more")) == "OSError: the PTX"
    assert simt._first_line(ValueError()) == "ValueError()"
    assert len(simt._first_line(OSError("long " * 1000))) < 200


def test_numba_that_cannot_be_imported_is_one_sentence(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3')")
    said = in_a_new_process(
        "import sys",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "from kernels.lab import simt",
        "print(simt.ready())",
    )
    assert said == (
        "Numba cannot be imported (ImportError: Numba needs NumPy 2.3), so its kernel "
        "is shown and not run here; pip install --upgrade numba-cuda\nFalse\n"
    )


@pytest.mark.parametrize(
    ("tensor", "got"),
    [([1.0], "list"), (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16")],
)
def test_what_numba_cannot_take_is_named(tensor, got):
    with pytest.raises(TypeError, match=f"got {got}"):
        simt.array(tensor)
