"""Ahead-of-time compilation: what a launch would compile, on any documented GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import compile, gpu, process
from kernels.lab.launch import Launch


@triton.jit
def row_kernel(output_ptr, input_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    offsets = tl.program_id(0).to(tl.int64) * n_cols + cols
    x = tl.load(input_ptr + offsets, mask=cols < n_cols, other=-float("inf"))
    x = tl.exp(x.to(tl.float32) - tl.max(x, axis=0))
    y = (x / tl.sum(x, axis=0)).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + offsets, y, mask=cols < n_cols)


@triton.jit
def loop_kernel(
    output_ptr,
    input_ptr,
    n_rows,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_COLS)
    start, step = tl.program_id(0), tl.num_programs(0)
    for row in tl.range(start, n_rows, step, num_stages=STAGES):
        offsets = row.to(tl.int64) * n_cols + cols
        x = tl.load(input_ptr + offsets, mask=cols < n_cols, other=-float("inf"))
        x = tl.exp(x.to(tl.float32) - tl.max(x, axis=0))
        y = (x / tl.sum(x, axis=0)).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + offsets, y, mask=cols < n_cols)


def rows(n_cols=1024, dtype=torch.float32, aligned=True, **options):
    x = compile.pointer(dtype, aligned)
    options = {"BLOCK_COLS": triton.next_power_of_2(n_cols), "num_warps": 4} | options
    return compile.aot(row_kernel, x, x, n_cols, **options)


def test_every_stage_is_there():
    compiled = rows(num_warps=8, num_stages=2)
    assert (compiled.name, compiled.gpu.name) == ("row_kernel", "NVIDIA H200")
    assert (compiled.num_warps, compiled.num_stages) == (8, 2)
    assert compiled.count(r"tt\.load", "ttir") == 1
    assert compiled.count(r"#ttg\.blocked", "ttgir") >= 1
    assert compiled.count(r"define .*@row_kernel", "llir") == 1
    assert compiled.count(r"\.target sm_90a") == 1
    assert compiled.count(r"LDG\.", "sass") >= 1
    assert compiled.cubin.startswith(b"\x7fELF")


def test_texts_are_fit_to_read():
    compiled = rows()
    for stage in ("ttir", "ttgir"):
        assert compiled.count(r"\bloc\(|#loc", stage) == 0
    assert compiled.count(r"\.loc|\.file|test_compile") == 0
    assert compiled.count(r"/\*|;", "sass") == 0
    assert compiled.lines("EXIT", "sass")[-1] == "EXIT"
    assert "ttir" not in repr(compiled)
    assert str(compiled).startswith("row_kernel for NVIDIA H200, 4 warps: ")
    assert ", 1 warp: " in str(rows(n_cols=32, num_warps=1))


@pytest.fixture
def empty_cache(tmp_path):
    """What Triton's tools print is not yet kept on disk."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        compile.tool.cache_clear()
        yield


def test_disassembling_prints_nothing(empty_cache, capfd):
    """nvdisasm warns of a format that it understands all the same."""
    assert rows().count(r"\bEXIT", "sass") >= 1
    assert capfd.readouterr() == ("", "")


def test_a_tool_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"nvdisasm failed: \w+"):
        compile.tool("nvdisasm", b"no machine code")


def test_launches_that_share_a_kernel_have_one_key():
    assert rows(1000).key == rows(1001).key != rows(1008).key == rows(1024).key
    others = rows(num_warps=8), rows(num_stages=1), rows(dtype=torch.float16)
    assert len({rows().key, *(other.key for other in others)}) == 4
    assert rows().ptx == rows(num_stages=1).ptx  # there is no loop to pipeline


def test_divisibility_decides_the_width_of_loads():
    """Triton's own specialisation is at work: four floats a load, or one."""
    wide, narrow = r"ld\.global\.v4\.b32", r"ld\.global\.b32"
    assert (rows(1024).count(wide), rows(1024).count(narrow)) == (2, 0)
    assert (rows(1001).count(wide), rows(1001).count(narrow)) == (0, 8)
    assert rows(1024, aligned=False).count(wide) == 0
    assert rows(1024, dtype=torch.bfloat16).count(wide) == 1
    assert rows(1024, dtype=torch.float64).count(r"ld\.global\.v2\.b64") == 4


def test_an_argument_of_one_becomes_a_constant():
    parameters = [rows(n).count(r"\.param \.u32") for n in (16, 1)]
    assert parameters == [1, 0]


def test_tensors_and_stand_ins_compile_alike():
    x = torch.zeros(4, 1024)
    options = {"BLOCK_COLS": 1024, "num_warps": 4}
    assert compile.aot(row_kernel, x, x, 1024, **options).ptx == rows().ptx
    shifted = torch.zeros(4096 + 1)[1:]
    unaligned = compile.aot(row_kernel, shifted, shifted, 1024, **options)
    assert unaligned.ptx == rows(aligned=False).ptx


