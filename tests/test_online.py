"""Rows of any length: pairs merge in any order, and a second reading completes them."""

import dataclasses
import math
import random
import re

import pytest
import torch
import triton
import triton.language as tl

from kernels import online
from kernels.lab import backend, check, compile, meter, occupancy

INF = float("inf")
NARROW = {"block_cols": 16, "lanes": 4, "num_warps": 1}


def matrix(n_rows, n_cols, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n_rows + n_cols)
    x = 3 * torch.randn(n_rows, n_cols, generator=generator)
    return x.to(backend.DEVICE, dtype)


def assert_right(y, x, dim=1):
    torch.testing.assert_close(y, torch.softmax(x.double(), dim).to(x.dtype))


# ---- the monoid ----------------------------------------------------------------------


@triton.jit
def pairs_kernel(top_ptr, total_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    """One program writes the pair of one row."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=-float("inf"))
    top, total = online.pair(x)
    tl.store(top_ptr + row + tl.arange(0, 1), top)
    tl.store(total_ptr + row + tl.arange(0, 1), total)


@triton.jit
def merge_kernel(top_ptr, total_ptr, other_ptr, other_total_ptr, BLOCK: tl.constexpr):
    """One program merges BLOCK pairs with BLOCK others, in place."""
    i = tl.arange(0, BLOCK)
    one = tl.load(top_ptr + i), tl.load(total_ptr + i)
    other = tl.load(other_ptr + i), tl.load(other_total_ptr + i)
    top, total = online.merge(one[0], one[1], other[0], other[1])
    tl.store(top_ptr + i, top)
    tl.store(total_ptr + i, total)


def wrong_merge(top, total, other_top, other_total):
    """Forgets to tell the sums from the new maximum."""
    return tl.maximum(top, other_top), total + other_total


@triton.jit
def merge_all_kernel(top_ptr, total_ptr, PARTS: tl.constexpr):
    """One program merges the PARTS pairs of a row, into the first."""
    i = tl.arange(0, PARTS)[None, :]
    top, total = online.merge_all(tl.load(top_ptr + i), tl.load(total_ptr + i))
    tl.store(top_ptr + tl.arange(0, 1), top)
    tl.store(total_ptr + tl.arange(0, 1), total)


def pairs_of(parts):
    """The pair of each part, by the kernel's `pair`: (tops, totals)."""
    longest = max(len(part) for part in parts)
    x = torch.full((len(parts), max(longest, 1)), -INF)
    for row, part in zip(x, parts, strict=True):
        row[: len(part)] = part
    tops, totals = torch.empty(2, len(parts), device=backend.DEVICE)
    block = triton.next_power_of_2(x.shape[1])
    pairs_kernel[(len(parts),)](tops, totals, x.to(backend.DEVICE), x.shape[1], block)
    return tops, totals


def merged(one, other):
    """The kernel's `merge` of two blocks of pairs."""
    one = tuple(part.clone() for part in one)
    merge_kernel[(1,)](*one, *other, len(one[0]))
    return one


def assert_same(one, other, **tolerance):
    """Maxima are equal, sums are up to rounding, NaN is NaN."""
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0, equal_nan=True)
    tolerance = tolerance or {"rtol": 1e-6, "atol": 0}
    torch.testing.assert_close(one[1], other[1], equal_nan=True, **tolerance)


def reference(row):
    """The pair of a whole row, in float64."""
    top = row.max()
    return top, (row.double() - top.double()).exp().sum()


KINDS = {
    "normal": lambda row: row,
    "large": lambda row: 1e4 + 20 * row,
    "small": lambda row: row - 1e4,
    "rising": lambda row: row.sort().values * 30,
    "falling": lambda row: row.sort(descending=True).values * 30,
    "constant": lambda row: torch.full_like(row, -7.5),
    "half -inf": lambda row: torch.cat([torch.full_like(row[::2], -INF), row[1::2]]),
}


def random_pairs(seed, count=64):
    """Pairs as parts of rows have them, that of no values among them."""
    generator = torch.Generator().manual_seed(seed)
    tops = 30 * torch.randn(count, generator=generator)
    totals = 1 + 1000 * torch.rand(count, generator=generator)
    tops[::7], totals[::7] = -INF, 0
    return tops.to(backend.DEVICE), totals.to(backend.DEVICE)


@pytest.mark.parametrize("seed", range(5))
def test_merging_is_associative(seed):
    a, b, c = (random_pairs(3 * seed + i) for i in range(3))
    assert_same(merged(merged(a, b), c), merged(a, merged(b, c)))


