"""Each step towards chapter `online`'s kernel is right, and the page's tables."""

import functools

import pandas as pd
import pytest
import torch
import triton
import triton.language as tl

from benchmarks import passes, variants
from kernels import online
from kernels.lab import backend, check, compile, gpu, meter, show
from kernels.online import exp_shifted_or_zero
from tests.helpers import TRITON, assert_right, matrix

FEW = {"dtypes": [torch.float32], "layouts": ["sliced"], "max_cols": 33}
STEPS = {"two": passes.two_pass_kernel, "backwards": passes.backwards_kernel}


@pytest.mark.parametrize("name", STEPS)
def test_each_step_is_a_softmax(name):
    softmax = passes.row_by_row(STEPS[name], block_cols=16)
    summary = check.softmax(softmax, **FEW)
    assert summary, summary
    x = matrix(2, 20_000)
    assert_right(passes.row_by_row(STEPS[name])(x), x)


@pytest.mark.parametrize("kernel", [*STEPS.values(), passes.silent_kernel])
def test_each_step_reads_twice(kernel):
    x = matrix(3, 100)
    counted = meter.count(passes.row_by_row(kernel, block_cols=16), x).values
    wanted = meter.passes(3, 100, passes=2)
    written = 3 if kernel is passes.silent_kernel else wanted.written
    assert (counted.read, counted.written) == (wanted.read, written)


def test_the_silent_kernel_stores_the_sum():
    x = matrix(3, 100)
    y = passes.row_by_row(passes.silent_kernel, block_cols=16)(x)
    torch.testing.assert_close(y[:, 0].cpu(), torch.ones(3))


def changed(old, new) -> tuple[int, int]:
    """How many lines a step adds and removes, except for the kernel's name."""
    lines = repr(show.diff(old, new)).splitlines()[2:]
    lines = [line for line in lines if line[1:5] != "def "]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def test_no_step_adds_more_than_ten_lines():
    two = changed(variants.three_pass_kernel, passes.two_pass_kernel)
    back = changed(passes.two_pass_kernel, passes.backwards_kernel)
    assert (two, back) == ((4, 9), (6, 4))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["T4", "H200"])
@pytest.mark.parametrize("kernel", [*STEPS.values(), passes.silent_kernel])
def test_every_step_compiles(kernel, name):
    x, strides = compile.pointer(torch.float32), (65536, 1, 65536, 1)
    made = compile.aot(
        kernel, x, x, *strides, 65536, 16384, online.merge, num_warps=32, gpu=name
    )
    spilling = kernel is passes.silent_kernel and TRITON >= (3, 9)
    assert made.spills <= (32 if spilling else 0)


# ---- the learner's merge -------------------------------------------------------------


@triton.jit
def unfinished(max_a, sum_a, max_b, sum_b):
    both = ...
    return both, ...


@triton.jit
def without_moving(max_a, sum_a, max_b, sum_b):
    return tl.maximum(max_a, max_b), sum_a + sum_b


@triton.jit
def nan_without_moving(max_a, sum_a, max_b, sum_b):
    both = tl.maximum(max_a, max_b, propagate_nan=tl.PropagateNan.ALL)
    return both, sum_a + sum_b


@triton.jit
def without_nan(max_a, sum_a, max_b, sum_b):
    both = tl.maximum(max_a, max_b)
    moved_a = sum_a * tl.exp(max_a - both)
    return both, moved_a + sum_b * tl.exp(max_b - both)


@triton.jit
def one_sum_forgotten(max_a, sum_a, max_b, sum_b):
    both = tl.maximum(max_a, max_b)
    moved_a = sum_a * exp_shifted_or_zero(max_a, both)
    return both, moved_a + exp_shifted_or_zero(max_b, both)


# Of a number and NaN, `tl.maximum` is the number on a GPU, and in the interpreter from
# Triton 3.9 on; before it is NaN. Where it is the number, a merge whose sums are never
# NaN loses a row's NaN, and is wrong in that row.
MAXIMA = without_moving, nan_without_moving
KEEPS_NAN = backend.INTERPRETED and TRITON < (3, 9)
FIRST_WRONG = "its values sum to" if KEEPS_NAN else "(one NaN)"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (unfinished, 'Not yet: line 2 of unfinished still has "..." in it.'),
        (without_moving, FIRST_WRONG),
        (nan_without_moving, "its values sum to"),
        (without_nan, "is nan"),
        (one_sum_forgotten, "in 0 of 10 random orders only"),
        (online.merge, "Right in all 48 cases, and for the parts of a row in 10"),
    ],
)
def test_a_merge_is_judged_in_a_sentence(function, said, capsys):
    passes.judge(function)
    assert said in " ".join(capsys.readouterr().out.split())


