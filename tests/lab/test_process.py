"""Calls into the other world and processes apart: what travels and what comes back."""

import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, description, process
from tests import forks


@triton.jit
def double_kernel(output_ptr, input_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + offsets, mask=offsets < n)
    tl.store(output_ptr + offsets, 2 * x, mask=offsets < n)


def double(x):
    output = torch.empty_like(x)
    double_kernel[(1,)](output, x, x.numel(), BLOCK=8)
    return output


def test_call_runs_kernels_in_the_interpreter():
    result = process.call_in("interpreter", double, torch.arange(5.0))
    assert result.tolist() == [0, 2, 4, 6, 8]


def test_call_reaches_the_compiler():
    kind = process.call_in(
        "compiler", lambda kernel: type(kernel).__name__, double_kernel
    )
    assert kind == "JITFunction"


@pytest.mark.parametrize("is_torchs", [True, False])
def test_torch_compile_does_not_choose_the_assembler(is_torchs, monkeypatch, tmp_path):
    folder = Path(torch.__file__).parent if is_torchs else tmp_path
    named = str(folder / "bin" / "ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", named)
    helper = process.Helper("compiler")
    try:
        found = helper.call(os.getenv, ("TRITON_PTXAS_PATH",), {})
    finally:
        helper.stop()
    assert found == (None if is_torchs else named)


def test_notebook_kernel_travels_by_its_source(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import kernels, triton, triton.language as tl\n"
        "from kernels.lab import process\n"
        "SCALE = tl.constexpr(3)\n"
        "@triton.jit(do_not_specialize=['n'])\n"
        "def kernel(x_ptr, n, BLOCK: tl.constexpr):\n"
        "    tl.store(x_ptr + tl.arange(0, BLOCK), SCALE)\n"
        "def look():\n"
        "    names = [parameter.name for parameter in kernel.params]\n"
        "    return type(kernel).__name__, 'SCALE' in kernel.src, names\n"
        "print(process.call_in('compiler', look))\n"
    )
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    run = forks.python(code, env=dict(os.environ), cwd=backend.ROOT)
    assert run.stdout.strip() == "('JITFunction', True, ['x_ptr', 'n', 'BLOCK'])", (
        run.stderr
    )


def test_code_keeps_the_name_of_its_file():
    notebook = {"__name__": "__main__"}
    source = "def outer():\n    return lambda: 1"
    exec(compile(source, "<ipython-input-7>", "exec"), notebook)
    outer = pickle.loads(process.dumps(notebook["outer"]))
    assert outer is not notebook["outer"]
    assert outer.__code__.co_filename == "<ipython-input-7>"
    assert outer().__code__.co_filename == "<ipython-input-7>"


def test_tensor_keeps_its_strides():
    x = torch.arange(12.0).reshape(3, 4)[:, 1:3].T
    shape, stride, values = process.call_in(
        "compiler", lambda t: (t.shape, t.stride(), t.tolist()), x
    )
    assert (shape, stride, values) == (x.shape, x.stride(), x.tolist())


def fail():
    raise KeyError("as it was raised")


def test_exception_comes_back():
    with pytest.raises(KeyError, match="as it was raised"):
        process.call_in("compiler", fail)


def raise_of_a_package(folder):
    """Raises an error whose class only this process can import."""
    Path(folder, "only_there.py").write_text("class OddLength(ValueError): pass\n")
    sys.path.insert(0, folder)
    import only_there

    raise only_there.OddLength("33 columns")


def test_exception_of_a_package_that_is_not_here_is_told(tmp_path):
    helper = process.Helper("compiler")
    try:
        with pytest.raises(RuntimeError, match=r"OddLength\('33 columns'\)"):
            helper.call(raise_of_a_package, (str(tmp_path),))
        kept = helper.process
        assert helper.call(os.getpid) == kept.pid
        assert helper.process is kept  # it need not start again
    finally:
        helper.stop()


def test_dead_helper_is_an_error_and_the_next_call_works():
    with pytest.raises(RuntimeError, match=r"\(compiler\) ended before it"):
        process.call_in("compiler", os._exit, 3)
    assert process.call_in("compiler", abs, -1) == 1


def test_printing_does_not_disturb_the_answer():
    assert process.call_in("compiler", lambda: print("noise") or 7) == 7


def world():
    return os.getpid(), backend.INTERPRETED, os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_call_apart_has_a_process_of_this_world_that_ends_with_it():
    pid, *rest = process.call_apart(world)
    assert pid != os.getpid() and tuple(rest) == world()[1:]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_apart_may_fail_or_die_without_harm():
    with pytest.raises(KeyError, match="as it was raised"):
        process.call_apart(fail)
    with pytest.raises(RuntimeError, match="ended before it answered"):
        process.call_apart(os._exit, 3)


def test_a_call_that_takes_too_long_ends_with_all_that_it_started():
    def hang():
        import subprocess as sub

        child = sub.Popen(["sleep", "60"])
        Path(note).write_text(f"{os.getpid()} {child.pid}")
        child.wait()

    helper = process.Helper("interpreter")
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


def test_compiler_sees_no_gpu_and_the_interpreter_is_this_process_where_it_can_be():
    pid, interpreted, devices = process.call_in("compiler", world)
    assert (interpreted, devices) == (False, "") and pid != os.getpid()
    pid, interpreted, _ = process.call_in("interpreter", world)
    assert interpreted and (pid == os.getpid()) == backend.INTERPRETED


def test_interpreter_that_cannot_run_is_refused_before_a_process_starts(monkeypatch):
    def refuse():
        raise RuntimeError("install 'numpy<2.4'")

    monkeypatch.setattr(description, "require_interpreter", refuse)
    monkeypatch.setattr(process.Helper, "start", lambda helper: pytest.fail("started"))
    with pytest.raises(RuntimeError, match=r"numpy<2\.4"):
        process.call_in("interpreter", abs, -1)


def test_stopped_helper_is_forgotten():
    helper = process.Helper("compiler")
    assert helper.call(os.getpid) == helper.process.pid
    helper.stop()
    assert helper.process is None
    helper.stop()  # there is nothing to end


@pytest.mark.gpu
def test_a_call_apart_loses_its_own_cuda_context():
    def break_it():
        index = torch.tensor([10**9], device="cuda")
        torch.zeros(1, device="cuda")[index].cpu()

    with pytest.raises(RuntimeError, match=r"CUDA error|device-side assert"):
        process.call_apart(break_it)
    assert torch.ones(3, device="cuda").sum() == 3


def test_unknown_world():
    with pytest.raises(ValueError, match="'compiler', 'interpreter'"):
        process.call_in("cpu", abs, -1)