def test_no_data_is_sent():
    huge = torch.empty(70000, 65536, device="meta")  # 18 GB, had it any
    compiled = compile.aot(row_kernel, huge, huge, 1024, BLOCK_COLS=1024)
    assert compiled.ptx == rows().ptx


@pytest.mark.parametrize(
    ("name", "target"),
    [("T4", 75), ("A100", 80), ("L4", 89), ("H100", "90a"), ("B200", "100a")],
)
def test_other_gpus(name, target):
    compiled = rows(gpu=name)
    assert compiled.count(rf"\.target sm_{target}\b") == 1
    assert compiled.gpu == gpu.named(name)
    assert compiled.registers > 0 and compiled.count("EXIT", "sass") > 0


def test_gpus_do_not_mix():
    first, second, again = (rows(gpu=name).cubin for name in ("H200", "T4", "H200"))
    assert first == again != second


def test_shared_memory():
    assert rows(num_warps=1).shared == 0  # a warp reduces by shuffles alone
    assert rows(num_warps=4).shared == 4 * 4  # one float of each warp
    x = compile.pointer(torch.float32)
    shared = [
        compile.aot(
            loop_kernel, x, x, 4096, 1024, BLOCK_COLS=1024, STAGES=stages, num_warps=4
        ).shared
        for stages in (1, 2, 3, 4)
    ]
    row = 4 * 1024
    assert shared == [16, 16 + row, 16 + 2 * row, 16 + 3 * row]


