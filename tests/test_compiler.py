"""The kernels of the chapter, and what its page says of every stage."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from kernels import compiler, program
from kernels.lab import check, compile, gpu, meter, occupancy, stages
from tests.helpers import GPUS, assert_right, dtypes_for, matrix

SINGLE, HALF = torch.float32, torch.bfloat16


@triton.jit
def masked_add(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x + y, mask=inside)


@triton.jit
def even_add(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = None if EVEN else offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x + y, mask=inside)


@triton.jit
def half_even(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (offsets < n) | EVEN
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x + y, mask=offsets < n)


@triton.jit
def never_masked(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    y = tl.load(y_ptr + offsets)
    tl.store(output_ptr + offsets, x + y)


@triton.jit
def stores_more(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = None if EVEN else offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x + y)


@triton.jit
def subtracts(output_ptr, x_ptr, y_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = None if EVEN else offsets < n
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(output_ptr + offsets, x - y, mask=inside)


def rows(n_cols: int = 1024, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    """A matrix of 4096 rows that has no memory."""
    return torch.empty(4096, n_cols, dtype=dtype, device="meta")


def vector(n: int = 1024, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.empty(n, dtype=dtype, device="meta")


def softmax_of(n_cols=1024, dtype=SINGLE, gpu="H200", **options):
    x = rows(n_cols, dtype)
    return compile.aot(compiler.softmax_launch_for(x, x, **options), gpu=gpu)


def addition(n=1024, dtype=SINGLE, gpu="H200", **options):
    x = vector(n, dtype)
    return compile.aot(compiler.add_launch_for(x, x, x, **options), gpu=gpu)


def loop_of(num_stages, gpu="H200", n_cols=8192):
    x = rows(n_cols)
    return compile.aot(compiler.loop_launch_for(x, x, num_stages=num_stages), gpu=gpu)


# ---- the kernels ---------------------------------------------------------------------


def test_is_a_softmax():
    assert check.softmax(compiler.softmax, layouts=("contiguous",))


def test_a_block_that_is_too_short_is_caught(capsys, monkeypatch):
    right = compiler.softmax_launch_for

    def half(output, x):
        launch = right(output, x)
        block = max(1, launch.constants["BLOCK_COLS"] // 2)
        return replace(launch, constants={**launch.constants, "BLOCK_COLS": block})

    monkeypatch.setattr(compiler, "softmax_launch_for", half)
    assert not check.softmax(compiler.softmax, layouts=("contiguous",))
    assert "matrix" in capsys.readouterr().out


def test_reads_and_writes_each_value_once():
    x = matrix(5, 781)
    assert meter.count(compiler.softmax, x).values == meter.fused(5, 781)


@pytest.mark.parametrize("num_warps", [1, 8])
def test_is_right_with_any_number_of_warps(num_warps):
    x = matrix(3, 1000)
    output = torch.empty_like(x)
    compiler.softmax_launch_for(output, x, num_warps=num_warps)(output, x)
    assert_right(output, x)


@pytest.mark.parametrize("n", [1000, 2048])
def test_adds(n):
    x, y = matrix(1, n)[0], matrix(1, n, seed=1)[0]
    output = torch.full_like(x, 7.0)
    compiler.add_launch_for(output, x, y)(output, x, y)
    assert torch.equal(output, x + y)


@pytest.mark.parametrize(("n", "even"), [(1, False), (1000, False), (1024, True)])
def test_a_kernel_learns_whether_blocks_fill_the_vectors(n, even):
    v = vector(n)
    launch = compiler.add_launch_for(v, v, v, kernel=even_add)
    assert launch.constants["EVEN"] is even
    assert "EVEN" not in compiler.add_launch_for(v, v, v).constants


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_loop_is_a_softmax(num_stages):
    x = matrix(5, 300)
    output = torch.empty_like(x)
    compiler.loop_launch_for(output, x, num_stages=num_stages)(output, x)
    assert_right(output, x)


@pytest.mark.gpu
def test_a_launch_runs_what_is_compiled_ahead_of_time():
    x = matrix(64, 1024)
    output = torch.empty_like(x)
    launch = compiler.softmax_launch_for(output, x)
    assert launch(output, x).asm["ptx"].count("shfl.sync") == compile.aot(
        launch, gpu=gpu.here()
    ).count(r"shfl\.sync")


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name):
    launches = []
    for dtype in dtypes_for(name):
        for n_cols in (1000, 1024, 4096):
            x = rows(n_cols, dtype)
            launches.append(compiler.softmax_launch_for(x, x))
        v, x = vector(1024, dtype), rows(8192, dtype)
        kernels = program.add_kernel, even_add
        launches += [compiler.add_launch_for(v, v, v, kernel=k) for k in kernels]
        launches += [compiler.loop_launch_for(x, x, num_stages=s) for s in (1, 3)]
    for made in compile.aot_all(launches, gpu=name):
        assert occupancy.of(made).blocks_per_sm >= 1


# ---- what the page says --------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*[(name, SINGLE) for name in GPUS], ("T4", HALF), ("H100", HALF)],
)
def test_names_and_line_breaks_leave_no_trace(name, dtype):
    p = compile.pointer(dtype)
    other = compile.aot(program.softmax_kernel, p, p, 1024, BLOCK_COLS=1024, gpu=name)
    assert softmax_of(dtype=dtype, gpu=name).sass == other.sass


@pytest.mark.thorough
def test_float32_needs_no_conversion_and_bfloat16_does():
    for dtype, needed in ((SINGLE, False), (HALF, True)):
        x = rows(dtype=dtype)
        trace = stages.trace(compiler.softmax_launch_for(x, x))
        assert bool(trace.lines("x.to(", "ttir")) == needed
        assert bool(trace.lines("x.to(", "ptx")) == needed


def test_the_statements_grow_where_the_page_says():
    """Few lines for blocks, many for a thread; ptxas adds to exp and to division."""
    trace = stages.trace(compiler.softmax_launch_for(rows(), rows()))
    total = [len(trace.stages[stage]) for stage in compile.STAGES]
    assert total[0] <= 31 and abs(total[1] - total[0]) <= 1
    assert min(total[2:]) > 3.5 * total[0]
    lines = {row[0].split(" = ")[0]: row[1:] for row in trace.counts()}
    assert lines["numerator"][3:] == [16, 40]
    assert lines["y"][3] == 8 and 27 <= lines["y"][4] <= 30
    assert lines["row_max"][:2] == [5, 5] and lines["row_max"][3] >= 30
    assert max(lines, key=lambda name: lines[name][3]) == "row_max"
    assert 155 <= total[4] <= 180  # "about 170"


def test_few_instructions_touch_memory_and_exp_takes_five():
    made = softmax_of()
    memory = [compiler.count(made, name, "sass") for name in ("LDG", "STG")]
    assert memory == [2, 2]
    trace = stages.trace(compiler.softmax_launch_for(rows(), rows()))
    names = [s.split(" R")[0] for s in trace.lines("tl.exp", "sass")]
    names = [re.sub(r"^@!P\d ", "", name).split(".AND")[0] for name in names]
    assert Counter(names) == {"FMUL": 24, "FSETP.GEU": 8, "MUFU.EX2": 8}


@pytest.mark.thorough
def test_rounding_to_bfloat16_takes_sm_75_six_instructions_a_value():
    sizes = {}
    for name in ("T4", "A100"):
        trace = stages.trace(compiler.softmax_launch_for(rows(), rows()), gpu=name)
        single = len(trace.lines("tl.store"))
        x = rows(dtype=HALF)
        trace = stages.trace(compiler.softmax_launch_for(x, x), gpu=name)
        sizes[name] = len(trace.lines("tl.store")) - single
    assert sizes["T4"] >= 48 > 4 >= sizes["A100"]


def test_triton_compiles_for_amd_too():
    assert {"nvidia", "amd"} <= set(triton.backends.backends)


@pytest.mark.parametrize("num_warps", [1, 4, 32])
def test_ttir_is_the_same_for_any_number_of_warps(num_warps):
    plain, other = softmax_of(), softmax_of(num_warps=num_warps)
    assert str(stages.diff(plain, other, "ttir")) == "no line changes"
    (layout,) = other.lines("^#blocked =", "ttgir")
    assert f"warpsPerCTA = [{num_warps}]" in layout


def test_the_sum_of_an_address():
    """`x_ptr + offsets`: a block of pointers, then one product and sum a thread."""
    x = vector()
    trace = stages.trace(compiler.add_launch_for(x, x, x))
    of = "x = tl.load"
    operations = [line.split(" = ")[1].split()[0] for line in trace.lines(of, "ttir")]
    assert operations == ["tt.splat", "tt.addptr", "tt.load"]
    assert len([s for s in trace.lines(of, "ttgir") if "#blocked" in s]) == 3
    for stage, pattern in (
        ("llir", r"getelementptr"),
        ("ptx", r"add\.s64"),
        ("sass", r"IMAD\.WIDE R\d+, R\d+, 0x4, R\d+"),
    ):
        assert len([s for s in trace.lines(of, stage) if re.search(pattern, s)]) == 1
    moves = [s for s in trace.lines(of) if re.match(r"mov\S* %r\d+, 0(x0)?;", s)]
    assert len(moves) >= 1  # masked lanes get zeros
    assert any(re.match(r"@%p\d+ ld\.global\.v4\.b32", s) for s in trace.lines(of))
    assert any(re.match(r"@!?P\d LDG\.E\.128", s) for s in trace.lines(of, "sass"))


def test_the_reduction():
    trace = stages.trace(compiler.softmax_launch_for(rows(), rows()))
    for of, fold in (("row_max =", "max.f32"), ("row_sum =", "add.f32")):
        lines = trace.lines(of)
        distances = re.findall(r"bfly\.b32 %r\d+, %r\d+, (\d+)", "\n".join(lines))
        assert distances == ["16", "8", "4", "2", "1", "2", "1"]
        assert sum(fold in line for line in lines) == 7 + 5 + 2
        assert sum("st.shared" in line for line in lines) in (1, 2)
        assert 1 <= sum("bar.sync" in line for line in lines) <= 3


def test_instructions_of_the_table():
    for name, shuffles in (("T4", 14), ("H200", 14), ("B200", None)):
        made = softmax_of(gpu=name)
        assert compiler.count(made, "MUFU.EX2", "sass") == 8
        assert compiler.count(made, "ex2.approx") == 8
        assert compiler.count(made, "div.full") == 8
        assert compiler.count(made, "MUFU.RCP", "sass") == 1
        if shuffles:
            assert compiler.count(made, "shfl.sync") == shuffles
            assert compiler.count(made, "redux.sync") == 0
        else:
            assert compiler.count(made, "shfl.sync") < 14
            assert compiler.count(made, "redux.sync.max") > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "asynchronous"),
    [("T4", False), ("A100", True), ("L4", True), ("H200", True), ("B200", True)],
)
def test_the_pipeline_needs_compute_capability_8(name, asynchronous):
    made = loop_of(3, name)
    assert (made.count(r"ttg\.async_copy_global_to_local", "ttgir") > 0) == asynchronous
    assert (made.count(r"tt\.load", "ttgir") > 0) != asynchronous
    assert (compiler.count(made, "cp.async.cg") > 0) == asynchronous
    assert (compiler.count(made, "LDGSTS", "sass") > 0) == asynchronous
    assert (made.shared >= 2 * 8192 * 4) == asynchronous
    assert made.count(r"tt\.load", "ttir") == 1


def test_sm_75_compiles_the_same_loop_for_any_number_of_stages():
    assert loop_of(1, "T4").sass == loop_of(3, "T4").sass


CHANGES = {  # a change, and an instruction whose number it changes in the PTX
    "8 warps": ("ld.global.v4", 2, 1),
    "bfloat16": ("cvt.f32.bf16", 0, 8),
    "1000 columns": ("ld.global.b32", 0, 8),
    "no mask": ("setp", 1, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_right_guess_is_told(change):
    pairs = {
        "8 warps": (softmax_of(), partial(softmax_of, num_warps=8)),
        "bfloat16": (softmax_of(), partial(softmax_of, dtype=HALF)),
        "1000 columns": (softmax_of(), partial(softmax_of, n_cols=1000)),
        "no mask": (addition(), partial(addition, kernel=even_add)),
    }
    old, new = pairs[change][0], pairs[change][1]()
    name, before, after = CHANGES[change]
    assert compiler.judge(name, old, new) == (
        f"Right: there are {after} {name} where there were {before}."
    )


def test_a_wrong_guess_is_told():
    old, new = softmax_of(), softmax_of(num_warps=8)
    assert compiler.judge(..., old, new).startswith("No guess yet")
    assert compiler.judge("bra", old, new).startswith("No: neither kernel has bra")
    said = compiler.judge("setp", addition(), addition(kernel=masked_add))
    assert said == "Not judged: both kernels have the same instructions so far."
    same = compiler.judge("shfl", old, softmax_of(dtype=HALF))
    assert same.startswith("No: 14 shfl before and after")
    with pytest.raises(TypeError, match="guess must be text such as 'setp', got 3"):
        compiler.judge(3, old, new)


# ---- the learner's addition ----------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (masked_add, "Not yet: masked_add is right for 5 lengths, .* 1 setp and 3 acc"),
        (half_even, "Not yet: half_even is right for 5 lengths, .* 1 setp and 1 acc"),
        (never_masked, "out of bounds. never_masked, program 1: load .* of x_ptr"),
        (stores_more, "out of bounds. stores_more, program 1: store .* of output_ptr"),
        (subtracts, "With 1000 values and 1000 values .*, element 0 of the result is"),
        (even_add, "Right: even_add is right for 5 lengths, .* no access has a pred"),
    ],
)
def test_an_addition_is_judged_in_a_sentence(kernel, said):
    assert re.search(said, compiler.judge_add(kernel).replace("\n", " "))


# ---- Triton 1.0's listing ------------------------------------------------------------


def test_what_the_first_triton_printed_is_still_there():
    """int32 vectors, blocks of 512, 4 warps: as in the announcement of 2021."""
    made = addition(1024, torch.int32)
    names = re.findall(r"= ([\w.]+)|(tt\.store)", made.ttir)
    assert {
        "tt.get_program_id",
        "tt.make_range",
        "tt.splat",
        "tt.addptr",
        "tt.load",
    } < {one or other for one, other in names}
    assert "tt.divisibility = 16" in made.ttir
    assert made.count(r"^\.reqntid 128") == 1
    assert made.count(r"@%p\d+ ld\.global\.v4\.b32") == 2
    assert made.count(r"@%p\d+ st\.global\.v4\.b32") == 1
    assert made.count(r"mul\.wide\.s32") == 1
    assert made.count(r"\bbra\b|maxntid|ld\.global\.cg") == 0


def test_a_length_that_only_2_divides_gets_no_wide_access():
    """One predicate for four values would pass the end of 1022 elements by two."""
    made = addition(1022, torch.int32)
    assert compiler.count(made, "ld.global.v4") == 0
    assert compiler.count(made, "setp") == 4


# ---- a learner's kernel --------------------------------------------------------------


@triton.jit
def scale_kernel(x_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n_elements)
    tl.store(x_ptr + offsets, 2 * x, mask=offsets < n_elements)


def test_any_kernel_can_be_traced():
    p = compile.pointer(SINGLE)
    trace = stages.trace(scale_kernel, p, 1024, BLOCK=512)
    assert any("st.global.v4" in line for line in trace.lines("tl.store"))
