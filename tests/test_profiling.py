"""The slow kernel is right, its fault is one line, and the judge tells mended ones."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import meta, profiling, program
from kernels.lab import check, clock, compile, gpu, meter, occupancy
from tests.helpers import GPUS, assert_right, in_company, matrix

FLOAT = compile.pointer(torch.float32)


def slow(n_cols: int, num_warps: int, dtype: torch.dtype = torch.float32):
    """A launch of the slow kernel, for `compile.aot_all`."""
    block, x = triton.next_power_of_2(n_cols), compile.pointer(dtype)
    arguments = x, x, n_cols, block, 32 * num_warps
    return profiling.slow_kernel, arguments, {"num_warps": num_warps}


def compiled(launch):
    kernel, arguments, options = launch
    return compile.aot(kernel, *arguments, **options)


# ---- right, and counted --------------------------------------------------------------


@pytest.mark.parametrize("softmax", [profiling.slow_softmax, profiling.softmax])
def test_passes_the_check(softmax):
    assert check.softmax(softmax, layouts=["contiguous"])


@pytest.mark.parametrize("softmax", [profiling.slow_softmax, profiling.softmax])
@pytest.mark.parametrize("shape", [(1, 1), (7, 781), (3, 1024)])
def test_reads_and_writes_each_value_once(softmax, shape):
    assert meter.count(softmax, matrix(*shape)).values == meter.fused(*shape)


def test_rows_that_are_not_contiguous_are_named():
    with pytest.raises(ValueError, match=r"contiguous.*x\.contiguous\(\)"):
        profiling.slow_softmax(matrix(4, 6).t())


def test_more_elements_than_32_bits_can_count_are_named(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "numel", lambda x: 2**31)
    with pytest.raises(ValueError, match=r"fewer than 2\^31.*got 2147483648.*strided"):
        profiling.softmax(matrix(2, 3))


@pytest.mark.parametrize("name", profiling.PROVIDERS)
def test_every_provider_is_a_softmax(name):
    if name == "torch.compile":
        pytest.skip("kernels.eager tests what torch.compile makes of the five lines")
    x = matrix(5, 100)
    assert_right(profiling.PROVIDERS[name](x), x)


@pytest.mark.gpu
def test_torch_compile_is_a_softmax():
    x = matrix(5, 100)
    assert_right(profiling.PROVIDERS["torch.compile"](x), x)


# ---- the fault -----------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [1024, 4096, 12544])
def test_the_fault_is_the_width_of_an_access(n_cols):
    warps = meta.pick_num_warps(n_cols, 4)
    block = triton.next_power_of_2(n_cols)
    values = block // (32 * warps)  # of a thread
    faulty = compiled(slow(n_cols, warps))
    mended = compile.aot(
        program.softmax_kernel, FLOAT, FLOAT, n_cols, block, num_warps=warps
    )
    for move in (r"ld\.global", r"st\.global"):
        assert faulty.count(move) == values
        assert mended.count(move) == values // 4


def test_a_warp_of_the_slow_kernel_touches_a_sector_for_each_lane():
    """One value of each lane, as `cols` in the kernel; a sector holds 8 values."""
    made = compiled(slow(4096, 8))
    assert "sizePerThread = [1]" in made.lines("#blocked = ", "ttgir")[0]
    columns = [i % 256 * 16 + i // 256 for i in range(4096)]
    assert sorted(columns) == list(range(4096))
    for first in range(0, 4096, 32):  # the elements that a warp's load takes
        assert len({column // 8 for column in columns[first : first + 32]}) == 32


def test_neither_registers_nor_spills_are_at_fault():
    made = compiled(slow(4096, 8))
    assert made.spills == 0
    assert occupancy.of(made).warps_per_sm >= 40
    assert occupancy.of(compiled(slow(4096, 16))).warps_per_sm == 64


def test_the_other_kernel_of_the_chapter_spills():
    sizes = 32768, 32768
    made = compile.aot(program.softmax_kernel, FLOAT, FLOAT, *sizes, num_warps=4)
    assert made.spills > 0


# ---- the autotuner -------------------------------------------------------------------


def test_the_autotuner_gives_each_number_of_warps_its_threads():
    configs = profiling.autotuned().configs
    assert [config.num_warps for config in configs] == list(meta.WARPS)
    assert all(c.kwargs == {"THREADS": 32 * c.num_warps} for c in configs)


def test_the_autotuned_kernel_is_right():
    def pretended(call, quantiles):
        call()
        return [1.0, 1.0, 1.0]

    x = matrix(3, 1000)
    y = torch.empty_like(x)
    profiling.autotuned(do_bench=pretended)[(3,)](y, x, 1000, BLOCK_COLS=1024)
    assert_right(y, x)


# ---- the judge -----------------------------------------------------------------------


@triton.jit
def mended(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def half_mended(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < n_cols
    x = tl.load(x_ptr + row * n_cols + i, mask=inside, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    # Always true, but Triton doesn't know that it is so for neighbours together.
    known = inside & (i % 3 < 3)
    tl.store(y_ptr + row * n_cols + i, y, mask=known)


@triton.jit
def loads_the_same_column(
    y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, THREADS: tl.constexpr
):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    cols = i // THREADS * THREADS
    inside = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(y_ptr + row * n_cols + cols, y, mask=inside)


@triton.jit
def unfinished(y_ptr, x_ptr, n_cols, BLOCK: tl.constexpr, THREADS: tl.constexpr):
    tl.store(y_ptr + tl.program_id(0), tl.load(x_ptr) + undefined)  # noqa: F821


def test_the_judge_accepts_a_mended_kernel():
    said = profiling.judge(mended)
    assert said.startswith("Mended: ") and "16 bytes" in said


def test_the_judge_refuses_the_slow_kernel_as_it_is():
    said = profiling.judge(profiling.slow_kernel)
    assert said.startswith("Not yet: the result is right") and "4 bytes" in said


def test_the_judge_refuses_narrow_stores_alone():
    said = profiling.judge(half_mended)
    assert "loads its 16 values 16 bytes at a time, and stores them 4 bytes" in said


def test_the_judge_names_a_wrong_value():
    said = profiling.judge(loads_the_same_column)
    assert said.startswith("Not yet: in a 3 × 64 matrix, row 0, column ")
    assert "should be" in said


def test_the_judge_answers_a_kernel_that_fails():
    said = profiling.judge(unfinished)
    assert said.startswith("Not yet: ") and "undefined" in said


# ---- on every kind of GPU, and on one ------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name):
    launches = [slow(4096, 8), slow(256, 1), slow(4096, 4, torch.bfloat16)]
    for made in compile.aot_all(launches, gpu=gpu.named(name)):
        assert occupancy.of(made).blocks_per_sm >= 1


@pytest.mark.gpu
@in_company
def test_the_slow_kernel_is_slow_and_the_mended_one_is_not():
    x = matrix(4096, 4096)
    slow_us, ours_us = (
        clock.device_us(softmax, x)[1]
        for softmax in (profiling.slow_softmax, profiling.softmax)
    )
    assert slow_us > 2 * ours_us


@pytest.mark.gpu
def test_warmup_tells_what_compile_aot_tells(tritons_ptxas):
    x = torch.empty(1, 4096, device="cuda")
    kernel, (_, _, *sizes), options = slow(4096, 8)
    made = kernel.warmup(x, x, *sizes, **options, grid=(1,))
    made._init_handles()
    told = compile.aot(kernel, FLOAT, FLOAT, *sizes, **options, gpu=gpu.here())
    assert (made.n_regs, made.n_spills) == (told.registers, told.spills)
