"""Rows of any length: pairs merge in any order, and a second reading completes them."""

import dataclasses
import math
import random
import re
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from kernels import online
from kernels.lab import backend, cases, check, compile, gpu, meter, occupancy
from kernels.lab import launch as launch_module
from kernels.lab.compile import Compiled
from kernels.lab.direct import CachedLaunch
from kernels.lab.launch import Launch
from kernels.online import Config, exp_shifted_or_zero
from tests.helpers import assert_right, fewer, matrix, patched

INF = float("inf")
NARROW = Config(rows=1, block_cols=16, accumulators=4, num_warps=1)
ULP = 2.0**-23  # from 1 to the next float32

Pairs = tuple[torch.Tensor, torch.Tensor]  # maxima, and sums


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)


def by_blocks_of_16(x: torch.Tensor) -> torch.Tensor:
    return online.softmax(x, config=NARROW)


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


def without_rescaling_an_axis(maxima, sums, AXIS: tl.constexpr):
    row_max = tl.max(maxima, axis=AXIS, keep_dims=True)
    return row_max, tl.sum(sums, axis=AXIS, keep_dims=True)


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


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(online.softmax)
    assert summary, summary


@pytest.mark.parametrize("accumulators", [1, 2, 16])
def test_loops_that_turn_often(accumulators):
    config = Config(32, 16, accumulators, num_warps=1)

    def softmax(x):
        return online.softmax(x, config=config)

    few = {"dtypes": [torch.float32], "layouts": ["contiguous"]}
    summary = check.softmax(softmax, max_cols=65, **few)
    assert summary, summary


@pytest.mark.parametrize("accumulators", [1, 2, 16])
@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 64, 100])
def test_one_row_at_a_time(n_cols, accumulators):
    x = matrix(3, n_cols)
    config = dataclasses.replace(NARROW, accumulators=accumulators)
    assert_right(online.softmax(x, config=config), x)


@pytest.mark.parametrize("where", ["first", "inner", "last", "all but one"])
@pytest.mark.parametrize("backwards", [True, False])
def test_blocks_of_minus_infinity(where, backwards):
    x = matrix(1, 64)
    places = {"first": slice(32), "inner": slice(16, 48), "last": slice(32, None)}
    x[:, places.get(where, slice(63))] = -INF
    config = dataclasses.replace(NARROW, backwards=backwards)
    assert_right(online.softmax(x, config=config), x)


@pytest.mark.parametrize("value", [INF, float("nan")])
@pytest.mark.parametrize("place", [0, 15, 16, 40, 63])
def test_a_bad_value_spoils_its_row_alone(place, value):
    x = matrix(2, 64)
    x[0, place] = value
    y = by_blocks_of_16(x)
    assert y[0].isnan().all()
    assert_right(y[1:], x[1:])


def test_a_row_of_minus_infinity_is_nan():
    x = torch.full((1, 70), -INF, device=backend.DEVICE)
    assert by_blocks_of_16(x).isnan().all()


def test_large_values_keep_their_differences():
    x = torch.tensor([[1e30, -1e30] * 20], device=backend.DEVICE)
    assert_right(by_blocks_of_16(x), x)
    x = 2.0**23 + matrix(2, 50).round()
    assert_right(by_blocks_of_16(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_any_dimension_through_a_view(dim, dtype):
    x = matrix(2 * 33, 5 * 7, dtype).view(2, 33, 5, 7)
    y = like(x)
    blocks = math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])
    views = y.view(blocks), x.view(blocks)
    online.launch_for(*views)(*views)
    assert_right(y, x, dim)


def test_outputs_of_any_strides():
    x = matrix(6, 50)
    buffer = torch.full((50, 2, 12), 7.0, device=backend.DEVICE)
    y = buffer[:, 0, ::2].t()
    views = y[:, :, None], x[:, :, None]
    online.launch_for(*views)(*views)
    assert_right(y, x)
    assert (buffer[:, 1] == 7).all() and (buffer[:, :, 1::2] == 7).all()


def test_a_matrix_is_taken_as_columns_without_a_copy():
    x = matrix(3, 50)
    columns = online.as_columns(x)
    assert columns.shape == (1, 50, 3) and columns.data_ptr() == x.data_ptr()
    y = like(x)
    outputs = online.as_columns(y)
    online.launch_for(outputs, columns)(outputs, columns)
    assert_right(y, x)


