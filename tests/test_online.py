"""Rows of any length: a first reading finds pairs, and a second writes the softmax."""

import dataclasses
import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import triton.language as tl  # noqa: F401 - the interpreter wants it visible

from kernels import online
from kernels.lab import backend, cases, check, compile, gpu, meter
from kernels.lab import launch as launch_module
from kernels.lab.direct import CachedLaunch
from kernels.lab.launch import Launch
from kernels.online import Config
from tests.helpers import (
    assert_parts_are_read_twice,
    assert_right,
    fewer,
    like,
    matrix,
    patched,
)

INF = float("inf")
NARROW = Config(rows=1, block_cols=16, accumulators=4, num_warps=1)


def by_blocks_of_16(x: torch.Tensor) -> torch.Tensor:
    return online.softmax(x, config=NARROW)


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
    y, z = like(x), like(x)
    launch = online.launch_for(y, x)
    assert launch == online.launch_for(online.as_columns(y), columns)
    launch(y, x)
    assert_right(y, x)
    launch(online.as_columns(z), columns)  # a kernel is passed addresses, not shapes
    assert_right(z, x)


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
            sharing(y, x, n_parts, config)(y, x)
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


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 70, 21), (1, 5, 100), (4, 7, 16)])
def test_adjacent_rows_in_any_number(shape, n_parts):
    """They are written, and nothing beside them is."""
    x = matrix(shape[0], math.prod(shape[1:])).view(shape)
    room = torch.full((x.numel() + 64,), 7.0, device=x.device)
    output = room[32:-32].view(shape)
    sharing(output, x, n_parts, dataclasses.replace(NARROW, rows=32))(output, x)
    assert_right(output, x, 1)
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()


@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1e30])
@pytest.mark.parametrize("place", [slice(16), slice(20, 90), slice(96, None)])
def test_parts_of_one_value(place, value):
    x = matrix(3, 130)
    x[1, place] = value
    assert_right(in_parts(4)(x), x)


def test_the_output_may_be_the_input_of_parts():
    x = matrix(2, 300)
    wanted = in_parts(3)(x)
    sharing(x, x, 3)(x, x)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("n_parts", [2, 5])
@pytest.mark.parametrize("shape", [(3, 160), (2, 333)])
def test_parts_are_read_twice_and_written_once(shape, n_parts):
    counted = meter.count(in_parts(n_parts), matrix(*shape))
    assert_parts_are_read_twice(counted, math.prod(shape), shape[0], n_parts)


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
    online.prepare(x, x, lambda launch: found.append(launch) or launch)
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


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(8193, 4097), (300, 100_001), (20_000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adjacent_rows_of_the_input_hardly_spill(dtype, shape):
    """With Triton 3.6 not at all; with 3.7 and 3.9, 52 to 68 bytes at most."""
    x, y = (torch.empty(s, dtype=dtype, device="meta") for s in (shape[::-1], shape))
    found = []
    online.prepare(y, x.t(), lambda launch: found.append(launch) or launch)
    for kernel in compile.aot_all(found, gpu="H200"):
        assert kernel.spills <= 80


LARGE = [(8193, 4097), (300, 100_001), (4, 99_999)]
ON_A_GPU = [pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE]


@pytest.mark.parametrize("shape", [(40, 300), *ON_A_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adjacent_rows_are_right(dtype, shape):
    x = torch.randn(shape, device=backend.DEVICE).to(dtype)
    turned, into = x.t().contiguous().t(), like(x.t()).t()
    for output, given in ((like(x), turned), (into, x), (into, turned)):
        online.prepare(output, given, CachedLaunch)(output, given)
        assert_right(output, x)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 20_000_001), (3, 8_000_000), (1, 2**18, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_rows_are_right_and_the_same_in_every_run(dtype, shape):
    """On two streams and on a graph too, as their pairs are memory of each call."""
    x = torch.randn(shape, device=backend.DEVICE).to(dtype)
    if gpu.free_bytes() < 12 * 8 * x.numel():
        pytest.skip("needs memory for results in float64")
    y = like(x)
    run = online.prepare(y, x, CachedLaunch)
    assert not isinstance(run, CachedLaunch)  # two of them
    run(y, x)
    first = y.clone()
    assert_right(first, x, 1)
    streams, outputs = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(torch.full_like(first, 7))
                run(outputs[-1], x)
    torch.cuda.synchronize()
    assert all(torch.equal(output, first) for output in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(y, x)
        run(outputs[0], x)
    for output in (y, outputs[0]):
        output.fill_(7)
    for _ in range(3):
        graph.replay()
    assert torch.equal(y, first) and torch.equal(outputs[0], first)


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
