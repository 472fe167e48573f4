"""What Nsight Compute prints is read as it is; what it cannot do is told apart."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.lab import bench, counters

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",'
    '"Block Size","Grid Size","Device","CC","dram__bytes_read.sum",'
    '"dram__bytes_write.sum","gpu__time_duration.sum"'
)
REDUCE = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "func_wrapper_t<float, at::native::sum_functor<float>>, unsigned int, float, 4, 4>>"
    "(T3)"
)
ELEMENTWISE = (
    "void at::native::<unnamed>::elementwise_kernel<128, 2, void at::native::"
    "gpu_kernel_impl<at::native::(anonymous namespace)::exp_kernel_cuda>>(int, T3)"
)


def line(number, kernel, read, written, duration):
    cells = [number, 4242, "python3.12", "127.0.0.1", kernel, 1, 7]
    cells += ["(32, 16, 1)", "(512, 1, 1)", 0, "9.0", read, written, duration]
    return ",".join(f'"{cell}"' for cell in cells)


def table(*lines, units=("byte", "byte", "ns")):
    log = ["==PROF== Connected to process 4242 (/usr/bin/python3.12)"]
    log += ['==PROF== Profiling "reduce_kernel" - 0: 0%....50%....100% - 1 pass']
    log += ["==PROF== Disconnected from process 4242", HEADER]
    log += [",".join(f'"{unit}"' for unit in [""] * 11 + list(units)), *lines]
    return "\n".join(log) + "\n"


def test_parse_base_units():
    text = table(
        line(0, REDUCE, "268,501,248", "13,056", "75,232"),
        line(1, ELEMENTWISE, "268452864", "246814208", "140416"),
    )
    assert counters.parse(text) == [
        {
            "kernel": "reduce_kernel",
            "read_bytes": 268501248,
            "written_bytes": 13056,
            "duration_us": 75.232,
        },
        {
            "kernel": "elementwise_kernel",
            "read_bytes": 268452864,
            "written_bytes": 246814208,
            "duration_us": 140.416,
        },
    ]


def test_parse_scaled_units():
    numbers = line(0, "add(at::Tensor)", "268.50", "13.06", "0.07523")
    (row,) = counters.parse(table(numbers, units=("Mbyte", "Kbyte", "msecond")))
    assert row["kernel"] == "add"
    assert (row["read_bytes"], row["written_bytes"]) == (268500000, 13060)
    assert row["duration_us"] == 75.23


@pytest.mark.parametrize(
    "text",
    [
        "",
        "==PROF== No kernels were profiled.",
        table(line(0, REDUCE, 1, 1, 1)).replace("dram__bytes_write", "dram__sectors"),
    ],
)
def test_parse_what_is_no_such_table(text):
    with pytest.raises(ValueError, match=r"table with \[.*dram__bytes_write"):
        counters.parse(text)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts an `ncu` on the PATH that notes its arguments, prints, and exits."""
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = tmp_path / "arguments"

    def install(text, code=0):
        (tmp_path / "text").write_text(text)
        script = tmp_path / "ncu"
        script.write_text(
            f"#!{sys.executable}\nimport json, pathlib, sys\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "(here / 'arguments').write_text(json.dumps(sys.argv))\n"
            "print((here / 'text').read_text(), end='')\n"
            f"sys.exit({code})\n"
        )
        script.chmod(0o755)
        return lambda: json.loads(arguments.read_text())

    return install


def something_to_profile():
    """Named on the command line of the process that ncu starts."""


def test_profile_runs_the_function_under_ncu(ncu):
    first, second = line(0, ELEMENTWISE, 9, 9, 9), line(1, REDUCE, 5, 6, 3000)
    arguments = ncu(table(first, second))
    (row,) = counters.profile(something_to_profile)
    assert list(row.values()) == ["reduce_kernel", 5, 6, 3.0]
    given = arguments()
    for words in (
        "--profile-from-start off",
        "--clock-control none",
        "--cache-control none",
        "--csv --page raw",
        "--metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum",
    ):
        assert words in " ".join(given)
    assert given[-3:-1] == [sys.executable, "-c"]
    assert "test_counters import something_to_profile" in given[-1]
    assert given[-1].endswith("; counters.warm_up(); something_to_profile()")


def test_profile_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bench.Unavailable, match="not on the PATH"):
        counters.profile(something_to_profile)


@pytest.mark.parametrize(
    "text",
    [
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
        "NVIDIA GPU Performance Counters\n==ERROR== The application returned an error "
        "code (1).\n",
        "Failed to initialize the profiler: LibraryNotLoaded\n",
    ],
)
def test_profile_without_permission(ncu, text):
    ncu(text, code=1)
    with pytest.raises(bench.Unavailable, match=r"ERR_NVGPUCTRPERM|LibraryNotLoaded"):
        counters.profile(something_to_profile)


def test_a_mistake_of_ours_is_not_taken_for_a_missing_permission(ncu):
    ncu(
        "Traceback: NameError\n==ERROR== The application returned an error code (1).", 1
    )
    with pytest.raises(RuntimeError, match="NameError") as caught:
        counters.profile(something_to_profile)
    assert not isinstance(caught.value, bench.Unavailable)


def test_watched_starts_and_stops_the_profiler_around_the_work(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("stop"))
    with counters.watched():
        log.append("work")
    assert log == ["wait", "start", "work", "wait", "stop"]
    log.clear()
    others = SimpleNamespace(sum=lambda: log.append("read others"))
    monkeypatch.setattr(counters, "_others", lambda: others)
    with counters.watched(emptied=True):
        log.append("work")
    assert log == ["read others", "wait", "start", "work", "wait", "stop"]
    log.clear()
    monkeypatch.setattr(torch, "exp", lambda x: log.append("exp"))
    counters.warm_up()
    assert log == ["wait", "start", "exp", "wait", "stop"]


def one_kernel():
    x = torch.ones(2**24, device="cuda")
    with counters.watched():
        torch.exp(x)


def test_a_function_that_no_other_process_can_import():
    with pytest.raises(TypeError, match=r"of a module.*got .*<lambda>"):
        counters.profile(lambda: None)


@pytest.mark.gpu
def test_a_kernel_of_a_gpu(monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here, prepend=os.pathsep)
    try:
        (row,) = counters.profile(one_kernel)
    except bench.Unavailable as error:
        pytest.skip(str(error))
    assert row["kernel"] == "vectorized_elementwise_kernel"
    assert 0 < row["read_bytes"] < 1.05 * 2**26
    assert row["duration_us"] > 0
