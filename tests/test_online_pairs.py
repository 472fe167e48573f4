"""Pairs of a maximum and a sum merge in any order, and wrong merges are caught."""

import random

import pytest
import torch
import triton
import triton.language as tl

from kernels import online
from kernels.lab import backend, check, compile
from kernels.online import exp_shifted_or_zero
from tests.helpers import patched, without_rescaling_an_axis
from tests.test_online import by_blocks_of_16

INF = float("inf")
ULP = 2.0**-23  # from 1 to the next float32

Pairs = tuple[torch.Tensor, torch.Tensor]  # maxima, and sums


# ---- the monoid ----------------------------------------------------------------------


@triton.jit
def pairs_kernel(max_ptr, sum_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    """One program writes the pair of one row."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    row_max, row_sum = online.max_and_sum(x)
    tl.store(max_ptr + row + tl.arange(0, 1), row_max)
    tl.store(sum_ptr + row + tl.arange(0, 1), row_sum)


@triton.jit
def merge_kernel(max_a_ptr, sum_a_ptr, max_b_ptr, sum_b_ptr, BLOCK: tl.constexpr):
    """One program merges BLOCK pairs with BLOCK others, in place of the first."""
    i = tl.arange(0, BLOCK)
    max_a, sum_a = tl.load(max_a_ptr + i), tl.load(sum_a_ptr + i)
    max_b, sum_b = tl.load(max_b_ptr + i), tl.load(sum_b_ptr + i)
    both_max, both_sum = online.merge(max_a, sum_a, max_b, sum_b)
    tl.store(max_a_ptr + i, both_max)
    tl.store(sum_a_ptr + i, both_sum)


@triton.jit
def merge_axis_kernel(max_ptr, sum_ptr, PARTS: tl.constexpr):
    """One program merges the PARTS pairs of a row, in place of the first."""
    i = tl.arange(0, PARTS)[None, :]
    maxima, sums = tl.load(max_ptr + i), tl.load(sum_ptr + i)
    row_max, row_sum = online.merge_axis(maxima, sums, 1)
    first = tl.arange(0, 1)[None, :]
    tl.store(max_ptr + first, row_max)
    tl.store(sum_ptr + first, row_sum)


def pairs_of(parts: list[torch.Tensor]) -> Pairs:
    """The pair of each part, by `max_and_sum`; parts are padded with -inf."""
    longest = max(len(part) for part in parts)
    x = torch.full((len(parts), max(longest, 1)), -INF)
    for row, part in zip(x, parts, strict=True):
        row[: len(part)] = part
    maxima, sums = torch.empty(2, len(parts), device=backend.DEVICE)
    block = triton.next_power_of_2(x.shape[1])
    pairs_kernel[(len(parts),)](maxima, sums, x.to(backend.DEVICE), x.shape[1], block)
    return maxima, sums


def merged(a: Pairs, b: Pairs) -> Pairs:
    """The kernel's `merge` of two blocks of pairs."""
    a = tuple(part.clone() for part in a)
    merge_kernel[(1,)](*a, *b, len(a[0]))
    return a


def assert_same(a: Pairs, b: Pairs, rtol: float = 1e-6) -> None:
    """Maxima are equal, sums differ by a share of at most rtol, NaN is NaN."""
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(a[1], b[1], rtol=rtol, atol=0, equal_nan=True)


def reference(row: torch.Tensor) -> Pairs:
    """The pair of a whole row, in float64."""
    row_max = row.max()
    return row_max, (row.double() - row_max.double()).exp().sum()


KINDS = {
    "normal": lambda row: row,
    "large": lambda row: 1e4 + 20 * row,
    "small": lambda row: row - 1e4,
    "rising": lambda row: row.sort().values * 30,
    "falling": lambda row: row.sort(descending=True).values * 30,
    "constant": lambda row: torch.full_like(row, -7.5),
    "half -inf": lambda row: torch.cat([torch.full_like(row[::2], -INF), row[1::2]]),
}


def random_pairs(seed: int, count: int = 64) -> Pairs:
    """Pairs as parts of rows have them, and the pairs of empty parts among them."""
    generator = torch.Generator().manual_seed(seed)
    maxima = 30 * torch.randn(count, generator=generator)
    sums = 1 + 1000 * torch.rand(count, generator=generator)
    maxima[::7], sums[::7] = -INF, 0
    return maxima.to(backend.DEVICE), sums.to(backend.DEVICE)


@pytest.mark.parametrize("seed", range(5))
def test_merging_is_associative(seed):
    a, b, c = (random_pairs(3 * seed + i) for i in range(3))
    assert_same(merged(merged(a, b), c), merged(a, merged(b, c)))


@pytest.mark.parametrize("seed", range(5))
def test_merging_is_commutative(seed):
    """In exact arithmetic; on a GPU, sums may differ by two units in the last place.

    There the compiler fuses one of the two products with the addition, so that only the
    other product is rounded. If the pairs change places, so do the products.
    """
    a, b = random_pairs(2 * seed), random_pairs(2 * seed + 1)
    rtol = 0 if backend.INTERPRETED else 4 * ULP
    assert_same(merged(a, b), merged(b, a), rtol)


def test_a_gpu_rounds_one_product_of_a_merge():
    pair = (compile.pointer(torch.float32),) * 2
    kernel = compile.aot(merge_kernel, *pair, *pair, BLOCK=64)
    assert kernel.count(r"fma\.rn\.f32") == 1
    assert kernel.count(r"add\S*\.f32") == 0


def test_the_pair_of_no_values_is_the_identity():
    a = random_pairs(0)
    identity = torch.full_like(a[0], -INF), torch.zeros_like(a[1])
    assert_same(merged(a, identity), a, rtol=0)
    assert_same(merged(identity, a), a, rtol=0)
    maxima, sums = pairs_of([torch.tensor([]), torch.tensor([-INF, -INF])])
    assert maxima.tolist() == [-INF, -INF] and sums.tolist() == [0, 0]


def by_random_splits(row: torch.Tensor, seed: int) -> Pairs:
    """The pair of a row that is cut, shuffled and merged at random."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(row) + 1), k=rng.randint(1, 8)))  # empty ones
    maxima, sums = pairs_of(row.tensor_split(cuts))
    parts = list(zip(maxima.split(1), sums.split(1), strict=True))
    rng.shuffle(parts)
    while len(parts) > 1:
        i = rng.randrange(len(parts) - 1)
        parts[i : i + 2] = [merged(parts[i], parts[i + 1])]
    return parts[0][0].cpu(), parts[0][1].cpu()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_merges_to_the_whole(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    row = KINDS[kind](torch.randn(300 + seed, generator=generator))
    row_max, row_sum = by_random_splits(row, seed)
    wanted_max, wanted_sum = reference(row)
    assert row_max == wanted_max
    assert row_sum.double().item() == pytest.approx(wanted_sum.item(), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_an_axis_merges_as_pair_after_pair_does(parts):
    maxima, sums = random_pairs(parts, parts)
    whole = maxima[:1], sums[:1]
    for i in range(1, parts):
        whole = merged(whole, (maxima[i : i + 1], sums[i : i + 1]))
    merge_axis_kernel[(1,)](maxima, sums, parts)
    assert_same((maxima[:1], sums[:1]), whole)


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_values_without_a_softmax_make_the_sum_nan(value):
    _, sums = pairs_of([torch.tensor([1.0, value, 2.0])])
    assert sums.isnan().all()
    good = pairs_of([torch.tensor([5.0, 6.0])])
    bad = pairs_of([torch.tensor([value])])
    assert merged(good, bad)[1].isnan().all()
    assert merged(bad, good)[1].isnan().all()


# ---- wrong kernels -------------------------------------------------------------------


def without_rescaling(max_a, sum_a, max_b, sum_b):
    return tl.maximum(max_a, max_b), sum_a + sum_b


def of_the_block_without_its_maximum(x):
    return tl.max(x, axis=1), tl.sum(exp_shifted_or_zero(x, 0.0), axis=1)


def with_nan_for_empty_parts(x, row_max):
    return tl.exp2((x - row_max) * online.LOG2E)


@pytest.mark.parametrize(
    ("helper", "wrong", "fault"),
    [
        ("merge", without_rescaling, check.Fault.SUM),
        ("merge_axis", without_rescaling_an_axis, check.Fault.SUM),
        ("max_and_sum", of_the_block_without_its_maximum, check.Fault.SUM),
        ("exp_shifted_or_zero", with_nan_for_empty_parts, check.Fault.NAN),
    ],
)
def test_wrong_helpers_are_caught(helper, wrong, fault):
    few = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 65}
    with patched(online, helper, wrong):
        summary = check.softmax(by_blocks_of_16, **few)
    assert not summary and summary.failure.fault is fault


def test_random_splits_catch_a_wrong_merge():
    row = torch.randn(300, generator=torch.Generator().manual_seed(0))
    with patched(online, "merge", without_rescaling):
        found = [by_random_splits(row, seed)[1].item() for seed in range(10)]
    wanted = reference(row)[1].item()
    assert all(abs(row_sum / wanted - 1) > 0.01 for row_sum in found)