def test_the_maximum_of_a_number_and_nan_is_the_number_on_a_gpu():
    x = compile.pointer(torch.float32)
    of = [compile.aot(passes.pairs_kernel, x, x, x, x, 64, f) for f in MAXIMA]
    assert [made.count(r"max\.f32") > 0 for made in of] == [True, False]
    assert [made.count(r"max\.NaN\.f32") > 0 for made in of] == [False, True]


# ---- what the page shows -------------------------------------------------------------


def test_accumulators_trade_barriers_for_exponentials():
    table = passes.in_the_first_loop((1, 4096))
    assert list(table.index) == ["1", "4096"]
    assert table["barriers"]["4096"] == table["shuffles"]["4096"] == "0"
    assert int(table["barriers"]["1"]) > 0 and int(table["shuffles"]["1"]) > 0
    assert table["exponentials"].tolist() == ["18", "24"]


def test_excerpts_of_the_kernel():
    kernel = online.softmax_kernel
    text = show.excerpt(kernel, "if STEP == 1", "else:").text
    assert text.startswith("if STEP == 1:\n    tl.store(") and "else" not in text
    text = show.excerpt(kernel, "if STEP == 2", "else:").text
    assert "part_max = tl.load(" in text and "else" not in text
    first, after = "for block in range(begin, end)", "row_max, row_sum = merge_axis"
    text = show.excerpt(kernel, first, after).text
    assert "tl.load(" in text and "max_and_sum(" in text and "tl.store(" not in text


def test_the_models_beside_the_counters():
    h200 = gpu.named("H200")
    room = passes.room_in_l2(h200)
    assert room == h200.l2_bytes / (132 * 4)  # one program on an SM
    counted = [
        {"provider": name, "n_rows": 2, "n_cols": n, "read_bytes": 8 * n * 1.5}
        for n in (1000, 2**20)
        for name in passes.COUNTED
    ]
    counted = pd.DataFrame(counted).assign(gpu=h200.name)
    table = passes.readings(counted)
    assert list(table) == ["model", *passes.COUNTED.values()]
    assert table["model"].tolist() == [1, 2 - room / 2**20]
    assert (table["no stores"] == 1.5).all()
    measured = [
        {"provider": "online", "n_cols": n, "share_of_copy": 0.7} for n in (1000, 4096)
    ]
    older = passes.readings(counted[counted["provider"] != "online.silent"])
    assert list(older) == list(table)[:-1]
    shares = passes.shares(counted, pd.DataFrame(measured))
    assert shares["measured"].tolist() == [0.7, 0.7]
    assert shares["by the bytes counted"].iloc[0] == 0.8
    assert shares["by the bytes counted"].isna().tolist() == [False, True]


@pytest.mark.parametrize("name", passes.BY_WARPS)
def test_other_numbers_of_warps(name):
    x = matrix(2, 9000, torch.bfloat16)
    assert_right(passes.BY_WARPS[name](x), x)


# ---- two launches --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("n_parts", [2, 3, 5])
def test_rows_in_parts(n_parts):
    config = online.Config(4, 8, 4, num_warps=1)
    softmax = functools.partial(passes.in_parts, n_parts=n_parts, config=config)
    summary = check.softmax(softmax, **FEW)
    assert summary, summary


def test_long_rows_are_shared():
    x = torch.randn(3, 70_000, device=backend.DEVICE)
    assert_right(passes.two_launches(x), x)
    counted = meter.count(passes.two_launches, x)
    grids = [op.grid for op in counted.rows if op.grid]
    assert len(grids) == 2 and grids[0][1] == grids[1][1] > 1
    assert 2 < counted.values.read / x.numel() < 2.01


def test_an_empty_matrix_stays_empty():
    for shape in ((0, 5), (5, 0), (0, 0)):
        x = torch.empty(shape, device=backend.DEVICE)
        assert passes.two_launches(x).shape == passes.in_parts(x).shape == shape
        for kernel in STEPS.values():
            assert passes.row_by_row(kernel)(x).shape == shape
