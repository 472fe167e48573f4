"""A launch is what the bare call is; its fast path passes the same values."""

import dataclasses
import itertools
import sys

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, compile, gpu, launch, occupancy, process
from kernels.lab import words as words_module
from kernels.lab.direct import CachedLaunch
from kernels.lab.launch import Launch, Pointer
from tests import helpers
from tests.fakes import FakeCompiled, FakeKernel
from tests.helpers import assert_right, matrix, patched


@triton.jit
def shift_rows(x, row_max):
    """What row_kernel calls; tests replace it."""
    return x - row_max


@triton.jit
def row_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One program writes SCALE times the softmax of one row."""
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    input_ptrs = input_ptr + row * input_row_stride + cols
    x = tl.load(input_ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    numerator = tl.exp(shift_rows(x, tl.max(x, axis=0)))
    y = SCALE * numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * output_row_stride + cols, y, mask=inside)


@triton.jit(do_not_specialize=["tag"])
def tag_kernel(
    output_ptr, input_ptr, words_ptr, tag, n_cols, BLOCK: tl.constexpr, N: tl.constexpr
):
    """One program copies a row, and writes the tag to N words."""
    cols, words = tl.arange(0, BLOCK), tl.arange(0, N)
    x = tl.load(input_ptr + cols, mask=cols < n_cols)
    tl.store(output_ptr + cols, x, mask=cols < n_cols)
    tl.store(words_ptr + words, tl.zeros((N,), tl.int64) + tag)


@dataclasses.dataclass(frozen=True)
class Config:
    block_cols: int
    scale: float
    num_warps: int
    maxnreg: int | None = None


CONSTANTS = {"BLOCK_COLS": 128, "SCALE": 1.0, "num_warps": 2, "maxnreg": None}


def launch_for(output, x, kernel=row_kernel):
    return Launch(
        kernel=kernel,
        grid=(len(x),),
        scalars=(output.stride(0), x.stride(0), x.shape[1]),
        constants=launch.constants_of(Config(128, 1.0, num_warps=2)),
        pointers=(launch.pointer_to(output), launch.pointer_to(x)),
    )


def like(x):
    return torch.full_like(x, 7.0)


# ---- a launch ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_a_launch_is_the_bare_call(dtype):
    x = matrix(5, 100, dtype, stride=120, offset=3)
    output, bare = like(x), like(x)
    strides = output.stride(0), x.stride(0)
    row_kernel[(5,)](bare, x, *strides, 100, BLOCK_COLS=128, SCALE=1.0, num_warps=2)
    launch_for(output, x)(output, x)
    assert torch.equal(output, bare)
    assert_right(output, x)


def test_a_config_s_fields_are_the_constants():
    assert launch.constants_of(Config(128, 1.0, num_warps=2)) == CONSTANTS


def test_a_launch_holds_what_a_call_passes():
    x = matrix(5, 100)
    kernel = FakeKernel(row_kernel)
    prepared = launch_for(like(x), x, kernel)
    output = like(x)
    assert prepared(output, x) is kernel.compiled
    assert kernel.calls == [((5,), (output, x, 100, 100, 100), CONSTANTS)]
    aligned = Pointer(torch.float32)
    assert compile.bare(prepared)[1] == (aligned, aligned, 100, 100, 100)


def test_a_launch_cannot_be_changed():
    prepared = launch_for(matrix(2, 3), matrix(2, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        prepared.grid = (1,)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_pointers_know_dtype_and_alignment(device):
    for dtype, offset in itertools.product(backend.DTYPES, range(17)):
        x = torch.empty(64, dtype=dtype, device=device)[offset:]
        pointer = launch.pointer_to(x)
        assert pointer == Pointer(dtype, aligned=offset * dtype.itemsize % 16 == 0)
        assert (pointer.data_ptr() % 16 == 0) == pointer.aligned


def test_a_launch_on_meta_tensors_is_that_on_real_ones():
    for shape, offset in (((5, 100), 0), ((3, 33), 1)):
        real = matrix(*shape, offset=offset)
        meta = torch.empty(100 + real.numel(), device="meta")[offset:]
        meta = meta.as_strided(real.shape, real.stride(), offset)
        assert launch_for(meta, meta) == launch_for(real, real)
    huge = torch.empty(2**20, 2**20, device="meta")  # 4 TiB, if it had memory
    assert launch_for(huge, huge).scalars == (2**20,) * 3


# ---- the fast path -------------------------------------------------------------------


def test_the_first_call_goes_through_triton_and_no_other():
    kernel = FakeKernel(row_kernel)
    x = matrix(5, 100, stride=120)
    prepared = launch_for(like(x), x, kernel)
    cached = CachedLaunch(prepared)
    outputs = [like(x) for _ in range(3)]
    for output in outputs:
        cached(output, x)
        assert_right(output, x)
    assert kernel.calls == [((5,), (outputs[0], x, 100, 120, 100), CONSTANTS)]
    rest = (100, 120, 100, 128, 1.0)
    calls = [((5, 1, 1), (output, x, *rest)) for output in outputs[1:]]
    assert kernel.compiled.calls == calls


def test_later_calls_are_on_their_own_tensors():
    x = matrix(4, 9)
    cached = CachedLaunch(launch_for(x, x, FakeKernel(row_kernel)))
    for seed in range(3):
        x = matrix(4, 9, seed=seed)
        output = like(x)
        cached(output, x)
        assert_right(output, x)


@pytest.mark.parametrize("grid", [(3,), (3, 2), (3, 2, 4)])
def test_a_compiled_kernel_gets_a_grid_of_three(grid):
    x = matrix(3, 4)
    kernel = FakeKernel(row_kernel)
    cached = CachedLaunch(
        dataclasses.replace(launch_for(like(x), x, kernel), grid=grid)
    )
    for _ in range(2):
        cached(like(x), x)
    ((called, _),) = kernel.compiled.calls
    assert called == (*grid, 1, 1)[:3]


def workspace_launch(x, kernel, n_words=8):
    return Launch(
        kernel=kernel,
        grid=(1,),
        scalars=(x.shape[1],),
        constants={"BLOCK": 16, "N": n_words, "num_warps": 1},
        pointers=(launch.pointer_to(x),) * 2,
        n_words=n_words,
    )


def test_every_call_gets_words_and_a_tag(monkeypatch):
    kept, tags_left = torch.zeros(8, dtype=torch.int64), itertools.count(1)
    asked = []

    def take(n_words, device):
        asked.append((n_words, device))
        return kept.to(device), next(tags_left)

    monkeypatch.setattr(words_module, "take", take)
    x = matrix(1, 10)
    kernel = FakeKernel(tag_kernel)
    cached = CachedLaunch(workspace_launch(x, kernel))
    tags = []
    for _ in range(4):
        output = like(x)
        cached(output, x)
        assert torch.equal(output, x)
        calls = [args for _, args, *_ in kernel.calls + kernel.compiled.calls]
        words, tag = calls[-1][2:4]
        assert words.tolist() == [tag] * 8  # what the kernel wrote
        tags.append(tag)
    assert tags == [1, 2, 3, 4]
    assert asked == [(8, x.device)] * 4
    assert [args[4:] for _, args in kernel.compiled.calls] == [(10, 16, 8)] * 3


def test_without_words_a_call_may_pass_what_has_no_device():
    """A descriptor of a tensor has none."""
    passed = []
    kernel = {(4,): lambda *args, **constants: passed.append((args, constants))}
    Launch(kernel, (4,), (7,), {"BLOCK": 16}, ())("a descriptor")
    assert passed == [(("a descriptor", 7), {"BLOCK": 16})]


def test_the_stand_in_is_as_strict_as_a_compiled_kernel():
    compiled, x = FakeCompiled(row_kernel), matrix(2, 8)
    with pytest.raises(TypeError, match="expected 7 arguments, got 6"):
        compiled[2, 1, 1](like(x), x, 8, 8, 8, 8)
    with pytest.raises(ValueError, match="unpack"):
        compiled[2,](like(x), x, 8, 8, 8, 8, 1.0)
    with pytest.raises(TypeError, match="num_warps"):
        compiled[2, 1, 1](like(x), x, 8, 8, 8, 8, 1.0, num_warps=4)


@pytest.mark.parametrize(
    "broken",
    [
        {"rest": (130, 121, 100, 128, 1.0)},  # another stride
        {"rest": (130, 120, 100, 128, 2.0)},  # another constant
        {"rest": (120, 130, 100, 128, 1.0)},  # another order
        {"rest": (130, 120, 100)},  # no constants
        {"grid": (4, 1, 1)},  # a program too few
        {"compiled": {(5, 1, 1): lambda *args: None}},  # nothing is launched
    ],
)
def test_a_broken_fast_path_is_seen(broken):
    x = matrix(5, 100, stride=120, offset=64)  # with room for rows in a wrong stride
    output = matrix(5, 100, stride=130, offset=64)
    cached = CachedLaunch(launch_for(output, x, FakeKernel(row_kernel)))
    for _ in range(2):
        output.fill_(7.0)
        cached(output, x)
        assert_right(output, x)
    output.fill_(7.0)
    vars(cached).update(broken)
    with pytest.raises((AssertionError, TypeError)):
        cached(output, x)
        assert_right(output, x)


@pytest.mark.gpu
def test_the_fast_path_on_a_gpu():
    x = matrix(500, 100, stride=120)
    cached = CachedLaunch(launch_for(like(x), x))
    for seed in range(3):
        x = matrix(500, 100, stride=120, seed=seed)
        output = like(x)
        cached(output, x)
        assert_right(output, x)
    assert cached.compiled is not None


# ---- the GPU at hand -----------------------------------------------------------------


@pytest.mark.skipif(not backend.INTERPRETED, reason="is about machines without a GPU")
def test_without_a_gpu_launches_are_an_h200_s():
    h200 = gpu.named("H200")
    assert launch.sms_and_threads() == (h200.sms, h200.threads_per_sm)


REGISTERS = 40, 64, 88, 96, 168


@pytest.mark.parametrize("name", ["T4", "RTX 3090", "L4", "H200"])
def test_programs_at_once_are_those_of_the_occupancy(name, monkeypatch):
    there = gpu.named(name)
    sizes = there.sms, there.threads_per_sm
    monkeypatch.setattr(launch, "sms_and_threads", lambda: sizes)
    for num_warps, registers in itertools.product((1, 2, 4, 8, 16, 32), REGISTERS):
        if 32 * num_warps * registers > there.registers_per_block:
            continue
        how = {"num_warps": num_warps, "registers": registers, "shared": 64}
        resident = occupancy.resident(there, **how).blocks_per_sm * there.sms
        found = launch.programs_at_once(num_warps, registers)
        # Of smaller programs, some GPUs run more than 16 on an SM.
        assert found == resident or (num_warps < 4 and found < resident), how


@pytest.mark.gpu
def test_the_current_gpu_is_asked():
    here = gpu.current()
    assert launch.sms_and_threads() == (here.sms, here.threads_per_sm)


# ---- what the tests use: a helper that is replaced -----------------------------------


HERE = sys.modules[__name__]


def wrong_shift(x, row_max):
    return 2 * (x - row_max)


def is_right():
    x = matrix(3, 50)
    output = like(x)
    launch_for(output, x)(output, x)
    return torch.allclose(output, helpers.expected(x))


def test_a_patched_kernel_is_wrong_and_then_right_again():
    right = shift_rows
    assert is_right()
    with patched(HERE, "shift_rows", wrong_shift):
        assert not is_right()
        with patched(HERE, "shift_rows", right):
            assert is_right()
        assert not is_right()
    assert is_right() and shift_rows is right


def test_a_kept_launch_is_patched_as_well():
    x = matrix(3, 50)
    cached = CachedLaunch(launch_for(x, x, FakeKernel(row_kernel)))
    output = like(x)
    for _ in range(2):
        cached(output, x)
    with patched(HERE, "shift_rows", wrong_shift):
        cached(output, x)
        with pytest.raises(AssertionError):
            assert_right(output, x)
    cached(output, x)
    assert_right(output, x)


def compile_patched():
    """What is compiled before, under and after a patch: (PTX, and what is reused)."""
    triton.runtime.driver.set_active(compile.Target(90))
    args = Pointer(torch.float32), Pointer(torch.float32), 100, 100, 100

    def made():
        options = {"BLOCK_COLS": 128, "SCALE": 1.0, "grid": (1,)}
        kernel = row_kernel.warmup(*args, **options)
        return kernel.result() if hasattr(kernel, "result") else kernel

    before = made()
    with patched(HERE, "shift_rows", wrong_shift):
        under = made()
        under_again = made()
    after = made()
    return (
        before.asm["ptx"] != under.asm["ptx"],
        under is under_again,
        after is before,
    )


def test_a_patched_kernel_is_compiled_anew_and_the_right_one_is_kept():
    answers = process.call_in("compiler", compile_patched)
    assert answers == (True, True, True)


@pytest.mark.parametrize("keyword", ["stride", "offset"])
def test_a_matrix_has_nan_around_its_rows(keyword):
    x = matrix(3, 5, **{keyword: 7})
    flat = torch.empty(0, device=x.device).set_(x.untyped_storage())
    assert x.isfinite().all() and flat.isnan().sum() == flat.numel() - x.numel() > 0
    assert torch.equal(x, matrix(3, 5)) and not torch.equal(x, matrix(3, 5, seed=1))


def test_right_is_what_is_near_and_like_the_input():
    for dtype in helpers.TOLERANCES:
        x = matrix(4, 30, dtype)
        y = torch.softmax(x.double(), 1)
        assert_right(y.to(dtype), x)
        off = 1 + 3 * helpers.TOLERANCES[dtype]["rtol"]
        with pytest.raises(AssertionError):
            assert_right((y * off).to(dtype), x)
    with pytest.raises(AssertionError):
        assert_right(y.half(), matrix(4, 30))
