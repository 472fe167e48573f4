"""Rows that start anywhere: right, and moved in wide accesses all the same."""

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl

from kernels import tiled, unaligned
from kernels.lab import backend, check, compile, gpu, meter
from kernels.lab.compile import Compiled
from tests.helpers import (
    assert_right,
    matrix,
    meta_matrix,
    patched,
    tail_that_starts_late,
    wide_accesses,
)

SINGLE, HALF = torch.float32, torch.bfloat16


def buffered(x: torch.Tensor, stride: int, offset: int) -> tuple:
    """A buffer of sevens, and a view of x's shape in it."""
    length = 2 * offset + len(x) * stride
    buffer = torch.full((length,), 7.0, dtype=x.dtype, device=x.device)
    return buffer, buffer.as_strided(x.shape, (stride, 1), offset)


def compiled(n_cols: int, dtype: torch.dtype) -> Compiled:
    """The kernel for an H200, of contiguous rows."""
    x = meta_matrix(4096, n_cols, dtype)
    return compile.aot(unaligned.launch_for(x, x))


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(unaligned.softmax)
    assert summary, summary


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_is_right_wherever_rows_start(dtype, offset):
    for n_cols, stride in ((1, 1), (7, 9), (33, 33), (64, 65), (131, 136)):
        x = matrix(3, n_cols, dtype, stride=stride, offset=offset)
        assert_right(unaligned.softmax(x), x)


def test_is_right_where_output_rows_start_elsewhere():
    shifts = itertools.product((HALF, SINGLE), range(0, 5, 2), range(3))
    for dtype, out_offset, in_offset in shifts:
        for out_stride, n_cols in ((41, 37), (43, 37), (211, 199)):
            x = matrix(3, n_cols, dtype, stride=n_cols + 4, offset=in_offset)
            buffer, y = buffered(x, out_stride, out_offset)
            unaligned.launch_for(y, x)(y, x)
            assert_right(y, x)
            y.fill_(7.0)
            assert (buffer == 7).all()  # nothing beside the rows was written


@pytest.mark.parametrize("n_cols", [8, 9, 40, 73, 136, 265, 521, 1033, 2057, 4105])
def test_is_right_in_one_block_and_in_two(n_cols):
    for dtype in (HALF, SINGLE):
        x = matrix(3, n_cols, dtype, offset=3)
        assert_right(unaligned.softmax(x), x)


def test_moves_every_value_once_and_touches_no_other():
    for n_cols, dtype in itertools.product((5, 33, 1001, 1032), (HALF, SINGLE)):
        x = matrix(3, n_cols, dtype, stride=n_cols + 3, offset=1)
        counted = meter.count(unaligned.softmax, x)  # raises where one is outside
        assert counted.values == meter.fused(3, n_cols)


@pytest.mark.gpu
def test_beyond_32_bit_offsets():
    n_rows, n_cols = 2**31 // 1001 + 2, 1001
    if gpu.free_bytes() < 9e9:
        pytest.skip("needs 9 GB of free GPU memory")
    x = torch.zeros(n_rows, n_cols, dtype=HALF, device=backend.DEVICE)
    x[-1, -1] = 5
    y = unaligned.softmax(x)
    assert_right(y[-2:], x[-2:])


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [10241, 12345, 16393, 30001, tiled.MAX_COLS - 1])
def test_is_right_for_long_rows(n_cols):
    for dtype in backend.DTYPES:
        x = matrix(7, n_cols, dtype, offset=1)
        assert_right(unaligned.softmax(x), x)


# ---- the configuration ---------------------------------------------------------------


@pytest.mark.parametrize("element_size", [2, 4])
def test_configs_hold_their_rows(element_size):
    longest = tiled.MAX_COLS
    for n_cols in [*range(1, 1100), 4104, 8201, 16393, 24000, 30001, longest]:
        config = unaligned.choose_config(n_cols, element_size)
        body = n_cols // config.vector * config.vector
        assert config.block_cols + config.rest_cols >= body
        for number in (config.rows, config.block_cols, config.num_warps, config.vector):
            assert number == triton.next_power_of_2(number) > 0
        assert config.rest_cols in (0, triton.next_power_of_2(config.rest_cols))
        assert config.num_warps <= 32
        assert config.threads == triton.next_power_of_2(config.threads) > 0
        for cols in (config.block_cols, config.rest_cols):
            assert cols % (config.threads * config.vector) == 0


