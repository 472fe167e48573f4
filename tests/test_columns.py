"""The softmax of columns: whole, or in parts that programs share."""

import dataclasses
import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
import triton.language as tl  # noqa: F401 - the interpreter wants it visible

import kernels
from kernels import columns, fastest
from kernels.columns import Config
from kernels.lab import backend, check, compile, gpu, meter
from kernels.lab import launch as launch_module
from kernels.lab.direct import CachedLaunch
from kernels.lab.launch import power_of_2
from tests.helpers import (
    assert_parts_are_read_twice,
    assert_right,
    fewer,
    like,
    matrix,
    patched,
    tensor,
)
from tests.test_online import kept, without_the_first_part

INF = float("inf")
NARROW = Config(cols=4, block_rows=16, accumulators=4, num_warps=1)
DTYPES = (*backend.DTYPES, torch.float64)


def stack(n_matrices, n_rows, n_cols, dtype=torch.float32) -> torch.Tensor:
    return matrix(n_matrices, n_rows * n_cols, dtype).view(n_matrices, n_rows, n_cols)


def run(output: torch.Tensor, x: torch.Tensor, n_parts: int = 1, **changes) -> None:
    """Writes the softmax of x's columns, which so many programs share."""
    config = dataclasses.replace(NARROW, **changes)
    with (
        patch.object(columns, "choose_config", lambda *sizes: config),
        patch.object(columns, "choose_parts", lambda *sizes: n_parts),
    ):
        columns.prepare(output, x, kept)(output, x)


def in_columns(x: torch.Tensor) -> torch.Tensor:
    """The softmax of x's rows, by the columns of its transpose."""
    return columns.softmax(x.t().contiguous(), dim=0).t()


# ---- the softmax ---------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [columns.softmax, in_columns])
def test_is_a_softmax(softmax):
    summary = check.softmax(softmax, max_cols=fewer(257, 1100))
    assert summary, summary


