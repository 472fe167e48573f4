"""The checker passes what is right, and finds every kind of fault in what is wrong."""

import functools

import pytest
import torch
import triton
import triton.language as tl
from IPython.core.interactiveshell import InteractiveShell

from kernels.lab import backend, cases, check
from kernels.lab.cases import INF
from kernels.lab.check import Fault


@triton.jit
def row_kernel(
    output_ptr,
    input_ptr,
    output_row_stride,
    input_row_stride,
    input_col_stride,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    FLAW: tl.constexpr,
):
    """One program, one row; right where FLAW is empty, wrong in the way it names."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_COLS)
    mask = cols < n_cols
    padding = 0.0 if FLAW == "padding with 0" else float("-inf")
    if FLAW == "row stride ignored":
        input_row_stride = n_cols
    if FLAW == "column stride ignored":
        input_col_stride = 1
    if FLAW == "32 columns only":
        mask = cols < min(n_cols, 32)
    input_ptrs = input_ptr + row * input_row_stride + cols * input_col_stride
    if FLAW == "no mask on the load":
        x = tl.load(input_ptrs)
    else:
        x = tl.load(input_ptrs, mask=mask, other=padding)
    if FLAW == "no upcast":
        x -= tl.max(x, axis=0).to(x.dtype)
    else:
        x = x.to(tl.float32)
        if FLAW != "no maximum":
            x -= tl.max(x, axis=0)
    numerator = tl.exp(x)
    result = numerator / tl.sum(numerator, axis=0)
    if FLAW == "sums to 0.99":
        result *= 0.99
    if FLAW == "one past the row":
        mask = cols <= n_cols
    if FLAW == "no mask on the store":
        mask = cols >= 0
    if FLAW == "last column unwritten":
        mask = cols < n_cols - 1
    if FLAW == "row 0 unwritten":
        mask = cols < tl.where(row > 0, n_cols, 0)
    if FLAW == "in place":
        tl.store(input_ptrs, result, mask=mask)
    if FLAW == "before the input":
        tl.store(input_ptr - 1 - cols, result, mask=mask)
    tl.store(output_ptr + row * output_row_stride + cols, result, mask=mask)


def row_softmax(x, flaw="", allocate=torch.empty):
    output = allocate(x.shape, dtype=x.dtype, device=x.device)
    n_rows, n_cols = x.shape
    if output.numel():
        row_kernel[(n_rows,)](
            output,
            x,
            output.stride(0),
            *x.stride(),
            n_cols,
            BLOCK_COLS=triton.next_power_of_2(n_cols),
            FLAW=flaw,
        )
    return output


def torch_softmax(x):
    return torch.softmax(x, dim=1)


def eager_softmax(x):
    if x.numel() == 0:
        return torch.empty_like(x)
    largest = x.max(dim=1, keepdim=True).values
    numerator = torch.exp(x - largest)
    return numerator / numerator.sum(dim=1, keepdim=True)


# ---- right functions pass ------------------------------------------------------------


@pytest.mark.parametrize("function", [torch_softmax, eager_softmax, row_softmax])
def test_right_softmax_passes(function, capsys):
    summary = check.softmax(function)
    assert summary
    assert summary.failure is None
    assert capsys.readouterr().out == ""
    first, *others = str(summary).splitlines()
    assert first == f"{function.__name__} passes all {summary.cases} cases"
    note = any(line.startswith("The interpreter converts") for line in others)
    assert note == backend.INTERPRETED


# ---- wrong kernels, each with the fault to be found ----------------------------------

FLAWED_KERNELS = {
    "no maximum": Fault.NAN,
    "padding with 0": Fault.SUM,
    "no mask on the load": Fault.SUM,
    "row stride ignored": Fault.NAN,
    "column stride ignored": Fault.VALUE,
    "32 columns only": Fault.UNWRITTEN,
    "sums to 0.99": Fault.SUM,
    "one past the row": Fault.STRAY,
    "no mask on the store": Fault.STRAY,
    "before the input": Fault.STRAY,
    "last column unwritten": Fault.UNWRITTEN,
    "row 0 unwritten": Fault.UNWRITTEN,
    "in place": Fault.INPUT,
}


@pytest.mark.parametrize("flaw", FLAWED_KERNELS)
def test_flawed_kernel_is_caught(flaw):
    expect(functools.partial(row_softmax, flaw=flaw), FLAWED_KERNELS[flaw])


def expect(function, fault, **chosen):
    summary = check.softmax(function, **chosen)
    assert not summary
    assert summary.failure.fault == fault
    assert str(fault) in str(summary)
    return summary.failure


def test_kernel_without_upcast_is_caught():
    failure = expect(functools.partial(row_softmax, flaw="no upcast"), Fault.RAISED)
    assert failure.dtype == torch.float16


# ---- wrong functions -----------------------------------------------------------------


def sums_in_sixteen_bits(x):
    if x.numel() == 0:
        return torch.empty_like(x)
    numerator = torch.exp((x - x.amax(dim=1, keepdim=True)).float())
    total = torch.zeros_like(x[:, :1])
    for column in numerator.to(x.dtype).unbind(dim=1):
        total += column[:, None]
    return (numerator / total).to(x.dtype)


def ignores_the_offset(x):
    return torch.softmax(torch.as_strided(x, x.shape, x.stride(), 0), dim=1)


def assumes_alignment(x):
    aligned = x.storage_offset() // 4 * 4
    return torch.softmax(torch.as_strided(x, x.shape, x.stride(), aligned), dim=1)


def leaks_nan_to_the_next_row(x):
    y = torch.softmax(x, dim=1)
    y[1:] += 0 * y[:-1].sum(dim=1, keepdim=True)
    return y


def skips_rows_with_nan(x):
    y = torch.empty_like(x)
    whole = ~x.isnan().any(dim=1)
    y[whole] = torch.softmax(x[whole], dim=1)
    return y


def reads_unwritten_scratch(x):
    largest = torch.empty(len(x), 1, dtype=x.dtype, device=x.device)
    return torch.softmax(x - largest, dim=1) + largest - largest


def writes_past_zeros(x):
    y = torch.zeros_like(x)
    y.copy_(torch.softmax(x, dim=1))
    torch.as_strided(y, (1,), (1,), y.storage_offset() + y.numel()).fill_(0)
    return y


def writes_past_scratch(x):
    counter = torch.empty(1, dtype=torch.int32, device=x.device)
    torch.as_strided(counter, (2,), (1,), counter.storage_offset()).fill_(0)
    return torch.softmax(x, dim=1)


def writes_to_an_empty_output(x):
    y = torch.empty_like(x)
    if y.numel():
        return y.copy_(torch.softmax(x, dim=1))
    torch.as_strided(y, (1,), (1,), y.storage_offset()).fill_(0)
    return y


def normalises_in_place(x):
    x -= x.amax(dim=1, keepdim=True)
    return torch.softmax(x, dim=1)


def fails_on_no_columns(x):
    numerator = torch.exp(x - x.max(dim=1, keepdim=True).values)
    return numerator / numerator.sum(dim=1, keepdim=True)


def refuses_long_rows(x):
    if x.shape[1] > 1024:
        raise ValueError(f"too long: {x.shape[1]} columns")
    return torch.softmax(x, dim=1)


def only_minus_infinity_gives_zero(x):
    return torch.softmax(x, dim=1).masked_fill((x == -INF).all(1, keepdim=True), 0)


def three_eps_too_large(x):
    eps = torch.finfo(x.dtype).eps
    return (torch.softmax(x.double(), dim=1) * (1 + 3 * eps)).to(x.dtype)


def unfinished(x):
    return torch.exp(x) / ...


FLAWED_FUNCTIONS = {
    ignores_the_offset: Fault.NAN,
    assumes_alignment: Fault.NAN,
    leaks_nan_to_the_next_row: Fault.NAN,
    skips_rows_with_nan: Fault.UNWRITTEN,
    reads_unwritten_scratch: Fault.VALUE,
    writes_past_zeros: Fault.STRAY,
    writes_past_scratch: Fault.STRAY,
    writes_to_an_empty_output: Fault.STRAY,
    normalises_in_place: Fault.INPUT,
    fails_on_no_columns: Fault.RAISED,
    refuses_long_rows: Fault.RAISED,
    only_minus_infinity_gives_zero: Fault.NOT_NAN,
    lambda x: torch.softmax(x, dim=1).nan_to_num(0): Fault.NOT_NAN,
    lambda x: torch.softmax(x.nan_to_num(0, INF, -INF), dim=1): Fault.NOT_NAN,
    lambda x: torch.softmax(x, dim=0): Fault.VALUE,
    lambda x: x: Fault.ALIAS,
    lambda x: x.view(x.shape): Fault.ALIAS,
    lambda x: torch.softmax(x.float(), dim=1): Fault.DTYPE,
    lambda x: torch.softmax(x, dim=1)[None]: Fault.SHAPE,
    lambda x: torch.softmax(x, dim=1).to("meta"): Fault.DEVICE,
    lambda x: None: Fault.NO_TENSOR,
    unfinished: Fault.UNFINISHED,
}


@pytest.mark.parametrize("function", FLAWED_FUNCTIONS, ids=lambda f: f.__name__)
def test_flawed_function_is_caught(function):
    expect(function, FLAWED_FUNCTIONS[function])


def test_sum_in_sixteen_bits_is_caught():
    failure = expect(sums_in_sixteen_bits, Fault.SUM)
    assert failure.dtype != torch.float32


def test_bias_within_each_value_s_tolerance_is_caught_in_the_sum():
    failure = expect(three_eps_too_large, Fault.SUM, dtypes=[torch.float16])
    assert failure.got == pytest.approx(
        1 + 3 * torch.finfo(torch.float16).eps, abs=5e-4
    )


def test_every_fault_has_a_test():
    assert {*FLAWED_KERNELS.values(), *FLAWED_FUNCTIONS.values()} == set(Fault)


def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


# ---- what is said --------------------------------------------------------------------


LAST_UNWRITTEN = functools.partial(row_softmax, flaw="last column unwritten")


def test_failure_is_printed_in_a_sentence(capsys):
    summary = check.softmax(LAST_UNWRITTEN)
    assert capsys.readouterr().out == (
        "Row 0 (normal) of a 13 × 10 matrix (float32) is wrong: column 9 was never\n"
        "written. Does the mask of the store leave out too much?\n"
    )
    assert repr(summary) == str(summary) == "row_softmax fails: left output unwritten"


def test_notebook_shows_a_summary_but_no_failure_twice():
    formatter = InteractiveShell.instance().display_formatter
    assert formatter.format(check.softmax(LAST_UNWRITTEN)) == ({}, {})
    shown, _ = formatter.format(check.softmax(torch_softmax, max_cols=9))
    assert "passes all" in shown["text/plain"]


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (
            functools.partial(row_softmax, flaw="no mask on the store"),
            "a write at offset 130 of the output and 5 more",
        ),
        (writes_to_an_empty_output, "a write at offset 0 of the output"),
        (refuses_long_rows, "ValueError: too long: 1025 columns"),
    ],
)
def test_words_of_a_failure(function, got):
    assert check.softmax(function).failure.got == got


def test_failure_names_the_place_in_a_view():
    summary = check.softmax(functools.partial(row_softmax, flaw="row stride ignored"))
    assert (summary.failure.layout, summary.failure.row) == ("sliced", 1)


def test_summary_names_the_function():
    class Module:
        def __call__(self, x):
            return None

    def named(function):
        return check.softmax(function).function

    assert named(functools.partial(row_softmax, flaw="in place")) == "row_softmax"
    assert named(Module()) == "Module"
    with pytest.warns((DeprecationWarning, FutureWarning)):
        assert named(torch.jit.script(increment)) == "increment"


# ---- what is tried -------------------------------------------------------------------


def seen_by(**chosen):
    """The inputs that a right softmax is given."""
    seen = []

    def softmax(x):
        seen.append(x.clone())
        return torch.softmax(x, dim=1)

    assert check.softmax(softmax, **chosen)
    return seen


def test_inputs_are_what_breaks_softmax(every_row):
    seen = seen_by()
    heights = {len(x) for x in seen}
    widths = {x.shape[1] for x in seen}
    assert {0, 1, 2, 3, 15, 16, 17, 63, cases.ROWS[-1]} <= heights
    assert {0, 1, 2, 3, 127, 128, 129, 781, 1023, 1024, 1025, 1823, 4097} <= widths
    for dtype in backend.DTYPES:
        rows = [row for x in seen if x.dtype == dtype for row in x if len(row) > 2]
        infinite = [(row == -INF).sum() / len(row) for row in rows]
        assert {0, 1} < {share.item() for share in infinite}
        assert any((row == INF).any() for row in rows)
        assert any(row.isnan().any() and not row.isnan().all() for row in rows)
        assert max(row.nan_to_num(0, 0, 0).max() for row in rows) > 1e4
        assert min(row.nan_to_num(0, 0, 0).min() for row in rows) < -1e4


def test_layouts_are_what_they_are_called():
    views = {}

    def softmax(x):
        views.setdefault(x.shape, x)
        return torch.softmax(x, dim=1)

    for layout in check.LAYOUTS:
        views.clear()
        chosen = {"layouts": [layout], "dtypes": [torch.float16], "max_cols": 129}
        assert check.softmax(softmax, **chosen)
        x = views[2, 129]
        aligned = x.data_ptr() % 16 == 0
        assert (layout, x.stride(), aligned) in {
            ("contiguous", (129, 1), True),
            ("sliced", (129 + 32, 1), True),
            ("transposed", (1, 2), True),
            ("broadcast", (0, 1), True),
            ("offset", (129, 1), False),
        }


def test_inputs_are_the_same_every_time():
    first, second = (seen_by(max_cols=64) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_columns_stop_at_the_limit_and_reach_it():
    assert max(x.shape[1] for x in seen_by(max_cols=100)) == 100
    assert max(x.shape[1] for x in seen_by(max_cols=1)) == 1


def test_dtypes_and_layouts_can_be_chosen():
    summary = check.softmax(
        torch_softmax, dtypes=[torch.float16], layouts=["transposed"], max_cols=33
    )
    assert summary.dtypes == (torch.float16,)
    assert "bfloat16" not in str(summary)
    assert "sliced" not in str(summary)


def test_compiled_functions_are_checked_as_compiled():
    calls = []

    def compiler(graph, inputs):
        def zeros(x):
            calls.append(x.shape)
            return (torch.zeros_like(x),)

        return zeros

    compiled = torch.compile(lambda x: x + 1, backend=compiler, dynamic=False)
    torch._dynamo.reset()
    assert not check.softmax(compiled)
    assert calls


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"function": 3}, TypeError, "function must be a function that .* got int"),
        ({"dtypes": [torch.float64]}, ValueError, "dtypes must be .* got .*float64"),
        ({"dtypes": []}, ValueError, r"dtypes must be .* got \(\)"),
        ({"layouts": ["diagonal"]}, ValueError, "layouts must be .* got .*diagonal"),
        ({"max_cols": 0}, ValueError, "max_cols must be at least 1 or None, got 0"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        check.softmax(**({"function": torch_softmax} | arguments))


# ---- shuffles ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distances", "lanes", "verdict"),
    [
        ((16, 8, 4, 2, 1), 32, "Right: each of the 32 lanes hears of all 32"),
        ((1, 2, 4, 8, 16), 24, "Right: each of the 24 lanes hears of all 24"),
        ((8, 4, 2, 1), 16, "Right: each of the 16 lanes"),
        ((12, 6, 3, 1), 24, "lane 0 never hears of 8 of the 24 lanes, such as lane 16"),
        ((16, 8, 4, 2), 32, "lane 0 never hears of 16 of the 32 lanes, such as lane 1"),
        ((16, 8, 4, 2, 1, 1), 32, "lane 0 hears 2 times of lane 0"),
        ((), 1, "Right: each of the 1 lanes"),
    ],
)
def test_shuffles_are_judged_in_a_sentence(distances, lanes, verdict):
    assert verdict in check.shuffles(distances, lanes)


def test_shuffles_stay_within_a_warp():
    with pytest.raises(ValueError, match="lanes must be from 1 to 32, got 33"):
        check.shuffles((1,), 33)
    with pytest.raises(ValueError, match="one of the 32 lanes, got 32"):
        check.shuffles((32,))
