"""Strided softmax: right in any layout, at any offset, and nothing else is touched."""

import os
import re

import pytest
import torch
import triton
import triton.language as tl

from kernels import program, strided
from kernels.lab import backend, check, compile, gpu, meter
from kernels.lab.check import Fault
from tests import forks
from tests.helpers import assert_right, matrix

INF = float("inf")
FLOAT, HALF = compile.pointer(torch.float32), compile.pointer(torch.bfloat16)

LAYOUTS = {
    "contiguous": lambda: matrix(6, 10),
    "transposed": lambda: matrix(10, 6).t(),
    "sliced": lambda: matrix(6, 10, stride=14, offset=2),
    "every other column": lambda: matrix(6, 20)[:, ::2],
    "every other row": lambda: matrix(12, 10)[::2],
    "rows broadcast": lambda: matrix(1, 10).expand(6, 10),
    "columns broadcast": lambda: matrix(6, 1).expand(6, 10),
    "offset": lambda: matrix(6, 10, offset=1),
    "sliding windows": lambda: matrix(1, 15).flatten().unfold(0, 10, 1),
}


@pytest.fixture(params=LAYOUTS)
def x(request) -> torch.Tensor:
    return LAYOUTS[request.param]()


# ---- any layout ----------------------------------------------------------------------


def test_softmax_passes_the_check():
    assert check.softmax(strided.softmax)


def test_any_strides(x):
    assert_right(strided.softmax(x), x)


def test_output_lies_as_empty_like_lays_it(x):
    assert strided.softmax(x).stride() == torch.empty_like(x).stride()


def test_asks_for_each_value_once(x):
    assert meter.count(strided.softmax, x).values == meter.fused(*x.shape)


def test_empty_like_keeps_what_is_dense_and_closes_gaps():
    strides = {
        name: torch.empty_like(make()).stride() for name, make in LAYOUTS.items()
    }
    assert strides.pop("transposed") == strides.pop("sliding windows") == (1, 6)
    assert set(strides.values()) == {(10, 1)}


def test_torch_keeps_a_transposed_order_in_a_sum_and_not_in_its_softmax():
    x = LAYOUTS["transposed"]()
    assert (x + 1).stride() == strided.softmax(x).stride() == (1, 6)
    assert torch.softmax(x, dim=1).stride() == (10, 1)


def test_rows_without_a_softmax_are_nan_as_in_torch():
    x = matrix(5, 7)
    x[1, 2], x[2], x[3, 4], x[4, 0] = -INF, -INF, INF, float("nan")
    got = strided.softmax(x)
    assert_right(got, x)
    assert got.isnan().any(dim=1).tolist() == [False, False, True, True, True]
    assert got[1, 2] == 0


def test_such_rows_are_as_silent_as_on_a_gpu():
    code = (
        "import torch; from kernels import strided; from kernels.lab import backend; "
        "strided.softmax(torch.full((1, 3), -torch.inf, device=backend.DEVICE))"
    )
    done = forks.python(code, env=dict(os.environ), cwd=backend.ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_more_rows_than_a_grid_has_programs_are_named():
    rows = strided.MAX_ROWS + 1
    x = torch.ones(1, 1, device=backend.DEVICE).expand(rows, 1)
    with pytest.raises(ValueError, match=rf"at most {rows - 1} rows.*got {rows}"):
        strided.softmax(x)


# ---- wrong kernels, caught -----------------------------------------------------------


@triton.jit
def padded_kernel(output_ptr, input_ptr, n_cols, other, BLOCK_COLS: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    inside = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=inside, other=other)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=inside)


def padded(x: torch.Tensor, other: float) -> torch.Tensor:
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        block_cols = triton.next_power_of_2(n_cols)
        padded_kernel[(n_rows,)](output, x, n_cols, other, BLOCK_COLS=block_cols)
    return output


def zero_padded(x: torch.Tensor) -> torch.Tensor:
    return padded(x, 0.0)


def test_zeros_in_the_padding_are_caught(capsys):
    x = matrix(3, 10)
    assert_right(padded(x, -INF), x)
    failed = check.softmax(zero_padded, layouts=["contiguous"])
    assert failed.failure.fault is Fault.SUM
    said = capsys.readouterr().out
    assert "Masked elements took part in the sum" in " ".join(said.split())


