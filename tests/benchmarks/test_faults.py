"""Faulty kernels in processes of their own, and what tools say of them."""

import os
import re
import shutil

import pandas as pd
import pytest

from benchmarks import faults
from kernels import debugging
from kernels.lab import backend
from kernels.lab.record import Unavailable


def said(name: str, tool: tuple[str, ...] = (), **variables: str) -> str:
    return "\n".join(row["line"] for row in faults.run(name, tool, **variables)())


@pytest.mark.thorough
def test_the_command_stands_first_as_it_is_typed():
    rows = faults.run("unshifted", TRITON_INTERPRET="1")()
    assert (
        rows[0]["line"] == "$ TRITON_INTERPRET=1 python -m benchmarks.faults unshifted"
    )
    assert rows[2]["line"] == "sums of the rows: [1.0, nan]"


def test_an_unknown_call_is_named():
    with pytest.raises(ValueError, match=r"name must be one of .*got 'strayed'"):
        faults.run("strayed")


def test_a_missing_tool_is_unavailable():
    with pytest.raises(Unavailable, match="no-such-tool is not on the PATH"):
        faults.run("unshifted", ("no-such-tool",))()


@pytest.mark.thorough
def test_a_kernel_prints_in_both_ways():
    lines = said("printing", TRITON_INTERPRET="1")
    for value in ("2", "4"):
        assert f"device_print says:  [{value}.]" in lines
        assert f"\nprint says [{value}.]" in lines


@pytest.mark.thorough
def test_a_false_device_assertion_is_silent_in_the_interpreter():
    for variables in ({}, {"TRITON_DEBUG": "1"}):
        lines = said("asserting", TRITON_INTERPRET="1", **variables)
        assert "sums of the rows: [1.0, nan]" in lines
        assert "exp overflows" not in lines


@pytest.mark.thorough
def test_a_signal_shows_where_the_interpreter_hangs():
    for seconds in ("4", "12", "60"):  # starting Python takes two, or more
        timeout = (*faults.TIMEOUT, seconds)
        lines = said("in_turn", timeout, TRITON_INTERPRET="1", PYTHONFAULTHANDLER="1")
        if "in in_turn_kernel" in lines:  # `timeout` signals twice: it may be cut off
            break
    assert lines.count("the call returned") == 1
    assert "in in_turn_kernel" in lines and "kernels/debugging.py" in lines


@pytest.mark.thorough
def test_a_session_of_pdb_stops_in_the_row_that_goes_wrong():
    commands = ["p row, x", "next", "p numerator"]
    kernel = debugging.unshifted_kernel
    session = faults.debug("unshifted", kernel, "numerator", commands)
    lines = session.splitlines()
    assert re.match(r"Breakpoint 1 at kernels/debugging.py:\d+$", lines[0])
    assert [line[6:] for line in lines if line.startswith("(Pdb) ")] == commands
    assert "numerator = tl.exp(x)" in session and "array([1]" in session
    assert lines[-1].startswith("array([inf, inf, inf")


def test_what_was_said_is_printed_with_its_source(capsys):
    rows = [{"line": "$ a"}, {"line": "b"}]
    faults.tell(rows)
    assert capsys.readouterr().out == "$ a\nb\n"
    df = pd.DataFrame(rows)
    df.attrs["source"] = "a GPU"
    faults.tell(df)
    assert capsys.readouterr().out == "a GPU\n$ a\nb\n"


def test_exceptions_are_told_in_a_line(monkeypatch, capsys):
    def fail():
        raise RuntimeError("first line\nsecond line") from ValueError("the cause\nmore")

    codes = []
    monkeypatch.setitem(faults.CALLS, "fail", fail)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(backend, "DEVICE", "cpu")
    faults.main("fail")
    assert capsys.readouterr().out == "ValueError: the cause\n"
    assert codes == [1]


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(faults, "LIMIT_S", 1)
    assert "ended after 1 s" in said("in_turn", TRITON_INTERPRET="1")


def test_lines_are_shortened():
    text = "\n".join(
        [f"{backend.ROOT}/kernels/debugging.py:{i}: thread [{i},0,0]" for i in range(9)]
    )
    others = ["/x/torch/cuda.py", faults.INTERPRETER]
    foreign = [f'  File "{path}", line 3 in call' for path in others]
    frames = [f'  File "kernels/a.py", line {i} in b_kernel' for i in (4, 5)]
    lines = faults.shortened("\n".join(["==", "", text, *foreign, *frames, "x" * 200]))
    assert lines[0] == "kernels/debugging.py:0: thread [0,0,0]"
    assert lines[2] == frames[0]
    assert len(lines[3]) == faults.LONGEST and lines[3].endswith("…")
    assert lines[4] == "(7 more lines, most of them like these)"


needs_sanitizer = pytest.mark.skipif(
    not (shutil.which("compute-sanitizer") or os.path.exists("/usr/local/cuda/bin")),
    reason="needs NVIDIA's compute-sanitizer",
)


@pytest.mark.gpu
@needs_sanitizer
def test_the_sanitizer_sees_a_stray_read_if_every_tensor_is_an_allocation():
    alone = said("unmasked", faults.SANITIZER, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "Invalid __global__ read" in alone and "unmasked_kernel" in alone
    pooled = said("unmasked", faults.SANITIZER)
    assert "ERROR SUMMARY: 0 errors" in pooled


@pytest.mark.gpu
def test_a_hang_on_the_gpu_is_ended():
    lines = said("in_turn", (*faults.TIMEOUT, "40"), PYTHONFAULTHANDLER="1")
    assert lines.count("sums of the rows") == 1 and "Aborted" in lines