SHAPES = [
    *[(3, 5, 9), (2, 70, 21), (1, 5, 100), (4, 7, 16), (1, 1, 1), (5, 1, 3)],
    *[(3, 64, 10), (9, 10, 7), (5, 300, 2), (2, 3, 130), (1, 500, 3), (7, 40, 64)],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_stacks_of_any_shape(shape, dtype):
    """Columns are written, and nothing beside them is."""
    x = stack(*shape, dtype)
    room = torch.full((x.numel() + 64,), 7.0, dtype=dtype, device=x.device)
    output = room[32:-32].view(shape)
    columns.prepare(output, x, kept)(output, x)
    assert_right(output, x, 1)
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()


@pytest.mark.parametrize("n_parts", [1, 2, 5])
@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("shape", [(3, 100, 6), (5, 83, 1), (1, 160, 3)])
def test_blocks_and_parts(shape, matrices, n_parts):
    x = stack(*shape)
    room = torch.full((x.numel() + 64,), 7.0, device=x.device)
    output = room[32:-32].view(shape)
    run(output, x, n_parts, matrices=matrices)
    assert_right(output, x, 1)
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()


@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("vector", [1, 2])
def test_views_with_strides_of_their_own(vector, held, n_parts):
    base = stack(4, 60, 20)
    x = base[::2, 1::3, vector : vector + 6]
    buffer = torch.full((2, 22, 8), 7.0, device=x.device)
    output = buffer[:, 1:-1, :6]
    rows = {"block_rows": 32} if held else {}
    held = held and n_parts == 1
    run(output, x, n_parts, vector=vector, held=held, **rows)
    assert_right(output, x, 1)
    assert (buffer[:, :, 6:] == 7).all() and (buffer[:, ::21] == 7).all()


@pytest.mark.parametrize("value", [-INF, INF, float("nan"), 1e30, -1e30])
@pytest.mark.parametrize("n_parts", [1, 3])
@pytest.mark.parametrize("place", [slice(16), slice(20, 90), slice(96, None)])
def test_a_bad_value_spoils_its_column_alone(place, n_parts, value):
    x = stack(2, 130, 5)
    x[1, place, 3] = value
    output = like(x)
    run(output, x, n_parts)
    assert_right(output, x, 1)


def test_a_column_of_minus_infinity_is_nan():
    x = stack(1, 40, 3)
    x[:, :, 1] = -INF
    for n_parts in (1, 2):
        output = like(x)
        run(output, x, n_parts)
        assert output[:, :, 1].isnan().all() and not output[:, :, ::2].isnan().any()


@pytest.mark.parametrize("n_parts", [1, 3])
def test_the_output_may_be_the_input(n_parts):
    x = stack(2, 100, 5)
    wanted = like(x)
    run(wanted, x, n_parts)
    run(x, x, n_parts)
    assert torch.equal(x, wanted)


@pytest.mark.parametrize(("wide", "narrow"), [(0, 2), (0, 1), (3, 0), (3, 1)])
def test_a_wider_result(wide, narrow):
    dtypes = torch.float32, torch.float16, torch.bfloat16, torch.float64
    for shape in ((3, 21, 10), (2, 200, 33)):
        x = stack(*shape, dtypes[narrow])
        output = torch.empty(shape, dtype=dtypes[wide], device=x.device)
        columns.prepare(output, x, kept)(output, x)
        assert_right(output, x.to(dtypes[wide]), 1)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_stays_empty(shape):
    x = torch.empty(shape, device=backend.DEVICE)
    assert columns.softmax(x, dim=0).shape == shape


def test_a_dimension_may_count_from_the_end():
    x = matrix(5, 7)
    for dim in (-2, -1, 0, 1):
        assert_right(columns.softmax(x, dim), x, dim)


def test_errors_name_what_was_got():
    for dim in (-3, 2):
        with pytest.raises(IndexError, match=rf"from -2 to 1 .*got {dim}"):
            columns.softmax(matrix(2, 3), dim)
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.int"):
        columns.softmax(torch.ones(2, 2, dtype=torch.int32, device=backend.DEVICE))


# ---- how often values move -----------------------------------------------------------


@pytest.mark.parametrize(("n_rows", "passes"), [(1, 1), (21, 1), (64, 1), (65, 2)])
def test_short_columns_are_read_once(n_rows, passes):
    x = matrix(n_rows, 70)
    counted = meter.count(partial(columns.softmax, dim=0), x)
    assert counted.values == meter.passes(n_rows, 70, passes=passes)


@pytest.mark.parametrize("n_parts", [2, 4])
def test_parts_are_read_twice_and_written_once(n_parts):
    shape = 2, 160, 6
    counted = meter.count(lambda x: run(torch.empty_like(x), x, n_parts), stack(*shape))
    assert_parts_are_read_twice(counted, math.prod(shape), 12, n_parts)


# ---- wrong kernels -------------------------------------------------------------------


def of_the_first_matrix(place, strides, VECTOR):
    _, row, col = place
    return row * strides[1] + col * strides[2]


@pytest.mark.parametrize(
    ("helper", "wrong", "n_parts"),
    [("merge", without_the_first_part, 3), ("offset_of", of_the_first_matrix, 1)],
)
def test_a_wrong_kernel_is_caught(helper, wrong, n_parts):
    x = stack(2, 70, 9)
    output = like(x)
    with patched(columns, helper, wrong), pytest.raises(AssertionError):
        run(output, x, n_parts)
        assert_right(output, x, 1)
    run(output, x, n_parts)
    assert_right(output, x, 1)


# ---- the configuration ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "element_size", "vector", "expected"),
    [
        ((768, 197, 197), 2, 1, Config(64, 32, 2, 4)),
        ((768, 192, 192), 2, 8, Config(64, 32, 32, 4, vector=8)),
        ((8, 19, 512**2), 4, 4, Config(64, 32, 32, 2, vector=4, held=True)),
        ((4096, 64, 10), 2, 2, Config(32, 64, 64, 2, 2, vector=2, held=True)),
        ((10**5, 10, 7), 4, 1, Config(64, 16, 1, 2, 8, held=True)),
        ((20_000, 1000, 2), 4, 2, Config(2, 1024, 1024, 2, vector=2, held=True)),
        ((3, 65_536, 3), 4, 1, Config(4, 512, 512, 4)),
        ((2, 3, 10**7), 2, 8, Config(256, 4, 4, 2, vector=8, held=True)),
        ((768, 197, 197), 8, 1, Config(32, 32, 4, 4)),
    ],
)
def test_known_configs(shape, element_size, vector, expected):
    assert columns.choose_config(shape, element_size, vector) == expected


@pytest.mark.parametrize(("n_cols", "pairs"), [(4096, 8), (52, 8), (16, 128)])
def test_programs_of_many_columns_merge_few_pairs_at_once(n_cols, pairs):
    configs = [columns.choose_config((1, 10**5, n_cols), 4, 4, s) for s in (1, 2)]
    assert configs[0].accumulators == configs[0].block_rows
    assert configs[1] == dataclasses.replace(configs[0], accumulators=pairs)


def test_configs_are_powers_of_two_and_fit():
    lengths = (*range(1, 70), 781, 4097, 50257, 10**6)
    for n_rows in lengths:
        for n_cols in (2, 3, 7, 16, 50, 64, 1000, 2**31 + 1):
            for n_matrices in (1, 3, 5000):
                for size, vector in ((2, 1), (2, 8), (4, 1), (4, 4), (8, 1), (8, 2)):
                    shape = n_matrices, n_rows, n_cols
                    for step in (0, 1, 2):
                        c = columns.choose_config(shape, size, vector, step)
                        sizes = c.cols, c.block_rows, c.accumulators, c.matrices
                        assert all(n == power_of_2(n) for n in sizes), shape
                        assert 1 <= c.accumulators <= c.block_rows < 2 * n_rows
                        assert c.cols * c.block_rows <= 2048 // max(1, size // 4)
                        assert c.cols // c.matrices < 2 * n_cols
                        assert c.matrices < 2 * n_matrices
                        assert c.held == (step == 0 and n_rows <= c.block_rows)