def test_an_empty_matrix_stays_empty():
    for shape in ((0, 5), (5, 0), (0, 0)):
        x = torch.empty(shape, device=backend.DEVICE)
        assert online.softmax(x).shape == shape
        assert online.softmax(x, config=NARROW).shape == shape


def test_outputs_are_contiguous():
    x = matrix(3, 50).t()
    assert online.softmax(x).is_contiguous()


def test_errors_name_what_was_got():
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.int"):
        online.softmax(torch.ones(2, 2, dtype=torch.int32, device=backend.DEVICE))
    with pytest.raises(ValueError, match=r"2 dimensions .*got shape \(2, 3, 4\)"):
        online.softmax(torch.ones(2, 3, 4, device=backend.DEVICE))


@pytest.mark.parametrize("shape", [(37, 33), (3, 781), (2, 40_000)])
def test_reads_twice_and_writes_once(shape):
    counted = meter.count(online.softmax, matrix(*shape))
    assert counted.values == meter.passes(*shape, passes=2)


# ---- rows that programs share --------------------------------------------------------


def kept(launch: Launch) -> Launch:
    return launch


def sharing(
    output: torch.Tensor, x: torch.Tensor, n_parts: int, config: Config = NARROW
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What `prepare` returns where so many programs share a row of narrow blocks."""
    with (
        patch.object(online, "choose_config", lambda *sizes: config),
        patch.object(online, "choose_parts", lambda *sizes: n_parts),
    ):
        return online.prepare(output, x, kept)


def in_parts(n_parts: int, config: Config = NARROW) -> Callable:
    """A softmax of matrices whose rows so many programs share."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            columns = online.as_columns(y), online.as_columns(x)
            sharing(*columns, n_parts, config)(*columns)
        return y

    return softmax


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "n_parts"),
    [
        *[(torch.float32, n_parts) for n_parts in (2, 3, 11)],
        *[(torch.float64, n_parts) for n_parts in fewer((3,), (2, 3, 11))],
        *[(torch.bfloat16, n_parts) for n_parts in fewer((11,), (2, 3, 11))],
    ],
)
def test_programs_that_share_rows(dtype, n_parts, rows):
    softmax = in_parts(n_parts, dataclasses.replace(NARROW, rows=rows))
    lengths = 65, 100, 176, fewer(300, 500)  # some parts have fewer blocks, or none
    for turn, n_cols in enumerate(lengths):
        x = matrix(rows + 1, n_cols, dtype)
        views = x, x.t().contiguous().t()
        for view in fewer((views[turn % 2],), views):
            assert_right(softmax(view), x)


@pytest.mark.parametrize(
    ("n_parts", "rows", "layouts"),
    [
        (2, 1, ["sliced", "offset", *fewer([], ["broadcast"])]),
        (7, 4, ["broadcast", *fewer([], ["sliced", "offset"])]),
    ],
)
def test_parts_are_a_softmax(n_parts, rows, layouts, monkeypatch):
    monkeypatch.setattr(cases, "ROWS", (1, 2, 9))
    softmax = in_parts(n_parts, dataclasses.replace(NARROW, rows=rows))
    how = {"dtypes": [torch.float32], "layouts": layouts}
    summary = check.softmax(softmax, max_cols=130, **how)
    assert summary, summary


@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1e30])
@pytest.mark.parametrize("place", [slice(16), slice(20, 90), slice(96, None)])
def test_parts_of_one_value(place, value):
    x = matrix(3, 130)
    x[1, place] = value
    assert_right(in_parts(4)(x), x)


def test_the_output_may_be_the_input_of_parts():
    x = matrix(2, 300)
    wanted = in_parts(3)(x)
    columns = online.as_columns(x)
    sharing(columns, columns, 3)(columns, columns)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("n_parts", [2, 5])
@pytest.mark.parametrize("shape", [(3, 160), (2, 333)])
def test_parts_are_read_twice_and_written_once(shape, n_parts):
    counted = meter.count(in_parts(n_parts), matrix(*shape))
    n_values, n_words = math.prod(shape), 2 * shape[0] * n_parts
    first, second = (op for op in counted.rows if op.grid)
    assert (first.read_values, first.written_values) == (n_values, n_words)
    assert second.read_values == n_values + n_parts * n_words
    assert second.written_values == n_values


def without_the_first_part(max_a, sum_a, max_b, sum_b):
    return max_b, sum_b


def test_a_wrong_merge_of_parts_is_caught():
    x = matrix(2, 200)
    with (
        patched(online, "merge", without_the_first_part),
        pytest.raises(AssertionError),
    ):
        assert_right(in_parts(3)(x), x)
    assert_right(in_parts(3)(x), x)


