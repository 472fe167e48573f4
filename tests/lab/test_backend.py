"""The two worlds: which one this is, its validator, and calls into the other one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend


@triton.jit
def double_kernel(output_ptr, input_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + offsets, mask=offsets < n)
    tl.store(output_ptr + offsets, 2 * x, mask=offsets < n)


def double(x):
    output = torch.empty_like(x)
    double_kernel[(1,)](output, x, x.numel(), BLOCK=8)
    return output


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
    )


def test_world_matches_the_machine():
    asked = python("from kernels.lab import backend; print(backend.INTERPRETED)")
    assert asked.stdout.strip() == str(not backend.has_gpu()), asked.stderr


def test_environment_overrides_the_machine():
    for flag, interpreted in (("1", "True"), ("0", "False")):
        code = "from kernels.lab import backend; print(backend.INTERPRETED)"
        assert python(code, TRITON_INTERPRET=flag).stdout.strip() == interpreted


@pytest.mark.skipif(backend.has_gpu(), reason="a GPU needs no interpreter")
def test_triton_imported_too_early_is_an_error_that_says_what_to_do():
    result = python("import triton, kernels")
    assert "import kernels first" in result.stderr


def test_old_interpreter_with_new_numpy_is_refused():
    code = """
import importlib.metadata as metadata
real = metadata.version
fake = {"triton": "3.6.0", "numpy": "2.4.1"}
metadata.version = lambda name: fake.get(name) or real(name)
import kernels
"""
    assert "numpy<2.4" in python(code, TRITON_INTERPRET="1").stderr


def test_description_names_versions():
    assert torch.__version__ in backend.describe()
    assert triton.__version__ in backend.describe()


def test_kernel_runs_in_this_world():
    x = torch.arange(5.0, device=backend.DEVICE)
    assert double(x).tolist() == [0, 2, 4, 6, 8]


def test_call_runs_kernels_in_the_interpreter():
    result = backend.call_in("interpreter", double, torch.arange(5.0))
    assert result.tolist() == [0, 2, 4, 6, 8]


def test_call_reaches_the_compiler():
    kind = backend.call_in(
        "compiler", lambda kernel: type(kernel).__name__, double_kernel
    )
    assert kind == "JITFunction"


def test_notebook_kernel_travels_by_its_source(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import kernels, triton, triton.language as tl\n"
        "from kernels.lab import backend\n"
        "SCALE = tl.constexpr(3)\n"
        "@triton.jit(do_not_specialize=['n'])\n"
        "def kernel(x_ptr, n, BLOCK: tl.constexpr):\n"
        "    tl.store(x_ptr + tl.arange(0, BLOCK), SCALE)\n"
        "def look():\n"
        "    names = [parameter.name for parameter in kernel.params]\n"
        "    return type(kernel).__name__, 'SCALE' in kernel.src, names\n"
        "print(backend.call_in('compiler', look))\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert run.stdout.strip() == "('JITFunction', True, ['x_ptr', 'n', 'BLOCK'])", (
        run.stderr
    )


def test_tensor_keeps_its_strides():
    x = torch.arange(12.0).reshape(3, 4)[:, 1:3].T
    shape, stride, values = backend.call_in(
        "compiler", lambda t: (t.shape, t.stride(), t.tolist()), x
    )
    assert (shape, stride, values) == (x.shape, x.stride(), x.tolist())


def fail():
    raise KeyError("as it was raised")


def test_exception_comes_back():
    with pytest.raises(KeyError, match="as it was raised"):
        backend.call_in("compiler", fail)


def test_dead_helper_is_an_error_and_the_next_call_works():
    with pytest.raises(RuntimeError, match="compiler world died"):
        backend.call_in("compiler", os._exit, 3)
    assert backend.call_in("compiler", abs, -1) == 1


def test_printing_does_not_disturb_the_answer():
    assert backend.call_in("compiler", lambda: print("noise") or 7) == 7


def world():
    return os.getpid(), backend.INTERPRETED, os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_call_apart_has_a_process_of_this_world_that_ends_with_it():
    pid, *rest = backend.call_apart(world)
    assert pid != os.getpid() and tuple(rest) == world()[1:]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_apart_may_fail_or_die_without_harm():
    with pytest.raises(KeyError, match="as it was raised"):
        backend.call_apart(fail)
    with pytest.raises(RuntimeError, match="world died"):
        backend.call_apart(os._exit, 3)


def test_a_call_that_takes_too_long_ends_with_all_that_it_started():
    def hang():
        import subprocess as sub

        child = sub.Popen(["sleep", "60"])
        Path(note).write_text(f"{os.getpid()} {child.pid}")
        child.wait()

    helper = backend.Helper("interpreter")
    with tempfile.TemporaryDirectory() as folder:
        note = str(Path(folder, "pids"))
        assert helper.call(abs, (-1,), limit_s=60) == 1
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
            helper.call(hang, limit_s=0.5)
        pids = [int(pid) for pid in Path(note).read_text().split()]
    assert helper.process is None
    for pid in pids:
        wait_until_gone(pid)
    assert helper.call(abs, (-2,), limit_s=60) == 2  # in a new process
    helper.stop()


def wait_until_gone(pid: int, patience_s: float = 5.0) -> None:
    """A killed child of a killed process goes when init has taken notice of it."""
    end = time.monotonic() + patience_s
    while Path(f"/proc/{pid}/stat").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.02)


@pytest.mark.gpu
def test_a_call_apart_loses_its_own_cuda_context():
    def break_it():
        index = torch.tensor([10**9], device="cuda")
        torch.zeros(1, device="cuda")[index].cpu()

    with pytest.raises(RuntimeError, match=r"CUDA error|device-side assert"):
        backend.call_apart(break_it)
    assert torch.ones(3, device="cuda").sum() == 3


def test_unknown_world():
    with pytest.raises(ValueError, match="'compiler', 'interpreter'"):
        backend.call_in("cpu", abs, -1)


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