@pytest.mark.parametrize(
    ("shape", "per_sm"),
    [
        ((64, 12, 4096), None),  # held
        ((768, 197, 197), None),
        ((1, 4096, 4096), 8),
        ((1, 3_000_000, 3), 8),
        ((4, 200_000, 52), 4),  # many pairs to merge
        ((8, 128, 64), None),  # too short to be shared
        ((1, 20_000, 2000), 8),
        ((1, 8000, 8000), 16),  # many blocks for each program
        ((1, 4000, 20_000), 16),
        ((1, 2000, 20_000), None),  # enough tiles, and few blocks
        ((300, 60_000, 4), None),  # a tile's rows follow each other
        ((1, 100_000, 2**17), None),  # tiles enough
    ],
)
def test_columns_are_shared_where_they_leave_sms_idle(shape, per_sm, monkeypatch):
    monkeypatch.setattr(launch_module, "sms_and_threads", lambda: (132, 2048))
    x, found = torch.empty(shape, device="meta"), []
    columns.prepare(x, x, lambda launch: found.append(launch) or launch)
    assert len(found) == (2 if per_sm else 1)
    if per_sm:
        assert len({launch.grid for launch in found}) == 1
        n_programs, wanted = math.prod(found[0].grid), per_sm * 132
        assert 0.7 * wanted <= n_programs < wanted + found[0].grid[0]


def test_the_softmax_takes_adjacent_columns_here():
    """Columns in a stride of their own are for `online`."""
    x = tensor(3, 50, 14)
    cases = {x: True, x[:, 1:]: True, x.half(): True, x[:, :, ::2]: False}
    for case, here in cases.items():
        output = torch.empty(case.shape, dtype=case.dtype, device=x.device)
        with patch.object(columns, "prepare", wraps=columns.prepare) as prepare:
            fastest.prepare(output, case, 1)
        assert prepare.called is here


# ---- what the compiler makes of it ---------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *[(768, 197, 197), (768, 192, 192), (32, 21, 4225), (4096, 64, 10)],
        *[(10**5, 10, 7), (1, 4096, 4097), (20_000, 500, 3), (3000, 5000, 4)],
    ],
)
def test_nothing_is_spilled(shape, dtype):
    x, found = torch.empty(shape, dtype=dtype, device="meta"), []
    columns.prepare(x, x, lambda launch: found.append(launch) or launch)
    for launch in found:
        assert compile.aot(launch, gpu="H200").spills == 0


def test_tensors_off_16_bytes_have_the_pairs_of_single_elements():
    base = torch.empty(768 * 192 * 192 + 8, dtype=torch.bfloat16)
    shape = 768, 192, 192
    on, off = (base[at:][: math.prod(shape)].view(shape) for at in (0, 1))
    assert columns.launch_for(on, off).constants["VECTOR"] == 8
    launch = columns.launch_for(off, off)
    assert launch.constants["VECTOR"] == 1 and launch.constants["ACCUMULATORS"] == 2
    assert compile.aot(launch, gpu="H200").spills == 0


@pytest.mark.parametrize(("n_cols", "size"), [(192, 16), (196, 8), (194, 4), (197, 2)])
def test_accesses_are_as_wide_as_the_columns_allow(n_cols, size):
    x = torch.empty(768, 192, n_cols, dtype=torch.bfloat16, device="meta")
    kernel = compile.aot(columns.launch_for(x, x), gpu="H200")
    width = {16: r"v4\.b32", 8: r"v2\.b32", 4: r"b32", 2: r"b16"}[size]
    for access in ("ld", "st"):
        every = kernel.count(rf"{access}\.global")
        assert every == kernel.count(rf"{access}\.global[\w.:]*\.{width}") > 0


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2**18, 16), (1, 10**6, 3), (2, 4096, 1001)])
def test_long_columns_are_right_and_the_same_in_every_run(dtype, shape):
    x = torch.randn(shape, device=backend.DEVICE).to(dtype)
    first = kernels.softmax(x, dim=1)
    assert_right(first, x, 1)
    for _ in range(3):
        assert torch.equal(kernels.softmax(x, dim=1), first)
    streams = [torch.cuda.Stream() for _ in range(2)]
    run, outputs = columns.prepare(like(x), x, CachedLaunch), []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            outputs.append(torch.full_like(first, 7))
            run(outputs[-1], x)
    torch.cuda.synchronize()
    assert all(torch.equal(output, first) for output in outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 20_000, 2**17), (2**21, 30, 40)])
def test_offsets_of_more_than_2_to_31(shape):
    if gpu.free_bytes() < 4.5 * math.prod(shape):
        pytest.skip("needs 12 GB of free GPU memory")
    x = torch.zeros(shape, dtype=torch.bfloat16, device=backend.DEVICE)
    x[-1, :, -3:] = stack(1, shape[1], 3, torch.bfloat16)[0]
    y = kernels.softmax(x, dim=1)
    assert_right(y[-1:, :, -3:].contiguous(), x[-1:, :, -3:].contiguous(), 1)
