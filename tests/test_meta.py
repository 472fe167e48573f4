"""One kernel under every launch option: what each option changes, and how to choose."""

from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels import meta, program, strided
from kernels.lab import backend, check, compile, meter, occupancy, process
from kernels.lab.compile import Compiled
from kernels.strided import softmax_kernel
from tests.helpers import TRITON, assert_right, matrix

F32 = compile.pointer(torch.float32)


def compiled(
    n_cols: int = 1024, dtype: torch.dtype = torch.float32, **options: Any
) -> Compiled:
    x = torch.empty(2, n_cols, dtype=dtype)
    return compile.aot(softmax_kernel, *meta.arguments(x, x), **options)


# ---- the softmax ---------------------------------------------------------------------


def test_passes_the_check():
    assert check.softmax(meta.softmax)


def test_a_block_that_is_too_short_is_caught(capsys):
    def half(x):
        output = torch.empty_like(x)
        if x.numel():
            *arguments, block_cols = meta.arguments(output, x)
            softmax_kernel[(x.shape[0],)](*arguments, max(1, block_cols // 2))
        return output

    assert not check.softmax(half)
    assert "Does the block have" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(1, 1), (7, 781), (3, 1024)])
def test_reads_and_writes_each_value_once(shape):
    assert meter.count(meta.softmax, matrix(*shape)).values == meter.fused(*shape)


@pytest.mark.parametrize("num_warps", [0, 3, 64, -1, True, 4.0, "4"])
def test_wrong_number_of_warps_is_named(num_warps):
    with pytest.raises(ValueError, match=rf"one of \[1, 2.*32\].*got {num_warps!r}"):
        meta.softmax(matrix(2, 8), num_warps=num_warps)


def test_too_few_warps_for_a_row_are_named_with_those_that_do():
    with pytest.raises(ValueError, match=r"one of \[2, 4.*8193 columns.*got 1$"):
        meta.softmax(matrix(1, 8193), num_warps=1)
    x = matrix(1, 8193)
    assert_right(meta.softmax(x, num_warps=2), x)


def test_too_many_rows_are_named():
    rows = meta.MAX_ROWS + 1
    x = torch.empty(1, 3, device=backend.DEVICE).expand(rows, 3)
    with pytest.raises(ValueError, match=f"at most {meta.MAX_ROWS} rows.*got {rows}"):
        meta.softmax(x)


@pytest.mark.parametrize("num_warps", [None, 32])
def test_empty_gives_empty_with_any_warps(num_warps):
    assert meta.softmax(matrix(0, 5), num_warps=num_warps).shape == (0, 5)


# ---- the rules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cols", "element_size", "warps"),
    [
        *((0, 4, 1), (1, 2, 1), (512, 4, 1), (1023, 4, 2), (1025, 2, 2)),
        *((4096, 2, 4), (4096, 4, 8), (4097, 2, 8), (16384, 4, 32), (131072, 2, 32)),
    ],
)
def test_one_warp_for_two_kib(n_cols, element_size, warps):
    assert meta.pick_num_warps(n_cols, element_size) == warps


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_softmax_launches_what_the_rule_picks_and_accepts(dtype, monkeypatch):
    launched = []
    monkeypatch.setattr(meta, "launch", lambda x, **options: launched.append(options))
    for power in range(18):
        x = torch.empty(1, 2**power, dtype=dtype, device=backend.DEVICE)
        picked = meta.pick_num_warps(2**power, x.element_size())
        for num_warps in (None, picked):
            meta.softmax(x, num_warps=num_warps)
            assert launched.pop() == {"num_warps": picked}


# ---- what the options change (in the compiler, on no GPU) ----------------------------


def test_misspelt_options_pass_in_the_interpreter_only():
    x = matrix(3, 10).cpu()
    y = process.call_in("interpreter", meta.launch, x, num_wraps=8)
    assert_right(y, x)
    with pytest.raises(KeyError, match="num_wraps"):
        compiled(num_wraps=8)


def test_warps_spread_a_row_and_pay_with_barriers():
    for warps in meta.WARPS:
        made = compiled(4096, num_warps=warps)
        assert made.count(rf"\.reqntid {32 * warps}$") == 1
        assert made.count(r"ld\.global\.v4\.b32") == 32 // warps
        assert (made.count(r"bar\.sync") > 0) == (made.shared > 0) == (warps > 1)
        assert made.shared == (0 if warps == 1 else 4 * warps)


def test_rows_on_an_sm_shrink_with_too_many_warps():
    held = {
        warps: occupancy.of(compiled(4096, torch.bfloat16, num_warps=warps))
        for warps in meta.WARPS
    }
    kib = [8 * held[warps].blocks_per_sm for warps in meta.WARPS]
    assert kib == sorted(kib, reverse=True)
    assert kib[-3:] == [64, 32, 16]
    assert held[1].warps_per_sm < 16 < held[4].warps_per_sm


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_the_rule_keeps_enough_rows_and_warps_on_an_sm(dtype):
    lengths = [2**power for power in range(9, 16)]
    for n_cols in [n for n in lengths if n * dtype.itemsize >= 2048]:
        picked = meta.pick_num_warps(n_cols, dtype.itemsize)
        held = occupancy.of(compiled(n_cols, dtype, num_warps=picked))
        assert 64 <= held.blocks_per_sm * n_cols * dtype.itemsize / 1024 <= 128
        assert held.warps_per_sm >= 32
    assert held.blocks_per_sm == 1  # an SM holds one of the longest rows