@pytest.mark.parametrize("seed", range(5))
def test_merging_is_commutative(seed):
    a, b = random_pairs(2 * seed), random_pairs(2 * seed + 1)
    assert_same(merged(a, b), merged(b, a), rtol=0, atol=0)


def test_the_pair_of_nothing_is_the_identity():
    a = random_pairs(0)
    nothing = torch.full_like(a[0], -INF), torch.zeros_like(a[1])
    assert_same(merged(a, nothing), a, rtol=0, atol=0)
    assert_same(merged(nothing, a), a, rtol=0, atol=0)
    tops, totals = pairs_of([torch.tensor([]), torch.tensor([-INF, -INF])])
    assert tops.tolist() == [-INF, -INF] and totals.tolist() == [0, 0]


def by_random_splits(row, seed, merge=merged):
    """The pair of a row that is cut, shuffled and merged at random."""
    rng = random.Random(seed)
    cuts = sorted(rng.choices(range(len(row) + 1), k=rng.randint(1, 8)))  # empty ones
    tops, totals = pairs_of(row.tensor_split(cuts))
    parts = list(zip(tops.split(1), totals.split(1), strict=True))
    rng.shuffle(parts)
    while len(parts) > 1:
        i = rng.randrange(len(parts) - 1)
        parts[i : i + 2] = [merge(parts[i], parts[i + 1])]
    return parts[0][0].cpu(), parts[0][1].cpu()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_merges_to_the_whole(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    row = KINDS[kind](torch.randn(300 + seed, generator=generator))
    top, total = by_random_splits(row, seed)
    wanted_top, wanted_total = reference(row)
    assert top == wanted_top
    assert total.double().item() == pytest.approx(wanted_total.item(), rel=1e-5)


def test_such_splits_catch_a_wrong_merge():
    def forgetful(one, other):
        return torch.maximum(one[0], other[0]), one[1] + other[1]

    generator = torch.Generator().manual_seed(0)
    row = torch.randn(300, generator=generator)
    found = [by_random_splits(row, seed, forgetful)[1].item() for seed in range(10)]
    wanted = reference(row)[1].item()
    assert all(abs(total / wanted - 1) > 0.01 for total in found)


def test_a_wrong_merge_in_the_kernel_is_caught(monkeypatch, capsys):
    wrong = triton.jit(wrong_merge)
    monkeypatch.setattr(online, "merge", wrong)
    kernel = triton.jit(online.softmax_kernel.fn)
    monkeypatch.setattr(online, "softmax_kernel", kernel)

    def softmax(x):
        return online.softmax(x, **NARROW)

    assert not check.softmax(softmax, dtypes=[torch.float32], layouts=["contiguous"])
    assert check.Fault.SUM in capsys.readouterr().out


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_many_merge_as_one_after_the_other_do(parts):
    tops, totals = random_pairs(parts, parts)
    one = tops[:1], totals[:1]
    for i in range(1, parts):
        one = merged(one, (tops[i : i + 1], totals[i : i + 1]))
    merge_all_kernel[(1,)](tops, totals, parts)
    assert_same((tops[:1], totals[:1]), one)


@pytest.mark.parametrize("value", [INF, float("nan")])
def test_what_no_pair_can_tell_becomes_nan(value):
    _, totals = pairs_of([torch.tensor([1.0, value, 2.0])])
    assert totals.isnan().all()
    good = pairs_of([torch.tensor([5.0, 6.0])])
    bad = pairs_of([torch.tensor([value])])
    assert merged(good, bad)[1].isnan().all()
    assert merged(bad, good)[1].isnan().all()


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(online.softmax)
    assert summary, summary


@pytest.mark.parametrize("name", sorted({*online.VARIANTS} - {"online.three_pass"}))
def test_variants_are_softmaxes(name):
    fewer = {"dtypes": [torch.float32, torch.bfloat16], "layouts": ["sliced"]}
    summary = check.softmax(online.VARIANTS[name], max_cols=65, **fewer)
    assert summary, summary


@pytest.mark.parametrize("kind", check.VALUES)
def test_three_passes(kind):
    for n_cols in (1, 33, 20_000):
        x = torch.stack([check.VALUES[kind](row) for row in matrix(2, n_cols)])
        y = online.three_pass(x)
        wanted = torch.softmax(x.double(), 1).float()
        torch.testing.assert_close(y, wanted, equal_nan=True)


@pytest.mark.parametrize("lanes", [1, 2, 16])
def test_loops_that_turn_often(lanes):
    options = {"block_cols": 16, "lanes": lanes, "rows": 32, "num_warps": 1}

    def softmax(x):
        return online.softmax(x, **options)

    fewer = {"dtypes": [torch.float32], "layouts": ["contiguous"]}
    summary = check.softmax(softmax, max_cols=257, **fewer)
    assert summary, summary


@pytest.mark.parametrize("lanes", [1, 2, 16])
@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 64, 100])
def test_one_row_at_a_time(n_cols, lanes):
    x = matrix(3, n_cols)
    options = {"block_cols": 16, "lanes": lanes, "rows": 1, "num_warps": 1}
    assert_right(online.softmax(x, **options), x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", online.VARIANTS)
def test_variants_are_softmaxes_of_everything(name):
    summary = check.softmax(online.VARIANTS[name])
    assert summary, summary


@pytest.mark.parametrize("where", ["first", "inner", "last", "all but one"])
@pytest.mark.parametrize("backwards", [True, False])
def test_blocks_of_minus_infinity(where, backwards):
    x = matrix(1, 64)
    places = {"first": slice(32), "inner": slice(16, 48), "last": slice(32, None)}
    x[:, places.get(where, slice(63))] = -INF
    assert_right(online.softmax(x, backwards=backwards, **NARROW), x)


@pytest.mark.parametrize("value", [INF, float("nan")])
@pytest.mark.parametrize("place", [0, 15, 16, 40, 63])
def test_one_bad_value_spoils_its_row_alone(place, value):
    x = matrix(2, 64)
    x[0, place] = value
    y = online.softmax(x, **NARROW)
    assert y[0].isnan().all()
    assert_right(y[1:], x[1:])


def test_a_row_of_minus_infinity_is_nan():
    x = torch.full((1, 70), -INF, device=backend.DEVICE)
    assert online.softmax(x, **NARROW).isnan().all()


def test_large_values_keep_their_differences():
    x = torch.tensor([[1e30, -1e30] * 20], device=backend.DEVICE)
    assert_right(online.softmax(x, **NARROW), x)
    x = 2.0**23 + matrix(2, 50).round()
    assert_right(online.softmax(x, **NARROW), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_any_dimension_through_a_view(dim, dtype):
    x = torch.randn(2, 33, 5, 7, device=backend.DEVICE).to(dtype)
    y = torch.empty_like(x)
    flat = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    online.launch(y.view(flat), x.view(flat))
    if dtype == torch.bfloat16:
        torch.testing.assert_close(y, torch.softmax(x, dim), rtol=0.02, atol=1e-4)
    else:
        torch.testing.assert_close(y, torch.softmax(x, dim))


def test_outputs_of_any_strides():
    x = matrix(6, 50)
    y = torch.full((50, 2, 12), 7.0, device=backend.DEVICE)
    online.launch(y[:, 0, ::2].t()[:, :, None], x[:, :, None])
    assert_right(y[:, 0, ::2].t(), x)
    assert (y[:, 1] == 7).all() and (y[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("function", [online.softmax, online.three_pass])
def test_an_empty_matrix_stays_empty(function):
    for shape in ((0, 5), (5, 0), (0, 0)):
        assert function(torch.empty(shape, device=backend.DEVICE)).shape == shape


@pytest.mark.parametrize("function", [online.softmax, online.three_pass])
def test_outputs_are_contiguous(function):
    x = matrix(3, 50).t()
    assert function(x).is_contiguous()


def test_errors_name_what_was_got():
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.int"):
        online.softmax(torch.ones(2, 2, dtype=torch.int32, device=backend.DEVICE))
    with pytest.raises(ValueError, match=r"2 dimensions .*got shape \(2, 3, 4\)"):
        online.three_pass(torch.ones(2, 3, 4, device=backend.DEVICE))
    with pytest.raises(TypeError, match="warps"):
        online.softmax(matrix(2, 2), warps=4)


@pytest.mark.parametrize("shape", [(37, 33), (3, 781), (2, 40_000)])
def test_moves_what_it_says(shape):
    for name, variant in online.VARIANTS.items():
        counted = meter.count(variant, matrix(*shape))
        passes = 3 if name == "online.three_pass" else 2
        assert counted.values[:2] == online.traffic(*shape, passes=passes)


# ---- the plan ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "element_size", "adjacent", "expected"),
    [
        (1000, 65536, 4, False, (1, 16384, 4096, 32)),
        (1000, 2**33, 2, False, (1, 32768, 8192, 32)),
        (1000, 50257, 8, False, (1, 8192, 2048, 32)),
        (1000, 4096, 4, False, (1, 4096, 1024, 8)),
        (1000, 781, 2, False, (2, 1024, 256, 2)),
        (1, 781, 2, False, (1, 1024, 256, 1)),
        (10**9, 1, 4, False, (1024, 1, 1, 2)),
        (1000, 65536, 4, True, (32, 256, 64, 16)),
        (1000, 65536, 2, True, (64, 256, 64, 16)),
        (3, 65536, 4, True, (4, 2048, 512, 16)),
    ],
)
def test_known_plans(n_rows, n_cols, element_size, adjacent, expected):
    layout = online.plan(n_rows, n_cols, element_size, adjacent)
    got = layout.rows, layout.block_cols, layout.lanes, layout.num_warps
    assert got == expected


def test_plans_are_powers_of_two_and_fit():
    for n_cols in (*range(1, 70), 781, 4095, 4097, 50257, 10**6, 2**31 + 1):
        for n_rows in (1, 3, 5000):
            for element_size in (2, 4, 8):
                for adjacent in (True, False):
                    layout = online.plan(n_rows, n_cols, element_size, adjacent)
                    sizes = layout.rows, layout.block_cols, layout.lanes
                    assert all(size & (size - 1) == 0 for size in sizes)
                    assert 1 <= layout.lanes <= layout.block_cols < 2 * n_cols
                    tile = layout.rows * layout.block_cols * element_size
                    assert tile <= online.BLOCK_BYTES
                    assert layout.rows < 2 * n_rows
                    assert 1 <= layout.num_warps <= 32


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(dtype=torch.float32, n_cols=65536, adjacent=False, **changes):
    """The kernel for a matrix of 4096 rows, contiguous or transposed to contiguous."""
    x, n_rows = compile.pointer(dtype), 4096
    layout = online.plan(n_rows, n_cols, dtype.itemsize, adjacent)
    options = dataclasses.replace(layout, **changes).constants
    rows, columns = (n_rows * n_cols, 1, n_cols), (n_rows * n_cols, n_rows, 1)
    strides = *rows, *(columns if adjacent else rows)
    sizes = n_rows, n_cols, n_rows
    return compile.aot(online.softmax_kernel, x, x, *strides, *sizes, **options)


def first_loop(kernel):
    """The PTX from the first label to the jump back to it."""
    label = re.search(r"^(\$L__BB\d+_\d+):", kernel.ptx, re.MULTILINE)
    end = re.search(rf"bra\S*\s+{re.escape(label[1])};", kernel.ptx)
    return kernel.ptx[label.end() : end.start()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_know_nothing_of_each_other_within_the_loop(dtype):
    loop = first_loop(compiled(dtype))
    assert "ld.global" in loop and "ex2" in loop
    assert "bar.sync" not in loop and "shfl" not in loop
    loop = first_loop(compiled(dtype, lanes=1))
    assert "bar.sync" in loop and "shfl" in loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjacent", [True, False])
def test_accesses_are_16_bytes_wide(dtype, adjacent):
    kernel = compiled(dtype, adjacent=adjacent)
    for access in ("ld", "st"):
        every = kernel.count(rf"{access}\.global")
        assert every == kernel.count(rf"{access}\.global\S*\.v4\.b32") > 0


def test_hints_reach_the_cache():
    kernel = compiled()
    assert kernel.count(r"ld\.global.*L1::evict_last") > 0
    assert kernel.count(r"ld\.global.*L1::evict_first") > 0
    assert kernel.count(r"st\.global.*L1::evict_first") > 0
    assert compiled(hints=False).count("evict") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_rows_leave_one_program_on_an_sm(dtype):
    kernel = compiled(dtype)
    assert occupancy.of(kernel).blocks_per_sm == 1
    assert kernel.spills <= 16


# ---- sizes that only a GPU can hold --------------------------------------------------


@pytest.mark.gpu
def test_a_row_of_more_than_2_to_31_values():
    n_cols = 2**31 + 9
    x = torch.zeros(1, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
    y = online.softmax(x)
    assert y.min() == y.max() == torch.tensor(1 / n_cols).bfloat16().item()


@pytest.mark.gpu
def test_offsets_of_more_than_2_to_31():
    base = torch.zeros(40_000, 2**17, dtype=torch.bfloat16, device=backend.DEVICE)
    x = base.t()[:3]
    x.copy_(torch.randn(3, 40_000))
    y = online.softmax(x).float()
    torch.testing.assert_close(y, torch.softmax(x.float(), 1), rtol=0.02, atol=1e-6)