def launches_of(*shape: int, dtype: torch.dtype = torch.float32) -> list[Launch]:
    """What `prepare` launches for a contiguous tensor of this shape."""
    x, found = torch.empty(shape, dtype=dtype, device="meta"), []
    view = online.as_columns(x) if x.dim() == 2 else x
    online.prepare(view, view, lambda launch: found.append(launch) or launch)
    return found


@pytest.mark.parametrize("sms", [132, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_few_long_rows_fill_the_gpu(dtype, sms, monkeypatch):
    monkeypatch.setattr(launch_module, "sms_and_threads", lambda: (sms, 2048))
    for shape in ((1, 20_000_001), (1, 2**27), (16, 10**7), (3, 10**6, 2)):
        find, write = launches_of(*shape, dtype=dtype)
        assert find.grid == write.grid and find.scalars == write.scalars
        n_programs, n_blocks = math.prod(find.grid), find.scalars[-1]
        filled = online.PROGRAMS_PER_SM * sms
        assert 0.7 * filled <= n_programs < filled + find.grid[0]
        part = n_blocks * find.constants["BLOCK_COLS"]
        assert (find.grid[1] - 1) * part < shape[1] <= find.grid[1] * part
        pairs = find.pointers[2].dtype
        assert pairs == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("shape", "n_launches"),
    [
        ((1, 4096), 1),  # one block
        ((1, 2**16), 2),
        ((98, 2**18), 2),
        ((100, 2**20), 1),
        ((4096, 2**16), 1),  # enough rows
        ((133, 2**18), 1),  # enough, and L2 holds them
        ((160, 8_000_000), 2),  # they would leave SMs idle at the end
        ((1, 2**18, 16), 2),
        ((1, 4096, 20_000), 1),
    ],
)
def test_rows_are_shared_where_they_leave_sms_idle(shape, n_launches, monkeypatch):
    monkeypatch.setattr(launch_module, "sms_and_threads", lambda: (132, 2048))
    assert len(launches_of(*shape)) == n_launches


def test_one_launch_is_of_two_tensors():
    (launch,) = launches_of(300, 1000)
    assert len(launch.pointers) == 2 and launch.constants["STEP"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 20_000_001), (3, 8_000_000), (1, 2**18, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_rows_are_right_and_the_same_in_every_run(dtype, shape):
    """On two streams and on a graph too, as their pairs are memory of each call."""
    x = torch.randn(shape, device=backend.DEVICE).to(dtype)
    if gpu.free_bytes() < 12 * 8 * x.numel():
        pytest.skip("needs memory for results in float64")
    views = [online.as_columns(t) if t.dim() == 2 else t for t in (like(x), x)]
    run = online.prepare(*views, CachedLaunch)
    assert not isinstance(run, CachedLaunch)  # two of them
    run(*views)
    first = views[0].clone()
    assert_right(first, views[1], 1)
    streams, outputs = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(torch.full_like(first, 7))
                run(outputs[-1], views[1])
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*views)
        run(outputs[0], views[1])
    for y in (views[0], outputs[0]):
        y.fill_(7)
    for _ in range(3):
        graph.replay()
    assert torch.equal(views[0], first) and torch.equal(outputs[0], first)


# ---- the configuration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "element_size", "adjacent", "expected"),
    [
        (1000, 65536, 4, False, Config(1, 16384, 4096, 32)),
        (1000, 2**33, 2, False, Config(1, 32768, 8192, 32)),
        (1000, 50257, 8, False, Config(1, 8192, 2048, 32)),
        (1000, 4096, 4, False, Config(1, 4096, 1024, 8)),
        (1000, 781, 2, False, Config(2, 1024, 256, 2)),
        (1, 781, 2, False, Config(1, 1024, 256, 1)),
        (10**9, 1, 4, False, Config(1024, 1, 1, 2)),
        (1000, 65536, 4, True, Config(32, 256, 64, 16)),
        (1000, 65536, 2, True, Config(64, 256, 64, 16)),
        (3, 65536, 4, True, Config(4, 2048, 512, 16)),
    ],
)
def test_known_configs(n_rows, n_cols, element_size, adjacent, expected):
    assert online.choose_config(n_rows, n_cols, element_size, adjacent) == expected


