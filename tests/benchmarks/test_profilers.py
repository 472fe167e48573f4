"""What profilers print is read as it is; what a machine lacks is said and recorded."""

import contextlib
import json
import os
import sys

import pandas as pd
import pytest
import torch
from pytest import approx

from benchmarks import profilers
from kernels.lab import clock, record

SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()("
    "at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4, 4> >(T1)"
)
DIVISION = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
    "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::"
    "DivFunctor<float> > >(at::TensorIteratorBase&)::{lambda(int)#1}>(int, T2)"
)
EXP = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda(float)#1}, "
    "std::array<char*, 2ul> >(int, at::native::exp_kernel_cuda, T3)"
)
EXP_NAME = "vectorized_elementwise_kernel"
SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardReg<float, float, "
    "float, at::native::(anonymous namespace)::SoftMaxForwardEpilogue, long, 4>(float*)"
)
MANGLED_MAX = (
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_6MaxOpsIfEEjfLi4ELi4EE"
    "EEEvT1_"
)
MANGLED_DIVISION = (
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastINS0_13"
    "BinaryFunctorIfffNS0_15binary_internal10DivFunctorIfEEEEEEvRNS_18Tensor"
)
MANGLED_ADDITION = (
    "_ZN2at6native18elementwise_kernelILi128ELi2EZNS0_22gpu_kernel_impl_nocastINS0_15"
    "CUDAFunctor_addIfEEEEvRNS_18TensorIteratorBaseERKT_EUliE_EEviT1_"
)


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        (SUM, "reduce_kernel (sum)"),
        (DIVISION, "elementwise_kernel (div)"),
        (EXP, "vectorized_elementwise_kernel (exp)"),
        (SOFTMAX, "cunn_SoftMaxForwardReg"),
        (MANGLED_MAX, "reduce_kernel (max)"),
        (MANGLED_DIVISION, "elementwise_kernel (div)"),
        (MANGLED_ADDITION, "elementwise_kernel (add)"),
        ("slow_kernel", "slow_kernel"),
    ],
)
def test_kernels_are_named_by_what_they_do(signature, name):
    assert profilers.kernel_name(signature) == name


def test_what_is_printed_is_kept(monkeypatch, capsys):
    monkeypatch.delenv("COURSE_SAYS", raising=False)
    with profilers.printed(COURSE_SAYS="yes") as printed:
        print(os.environ["COURSE_SAYS"])
    print("after")
    assert printed.getvalue() == "yes\n"
    assert capsys.readouterr().out == "after\n"
    assert "COURSE_SAYS" not in os.environ


# ---- Proton --------------------------------------------------------------------------


def node(name, children=(), **metrics):
    metrics = {
        key.replace("time", "time (ns)"): value for key, value in metrics.items()
    }
    frame = {"name": name, "type": "function"}
    return {"frame": frame, "metrics": metrics, "children": [*children]}


def test_protons_tree_is_summed_and_sorted():
    short, long = node("a", count=20, time=2000), node(MANGLED_MAX, count=20, time=9000)
    naive = node("naive", [short, long], bytes=2684354560)
    ours = node("ours", [node("softmax_kernel", count=1, time=500)])
    root = node("ROOT", [naive, ours], count=0, time=0, bytes=0)
    rows = profilers.proton_rows(json.dumps([root, {"CUDA": {}}]))
    assert [tuple(row.values()) for row in rows] == [
        ("naive", 0, "naive", 40, 11.0, 2684354560),
        ("naive", 1, "reduce_kernel (max)", 20, 9.0, None),
        ("naive", 1, "a", 20, 2.0, None),
        ("ours", 0, "ours", 1, 0.5, None),
        ("ours", 1, "softmax_kernel", 1, 0.5, None),
    ]
    assert list(rows[0]) == ["scope", "depth", "name", "calls", "us", "bytes"]


# ---- Nsight Compute ------------------------------------------------------------------

HEADER = [
    *("ID", "Process ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit"),
    *("Metric Value", "Rule Name", "Rule Description"),
]


def ncu_text(*rows):
    lines = [",".join(f'"{cell}"' for cell in row) for row in (HEADER, *rows)]
    return "\n".join(["==PROF== Connected to process 1609", *lines])


def metric(number, kernel, name, unit, value):
    return number, 1609, kernel, "Section", name, unit, value, "", ""


def test_ncus_metrics_become_numbers():
    rule = (0, 1609, "slow_kernel", "Section", "", "", "", "CPIStall", "On average, …")
    text = ncu_text(
        metric(0, "slow_kernel", "Duration", "ns", "179,808"),
        metric(0, "slow_kernel", "DRAM Throughput", "%", "13.30"),
        metric(0, "slow_kernel", "dram__bytes_read.sum", "byte", "68515072"),
        metric(0, "slow_kernel", "Spilling Overhead", "%", "no data"),
        rule,
        metric(1, EXP.replace('"', ""), "Duration", "ns", "30688"),
    )
    assert profilers.ncu_rows(text) == [
        dict(zip(("launch", "kernel", "metric", "unit", "value"), row, strict=True))
        for row in (
            (0, "slow_kernel", "Duration", "µs", approx(179.808)),
            (0, "slow_kernel", "DRAM Throughput", "%", 13.3),
            (0, "slow_kernel", "dram__bytes_read.sum", "MB", approx(68.515072)),
            (
                1,
                "vectorized_elementwise_kernel",
                "Duration",
                "µs",
                approx(30.688),
            ),
        )
    ]