def test_accesses_are_16_bytes_wide_or_fewer_elements_of_short_rows():
    def vector(n_cols: int, element_size: int) -> int:
        return unaligned.choose_config(n_cols, element_size).vector

    assert vector(1000, 4) == vector(33, 4) == 4
    assert vector(1000, 2) == vector(tiled.SHORT_BYTES // 2, 2) == 8
    assert vector(tiled.SHORT_BYTES // 2 - 1, 2) == 4
    assert [vector(n, 4) for n in (26, 27)] == [2, 4]
    assert [vector(n, 2) for n in (41, 43)] == [2, 4]


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_thread_has_values_of_one_short_row(dtype):
    size = dtype.itemsize
    for n_cols in range(1, tiled.SHORT_BYTES // size):
        config = unaligned.choose_config(n_cols, size)
        assert config.rows * config.threads == 32 * config.num_warps
        assert n_cols <= 24 * config.threads and not config.recompute


def test_the_configurations_that_were_the_fastest():
    """Of an H200; threads of a row, elements of an access, warps."""
    odd = (5, 1, 2), (9, 2, 2), (17, 4, 2), (33, 4, 2), (47, 4, 4), (63, 8, 4)
    even = (6, 1, 2), (22, 2, 2), (30, 4, 2), (46, 4, 2), (58, 4, 4), (100, 8, 4)
    for n_cols, *expected in odd + even:
        config = unaligned.choose_config(n_cols, 2, aligned=n_cols % 2 == 0)
        assert [config.threads, config.vector] == expected
        assert config.num_warps == 4
    config = unaligned.choose_config(257, 2)
    assert (config.threads, config.vector, config.rows) == (16, 8, 8)


@pytest.mark.parametrize(
    ("n_cols", "output_row", "input_row", "expected"),  # rows: (stride, offset)
    [
        (64, (64, 0), (64, 0), (4, True)),
        (63, (63, 0), (63, 0), (1, True)),
        (64, (64, 1), (64, 1), (1, True)),
        (64, (64, 4), (64, 0), (4, True)),  # 4 elements are 16 bytes
        (64, (64, 0), (64, 1), (1, False)),
        (63, (63, 0), (64, 0), (1, False)),
        (64, (64, 0), (68, 0), (4, False)),
        (64, (64, 2), (64, 2), (1, True)),  # 8 bytes after an aligned address
    ],
)
def test_alignment_is_that_of_both_matrices(n_cols, output_row, input_row, expected):
    output, x = (
        meta_matrix(3, n_cols, stride=stride, offset=offset)
        for stride, offset in (output_row, input_row)
    )
    assert unaligned.alignment(output, x) == expected


@pytest.mark.parametrize(("stride", "offset"), [(64, 0), (65, 0), (65, 1), (72, 4)])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_a_launch_needs_no_memory(dtype, stride, offset):
    """Tensors without memory make the launch that real ones make."""
    x = matrix(5, 64, dtype, stride=stride, offset=offset)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    ghost = meta_matrix(5, 64, dtype, stride=stride, offset=offset)
    assert unaligned.launch_for(y.to("meta"), ghost) == unaligned.launch_for(y, x)


# ---- what the compiler makes of it ---------------------------------------------------


@pytest.mark.parametrize(("n_cols", "dtype"), [(1001, HALF), (781, SINGLE)])
def test_odd_rows_are_moved_in_16_bytes(n_cols, dtype):
    loads, stores = wide_accesses(compiled(n_cols, dtype))
    assert loads > 0 and stores > 0


def test_output_rows_that_start_elsewhere_are_loaded_by_elements():
    x, y = meta_matrix(4096, 1001, HALF), meta_matrix(4096, 1001, HALF, stride=1002)
    kernel = compile.aot(unaligned.launch_for(y, x))
    assert wide_accesses(kernel) == [0, 0] and kernel.spills == 0
    assert kernel.count(r"ld\.global\S*\.b16 ") >= 32  # a thread's values of a row
    assert kernel.count(r"st\.global\S*\.v2\.b32") >= 8  # its stores are of 8 bytes


def test_32_bit_output_rows_that_start_elsewhere_are_stored_in_wide_accesses():
    x, y = meta_matrix(4096, 781), meta_matrix(4096, 781, stride=782)
    loads, stores = wide_accesses(compile.aot(unaligned.launch_for(y, x)))
    assert loads == 0 and stores >= 6  # 781 values, 128 for each access of a warp


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_aligned_rows_in_different_strides_are_loaded_in_wide_accesses(dtype):
    x, y = meta_matrix(4096, 1000, dtype, stride=1008), meta_matrix(4096, 1000, dtype)
    loads, stores = wide_accesses(compile.aot(unaligned.launch_for(y, x)))
    assert loads > 0 and stores > 0


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [33, 63, 129, 257])
def test_edges_cost_little(n_cols):
    """A value of a short odd row takes few instructions, and its threads no spills."""
    launch = unaligned.launch_for(
        meta_matrix(4096, n_cols, HALF), meta_matrix(4096, n_cols, HALF)
    )
    kernel = compile.aot(launch)
    lines = kernel.count("    ", "sass") - kernel.count("NOP", "sass")
    values = launch.constants["ROWS"] * n_cols / (32 * kernel.num_warps)
    assert lines / values < 25 and kernel.spills == 0
    assert kernel.shared == 0  # no thread waits for values of another warp


def test_the_tiled_kernel_does_not_move_them_so():
    x = meta_matrix(4096, 1001, HALF)
    assert wide_accesses(compile.aot(tiled.launch_for(x, x))) == [0, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [4095, 16383])
def test_16_bits_that_are_not_kept_as_32_need_fewer_registers(n_cols):
    x = meta_matrix(4096, n_cols, HALF)
    launch = unaligned.launch_for(x, x)
    assert launch.constants["RECOMPUTE"]
    kept = dict(launch.constants) | {"RECOMPUTE": False}
    hidden, known = compile.aot_all(
        [launch, dataclasses.replace(launch, constants=kept)]
    )
    assert hidden.registers < 0.9 * known.registers


# ---- wrong kernels -------------------------------------------------------------------


def body_that_ends_early(row_start, n_cols, VECTOR: tl.constexpr):
    head = tl.minimum((-row_start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head - 1) & -VECTOR


def body_of_all_that_follows(row_start, n_cols, VECTOR: tl.constexpr):
    head = tl.minimum((-row_start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, n_cols - head


def head_of_whole_accesses(row_start, n_cols, VECTOR: tl.constexpr):
    head = tl.minimum(row_start.to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head) & -VECTOR


def head_that_is_cut(edge, head, body, n_cols, VECTOR: tl.constexpr):
    is_head = edge < VECTOR - 1
    cols = tl.where(is_head, edge, head + body + edge - VECTOR)
    return cols, cols < tl.where(is_head, head, n_cols)


def head_of_a_whole_access(edge, head, body, n_cols, VECTOR: tl.constexpr):
    is_head = edge < VECTOR
    cols = tl.where(is_head, edge, head + body + edge - VECTOR)
    return cols, cols < tl.where(is_head, VECTOR, n_cols)


@pytest.mark.parametrize(
    ("helper", "wrong"),
    [
        ("split_row", body_that_ends_early),
        ("split_row", body_of_all_that_follows),
        ("split_row", head_of_whole_accesses),
        ("edge_columns", tail_that_starts_late),
        ("edge_columns", head_that_is_cut),
        ("edge_columns", head_of_a_whole_access),
    ],
)
def test_a_wrong_cut_is_caught(helper, wrong, capsys):
    fewer = {"dtypes": [SINGLE], "layouts": ["contiguous", "offset"], "max_cols": 131}
    with patched(unaligned, helper, wrong):
        assert not check.softmax(unaligned.softmax, **fewer)
    assert "matrix" in capsys.readouterr().out
    x = matrix(3, 33)
    assert_right(unaligned.softmax(x), x)
