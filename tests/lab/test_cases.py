"""The matrices that the checker tries: their sizes, their memory, their numbers."""

import torch

from kernels.lab import backend
from kernels.lab.cases import LAYOUTS, VALUES, Case, plan


def test_every_dtype_and_layout_meets_every_kind_of_row():
    met = {
        (case.dtype, case.layout, kind)
        for case in plan(backend.DTYPES, tuple(LAYOUTS), 10)
        for kind in case.kinds
    }
    assert len(met) == len(backend.DTYPES) * len(LAYOUTS) * len(VALUES)


def test_no_case_is_tried_twice_and_the_longest_row_is_tried():
    cases = plan(backend.DTYPES, tuple(LAYOUTS), 100)
    assert len(set(cases)) == len(cases)
    assert max(case.n_cols for case in cases) == 100
    assert min(case.n_cols for case in cases) == 0


def test_matrix_lies_in_nan_with_the_strides_of_its_layout():
    trap = Case(2, 5, torch.float16, "sliced", ("normal", "one NaN")).input()
    assert trap.tensor.stride() == (37, 1)
    assert trap.tensor.isnan().tolist() == [5 * [False], 4 * [False] + [True]]
    outside = trap.buffer.isnan().sum() - 1
    assert outside == len(trap.buffer) - 10


def test_seeds_change_the_numbers():
    first, same, other = (
        Case(1, 4, torch.float32, "contiguous", ("normal",), seed).input().tensor
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same) and not torch.equal(first, other)
    seeded = plan(backend.DTYPES, tuple(LAYOUTS), None, seeds=True)
    assert len({case.seed for case in seeded}) == len(seeded)
