"""The checker of any function of rows: right ones pass, each fault has a cause."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import check
from kernels.lab.cases import INF
from kernels.lab.check import Fault
from tests.lab.test_check import fails_on_no_columns, row_softmax, unfinished


@triton.jit
def norm_kernel(
    output_ptr, input_ptr, n_cols, FILL: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK_COLS)
    mask = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=mask, other=FILL).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_cols + 1e-6)
    tl.store(output_ptr + row * n_cols + cols, y, mask=mask)


def rms_norm(x, fill=0.0):
    output = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    norm_kernel[(len(x),)](output, x, x.shape[1], FILL=fill, BLOCK_COLS=block)
    return output


def right_norm(x):
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)


def test_right_norm_passes():
    assert check.rows(rms_norm, right_norm, layouts=["contiguous"])


@pytest.mark.parametrize(
    ("function", "layouts", "fault", "words"),
    [
        (
            functools.partial(rms_norm, fill=-INF),
            ["contiguous"],
            Fault.VALUE,
            "of which the last 6 hold -inf. Masked elements took part.",
        ),
        (
            functools.partial(rms_norm, fill=1.0),
            ["contiguous"],
            Fault.VALUE,
            "is wrong: column 0 is",
        ),
        (rms_norm, list(check.LAYOUTS), Fault.NAN, "x.stride(0) elements: 42 here"),
        (unfinished, ["sliced"], Fault.UNFINISHED, "Not yet: line 2 of unfinished"),
        (fails_on_no_columns, ["sliced"], Fault.VALUE, "column 0 is 0.0323"),
        (lambda x: x[13], ["sliced"], Fault.RAISED, "IndexError: index 13 is out"),
    ],
)
def test_wrong_norm_gets_a_sentence(function, layouts, fault, words, capsys):
    summary = check.rows(function, right_norm, layouts=layouts)
    assert summary.failure.fault is fault
    assert words in " ".join(capsys.readouterr().out.split())


def test_what_earlier_rows_deny_is_no_cause(capsys):
    # Squares overflow in float16. A masked -inf would give zeros in the first row, too.
    check.rows(right_norm, right_norm, layouts=["contiguous"], dtypes=[torch.float16])
    said = " ".join(capsys.readouterr().out.split())
    assert "(shifted by +1e4)" in said and "column 0 is 0, not" in said
    assert "Masked elements" not in said


def log_softmax(x):
    return torch.log_softmax(x, dim=1)


def overflowing_log_softmax(x):
    return x - x.float().exp().sum(dim=1, keepdim=True).log().to(x.dtype)


@triton.jit
def one_place_kernel(output_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    places = input_ptr + row * n_cols + cols
    x = tl.load(places, mask=cols < n_cols, other=0).to(tl.float32)
    is_last = row == tl.num_programs(0) - 1  # on a GPU too
    tl.store(output_ptr, tl.sum(x, axis=0), mask=is_last)


def sum_in_one_place(x):
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    one_place_kernel[(len(x),)](output, x, x.shape[1], BLOCK=block)
    return output


ONE_LAYOUT = {"layouts": ["contiguous"], "max_cols": 10}


def test_rows_that_are_never_written_go_before_one_that_is_spoilt(capsys):
    failure = check.rows(sum_in_one_place, lambda x: x.sum(1), **ONE_LAYOUT).failure
    assert (failure.fault, failure.row) == (Fault.UNWRITTEN, 1)
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "never written. Is there a program for every row? Does each store at its own "
        "place?"
    )
    first = functools.partial(row_softmax, flaw="row 0 unwritten")
    assert "own place" not in check.softmax(first, **ONE_LAYOUT).failure.cause


def sum_of_squares(x):
    return x.float().square().sum(dim=1).to(x.dtype)


def exact_sum_of_squares(x):
    return x.square().sum(dim=1)


def test_rows_may_become_scalars_and_infinities():
    assert check.rows(log_softmax, log_softmax, max_cols=65)
    assert check.rows(sum_of_squares, exact_sum_of_squares, max_cols=65)
    assert not check.rows(overflowing_log_softmax, log_softmax, max_cols=65)
    wrong_shape = check.rows(log_softmax, exact_sum_of_squares).failure
    assert (wrong_shape.got, wrong_shape.expected) == ("13 × 10", "13")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fifth_too_much_is_seen_in_16_bits(dtype):
    def doubled(x):
        return 2 * x

    low = {"dtypes": [dtype], "layouts": ["contiguous"], "max_cols": 9}
    assert check.rows(doubled, doubled, **low)
    assert not check.rows(lambda x: 2.4 * x, doubled, **low)


def test_every_matrix_of_rows_has_numbers_of_its_own():
    seen = []
    assert check.rows(lambda x: seen.append(x[:1].clone()) or 2 * x, lambda x: 2 * x)
    alike = [x for x in seen if x.numel() and torch.equal(x, seen[0])]
    assert len(alike) == 1
    assert {0, 1} < {x.numel() for x in seen}