def test_zeros_in_the_padding_count_as_elements():
    x = torch.tensor([[-3.0, -2.0, -1.0]], device=backend.DEVICE)
    with_zero = torch.tensor([[-3.0, -2.0, -1.0, 0.0]], device=backend.DEVICE)
    wanted = torch.softmax(with_zero, dim=1)[:, :3]
    torch.testing.assert_close(zero_padded(x), wanted)
    assert zero_padded(x - 1000).count_nonzero() == 0
    assert not torch.allclose(zero_padded(x + 3), torch.softmax(x, dim=1), atol=0.01)
    assert_right(zero_padded(x + 100), x + 100)


def without_column_stride(x: torch.Tensor) -> torch.Tensor:
    """Passes row strides alone, as kernels do that believe in columns side by side."""
    output = torch.empty_like(x)
    if x.numel():
        n_rows, n_cols = x.shape
        strides = output.stride(0), 1, x.stride(0), 1
        block_cols = triton.next_power_of_2(n_cols)
        kernel = strided.softmax_kernel[(n_rows,)]
        kernel(output, x, *strides, n_cols, BLOCK_COLS=block_cols)
    return output


def test_a_missing_column_stride_is_caught(capsys):
    for x in (matrix(6, 10), matrix(6, 10, stride=14, offset=2)):
        assert_right(without_column_stride(x), x)
    assert not check.softmax(without_column_stride, layouts=["transposed"])
    assert "transposed" in capsys.readouterr().out


def test_the_kernel_without_strides_reads_a_transposed_matrix_in_memory_order():
    x = matrix(2, 3)
    output = torch.empty_like(x.t())
    program.softmax_kernel[(3,)](output, x.t(), 2, BLOCK_COLS=2)
    assert not torch.allclose(output, torch.softmax(x.t(), dim=1))
    assert_right(output.t().reshape(3, 2), x.reshape(3, 2))
    with pytest.raises(ValueError, match="contiguous"):
        program.softmax(x.t())


@triton.jit
def row_sums_kernel(
    output_ptr, input_ptr, input_row_stride, n_cols, BLOCK_COLS: tl.constexpr
):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    x = tl.load(input_ptr + row * input_row_stride + cols)  # no mask
    tl.store(output_ptr + row, tl.sum(x, axis=0))


def row_sums(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty(x.shape[0], device=x.device)
    n_rows, n_cols = x.shape
    block_cols = triton.next_power_of_2(n_cols)
    kernel = row_sums_kernel[(n_rows,)]
    kernel(output, x, x.stride(0), n_cols, BLOCK_COLS=block_cols)
    return output


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (lambda x: x, r"program 3: load at offset 24 .* last element is 23"),
        (lambda x: x[:, 1:4], r"program 0: load at offset 3 .* between the elements"),
    ],
)
def test_a_missing_mask_is_caught(view, words):
    with pytest.raises(meter.OutOfBounds, match=words):
        meter.count(row_sums, view(matrix(4, 6)))


# ---- 64-bit offsets ------------------------------------------------------------------


def huge(dtype: torch.dtype) -> torch.Tensor:
    """(3, 5), its last row 2^31 elements from its first; few pages are touched."""
    try:
        x = torch.empty_strided((3, 5), (2**30, 1), dtype=dtype, device=backend.DEVICE)
    except RuntimeError:
        pytest.skip(f"there is no address space for {2**31 * dtype.itemsize} bytes")
    return x.copy_(matrix(3, 5))