@pytest.mark.parametrize(
    "options", [{"num_stages": 1}, {"num_stages": 4}, {"launch_cooperative_grid": True}]
)
def test_these_options_compile_the_same_code_again(options):
    made = compiled(**options)
    assert made.key != compiled().key
    assert made.ptx == compiled().ptx


def test_fusion_needs_a_product_in_a_sum():
    made = compiled(enable_fp_fusion=False)
    assert made.ptx != compiled().ptx
    assert made.sass == compiled().sass


def test_maxnreg_is_per_thread_and_spills():
    for warps in (4, 8):
        free = compiled(8192, num_warps=warps)
        tight = compiled(8192, num_warps=warps, maxnreg=32)
        assert tight.lines(r"\.maxnreg") == [".maxnreg 32"]
        assert (free.spills, tight.registers) == (0, 32)
        assert tight.spills > 0 and tight.count(r"\b(LDL|STL)", "sass") > 0
        assert occupancy.of(tight).blocks_per_sm > occupancy.of(free).blocks_per_sm


def test_clusters_are_for_hopper():
    made = compile.aot(program.add_kernel, F32, F32, F32, 4096, BLOCK=1024, num_ctas=2)
    assert made.count(r"\.reqnctapercluster 2") == 1
    with pytest.raises(ValueError, match=r"num_ctas > 1 requires"):
        compiled(num_ctas=2, gpu="A100")


@pytest.mark.skipif(TRITON > (3, 7), reason="says what Triton 3.6 and 3.7 cannot do")
def test_a_cluster_cannot_share_a_reduction():
    with pytest.raises(RuntimeError, match="PassManager"):
        compiled(num_ctas=2)


@pytest.mark.skipif(TRITON < (3, 9), reason="says what Triton can do since 3.9")
def test_a_cluster_shares_a_reduction_and_pays_with_barriers():
    made = compiled(num_ctas=2)
    assert made.count(r"\.reqnctapercluster 2") == 1
    assert made.count(r"barrier\.cluster\.wait") > 0


def test_specialisation_decides_which_calls_share_a_kernel():
    def keys(*columns, kernel=program.softmax_kernel, number=int):
        calls = [(kernel, (F32, F32, number(n), 1024), {}) for n in columns]
        return len({made.key for made in compile.aot_all(calls)})

    columns = (1000, 1001, 1008, 1024)
    loose = triton.jit(do_not_specialize=["n_cols"])(program.softmax_kernel.fn)
    assert keys(*columns) == 2
    assert keys(*columns, kernel=loose) == 1
    assert keys(*columns, number=tl.constexpr) == 4
    assert keys(*columns, 1) == 3


# ---- heuristics and autotuning -------------------------------------------------------


def test_a_heuristic_is_evaluated_at_each_launch():
    seen = []

    def rule(args):
        seen.append(args["n_cols"])
        return 2

    chosen = triton.heuristics({"num_warps": rule})(softmax_kernel)
    for n_cols in (5, 5, 9):
        x = matrix(3, n_cols)
        assert_right(meta.launch(x, chosen), x)
    assert seen == [5, 5, 9]


def test_the_autotuner_knows_columns_and_dtypes_and_nothing_else():
    trials = []

    def pretended(call, quantiles):
        call()
        trials.append(call)
        return [float(-len(trials))] * 3  # the later, the faster

    tuned = meta.autotuned(do_bench=pretended)
    first = matrix(4, 100)
    assert not tuned.cache
    for x, tried in [
        *((first, 6), (first, 0), (first.repeat(9, 1), 0)),
        *((first.t().contiguous().t(), 0), (first.bfloat16(), 6)),
        *((matrix(4, 101), 6), (first, 0)),
    ]:
        trials.clear()
        result = meta.launch(x, tuned)
        assert len(trials) == tried
        assert_right(result, x)
    assert tuned.best_config.num_warps == 32
    assert len(tuned.cache) == 3
    assert not meta.autotuned().cache  # each begins anew


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_warps", meta.WARPS)
def test_every_number_of_warps_is_right(num_warps):
    function = partial(meta.softmax, num_warps=num_warps)
    for dtype in backend.DTYPES:
        for n_cols in (1, 33, 1001, 4096, 8192):
            x = matrix(65, n_cols, dtype)
            assert_right(function(x), x)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"maxnreg": 32}, {"enable_fp_fusion": False}])
def test_options_do_not_change_the_answer(options):
    x = matrix(65, 8192)
    assert_right(meta.launch(x, num_warps=4, **options), x)


@pytest.mark.gpu
def test_a_cooperative_launch_is_refused_where_not_all_programs_fit():
    x = matrix(32, 1024)
    assert_right(meta.launch(x, launch_cooperative_grid=True), x)
    with pytest.raises(RuntimeError, match="cooperative"):
        meta.launch(x.repeat(3000, 1), launch_cooperative_grid=True)
    assert_right(strided.softmax(x), x)  # the refusal leaves the GPU usable


@pytest.mark.gpu
def test_the_autotuner_finds_a_number_of_warps():
    tuned, x = meta.autotuned(), matrix(4096, 512)
    assert_right(meta.launch(x, tuned), x)
    assert tuned.best_config.num_warps in meta.WARPS
