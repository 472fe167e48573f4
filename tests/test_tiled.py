"""Tiles of rows: right wherever rows start, and moved in wide accesses."""

import dataclasses
import importlib.util
import inspect
import itertools

import pytest
import torch
import triton

from kernels import strided, tiled
from kernels.lab import backend, check, compile, meter

HALF, SINGLE = torch.bfloat16, torch.float32


def matrix(n_rows, n_cols, dtype=SINGLE, *, stride=None, offset=0):
    """Random rows, `stride` apart, the first `offset` elements after an aligned one."""
    stride = stride or n_cols
    generator = torch.Generator().manual_seed(n_rows + n_cols)
    values = torch.randn(n_rows * stride + offset, generator=generator)
    flat = values.to(backend.DEVICE, dtype)
    return flat.as_strided((n_rows, n_cols), (stride, 1), offset)


def assert_right(y, x):
    expected = torch.softmax(x.double(), 1)
    bfloat = {"rtol": 2e-2, "atol": 1e-4} if x.dtype == HALF else {}
    torch.testing.assert_close(y, expected.to(x.dtype), **bfloat)


def layout(n_cols, dtype=SINGLE, output_row=None, input_row=None):
    output_row, input_row = output_row or (n_cols, 0), input_row or (n_cols, 0)
    wide = tiled.accesses(n_cols, dtype.itemsize, output_row, input_row)
    return tiled.plan(n_cols, dtype.itemsize, *wide)


def compiled(n_cols, dtype):
    x = compile.pointer(dtype)
    numbers = (n_cols, n_cols, 0, 4096, n_cols)
    constants = layout(n_cols, dtype).constants
    return compile.aot(tiled.softmax_kernel, x, x, *numbers, **constants, gpu="H200")


def wide_accesses(one):
    return [one.count(rf"{kind}\.global\S*\.v4", "ptx") for kind in ("ld", "st")]


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(tiled.softmax)
    assert summary, summary


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_is_right_wherever_rows_start(dtype, offset):
    for n_cols, stride in ((1, 1), (7, 9), (33, 33), (64, 65), (131, 136)):
        x = matrix(3, n_cols, dtype, stride=stride, offset=offset)
        assert_right(tiled.softmax(x), x)


def test_is_right_where_output_rows_start_elsewhere():
    for out_offset, in_offset in itertools.product(range(0, 5, 2), range(3)):
        x = matrix(3, 37, stride=41, offset=in_offset)
        y = torch.full_like(matrix(3, 37, stride=43, offset=out_offset), 9.0)
        tiled.launch(y, x)
        assert_right(y, x)


@pytest.mark.parametrize("n_cols", [8, 9, 40, 72, 136, 264, 520, 1032, 2056, 4104])
def test_is_right_in_one_piece_and_in_two(n_cols):
    for dtype in (HALF, SINGLE):
        x = matrix(3, n_cols, dtype)
        assert_right(tiled.softmax(x), x)


def test_counts_every_value_once_and_touches_no_other():
    for n_cols, dtype in itertools.product((5, 33, 1001, 1032), (HALF, SINGLE)):
        x = matrix(3, n_cols, dtype, stride=n_cols + 3, offset=1)
        counted = meter.count(tiled.softmax, x)  # raises where an access is outside
        assert counted.values[:2] == tiled.traffic(3, n_cols)


def test_rows_too_long_are_refused():
    x = torch.empty(1, tiled.MAX_COLS + 1, device=backend.DEVICE)
    with pytest.raises(ValueError, match=rf"at most {tiled.MAX_COLS} columns"):
        tiled.softmax(x)


# ---- how it is laid out --------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_fit(itemsize):
    for n_cols in [*range(1, 1100), 4104, 8200, 16392, 24000, 30001, tiled.MAX_COLS]:
        row = (n_cols, 0)
        wide = tiled.accesses(n_cols, itemsize, row, row)
        plan = tiled.plan(n_cols, itemsize, *wide)
        vector, edges, _ = wide
        body = n_cols // vector * vector if edges else n_cols
        assert plan.block_cols + plan.rest_cols >= body
        assert edges or n_cols % vector == 0
        for number in (plan.rows, plan.block_cols, plan.num_warps):
            assert number == triton.next_power_of_2(number) > 0
        assert plan.num_warps <= 32


def test_two_pieces_waste_less():
    assert tiled.pieces(8192, 8) == (8192, 0)
    assert tiled.pieces(10240, 8) == (8192, 2048)
    assert tiled.pieces(12288, 8) == (16384, 0)


def test_accesses_are_as_wide_as_rows_allow():
    assert tiled.accesses(1000, 2, (1000, 0), (1000, 0)) == (8, False, True)
    assert tiled.accesses(1004, 2, (1004, 0), (1004, 0)) == (4, False, True)
    assert tiled.accesses(1001, 2, (1001, 0), (1001, 0)) == (8, True, True)
    assert tiled.accesses(1000, 2, (1000, 0), (1001, 0)) == (8, True, False)
    assert tiled.accesses(1000, 4, (1000, 0), (1000, 1)) == (4, True, False)
    assert tiled.accesses(50, 2, (50, 0), (50, 0)) == (2, False, True)


@pytest.mark.parametrize(("n_cols", "dtype"), [(1001, HALF), (781, SINGLE)])
def test_odd_rows_are_moved_in_16_bytes(n_cols, dtype):
    loads, stores = wide_accesses(compiled(n_cols, dtype))
    assert loads > 0 and stores > 0


def test_the_strided_kernel_does_not():
    x = compile.pointer(HALF)
    numbers = (1001, 1, 1001, 1, 1001, 1024)
    one = compile.aot(strided.softmax_kernel, x, x, *numbers, gpu="H200")
    assert wide_accesses(one) == [0, 0]


def test_sixteen_bits_need_fewer_registers():
    kept = dataclasses.replace(layout(16384, HALF), keep=True)
    x, numbers = compile.pointer(HALF), (16384, 16384, 0, 4096, 16384)
    kernel = tiled.softmax_kernel
    one = compile.aot(kernel, x, x, *numbers, **kept.constants, gpu="H200")
    assert compiled(16384, HALF).registers < one.registers


# ---- the check sees what could go wrong ----------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(n_cols - head) & -VECTOR", "(n_cols - head - 1) & -VECTOR"),
        ("head + body + edge - VECTOR", "head + body + edge - VECTOR + 1"),
        ("edge < VECTOR", "edge < VECTOR - 1"),
    ],
)
def test_a_wrong_cut_is_caught(right, wrong, tmp_path, capsys):
    text = inspect.getsource(tiled)
    assert right in text
    path = tmp_path / "wrong.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("wrong", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not check.softmax(module.softmax, layouts=["contiguous", "offset"])
    assert "input" in capsys.readouterr().out


@pytest.mark.gpu
def test_beyond_32_bit_offsets():
    n_rows, n_cols = 2**31 // 1001 + 2, 1001
    x = torch.zeros(n_rows, n_cols, dtype=HALF, device="cuda")
    x[-1, -1] = 5
    y = tiled.softmax(x)
    assert_right(y[-2:], x[-2:])


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [10240, 12345, 16392, 30001, tiled.MAX_COLS])
def test_is_right_for_long_rows(n_cols):
    for dtype in (HALF, SINGLE):
        x = matrix(7, n_cols, dtype)
        assert_right(tiled.softmax(x), x)