@triton.jit
def first_kernel(output_ptr, input_ptr, input_row_stride, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(output_ptr + row, tl.load(input_ptr + row * input_row_stride))


def first_of_rows(wide: bool) -> None:
    x = huge(torch.float16)
    output = torch.empty(3, dtype=x.dtype, device=x.device)
    first_kernel[(3,)](output, x, x.stride(0), WIDE=wide)
    assert torch.equal(output, x[:, 0])


def test_a_32_bit_offset_wraps_and_a_64_bit_one_does_not():
    meter.count(first_of_rows, True)
    with pytest.raises(
        meter.OutOfBounds, match=r"program 2: load at offset -2147483648"
    ):
        meter.count(first_of_rows, False)


@pytest.mark.parametrize("transposed", [False, True])
def test_elements_2_to_the_31_apart(transposed):
    x = huge(torch.float16).t() if transposed else huge(torch.float16)
    assert_right(strided.softmax(x), x)


def test_strides_beyond_31_bits_travel_as_64():
    def types(stride: int) -> list[str]:
        args = FLOAT, FLOAT, stride, 1, stride, 1, 1000
        compiled = compile.aot(strided.softmax_kernel, *args, BLOCK_COLS=1024)
        (line,) = compiled.lines(r"tt\.func public", "ttir")
        return re.findall(r"%input_row_stride: (i\d+)", line)

    assert types(2**31 - 1) == ["i32"]
    assert types(2**31) == ["i64"]
    assert types(1) == []  # a constant


@pytest.mark.parametrize("pointer", [FLOAT, HALF])
@pytest.mark.parametrize("n_cols", [1000, 1024])
def test_a_64_bit_row_costs_hardly_a_register(pointer, n_cols):
    row = n_cols, 1
    options = {"BLOCK_COLS": 1024}
    narrow = compile.aot(program.softmax_kernel, pointer, pointer, n_cols, **options)
    args = pointer, pointer, *row, *row, n_cols
    wide = compile.aot(strided.softmax_kernel, *args, **options)
    assert wide.registers <= narrow.registers + 4


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_more_than_2_to_the_31_elements(transposed):
    shape = (70_000, 32_768)
    if gpu.free_bytes() < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    x = torch.randn(shape, dtype=torch.float16, device=backend.DEVICE)
    x = x.view(shape[::-1]).t() if transposed else x
    got = strided.softmax(x)
    for row in (0, 32_767, 65_535, 65_536, 69_999):
        assert_right(got[row], x[row])


# ---- vector loads --------------------------------------------------------------------


def groups(pointers: tuple, stride: int, n_cols: int) -> tuple[int, int]:
    """The neighbours that a lane holds, and the bytes that each of its loads brings."""
    args = *pointers, stride, 1, stride, 1, n_cols
    compiled = compile.aot(strided.softmax_kernel, *args, BLOCK_COLS=1024)
    (layout, *_) = compiled.lines(r"^#blocked = ", "ttgir")
    loads = compiled.lines(r"ld\.global")
    found = {re.search(r"global(?:\.v(\d))?\.b(\d+)", load).groups() for load in loads}
    ((vector, bits),) = found
    held = re.search(r"sizePerThread = \[(\d+)\]", layout)[1]
    return int(held), int(vector or 1) * int(bits) // 8


@pytest.mark.parametrize("pointer", [FLOAT, HALF])
def test_vector_loads_need_address_stride_and_length(pointer):
    size, aligned = pointer.dtype.itemsize, (pointer, pointer)
    offset = (compile.pointer(pointer.dtype, False),) * 2
    assert groups(aligned, 1024, 1024) == (16 // size, 16)
    assert groups(aligned, 1008, 1008) == (16 // size, 16)
    for args in (
        (offset, 1008, 1008),
        (aligned, 1009, 1008),  # rows start anywhere
        (aligned, 1001, 1001),
        (aligned, 1000, 1000),  # divisible by 8, and Triton asks about 16
    ):
        assert groups(*args) == (1, size)


@pytest.mark.parametrize("pointer", [FLOAT, HALF])
def test_a_mask_that_ends_inside_a_group_leaves_lanes_16_bytes_apart(pointer):
    size = pointer.dtype.itemsize
    assert groups((pointer, pointer), 1008, 1001) == (16 // size, size)


def test_stores_are_grouped_by_the_stride_of_the_output():
    """Gaps between loads, none between stores: the values change lanes in between."""

    def layouts(output_stride: int) -> tuple[int, int, bool]:
        args = HALF, HALF, output_stride, 1, 1008, 1, 1001
        compiled = compile.aot(strided.softmax_kernel, *args, BLOCK_COLS=1024)
        held = dict(
            re.findall(r"^(#\w+) = .*sizePerThread = \[(\d+)\]", compiled.ttgir, re.M)
        )
        uses = (compiled.lines(rf"tt\.{op} ", "ttgir") for op in ("load", "store"))
        load, store = (int(held[re.search(r"(#\w+)>", use)[1]]) for (use,) in uses)
        return load, store, bool(compiled.lines("ttg.convert_layout", "ttgir"))

    assert layouts(1001) == (8, 1, True)
    assert layouts(1008) == (8, 8, False)


@triton.jit
def rows_kernel(output_ptr, input_ptr, col_stride, ROWS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    offsets = rows + cols * col_stride
    tl.store(output_ptr + offsets, tl.load(input_ptr + offsets))


@pytest.mark.parametrize(("n_rows", "load"), [(1, "global.b32"), (8, "global.v4.b32")])
def test_a_block_of_rows_has_neighbours_in_a_transposed_matrix(n_rows, load):
    compiled = compile.aot(rows_kernel, FLOAT, FLOAT, 4096, n_rows)
    assert {load in line for line in compiled.lines(r"ld\.global")} == {True}
