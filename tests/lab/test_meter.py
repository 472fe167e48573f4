"""The meter counts exactly what is moved, and stops what is out of bounds.

The tensors are CPU tensors: in both worlds the counted call then runs in the
interpreter, on a GPU machine in a helper process. What a test does inside that process
is in a function of its own, given to `process.call_in`.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.lab import backend, meter, process

SHAPES = [(1, 1), (4, 8), (3, 781), (5, 128), (7, 33), (1, 1823)]


# ---- kernels, right and wrong --------------------------------------------------------


@triton.jit
def row_softmax(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    READS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    source = input_ptr + row * input_row_stride + cols * input_col_stride
    for _ in range(READS):
        x = tl.load(source, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    y = (e / tl.sum(e, axis=0)).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * output_row_stride + cols, y, mask=cols < n_cols)


def fused(x, reads=1):
    n_rows, n_cols = x.shape
    y = torch.empty(x.shape, dtype=x.dtype)
    block = triton.next_power_of_2(n_cols)
    grid = (n_rows,)
    row_softmax[grid](y, x, y.stride(0), *x.stride(), n_cols, block, reads)
    return y


def naive(x):
    row_max = x.max(dim=1)[0]
    shifted = x - row_max[:, None]
    numerator = torch.exp(shifted)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


@triton.jit
def load_at(input_ptr, start, BLOCK: tl.constexpr):
    tl.load(input_ptr + start + tl.arange(0, BLOCK))


@triton.jit
def store_at(output_ptr, start, BLOCK: tl.constexpr):
    tl.store(output_ptr + start + tl.arange(0, BLOCK), 1.0)


@triton.jit
def load_by_helper(input_ptr, start, BLOCK: tl.constexpr):
    load_at(input_ptr, start, BLOCK)


@triton.jit
def load_nothing(input_ptr):
    lanes = tl.arange(0, 8)
    tl.load(input_ptr + 1_000_000_000_000 + lanes, mask=lanes < 0)


@triton.jit
def load_tile(input_ptr, row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.load(input_ptr + rows[:, None] * row_stride + tl.arange(0, COLS)[None, :])


@triton.jit
def add_atomically(output_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.atomic_add(output_ptr + lanes, 1.0, mask=lanes < n)


@triton.jit
def swap_atomically(output_ptr, place):
    tl.atomic_cas(output_ptr + place, 0, 7)


@triton.jit
def copy_by_descriptor(output_ptr, input_ptr, n_rows, n_cols, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(input_ptr, [n_rows, n_cols], [n_cols, 1], [1, BLOCK])
    y = tl.make_tensor_descriptor(output_ptr, [n_rows, n_cols], [n_cols, 1], [1, BLOCK])
    row = tl.program_id(0)
    y.store([row, 0], x.load([row, 0]))


@triton.jit
def copy_between(output_ptr, input_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + lanes, mask=lanes < n)
    tl.store(output_ptr + lanes, x, mask=lanes < n)


@triton.jit
def load_pairs(input_ptr, n, BLOCK: tl.constexpr):
    pairs = input_ptr.to(tl.pointer_type(tl.int64)) + tl.arange(0, BLOCK)
    tl.load(pairs, mask=tl.arange(0, BLOCK) < n)


@triton.jit
def load_bytes_from(input_ptr, byte):
    moved = input_ptr.to(tl.pointer_type(tl.int8)) + byte
    tl.load(moved.to(tl.pointer_type(tl.float32)))


@triton.jit
def load_from_number(address):
    tl.load(address.to(tl.int64).to(tl.pointer_type(tl.float32)))


@triton.jit
def load_from_either(first_ptr, second_ptr, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.load(tl.where(lanes < n, first_ptr + lanes, second_ptr + lanes - n))


def launch(kernel, grid=(1,)):
    """A function that launches the kernel on its arguments."""
    return lambda *args: kernel[grid](*args)


def fault(function, *args) -> str:
    with pytest.raises(meter.OutOfBounds) as caught:
        meter.count(function, *args)
    return str(caught.value)


def row_of(traffic: meter.Traffic, name: str) -> meter.Op:
    (row,) = [row for row in traffic.rows if row.name == name]
    return row


# ---- the formulas --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_naive_counts_to_its_formula(shape):
    n_rows, n_cols = shape
    traffic = meter.count(naive, torch.randn(shape))
    size = n_rows * n_cols
    assert traffic.read_values == 5 * size + 2 * n_rows
    assert traffic.written_values == 3 * size + 2 * n_rows
    assert traffic.written_indices == n_rows
    assert traffic.read_bytes == 4 * traffic.read_values
    assert traffic.written_bytes == 4 * traffic.written_values + 8 * n_rows
    assert traffic.bytes == traffic.read_bytes + traffic.written_bytes
    assert traffic.values == meter.naive(n_rows, n_cols)
    assert [row.name for row in traffic.rows] == ["max", "sub", "exp", "sum", "div"]


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_counts_to_its_formula(shape):
    traffic = meter.count(fused, torch.randn(shape))
    size = shape[0] * shape[1]
    assert traffic.values == (size, size, 0) == meter.fused(*shape)
    assert [(row.name, row.grid) for row in traffic.rows] == [
        ("row_softmax", (shape[0],))
    ]


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_bytes_follow_the_dtype(dtype):
    x = torch.randn(4, 100).to(dtype)
    assert meter.count(fused, x).bytes == 2 * 400 * dtype.itemsize
    assert meter.count(naive, x).read_bytes == (2000 + 8) * dtype.itemsize


def test_a_kernel_that_reads_twice_shows():
    traffic = meter.count(fused, torch.randn(6, 50), 2)
    assert traffic.values == (2 * 300, 300, 0) == meter.passes(6, 50, 2)
    assert traffic.values != meter.fused(6, 50)


def three_passes(n_rows, n_cols):
    return meter.passes(n_rows, n_cols, 3)


@pytest.mark.parametrize("formula", [meter.naive, meter.fused, three_passes])
def test_formulas_refuse_what_is_no_size(formula):
    with pytest.raises(ValueError, match="n_cols must be 0 or more, got -1"):
        formula(1, -1)
    with pytest.raises(TypeError, match="n_rows must be an int, got float"):
        formula(1.0, 1)


# ---- PyTorch's operations ------------------------------------------------------------

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.softmax(x, dim=1), (12, 12, 0)),
        (lambda x: x.clone(), (12, 12, 0)),
        (lambda x: x + x, (24, 12, 0)),
        (lambda x: 2 * x + 1, (24, 24, 0)),
        (lambda x: torch.cat([x, x[:1]]), (16, 16, 0)),
        (lambda x: x.add_(1), (12, 12, 0)),
        (lambda x: x[:, 1].mul_(2), (3, 3, 0)),
        (lambda x: x.zero_(), (0, 12, 0)),
        (lambda x: x.normal_(), (0, 12, 0)),
        (lambda x: x.copy_(torch.empty(4)), (4, 12, 0)),
        (lambda x: torch.exp(x, out=torch.empty(3, 4)), (12, 12, 0)),
        (lambda x: torch.max(x, 1, out=_max_out()), (12, 3, 3)),
        (lambda x: x.expand(5, 3, 4).sum(), (12, 1, 0)),
        (lambda x: x[:, :1].expand(3, 4).contiguous(), (3, 12, 0)),
        (lambda x: x.as_strided((3, 6), (3, 1)).sum(), (12, 1, 0)),
        (lambda x: x.t().reshape(-1), (12, 12, 0)),
        (lambda x: x.sum().item(), (13, 1, 0)),
        (lambda x: x > 3, (12, 0, 12)),
        (lambda x: torch.zeros(3), (0, 3, 0)),
    ],
)
def test_operations(function, expected):
    assert meter.count(function, X.clone()).values == expected


def _max_out():
    return torch.empty(3), torch.empty(3, dtype=torch.int64)


def test_views_allocations_and_metadata_move_nothing():
    def free(x):
        x[1:, ::2].t().unsqueeze(0).expand(4, -1, -1).detach()
        x.view(-1).reshape(2, 6)
        torch.empty(5), torch.empty_like(x), x.new_empty(3)
        torch.empty_strided((2, 2), (2, 1))
        return x.shape, x.stride(), x.is_contiguous(), x.unsqueeze_(0)

    assert meter.count(free, X.clone()).rows == ()


def test_indices_are_counted_apart_from_values():
    row = row_of(meter.count(lambda x, i: x[i], X, torch.tensor([0, 2])), "index")
    assert (row.read_values, row.read_indices) == (12, 2)
    assert row.read_bytes == 12 * 4 + 2 * 8


def test_keywords_are_passed_on():
    assert meter.count(torch.softmax, X, dim=0).values == (12, 12, 0)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="function must be callable, got Tensor"):
        meter.count(X)


# ---- Triton's launches ---------------------------------------------------------------

VIEWS = {
    "sliced": lambda: torch.randn(4, 100)[:, 10:60],
    "every other column": lambda: torch.randn(4, 100)[:, ::2],
    "transposed": lambda: torch.randn(50, 4).t(),
    "row broadcast": lambda: torch.randn(1, 50).expand(4, 50),
    "column broadcast": lambda: torch.randn(4, 1).expand(4, 50),
    "offset": lambda: torch.randn(1000)[3:203].view(4, 50),
    "overlapping": lambda: torch.randn(100).as_strided((4, 50), (7, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_right_kernels_may_touch_all_of_a_view(view):
    assert meter.count(fused, VIEWS[view]()).values == meter.fused(4, 50)


def test_a_mask_that_is_all_false_moves_nothing():
    row = row_of(meter.count(launch(load_nothing), torch.zeros(1)), "load_nothing")
    assert row == meter.Op("load_nothing", (1,))


def test_atomics_read_and_write():
    traffic = meter.count(launch(add_atomically), torch.zeros(5), 5, 8)
    assert traffic.values == (5, 5, 0)
    x = torch.zeros(3, dtype=torch.int32)
    row = row_of(meter.count(launch(swap_atomically), x, 2), "swap_atomically")
    assert (row.read_indices, row.written_indices, row.bytes) == (1, 1, 8)


def test_atomics_are_guarded():
    assert "atomic at offset 5" in fault(launch(add_atomically), torch.zeros(5), 6, 8)
    x = torch.zeros(3, dtype=torch.int32)
    assert "atomic at offset 3" in fault(launch(swap_atomically), x, 3)


def test_descriptors_are_counted_and_guarded():
    copy = launch(copy_by_descriptor, (2,))
    x = torch.randn(2, 12)
    assert meter.count(copy, torch.empty(2, 12), x, 2, 12, 16).values == (24, 24, 0)
    text = fault(copy, torch.empty(2, 12), x[:, :8], 2, 12, 16)
    assert "load at offset 8 of input_ptr" in text


def test_in_place_kernels():
    x = torch.ones(6)
    assert meter.count(launch(copy_between), x, x, 6, 8).values == (6, 6, 0)


def test_torch_and_triton_share_one_record():
    traffic = meter.count(lambda x: fused(torch.exp(x)).sum(), torch.randn(3, 5))
    assert [row.name for row in traffic.rows] == ["exp", "row_softmax", "sum"]
    assert traffic.values == (45, 31, 0)


def test_results_are_those_of_an_uncounted_run():
    def difference(x):
        y = torch.empty_like(x)
        meter.count(launch(copy_between), y, x, 6, 8)
        return (y - x).abs().max()

    assert process.call_in("interpreter", difference, torch.randn(6)) == 0


def test_an_empty_grid_moves_nothing():
    traffic = meter.count(launch(load_at, (0,)), torch.zeros(1), 0, 8)
    assert traffic.rows == (meter.Op("load_at", (0,)),)


# ---- out of bounds -------------------------------------------------------------------


def test_a_missing_mask_is_named():
    text = fault(launch(load_at, (2,)), torch.zeros(781), 0, 1024)
    assert text == (
        "load_at, program 0: load at offset 781 of input_ptr, whose last element is 780"
        "\ninput_ptr has shape (781,) and strides (1,)"
        "\n243 of 1024 elements are outside, the first is element 781"
    )


def test_a_tile_names_row_column_and_program():
    text = fault(launch(load_tile, (1, 3)), torch.zeros(5, 8), 8, 2, 8)
    assert text == (
        "load_tile, program (0, 2): load at offset 40 of input_ptr, whose last element "
        "is 39\ninput_ptr has shape (5, 8) and strides (8, 1): this would be row 5, "
        "column 0\n8 of 16 elements are outside, the first is element (1, 0)"
    )


def store_past_the_end():
    buffer = torch.zeros(16)
    with pytest.raises(meter.OutOfBounds) as caught:
        meter.count(launch(store_at), buffer[:7], 0, 8)
    return str(caught.value), buffer


def test_a_store_is_stopped_before_it_is_made():
    text, buffer = process.call_in("interpreter", store_past_the_end)
    assert "store at offset 7 of output_ptr, whose last element is 6" in text
    assert buffer.eq(0).all()


def test_an_access_that_would_kill_the_process_is_stopped():
    assert "offset 1099511627776 of" in fault(launch(load_at), torch.zeros(4), 2**40, 1)


def test_a_negative_offset():
    text = fault(launch(load_at), torch.zeros(2, 8)[1], -1, 4)
    assert "load at offset -1 of input_ptr, whose first element is 0" in text
    assert "first is element 0" in text


def test_the_neighbour_column_of_a_slice():
    text = fault(launch(load_at), torch.zeros(4, 10)[:, :7], 0, 8)
    assert "offset 7 of input_ptr, which lies between the elements of this" in text
    assert "shape (4, 7) and strides (10, 1): this would be row 0, column 7" in text


def test_the_skipped_column_of_a_transposed_view():
    text = fault(launch(load_at), torch.zeros(10, 4).t()[:, ::2], 4, 1)
    assert "shape (4, 5) and strides (1, 8): this would be row 4, column 0" in text


def test_the_gap_of_a_column_stride():
    text = fault(launch(load_at), torch.zeros(4, 10)[:, ::2], 0, 4)
    assert "offset 1 of input_ptr, which lies between the elements of this" in text
    assert "2 of 4 elements are outside, the first is element 1" in text


def test_a_gap_of_an_overlapping_view():
    windows = torch.zeros(100).as_strided((2, 2, 2), (10, 2, 2))  # 0 2 4, 10 12 14
    assert "offset 1 of" in fault(launch(load_at), windows, 0, 2)
    assert "offset 6 of" in fault(launch(load_at), windows, 6, 1)
    meter.count(launch(load_at), windows, 14, 1)


def test_a_broadcast_view_has_one_row():
    text = fault(launch(load_at), torch.zeros(8).expand(4, 8), 8, 1)
    assert "offset 8 of input_ptr, whose last element is 7" in text


def test_a_tensor_without_elements():
    for start in (0, -1):
        text = fault(launch(load_at), torch.empty(0, 3), start, 1)
        assert f"offset {start} of input_ptr, which has no elements" in text
        assert "would be row" not in text


def test_the_argument_is_the_one_the_pointer_came_from():
    halves = torch.zeros(16)
    left, right = halves[:8], halves[8:]
    text = fault(launch(copy_between), right, left, 9, 16)
    assert "load at offset 8 of input_ptr" in text
    text = fault(launch(copy_between), left, halves, 9, 16)
    assert "store at offset 8 of output_ptr" in text


def test_one_block_may_point_into_two_tensors():
    either = launch(load_from_either)
    first, second = torch.zeros(3), torch.zeros(5)
    assert meter.count(either, first, second, 3, 8).values == (8, 0, 0)
    text = fault(either, first, second, 4, 8)
    assert "offset 3 of first_ptr" in text
    assert "1 of 8 elements" in text


def test_a_pointer_of_another_type():
    x = torch.zeros(8)
    assert meter.count(launch(load_pairs), x, 4, 8).read_bytes == 32
    assert "offset 7 of input_ptr" in fault(launch(load_pairs), x[:7], 4, 8)
    text = fault(launch(load_bytes_from), x, 6)
    assert "offset 1 of input_ptr, not at the start of an element but at byte 6" in text


def test_a_number_is_no_pointer():
    text = fault(launch(load_from_number), 4096)
    assert "load at an address that no tensor argument leads to" in text


def test_a_fault_inside_a_called_function():
    text = fault(launch(load_by_helper), torch.zeros(4), 1, 4)
    assert text.startswith("load_by_helper, program 0: load at offset 4 of input_ptr")


def test_offsets_beyond_32_bits():
    span = 2**31 + 8
    x = torch.empty(1, dtype=torch.int8).expand(span)  # takes no memory
    assert "offset 8 of" in fault(launch(load_at), x, 8, 1)


def test_a_fault_crosses_from_the_helper(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    text = fault(launch(load_at), torch.zeros(781), 0, 1024)
    assert "load at offset 781 of input_ptr, whose last element is 780" in text
    assert meter.count(fused, torch.randn(2, 9)).values == meter.fused(2, 9)


# ---- counts inside counts, and what a count leaves behind ----------------------------


def test_counts_nest():
    inner = []

    def outer(x):
        y = torch.exp(x)
        inner.append(meter.count(lambda: fused(y).sum()))
        return y + 1, inner

    def nested(x):
        return meter.count(outer, x), inner[0]

    both, inside = process.call_in("interpreter", nested, torch.randn(2, 5))
    assert [row.name for row in inside.rows] == ["row_softmax", "sum"]
    assert [row.name for row in both.rows] == ["exp", "row_softmax", "sum", "add"]
    assert both.values == (10 + 20 + 10, 10 + 11 + 10, 0)


def patched() -> list:
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    return [
        interpreter._implicit_cvt,
        *(dict(vars(owner)) for owner in (builder, executor)),
    ]


def leave(function, *args):
    before = patched()
    try:
        meter.count(function, *args)
    except (meter.OutOfBounds, ZeroDivisionError) as error:
        return before == patched(), type(error)
    return before == patched(), None


def divide_by_zero():
    assert interpreter.GridExecutor.__call__.__name__ == "metered_run"
    return 1 / 0


@pytest.mark.parametrize(
    ("function", "args", "raised"),
    [
        (fused, (torch.randn(2, 3),), None),
        (divide_by_zero, (), ZeroDivisionError),
        (launch(load_at), (torch.zeros(3), 0, 4), meter.OutOfBounds),
    ],
)
def test_the_interpreter_is_as_it_was_afterwards(function, args, raised):
    assert process.call_in("interpreter", leave, function, *args) == (True, raised)


def test_a_count_after_a_fault():
    fault(launch(load_at), torch.zeros(3), 0, 4)
    assert meter.count(fused, torch.randn(2, 3)).values == meter.fused(2, 3)


def test_other_errors_of_a_kernel_stay_as_they_are():
    with pytest.raises(interpreter.InterpreterError, match="arange"):
        meter.count(launch(load_at), torch.zeros(4), 0, 3)


# ---- the table -----------------------------------------------------------------------


def test_the_table():
    traffic = meter.count(naive, torch.randn(1000, 8))
    lines = str(traffic).splitlines()
    titles = "operation", "values read", "values written", "indices written", "bytes"
    assert lines[0].split() == " ".join(titles).split()
    assert lines[1].split() == ["max", "8,000", "1,000", "1,000", "44,000"]
    assert lines[-1].split() == ["total", "42,000", "26,000", "1,000", "280,000"]
    assert len(lines) == 1 + 5 + 1
    row = "<th>max</th><td>8,000</td><td>1,000</td><td>1,000</td><td>44,000</td>"
    assert row in "".join(map(str.strip, traffic._repr_html_().splitlines()))


def test_the_table_leaves_out_indices_where_there_are_none():
    table = str(meter.count(fused, torch.randn(2, 4)))
    assert "indices" not in table
    assert "row_softmax[(2,)]" in table