def spilled_bytes(compiled):
    """Bytes of all stores to a thread's own memory in the machine code."""
    stores = compiled.lines(r"\bSTL", "sass")
    widths = (re.search(r"STL(?:\.(64|128))?", line)[1] for line in stores)
    return sum(int(bits or 32) // 8 for bits in widths)


def test_registers_and_spills():
    """A cap on registers is kept, and what does not fit is seen to be stored."""
    free = rows(4096)
    capped = rows(4096, maxnreg=32)
    assert free.registers > 32 >= capped.registers
    assert free.spills == spilled_bytes(free) == 0
    assert capped.spills == spilled_bytes(capped) > 0


def spills_logged_kept_and_anew(launches, on):
    """Spills as the first assembly logs them, as the cache on disk keeps them, and as
    they are found if it lacks them: then only is the kernel assembled again."""
    found = []
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        for again in (False, False, True):
            compile._resources.clear()
            if again:
                (path,) = Path(folder).glob("*/spills-*.txt")
                path.unlink()
            assemble = Mock(side_effect=compile.make_backend)
            with patch.object(compile, "make_backend", assemble):
                found.append(compile._compile(launches, on)[0].spills)
            assert assemble.called == again
    return found


def test_spills_are_kept_on_disk():
    capped = rows(4096, maxnreg=32)
    x = compile.pointer(torch.float32)
    launch = row_kernel, (x, x, 4096), {"BLOCK_COLS": 4096, "maxnreg": 32}
    call = spills_logged_kept_and_anew, [launch], capped.gpu
    assert process.call_in("compiler", *call) == [spilled_bytes(capped)] * 3


def test_many_kernels_at_once_keep_their_own_spills():
    """They have one name, and are assembled side by side."""
    x = compile.pointer(torch.float32)
    launches = [
        (row_kernel, (x, x, 4096), {"BLOCK_COLS": 4096, "maxnreg": cap})
        for cap in (24, 32, 64)
    ]
    made = compile.aot_all(launches)
    assert [each.spills for each in made] == [*map(spilled_bytes, made)]
    assert len({each.spills for each in made}) > 2


def test_what_a_tool_prints_is_kept_on_disk(empty_cache, monkeypatch):
    cubin, found = rows(4096).cubin, []
    for program in (subprocess.run, None):
        monkeypatch.setattr(subprocess, "run", program)
        compile.tool.cache_clear()
        found.append(compile.tool("nvdisasm", cubin, "--print-code"))
    assert "EXIT" in found[0] and found[0] == found[1]


def test_registers_are_those_the_machine_code_names():
    compiled = rows(4096)
    named = re.findall(r"\bR(\d+)\b", compiled.sass)
    assert compiled.registers > max(map(int, named))


def test_many_at_once():
    x = compile.pointer(torch.float32)
    launches = [
        (row_kernel, (x, x, 64), {"BLOCK_COLS": 64, "num_warps": warps})
        for warps in (1, 2, 1)
    ]
    compiled = compile.aot_all(launches, gpu="L4")
    assert [c.num_warps for c in compiled] == [1, 2, 1]
    assert compiled[0] == compiled[2] == rows(64, num_warps=1, gpu="L4")


LAUNCH = Launch(
    kernel=row_kernel,
    grid=(7,),
    scalars=(1001,),
    constants={"BLOCK_COLS": 1024, "num_warps": 8},
    pointers=(compile.pointer(torch.float32), compile.pointer(torch.float32, False)),
)


def test_a_launch_compiles_as_its_call_would():
    for name in ("H200", "T4"):
        bare = compile.aot(
            row_kernel, *LAUNCH.pointers, 1001, BLOCK_COLS=1024, num_warps=8, gpu=name
        )
        assert compile.aot(LAUNCH, gpu=name) == bare
    assert compile.aot_all([LAUNCH, compile.bare(LAUNCH)])[1] == compile.aot(LAUNCH)


def test_a_launch_brings_all_of_its_arguments():
    with pytest.raises(TypeError, match=r"already has its arguments.* got 1;"):
        compile.aot(LAUNCH, num_warps=4)
    with pytest.raises(TypeError, match=r"already has its arguments.* got 2;"):
        compile.aot(LAUNCH, 1001, num_warps=4)


@triton.jit(do_not_specialize=["tag"])
def publish_kernel(output_ptr, words_ptr, tag, n_words, BLOCK: tl.constexpr):
    words = tl.arange(0, BLOCK)
    tl.store(words_ptr + words, words.to(tl.int64) << 32 | tag, mask=words < n_words)
    tl.store(output_ptr, 1.0)


def test_words_come_with_a_tag():
    x = compile.pointer(torch.float32)
    launch = Launch(publish_kernel, (1,), (100,), {"BLOCK": 128}, (x,), 100)
    made = compile.aot(launch)
    (signature,) = made.lines("tt.func", "ttir")
    kinds = re.findall(r"%\w+: (!tt\.ptr<\w+>|\w+)", signature)
    assert kinds == ["!tt.ptr<f32>", "!tt.ptr<i64>", "i32", "i32"]
    words = compile.pointer(torch.int64)
    assert made == compile.aot(publish_kernel, x, words, 12345, 100, BLOCK=128)


def test_heuristics():
    @triton.heuristics({"BLOCK_COLS": lambda a: triton.next_power_of_2(a["n_cols"])})
    @triton.jit
    def local_kernel(output_ptr, n_cols, BLOCK_COLS: tl.constexpr):
        cols = tl.arange(0, BLOCK_COLS)
        tl.store(output_ptr + cols, cols, mask=cols < n_cols)

    x = compile.pointer(torch.int32)
    compiled = compile.aot(local_kernel, x, 1000, num_warps=1)
    assert "1024xi32" in compiled.ttir


def test_what_is_not_a_kernel():
    tuned = triton.autotune([triton.Config({"BLOCK_COLS": 16})], key=[])(row_kernel)
    with pytest.raises(TypeError, match=r"autotuned.*pass.*kernel\.fn"):
        compile.aot(tuned, 1)
    with pytest.raises(TypeError, match=r"function or a Launch, got <built-in"):
        compile.aot(print, 1)


def test_bad_arguments():
    x = compile.pointer(torch.float32)
    with pytest.raises(TypeError, match="BLOCK_COLS"):
        compile.aot(row_kernel, x, x, 16)
    with pytest.raises(TypeError, match="of type: object"):
        compile.aot(row_kernel, x, x, object(), BLOCK_COLS=16)
    with pytest.raises(KeyError, match="num_wraps"):
        rows(num_wraps=4)
    with pytest.raises(ValueError, match="got 'H300'"):
        rows(gpu="H300")
    with pytest.raises(TypeError, match=r"torch\.dtype, got 'float32'"):
        compile.pointer("float32")
    with pytest.raises(ValueError, match=r"stage must be.*got 'cubin'"):
        rows().lines("", "cubin")


def test_a_kernel_that_does_not_compile_leaves_the_compiler_usable():
    for _ in range(2):  # the second time it is known to fail
        with pytest.raises(triton.CompilationError, match="power of 2"):
            rows(BLOCK_COLS=1000)
    x = compile.pointer(torch.float32)
    launches = [(row_kernel, (x, x, n), {"BLOCK_COLS": n}) for n in (48, 50, 64)]
    with pytest.raises(triton.CompilationError, match="power of 2"):
        compile.aot_all(launches)
    assert rows().registers > 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_warps", [1, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [781, 1024, 4096])
def test_a_launch_uses_what_was_compiled_ahead(n_cols, dtype, num_warps, tritons_ptxas):
    x = torch.randn(64, n_cols, device="cuda").to(dtype)
    y = torch.empty_like(x)
    block = triton.next_power_of_2(n_cols)
    cases = [
        (row_kernel, (y, x, n_cols), {}),
        *((loop_kernel, (y, x, 64, n_cols), {"STAGES": s}) for s in (1, 3)),
    ]
    for kernel, args, constants in cases:
        options = constants | {"BLOCK_COLS": block, "num_warps": num_warps}
        launched = kernel[(64,)](*args, **options)
        ahead = compile.aot(kernel, *args, gpu=gpu.current(), **options)
        assert ahead.registers == launched.n_regs
        assert ahead.shared == launched.metadata.shared
        torch.testing.assert_close(y, torch.softmax(x, dim=1))