def test_configs_are_powers_of_two_and_fit():
    for n_cols in (*range(1, 70), 781, 4095, 4097, 50257, 10**6, 2**31 + 1):
        for n_rows in (1, 3, 5000):
            for element_size in (2, 4, 8):
                for adjacent in (True, False):
                    config = online.choose_config(
                        n_rows, n_cols, element_size, adjacent
                    )
                    sizes = config.rows, config.block_cols, config.accumulators
                    assert all(size & (size - 1) == 0 for size in sizes)
                    assert 1 <= config.accumulators <= config.block_cols < 2 * n_cols
                    tile = config.rows * config.block_cols * element_size
                    assert tile <= online.BLOCK_BYTES
                    shared = online.choose_config(
                        n_rows, n_cols, element_size, adjacent, step=1
                    )
                    assert shared.rows * shared.block_cols * element_size <= 32768
                    assert config.rows < 2 * n_rows
                    assert 1 <= config.num_warps <= 32


@pytest.mark.parametrize("dtype", [*backend.DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(1, 100, 1), (2, 30, 50), (1, 50, 300)])
def test_a_launch_needs_no_memory(shape, dtype):
    """Tensors without memory make the launch that real ones make."""
    x = torch.empty(shape, dtype=dtype, device=backend.DEVICE)
    for view in (x, x.transpose(1, 2), x[:, 1:]):
        y = torch.empty(view.shape, dtype=dtype, device=x.device)
        ghost = torch.empty(x.numel(), dtype=dtype, device="meta")
        ghost = ghost.as_strided(view.shape, view.stride(), view.storage_offset())
        assert online.launch_for(y.to("meta"), ghost) == online.launch_for(y, view)


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(
    dtype: torch.dtype = torch.float32,
    n_cols: int = 65536,
    adjacent: bool = False,
    **changes: object,
) -> Compiled:
    """The kernel for 4096 rows on an H200, contiguous or transposed to contiguous."""
    n_rows = 4096
    x = torch.empty(n_cols, n_rows, dtype=dtype, device="meta").t()
    y = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    config = online.choose_config(n_rows, n_cols, dtype.itemsize, adjacent)
    views = online.as_columns(y), online.as_columns(x if adjacent else y)
    config = dataclasses.replace(config, **changes)
    return compile.aot(online.launch_for(*views, config))


def first_loop(kernel: Compiled) -> str:
    """The PTX from the first label to the jump back to it."""
    label = re.search(r"^(\$L__BB\d+_\d+):", kernel.ptx, re.MULTILINE)
    end = re.search(rf"bra\S*\s+{re.escape(label[1])};", kernel.ptx)
    return kernel.ptx[label.end() : end.start()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_exchange_nothing_within_the_loop(dtype):
    loop = first_loop(compiled(dtype))
    assert "ld.global" in loop and "ex2" in loop
    assert "bar.sync" not in loop and "shfl" not in loop
    loop = first_loop(compiled(dtype, accumulators=1))
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
def test_programs_that_share_rows_share_sms(dtype):
    for shape in ((1, 20_000_000), (1, 2**20, 16)):
        for half in launches_of(*shape, dtype=dtype):
            kernel = compile.aot(half)
            # Triton 3.6 gives float64 164 registers, so one program fills an SM.
            at_least = 1 if dtype == torch.float64 else 2
            assert occupancy.of(kernel).blocks_per_sm >= at_least
            assert kernel.spills == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_rows_leave_one_program_on_an_sm(dtype):
    kernel = compiled(dtype)
    assert occupancy.of(kernel).blocks_per_sm == 1
    assert kernel.spills <= 16


# ---- sizes that only a GPU can hold --------------------------------------------------


@pytest.mark.gpu
def test_a_row_of_more_than_2_to_31_values():
    n_cols = 2**31 + 9
    if gpu.free_bytes() < 4.1 * n_cols:
        pytest.skip("needs 9 GB of free GPU memory")
    x = torch.zeros(1, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
    y = online.softmax(x)
    assert y.min() == y.max() == torch.tensor(1 / n_cols).bfloat16().item()


@pytest.mark.gpu
def test_offsets_of_more_than_2_to_31():
    n_rows, n_cols = 2**17, 20_000
    if gpu.free_bytes() < 2.1 * n_rows * n_cols:
        pytest.skip("needs 6 GB of free GPU memory")
    shape = n_cols, n_rows
    base = torch.zeros(shape, dtype=torch.bfloat16, device=backend.DEVICE)
    x = base.t()[:3]
    x.copy_(matrix(3, n_cols))
    assert_right(online.softmax(x), x)
