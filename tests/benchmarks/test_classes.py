"""The control of shared kernels: which kernels a shape has alone, and the record."""

import pytest
import torch

from benchmarks import classes, regions
from kernels import cooperative, fastest, tiled, unaligned
from kernels.lab import compile, record
from kernels.lab.record import Case
from tests.helpers import assert_right

LENGTHS = (  # two lengths whose rows share a kernel of the chapter
    (tiled, 100, 104, torch.float32),
    (unaligned, 1601, 1603, torch.bfloat16),
    (cooperative, 100_000, 100_008, torch.float32),
)


def launches(chapter, n_cols, dtype):
    x = torch.empty(64, n_cols, dtype=dtype, device="meta")
    shared = chapter.launch_for(torch.empty_like(x), x)
    return shared, classes.of_its_own(shared)


@pytest.mark.thorough
@pytest.mark.parametrize("chapter, n, other, dtype", LENGTHS)
def test_a_kernel_of_its_own_serves_one_length(chapter, n, other, dtype):
    shared, own = map(compile.aot, launches(chapter, n, dtype))
    shared_too, own_too = map(compile.aot, launches(chapter, other, dtype))
    assert shared.key == shared_too.key
    assert len({shared.key, own.key, own_too.key}) == 3
    assert own.name == shared.name


def test_with_constants_registers_may_be_spilled():
    shared, own = map(compile.aot, launches(cooperative, 2**20, torch.bfloat16))
    assert shared.spills + 200 < own.spills


def test_the_kernel_itself_stays_as_it_is():
    before = dict(tiled.softmax_kernel.fn.__annotations__)
    made = classes.with_constants(tiled.softmax_kernel)
    assert made.fn is not tiled.softmax_kernel.fn
    assert tiled.softmax_kernel.fn.__annotations__ == before
    assert {*made.fn.__annotations__} - {*before} == {
        *("output_row_stride", "input_row_stride", "n_rows", "n_cols")
    }


def test_the_tag_is_no_constant():
    made = classes.with_constants(cooperative.softmax_kernel)
    assert "tag" not in made.fn.__annotations__


@pytest.mark.parametrize("n", classes.BETWEEN)
def test_few_rows_of_these_lengths_share_a_kernel_with_others(n):
    for dtype in (torch.float32, torch.bfloat16):
        kernels = []
        for n_cols in (n - 8, n, n + 8):
            x = torch.empty(64, n_cols, dtype=dtype, device="meta")
            made = fastest.prepare(torch.empty_like(x), x, 1).launch
            kernels.append((made.kernel, made.constants))
        assert kernels[1] in (kernels[0], kernels[2])


def test_the_record_says_what_sharing_costs():
    """Little, and constants cost more where the compiler then spills registers."""
    recorded = record.recorded("fastest_classes", "nvidia-h200")
    recorded = recorded.set_index(["dtype", "n_rows", "n_cols"])
    assert {*recorded.index} == {regions.key(case)[:3] for case in classes.CASES}
    ratio = recorded["shared_us"] / recorded["own_us"]
    assert 0.5 < (ratio <= 1).mean() < 0.7
    assert ratio.max() < 1.0665
    its = ratio.index.isin(named(*regions.BY_NAME))
    assert ratio[its].max() < 1.0175
    assert sorted(ratio)[2] < 0.6


def named(*names):
    cases = [case for name in names for case in regions.BY_NAME[name].cases]
    return [regions.key(case)[:3] for case in cases]


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    with pytest.raises(RuntimeError, match="nothing can be timed"):
        classes.times()


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [100, 1601, 3000, 65_536, 50_257])
def test_both_are_right(n_cols):
    case = Case(torch.bfloat16, 64, n_cols)
    x = record.random(*case[:3])
    for call in classes.calls(case).values():
        assert_right(call(x), x)
        assert_right(call(x + 1), x + 1)


@pytest.mark.gpu
def test_both_are_timed():
    case = Case(torch.float32, 64, 3000)
    (row,) = classes.times([case])
    assert [*row.values()][:3] == ["float32", 64, 3000]
    assert 1 < row["shared_us"] < 100 and 1 < row["own_us"] < 100
    x = torch.empty(64, 3000, device="cuda")
    prepared = fastest.prepare(torch.empty_like(x), x, 1).launch
    assert prepared.constants["BLOCK_COLS"] == 4096
