"""The two worlds: which is chosen and why, and the validator."""

import os
import subprocess

import numpy
import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, description
from tests import forks
from tests.fakes import fake_gpu


@triton.jit
def double_kernel(output_ptr, input_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + offsets, mask=offsets < n)
    tl.store(output_ptr + offsets, 2 * x, mask=offsets < n)


def test_kernel_runs_in_this_world():
    x = torch.arange(5.0, device=backend.DEVICE)
    output = torch.empty_like(x)
    double_kernel[(1,)](output, x, x.numel(), BLOCK=8)
    assert output.tolist() == [0, 2, 4, 6, 8]


# ---- the choice, in new processes ----------------------------------------------------

DROPPED = (
    *("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "COURSE_GPU_GB", "COURSE_MEASURE"),
)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k not in DROPPED}
    strict = "import warnings; warnings.simplefilter('error', UserWarning)\n"
    return forks.python(strict + code, env=kept | environment, cwd=backend.ROOT)


def said(code: str, **environment: str) -> str:
    run = python(code, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


WORLD = """
from kernels.lab import backend, description
print(backend.INTERPRETED, backend.DEVICE, backend.describe())
"""

DRIVER = """
import ctypes, warnings
class Driver:
    def cuInit(self, flags):
        return 0
    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0
load = ctypes.CDLL
def fake_load(name, *rest, **options):
    return Driver() if name == "libcuda.so.1" else load(name, *rest, **options)
ctypes.CDLL = fake_load
import torch
def available():
    warnings.warn("The NVIDIA driver on your system is too old")
    return False
torch.cuda.is_available = available
torch.version.cuda = {cuda!r}
"""


def test_world_matches_the_machine():
    if backend.has_gpu() and torch.cuda.is_available():
        assert said(WORLD).startswith("False cuda Kernels are compiled, run and timed")
    elif backend.has_gpu():
        assert said(WORLD).startswith("True cpu The ")
    else:
        assert said(WORLD).startswith(
            "True cpu There is no GPU here: kernels run in Triton's interpreter, and "
            "measured figures are the ones recorded on nvidia-h200 (torch "
        )


def test_environment_overrides_the_machine():
    for yes in ("1", "true", "y"):  # Triton takes them alike
        assert said(WORLD, TRITON_INTERPRET=yes).startswith("True cpu ")
    without = said(WORLD, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert without.startswith(
        "False cuda TRITON_INTERPRET turns the interpreter off, and PyTorch finds no "
        "GPU: kernels can be compiled here, and not run ("
    )


def test_gpu_with_a_torch_that_has_no_cuda_is_not_used(nvidia_smi):
    code = DRIVER.format(cuda=None) + WORLD
    sentence = said(code)
    assert sentence.startswith(
        "True cpu The NVIDIA A10 of this machine is not used, because torch "
        f"{torch.__version__} is built without CUDA: kernels run in Triton's "
        "interpreter, and measured figures are "
    )
    # A process that this one starts inherits TRITON_INTERPRET, which is not the reason.
    assert said(code, TRITON_INTERPRET="1") == sentence


def test_gpu_whose_driver_torch_cannot_start_is_not_used(nvidia_smi):
    assert said(DRIVER.format(cuda="13.0") + WORLD).startswith(
        "True cpu The NVIDIA A10 of this machine is not used, because torch "
        f"{torch.__version__}, built for CUDA 13.0, does not start with the driver "
        "that is installed: kernels run in "
    )


def test_hidden_gpu_is_not_used(nvidia_smi):
    assert said(WORLD, CUDA_VISIBLE_DEVICES="").startswith(
        "True cpu The NVIDIA A10 of this machine is not used, because "
        "the CUDA driver reports no device for CUDA_VISIBLE_DEVICES='': kernels run in "
    )


def test_gpu_is_not_used_if_the_reader_says_so(nvidia_smi, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(backend, "obstacle", lambda: "")
    assert backend.describe().startswith(
        "The NVIDIA A10 of this machine is not used, because TRITON_INTERPRET is set: "
    )


@pytest.mark.skipif(not backend.INTERPRETED, reason="a GPU needs no interpreter")
def test_triton_imported_too_early_is_an_error_that_says_what_to_do():
    result = python("import triton, kernels")
    assert "no GPU can be used here (" in result.stderr
    assert "import kernels first" in result.stderr


# ---- the interpreter's NumPy ---------------------------------------------------------


@pytest.fixture
def versions(monkeypatch):
    def pretend(triton_version: str, numpy_version: str) -> None:
        monkeypatch.setattr(triton, "__version__", triton_version)
        monkeypatch.setattr(numpy, "__version__", numpy_version)
        description.require_interpreter.cache_clear()

    yield pretend
    description.require_interpreter.cache_clear()


@pytest.mark.parametrize(
    ("of_triton", "of_numpy"),
    [("3.6.0", "2.3.5"), ("3.7.1", "2.4.0"), ("3.10.0+git1a2b", "2.10.0rc1")],
)
def test_interpreter_works_with_its_numpy(versions, of_triton, of_numpy):
    versions(of_triton, of_numpy)
    description.require_interpreter()


def test_old_interpreter_with_new_numpy_is_refused_when_a_kernel_runs(versions):
    versions("3.6.0", "2.4.1")
    cure = r"triton 3\.6\.0 .* got NumPy 2\.4\.1; install 'numpy<2\.4', or triton 3\.7"
    with pytest.raises(RuntimeError, match=cure):
        description.require_interpreter()
    x = torch.ones(2, 3, device=backend.DEVICE)
    if backend.INTERPRETED:
        with pytest.raises(RuntimeError, match=cure):
            backend.validate(x)
    else:
        backend.validate(x)  # nothing is interpreted here


def test_old_interpreter_with_new_numpy_can_be_imported():
    code = """
import numpy, os
os.environ["TRITON_INTERPRET"] = "1"
import triton
numpy.__version__, triton.__version__ = "2.4.1", "3.6.0"
from kernels.lab import backend, description
try:
    description.require_interpreter()
except RuntimeError:
    print("refused when it is needed")
"""
    assert said(code) == "refused when it is needed"


@pytest.mark.parametrize(
    ("facts", "there"), [({}, True), ({"failing": "cuInit"}, False)]
)
def test_driver_is_asked_for_devices(facts, there):
    ask = backend.has_gpu.__wrapped__  # fake_gpu replaces has_gpu itself
    with fake_gpu(**facts) as driver:
        assert ask() is there
    assert driver.names == ["cuInit", "cuDeviceGetCount"][: 1 + there]


# ---- a smaller GPU -------------------------------------------------------------------


@pytest.mark.skipif(backend.has_gpu(), reason="there is a GPU to limit")
def test_limit_means_nothing_without_a_gpu():
    assert said(WORLD, TRITON_INTERPRET="0", COURSE_GPU_GB="14").startswith("False")


@pytest.mark.gpu
def test_limited_process_gets_no_more():
    code = """
import torch
from kernels.lab import backend, gpu
print(gpu.free_bytes() <= 2e9, "at most 2 GB" in backend.describe())
try:
    torch.empty(3 * 10**9, dtype=torch.int8, device="cuda")
except torch.OutOfMemoryError:
    print("refused")
"""
    assert said(code, COURSE_GPU_GB="2").split() == ["True", "True", "refused"]


class TestValidate:
    def test_takes_every_dtype(self):
        for dtype in backend.DTYPES:
            backend.validate(torch.ones(2, 3, dtype=dtype, device=backend.DEVICE))

    def test_takes_empty(self):
        backend.validate(torch.ones(0, 3, device=backend.DEVICE))

    @pytest.mark.parametrize(
        ("x", "words"),
        [
            ([1.0], "torch.Tensor, got list"),
            (torch.ones(2, 2, dtype=torch.int64), "got torch.int64"),
            (torch.ones(2, 2, dtype=torch.float64), "got torch.float64"),
        ],
    )
    def test_type_errors(self, x, words):
        with pytest.raises(TypeError, match=words):
            backend.validate(x)

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
    def test_rank(self, shape):
        with pytest.raises(ValueError, match="2 dimensions"):
            backend.validate(torch.ones(shape, device=backend.DEVICE))

    def test_device(self):
        with pytest.raises(ValueError, match=f"on '{backend.DEVICE}'.*got.*'meta'"):
            backend.validate(torch.ones(2, 2, device="meta"))

    def test_columns(self):
        x = torch.ones(2, 9, device=backend.DEVICE)
        with pytest.raises(ValueError, match=r"at most 8 columns.*got 9"):
            backend.validate(x, max_cols=8)

    def test_rows(self):
        x = torch.ones(1, 2, device=backend.DEVICE).expand(9, 2)
        backend.validate(x, max_rows=9)
        with pytest.raises(ValueError, match=r"at most 8 rows.*got 9"):
            backend.validate(x, max_rows=8)

    def test_contiguous(self):
        x = torch.ones(3, 4, device=backend.DEVICE).T
        with pytest.raises(ValueError, match="contiguous"):
            backend.validate(x, contiguous=True)
