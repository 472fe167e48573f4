"""The experiments of chapter `columns`, and the judge of its question."""

import math

import pandas as pd
import pytest
import torch

from benchmarks import columns as experiments
from kernels.lab import clock, compile
from tests.helpers import TRITON, assert_right


@pytest.fixture
def small(monkeypatch):
    """Every case with few values, and a clock that counts the calls it is given."""
    seen = []

    def device_us(function, x):
        seen.append((tuple(x.shape), function(x)))
        return 1.0, float(len(seen)), 3.0

    def less(case):
        return case._replace(shape=tuple(min(n, 5) for n in case.shape))

    monkeypatch.setattr(clock, "device_us", device_us)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(experiments, "CASES", [*map(less, experiments.CASES)])
    shape = 1, 1, 300, 64
    monkeypatch.setattr(
        experiments, "SQUARES", experiments.SQUARES._replace(shape=shape)
    )
    monkeypatch.setattr(experiments, "FEW", experiments.FEW._replace(shape=(2000, 64)))
    return seen


def test_cases_are_stacks():
    for case in experiments.CASES:
        assert math.prod(case.stack()) == math.prod(case.shape)
        assert case.stack()[1] == case.shape[case.dim]
        size = 2 * math.prod(case.shape) * case.dtype.itemsize
        assert 50e6 < size < 1e9, case  # beyond L2, and in 14 GB with its copies


def test_the_kernel_is_not_measured_on_what_it_was_tuned_for():
    shapes = [case.shape for case in experiments.CASES]
    assert len(set(shapes)) == len(shapes)
    assert experiments.FEW.shape not in shapes


def test_every_case_has_all_providers(small):
    rows = pd.DataFrame(experiments.times())
    table = experiments.table(rows)
    assert list(table) == ["copy", "torch", "torch.compile", "online", "columns"]
    assert len(table) == len(experiments.CASES) and not table.isna().any(axis=None)
    assert list(rows["us"]) == [float(n + 1) for n in range(len(rows))]


def test_a_wrong_softmax_is_not_timed(small):
    x = torch.randn(3, 4)
    with pytest.raises(AssertionError):
        experiments.taken(torch.exp, x, 1)
    assert not small


@pytest.mark.thorough
def test_blocks_and_ways_are_softmaxes(small):
    assert [row["rows of a block"] for row in experiments.blocks()] == [
        32,
        64,
        128,
        256,
    ]
    assert [row["way"] for row in experiments.parts()] == ["one launch", "two launches"]
    for shape, y in small:
        assert y.shape == shape
    x = experiments.tensor(experiments.FEW)
    one, two = (y for shape, y in small if shape == tuple(x.shape))
    torch.testing.assert_close(one.sum(0), two.sum(0), rtol=1e-2, atol=1e-2)


def test_blocks_differ_in_their_rows_alone():
    launches = [experiments.with_rows(experiments.SQUARES, n) for n in (32, 256)]
    first, second = (launch.constants for launch in launches)
    assert first["COLS"] == second["COLS"] and launches[0].grid == launches[1].grid
    values = [c["BLOCK_ROWS"] * c["COLS"] // c["num_warps"] for c in (first, second)]
    assert values == [512, 512]


@pytest.mark.thorough
def test_code_is_of_two_launches_with_the_same_blocks(small, monkeypatch):
    case = experiments.UNEVEN
    first, second = (made.constants for made in experiments.launches(case).values())
    assert first["BLOCK_COLS"] == second["BLOCK_ROWS"]
    assert first["ROWS"] == second["COLS"]
    assert first["num_warps"] == second["num_warps"]
    for name in ("UNEVEN", "FULL"):
        monkeypatch.setattr(experiments, name, case._replace(shape=(1, 2, 197, 7)))
    rows = list(experiments.code())
    assert [row["kernel"] for row in rows] == 2 * [*experiments.launches(case)]
    assert len(small) == 4 and all(row["instructions"] > 100 for row in rows)


def test_lanes_go_across_where_the_compiler_sees_neighbours():
    """Triton 3.6 sends them across in `online`, too; newer ones send them down."""
    found = {
        name: experiments.lanes_across(launch)
        for name, launch in experiments.launches(experiments.UNEVEN).items()
    }
    assert found == {"online": 32 if TRITON < (3, 7) else 1, "columns": 32}


def test_lanes_that_go_down_take_registers():
    launches = experiments.launches(experiments.UNEVEN).values()
    online, columns = (made.registers for made in compile.aot_all(launches))
    assert online < 2 * columns if TRITON < (3, 7) else online > 3 * columns


def test_through_is_a_softmax():
    case = experiments.Case("", torch.float32, (3, 21, 5), 1)
    x = experiments.tensor(case)
    meta = experiments.on_meta(case)
    run = experiments.columns.launch_for(meta, meta)
    assert_right(experiments.through(run, case)(x), x, 1)


# ---- the judge -----------------------------------------------------------------------


def test_sectors_of_a_warp():
    assert experiments.sectors(1, 4) == 4
    assert experiments.sectors(1, 2) == 2
    assert experiments.sectors(4, 2) == 8
    assert experiments.sectors(16, 2) == experiments.sectors(1000, 4) == 32


def test_judge_takes_a_formula():
    verdict = experiments.judge(lambda apart, itemsize: min(32, apart * itemsize))
    assert verdict, verdict


@pytest.mark.parametrize("sentence", experiments.MISTAKES)
def test_judge_names_a_mistake(sentence):
    verdict = experiments.judge(experiments.MISTAKES[sentence])
    assert not verdict and sentence in " ".join(str(verdict).split())