def test_text_without_a_table_is_named():
    with pytest.raises(ValueError, match=r"ncu's table.*No kernels were profiled"):
        profilers.ncu_rows("==WARNING== No kernels were profiled.")


def test_a_machine_without_ncu_is_told_so(monkeypatch):
    monkeypatch.setattr(profilers.shutil, "which", lambda name: None)
    with pytest.raises(record.Unavailable, match=r"ncu .* is not on the PATH"):
        profilers.run_ncu([], "pass")


def test_a_missing_permission_is_told(monkeypatch, tmp_path):
    words = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!{sys.executable}\nprint({words!r})\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(record.Unavailable, match="cannot profile here: ERR_NVGPUCTR"):
        profilers.run_ncu(["--clock-control", "none"], "pass")


# ---- measured, or recorded -----------------------------------------------------------


@pytest.fixture
def measuring(monkeypatch):
    """A machine that measures, whose record has one row."""
    row = {"us": 7.0} | dict.fromkeys(record.PROVENANCE, "recorded")
    monkeypatch.setattr(clock, "can_measure", lambda: True)
    monkeypatch.setattr(clock, "alone", contextlib.nullcontext)
    monkeypatch.setattr(record, "_provenance", lambda: dict.fromkeys(row, "x"))
    monkeypatch.setattr(record, "_found", lambda path: path)
    monkeypatch.setattr(record, "_observed", lambda source: pd.DataFrame([row]))


def fails(error):
    raise error
    yield


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module named triton.profiler"),
        OSError("no such file: libcupti.so"),
        RuntimeError("Failed to execute cuptiSubscribe with error 39\nat …"),
    ],
)
def test_where_a_tool_is_missing_the_record_is_read(measuring, capsys, error):
    df = profilers.observed("proton", lambda: fails(error))
    words = str(error).splitlines()[0]
    said = f"profiling_proton is not observed here: {type(error).__name__}: {words}."
    assert said in capsys.readouterr().out
    assert df["us"].tolist() == [7.0]


def test_a_mistake_is_no_missing_tool(measuring):
    with pytest.raises(KeyError):
        profilers.observed("proton", lambda: fails(KeyError("us")))


def test_a_pause_comes_before_the_call():
    ticks = iter([0.0, 10e-6, 39e-6, 41e-6])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profilers.time, "perf_counter", lambda: next(ticks))
        assert profilers.after(40, max, 2, 3) == 3
    assert next(ticks, None) is None


def test_calls_in_a_row_are_divided(monkeypatch):
    ticks, calls = iter([1.0, 1.002]), []
    monkeypatch.setattr(profilers.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    us = profilers.loop_us(lambda: calls.append("call"), 4)
    assert us == approx(500) and calls == ["wait", *["call"] * 4, "wait"]


# ---- the cache -----------------------------------------------------------------------


@pytest.mark.thorough
def test_the_cache_is_missed_by_an_edit_of_the_text_and_found_again():
    edits = {
        "first": ("", ""),
        "again": ("", ""),
        "comment": ("# the columns", "# columns"),
        "below": ("triton.knobs", "\ntriton.knobs"),
        "always": ("", ""),
    }
    rows, files = profilers.cache_runs(
        edits, {"always": {"TRITON_ALWAYS_COMPILE": "1"}}
    )
    told = [(row["kernel"], row["on_disk"]) for row in rows]
    assert told == [
        *(("compiled", 1), ("found", 1), ("compiled", 2), ("found", 2)),
        ("compiled", 2),
    ]
    assert {f"double_kernel.{kind}" for kind in ("ttir", "ptx", "cubin")} <= {*files}


def test_a_program_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)broken failed: .*SyntaxError"):
        profilers.cache_runs({"broken": ("import triton\n", "import\n")}, {})


def test_edits_change_the_program():
    """The chapter's edits; a program that they don't change would be found."""
    for old in ("# the columns", "@", "triton.knobs", ": 4}", "90"):
        assert profilers.PROGRAM.count(old) == 1, old


@pytest.mark.gpu
def test_ncu_reads_the_chapters_lines():
    lines = profilers.NCU_LINES
    options = ["--clock-control", "none", "-k", "slow_kernel", "-c", "1"]
    sections = "SpeedOfLight|LaunchStats|Occupancy|MemoryWorkloadAnalysis"
    options += ["--section", f"regex:^({sections})$"]
    options += ["--metrics", ",".join(name for name in lines if "__" in name)]
    try:
        rows = profilers.run_ncu(options, profilers.THREE_KERNELS)
    except record.Unavailable as error:
        pytest.skip(str(error))
    read = {row["metric"]: row["value"] for row in rows}
    assert set(lines) <= set(read)
    assert {row["kernel"] for row in rows} == {"slow_kernel"}
    assert read["smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio"] == 4
