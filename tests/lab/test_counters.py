"""What Nsight Compute prints is read as it is; what it cannot do is said."""

import contextlib
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kernels.lab import backend, clock, counters, gpu, record
from tests.helpers import in_company

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


def test_parse_other_metrics():
    header = HEADER.replace("gpu__time_duration.sum", "lts__t_sector_hit_rate.pct")
    text = table(line(0, "add", 32, 7, "12.3456"), units=("byte", "sector", "%"))
    metrics = {
        "lts__t_sector_hit_rate.pct": "hit_rate",
        "dram__bytes_write.sum": "sectors",
    }
    assert counters.parse(text.replace(HEADER, header), metrics) == [
        {"kernel": "add", "hit_rate": 12.346, "sectors": 7}
    ]
    (row,) = counters.parse(
        text.replace(HEADER, header).replace("12.3456", "n/a"), metrics
    )
    assert math.isnan(row["hit_rate"])


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts an `ncu` on the PATH that notes its arguments, prints, and exits."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(clock, "alone", contextlib.nullcontext)
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


def test_profile_reads_what_it_is_asked_for(ncu, monkeypatch):
    @contextlib.contextmanager
    def alone():
        log.append("alone")
        yield
        log.append(arguments())

    log = []
    monkeypatch.setattr(clock, "alone", alone)
    header = table(line(0, ELEMENTWISE, 9, 9, 9), line(1, REDUCE, 5, 6, 3000))
    arguments = ncu(header)
    (row,) = counters.profile(
        something_to_profile,
        {"dram__bytes_write.sum": "written"},
        flush=True,
        replay="application",
    )
    assert row == {"kernel": "reduce_kernel", "written": 6}
    assert log == ["alone", arguments()]  # ncu ran while nothing else measured
    given = " ".join(arguments())
    assert "--cache-control all" in given and "--cache-control none" not in given
    assert "--replay-mode application" in given
    assert "--metrics dram__bytes_write.sum " in given
    with pytest.raises(ValueError, match="replay must be 'kernel' or 'application'"):
        counters.profile(something_to_profile, replay="twice")


@pytest.mark.parametrize("lost", range(counters.TRIES + 1))
def test_a_counter_that_ncu_loses_is_read_again(ncu, monkeypatch, lost):
    right = table(line(0, ELEMENTWISE, 9, 9, 9), line(1, REDUCE, 5, 6, 3000))
    texts = iter([right.replace('"5"', '"nan"')] * lost + [right])
    monkeypatch.setattr(
        counters.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, 0, next(texts), ""),
    )
    ncu(right)  # is on the PATH
    if lost < counters.TRIES:
        (row,) = counters.profile(something_to_profile)
        assert row["read_bytes"] == 5 and not [*texts]
    else:
        with pytest.raises(record.Unavailable, match="in 3 tries: it is 'nan'"):
            counters.profile(something_to_profile)


def test_profile_without_ncu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(record.Unavailable, match="not on the PATH"):
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
    with pytest.raises(record.Unavailable, match=r"ERR_NVGPUCTRPERM|LibraryNotLoaded"):
        counters.profile(something_to_profile)


def test_a_mistake_of_ours_is_not_taken_for_a_missing_permission(ncu):
    ncu(
        "Traceback: NameError\n==ERROR== The application returned an error code (1).", 1
    )
    with pytest.raises(RuntimeError, match="NameError") as caught:
        counters.profile(something_to_profile)
    assert not isinstance(caught.value, record.Unavailable)


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
    monkeypatch.setattr(gpu, "driver", log.append)
    with counters.watched(emptied=True):
        log.append("work")
    emptied = ["wait", "cuCtxResetPersistingL2Cache", "read others"]
    assert log == [*emptied, "wait", "start", "work", "wait", "stop"]
    log.clear()
    monkeypatch.setattr(torch, "exp", lambda x: log.append("exp"))
    counters.warm_up()
    assert log == ["wait", "start", "exp", "wait", "stop"]


def one_kernel():
    x = torch.ones(2**24, device="cuda")
    with counters.watched():
        torch.exp(x)


def test_a_function_that_no_other_process_can_import():
    with pytest.raises(TypeError, match=r"can import, got .*<lambda>"):
        counters.profile(lambda: None)


@pytest.mark.gpu
@in_company
def test_a_kernel_of_a_gpu():
    try:
        (row,) = counters.profile(one_kernel)
    except record.Unavailable as error:
        pytest.skip(str(error))
    assert row["kernel"] == "vectorized_elementwise_kernel"
    assert 0 < row["read_bytes"] < 1.05 * 2**26
    assert row["duration_us"] > 0


# ---- which kernels a call launches ---------------------------------------------------


def test_the_kernels_of_a_trace_are_those_of_the_gpu_in_order():
    events = [
        {"cat": "kernel", "name": "second", "ts": 2.5},
        {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 0.5},
        {"cat": "kernel", "name": "first", "ts": 1.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.1},
        {"name": "process_name", "ph": "M"},
        {"cat": "kernel", "name": "second", "ts": 4.0},
    ]
    names = counters._kernels_of({"traceEvents": events})
    assert names == ["first", "second", "second"]


def test_nothing_is_launched_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match=r"interpreter.*record\.observe"):
        counters.launched(torch.clone, torch.ones(2))


@pytest.mark.gpu
def test_an_operation_is_one_kernel_and_a_view_none():
    x = torch.randn(64, 64, device="cuda")
    assert len(counters.launched(torch.exp, x)) == 1
    assert len(counters.launched(lambda x: torch.exp(x.t()) + 1, x)) == 2
    with pytest.raises(record.Unavailable, match="no kernel"):
        counters.launched(torch.t, x)
