"""Stages: lines traced to their Python; compiled kernels compared, counted, timed."""

import functools
import re

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import compile, gpu, stages

P = compile.pointer(torch.float32)
GPUS = ("T4", "A100", "H200", "B200", "RTX 5090")


@triton.jit
def halve(x):
    return x * 0.5


@triton.jit
def kernel(
    output_ptr,
    input_ptr,
    n_cols,
    BLOCK: tl.constexpr,
):
    """A docstring, which is no statement."""
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(
        input_ptr + cols,  # a comment, which is left out
        mask=inside,
        other=-float("inf"),
    )
    row_max = tl.max(x, axis=0)
    y = halve(tl.exp(x - row_max))
    tl.store(output_ptr + cols, y, mask=inside)


@triton.jit
def loop_kernel(output_ptr, input_ptr, n_rows, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(n_rows, num_stages=3):
        total += tl.load(input_ptr + row * BLOCK + cols)
    tl.store(output_ptr + cols, total)


@functools.cache
def traced(gpu="H200", **options):
    return stages.trace(kernel, P, P, 1024, BLOCK=1024, gpu=gpu, **options)


def newly_compiled(n_cols=1024, gpu="H200", **options):
    return compile.aot(kernel, P, P, n_cols, BLOCK=1024, gpu=gpu, **options)


compiled = functools.cache(newly_compiled)


# ---- statements ----------------------------------------------------------------------


def test_source_is_the_kernels_statements():
    assert list(traced().source.values()) == [
        "def kernel",
        "cols = tl.arange(0, BLOCK)",
        "inside = cols < n_cols",
        'x = tl.load( input_ptr + cols, mask=inside, other=-float("inf"), )',
        "row_max = tl.max(x, axis=0)",
        "y = halve(tl.exp(x - row_max))",
        "tl.store(output_ptr + cols, y, mask=inside)",
    ]


def test_a_loop_is_its_head_and_its_body():
    trace = stages.trace(loop_kernel, P, P, 64, BLOCK=1024)
    assert any("= scf.for" in line for line in trace.lines("tl.range", "ttir"))
    (load,) = [line for line in trace.lines("total +=", "ttir") if "tt.load" in line]
    assert load.startswith("  ")  # it stands in the loop


@pytest.mark.parametrize(
    ("of", "why"), [("tl.dot", "no statement"), ("tl.", "several statements")]
)
def test_a_piece_must_name_one_statement(of, why):
    with pytest.raises(ValueError, match=rf"of must be .*{re.escape(of)}.*{why}"):
        traced().lines(of)


def test_a_stage_must_be_there():
    with pytest.raises(ValueError, match=r"stage must be one of .* got 'cubin'"):
        traced().lines("tl.load", "cubin")
    with pytest.raises(ValueError, match=r"stage must be one of .* got 'cubin'"):
        stages.diff(compiled(), compiled(), "cubin")


# ---- lines ---------------------------------------------------------------------------

OF_LOAD = {  # what the load becomes, at each stage
    "ttir": r"%x\w* = tt\.load ",
    "ttgir": r"%x\w* = tt\.load .*#blocked",
    "llir": r"ld\.global\.v4\.b32",
    "ptx": r"^@%p\d+ ld\.global\.v4\.b32",
    "sass": r"LDG\.E\.128",
}
OF_MAX = {
    "ttir": r'"tt\.reduce"',
    "ttgir": r'"tt\.reduce"',
    "llir": r"nvvm\.(shfl|redux)",
    "ptx": r"shfl\.sync\.bfly|redux\.sync",
    "sass": r"SHFL\.BFLY|REDUX",
}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("stage", compile.STAGES)
def test_lines_come_from_their_statement_and_from_no_other(stage, name):
    trace = traced(name)
    for of, pattern in (("tl.load", OF_LOAD[stage]), ("row_max =", OF_MAX[stage])):
        every = [line for line in trace.stages[stage] if re.search(pattern, line.text)]
        mine = [line for line in trace.lines(of, stage) if re.search(pattern, line)]
        assert mine
        assert len(mine) == len(every)


def test_what_is_inlined_belongs_to_the_call_in_the_kernel():
    trace = traced()
    assert any("arith.mulf" in line for line in trace.lines("halve", "ttir"))
    assert sum("mul.f32" in line for line in trace.lines("halve")) >= 8
    assert any("arith.max" in line for line in trace.lines("row_max =", "ttir"))


def test_a_trace_has_the_machine_code_of_the_kernel():
    """Line numbers change no instruction."""
    for name in GPUS:
        trace, made = traced(name), compiled(gpu=name)
        code = [line.strip() for line in made.sass.splitlines()]
        code = [line for line in code if not re.match(r"NOP|\.L_|BRA `\(\.L_x", line)]
        assert [line.text for line in trace.stages["sass"]] == code


def test_most_lines_have_a_statement():
    for row in (traced("T4").counts()[-1], traced().counts()[-1]):
        assert row[0] == "(no statement)"
        assert max(row[1:]) <= 3


def test_counts_are_those_of_the_lines():
    trace = traced()
    rows = trace.counts()
    assert [row[0] for row in rows[:-1]] == list(trace.source.values())
    for i, stage in enumerate(compile.STAGES):
        assert sum(row[1 + i] for row in rows) == len(trace.stages[stage])
    loads = next(row for row in rows if row[0].startswith("x ="))
    assert loads[4] == len(trace.lines("tl.load", "ptx"))


def test_a_trace_says_which_kernel_and_gpu():
    trace = traced("T4")
    assert (trace.name, trace.gpu) == ("kernel", gpu.named("T4"))


def test_show_is_the_statement_and_its_lines():
    shown = str(traced().show("row_max =", "ttir", "ptx", only="reduce|shfl"))
    assert shown.startswith("row_max = tl.max(x, axis=0)\n\nttir (5 lines, 2 of them")
    assert shown.count("shfl.sync.bfly") == 7
    assert "st.shared" not in shown
    every = str(traced().show("row_max ="))
    assert re.findall(r"^(\w+) \(\d+ lines\)$", every, re.M) == list(compile.STAGES)


def test_what_cannot_be_compiled_is_said_as_by_aot():
    with pytest.raises(ValueError, match="H99"):
        stages.trace(kernel, P, P, 1024, BLOCK=1024, gpu="H99")
    with pytest.raises(TypeError, match="kernel must be"):
        stages.trace(len, P)
    with pytest.raises(triton.CompilationError):
        stages.trace(kernel, P, P, 1000, BLOCK=1000)


# ---- comparing -----------------------------------------------------------------------


def test_equal_kernels_have_no_difference():
    assert str(stages.diff(compiled(), compiled())) == "no line changes"


def test_blocks_know_nothing_of_warps_and_layouts_do():
    four, eight = compiled(num_warps=4), compiled(num_warps=8)
    assert str(stages.diff(four, eight, "ttir")) == "no line changes"
    changed = str(stages.diff(four, eight, "ttgir")).splitlines()[2:]
    assert [line[:11] for line in changed] == ["-#blocked =", "+#blocked ="]


def test_numbers_of_registers_are_no_difference():
    """A mask inside a group of four adds predicates, and renumbers all registers."""
    changed = str(stages.diff(compiled(1024), compiled(1000))).splitlines()
    assert changed[:2] == [
        "--- kernel, NVIDIA H200, 4 warps",
        "+++ kernel, NVIDIA H200, 4 warps",
    ]
    assert "+8 × setp.lt.s32 %p, %r, %r;" in changed
    assert not any("max.f32" in line for line in changed)


def test_gpus_differ_in_one_threads_code():
    old, new = compiled(gpu="H200"), compiled(gpu="B200")
    assert str(stages.diff(old, new, "ttir")) == "no line changes"
    assert "-shfl.sync.bfly.b32 %r, %r, 16, 31, -1;" in str(stages.diff(old, new))
    assert "+redux.sync.max.f32 %r, %r, %r;" in str(stages.diff(old, new))
    assert "REDUX" in str(stages.diff(old, new, "sass"))


def test_opcodes_are_counted_by_name():
    assert stages.opcodes(compiled())["ld.global.v4.b32"] == 2
    assert stages.opcodes(compiled(1000))["ld.global.b32"] == 8
    sass = stages.opcodes(compiled(), "sass")
    assert (sass["LDG.E.128"], sass["MUFU.EX2"]) == (2, 8)
    assert "NOP" not in sass
    with pytest.raises(ValueError, match="stage must be 'ptx' or 'sass', got 'ttir'"):
        stages.opcodes(compiled(), "ttir")


# ---- timing --------------------------------------------------------------------------


def test_every_stage_takes_its_time():
    times = stages.times(kernel, P, P, 1024, BLOCK=1024, repeats=1)
    assert list(times) == ["ast", "ttir", "ttgir", "llir", "ptx", "cubin"]
    assert all(0 < ms < 60_000 for ms in times.values())


def test_timing_leaves_the_cache_as_it_is():
    before = newly_compiled()
    stages.times(kernel, P, P, 1024, BLOCK=1024, repeats=1)
    assert newly_compiled().sass == before.sass
    with pytest.raises(ValueError, match="repeats must be at least 1, got 0"):
        stages.times(kernel, P, P, 1024, BLOCK=1024, repeats=0)
