"""The likely cause is named where a function has it, and not where it cannot be."""

import functools
import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import causes, check
from kernels.lab.cases import FINITE
from tests.lab.test_check import FLAWED_KERNELS, ignores_the_offset, row_softmax
from tests.lab.test_verdict import said


def flaw(name):
    return functools.partial(row_softmax, flaw=name)


@triton.jit
def zero_maximum_kernel(output_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=mask, other=0).to(tl.float32)
    numerator = tl.where(mask, tl.exp(x - tl.max(x, axis=0)), 0)
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=mask)


def zero_maximum(x):
    output = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        zero_maximum_kernel[(len(x),)](output, x, x.shape[1], BLOCK=block)
    return output


def negative(function):
    """The function's softmax of the same rows, all values below 0."""

    def shifted(x):
        largest = x.nan_to_num(0, 0, 0).amax() if x.numel() else 0
        return function(x - largest - 1)

    return shifted


def numerators(x):
    return torch.exp(x.float() - x.float().amax(1, keepdim=True)).to(x.dtype)


def distances(x):
    return x - x.amax(1, keepdim=True)


CAUSES = {
    "no maximum": "inf/inf is NaN. Was the row's maximum subtracted",
    "padding with 0": "sum, as 0, and exp(0 - maximum) is above 0. Which value has",
    "no mask on the load": "The 6 elements after the row took part. A block of 16",
    "row stride ignored": "row to the next it is x.stride(0) elements: 42 here, not 10",
    "column stride ignored": "it is x.stride(1) elements: 13 here, not 1.",
    "32 columns only": "All columns from 32 on are lost. Does the block have 32",
    "one past the row": "at offset 130 of the output, which is outside. Does every",
    "last column unwritten": "column 9 was never written. Does the mask of the store",
    "row 0 unwritten": "Is there a program for every row?",
    "sums to 0.99": "is wrong: its values sum to 0.99, not to 1.",
    "in place": "row_softmax changes its input, a 13 × 10 matrix (float32).",
}


@pytest.mark.parametrize("name", CAUSES)
def test_likely_cause_is_named(name, capsys):
    assert name in FLAWED_KERNELS
    assert CAUSES[name] in said(flaw(name), capsys)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (zero_maximum, "Row 4 (shifted by -1e4) of a 13 × 10 matrix"),
        (zero_maximum, "A masked element that holds 0 may have won the maximum."),
        (numerators, "That is exp(x - maximum). Was it divided by the row's sum?"),
        (distances, "That is x - maximum. Was the exponential taken?"),
        (ignores_the_offset, "and another row holds NaN: was something outside"),
    ],
)
def test_other_causes_are_named(function, words, capsys):
    assert words in said(function, capsys, max_cols=10)


@triton.jit
def filled_kernel(
    output_ptr, input_ptr, n_cols, FILL: tl.constexpr, BLOCK: tl.constexpr
):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(input_ptr + row * n_cols + cols, mask=mask, other=FILL).to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(output_ptr + row * n_cols + cols, y, mask=mask)


def filled(x, fill):
    output = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        filled_kernel[(len(x),)](output, x, x.shape[1], FILL=fill, BLOCK=block)
    return output


FINITE_MAXIMUM = "Does a masked element hold a finite number? It is then the maximum"
HOLDS_NAN = "does a masked element hold ∞ or NaN, as it may without `other`?"


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (math.inf, HOLDS_NAN),
        (math.nan, HOLDS_NAN),
        (-1e9, FINITE_MAXIMUM),
        (-1e30, FINITE_MAXIMUM),
    ],
)
def test_what_masked_elements_hold_is_asked(fill, words, capsys):
    function = functools.partial(filled, fill=fill)
    assert words in said(function, capsys, max_cols=10, layouts=["contiguous"])


def test_a_row_that_fills_its_block_has_no_masked_elements(capsys):
    width = {"max_cols": 8, "layouts": ["contiguous"]}
    assert "masked" not in said(one_maximum, capsys, **width)
    zeros = said(lambda x: torch.softmax(x, dim=1).nan_to_num(0), capsys, **width)
    assert "(only -inf)" in zeros and "masked" not in zeros


def minus_smallest(x):
    if not x.numel():
        return torch.empty_like(x)
    numerator = (x - x.amin(1, keepdim=True)).exp()
    return numerator / numerator.sum(1, keepdim=True)


def test_something_smaller_than_the_maximum_is_named(capsys):
    words = said(minus_smallest, capsys, dtypes=[torch.float32])
    assert "(ramp from 0 to -100)" in words
    assert words.endswith(
        "The exponential of 100 is infinite. Was something smaller than the row's "
        "maximum subtracted?"
    )


def sums_of_columns(x):
    if not x.numel():
        return torch.empty_like(x)
    numerator = (x - x.amax(1, keepdim=True)).exp()
    return numerator / numerator.sum(dim=0)


def maxima_of_columns(x):
    if not x.numel():
        return torch.empty_like(x)
    numerator = (x - x.amax(dim=0)).exp()
    return numerator / numerator.sum(1, keepdim=True)


@pytest.mark.parametrize("function", [sums_of_columns, maxima_of_columns])
def test_what_runs_over_several_rows_is_named(function, capsys):
    words = said(function, capsys, dtypes=[torch.float32])
    assert "Row 0 (normal)" in words
    assert "or does a maximum or a sum run over several rows?" in words


def one_maximum(x):
    return (x - x.max()).exp() / (x - x.max()).exp().sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 2], [math.nan, 0]], "and another row holds NaN: was something"),
        ([[1, 2], [math.inf, 0]], "and another row holds inf: was something"),
        ([[1, 2], [900, 0]], "and another row holds 900: was something"),
        ([[1, 2], [70, 0]], "NaN lies around the matrix: was something"),
    ],
)
def test_one_maximum_for_all_rows_is_named(rows, words):
    x = torch.tensor(rows, dtype=torch.float64)
    evidence = causes.Evidence(
        memory=x.flatten(),
        start=0,
        strides=(2, 1),
        size=(2, 2),
        row=0,
        got=torch.full((2,), math.nan).double(),
        expected=torch.softmax(x[0], 0),
        dtype=torch.float32,
        unwritten=torch.zeros(2, dtype=torch.bool),
    )
    cause = causes.cause(evidence, lambda x: torch.softmax(x, 1), softmax=True)
    assert words in cause and cause.startswith("NaN lies around the matrix")


def test_a_mask_that_hides_all_but_one_column_is_no_short_block(capsys):
    def first_only(x):
        output = torch.empty_like(x)
        output[:, :1] = torch.softmax(x, dim=1)[:, :1]
        return output

    words = said(first_only, capsys)
    assert "Does the mask of the store leave out too much?" in words


def test_nan_may_also_be_made(capsys):
    check.rows(lambda x: x * torch.nan, lambda x: x)
    words = " ".join(capsys.readouterr().out.split())
    assert "Or does a line make NaN, as 0/0 does?" in words
    assert words.endswith("take part, in a load without `other`?")


@pytest.mark.parametrize(
    ("scale", "found", "named"),
    [
        (1, causes.UNDEFINED, True),  # won a maximum
        (1, 2 * causes.UNDEFINED, True),  # of a range
        (1, 20_000.0, False),
        (1e5, causes.UNDEFINED, False),  # no more than x holds
    ],
)
def test_an_undefined_element_is_named_where_nothing_is_as_large(
    scale, found, named, capsys
):
    def large(x):
        return torch.full((len(x),), found, device=x.device)

    options = {"dtypes": [torch.float32], "values": FINITE, "result": torch.float32}
    check.rows(large, lambda x: scale * (x.amax(1) + 1), **options)
    words = " ".join(capsys.readouterr().out.split())
    assert words.endswith("in a load without `other`?") == named, words


def test_a_cause_is_found_where_the_result_depends_on_the_rows_number(capsys):
    def neighbours(x):
        return x.as_strided(x.shape, (x.stride(0), 1)).tril().sum(dim=1)

    check.rows(neighbours, lambda x: x.tril().sum(dim=1), layouts=["transposed"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Row 1" in words and "The kernel took neighbours in memory." in words


@pytest.mark.parametrize(
    ("divisor", "named"), [(lambda x: x.norm(), False), (lambda x: torch.inf, True)]
)
def test_small_values_are_not_taken_for_zeros(divisor, named, capsys):
    unit = functools.partial(torch.nn.functional.normalize, dim=1)
    kinds = {"layouts": ["contiguous"], "values": FINITE}
    check.rows(lambda x: x / divisor(x), unit, **kinds)
    words = " ".join(capsys.readouterr().out.split())
    assert "is wrong" in words and ("hold -inf" in words) == named


def test_a_neighbour_is_not_blamed_for_a_value_that_is_near_its_own(capsys):
    """The maximum of row 4 is 0, which is not far from the next row's first values."""

    def from_zero(x):
        return x.amax(1).clamp(min=0) - x.amin(1)

    kinds = {"layouts": ["contiguous"], "values": FINITE}
    check.rows(from_zero, lambda x: x.amax(1) - x.amin(1), **kinds)
    words = " ".join(capsys.readouterr().out.split())
    assert "Row 4" in words and words.endswith("is 10007, not 24.916.")


def test_one_maximum_is_found_by_the_checker(capsys):
    words = said(one_maximum, capsys)
    assert "or does a maximum or a sum run over several rows?" in words


def test_zero_that_wins_the_maximum_of_negative_numbers_is_named(capsys):
    words = said(flaw("padding with 0"), capsys, max_cols=3, layouts=["broadcast"])
    assert "Row 0" in words and "its values sum to" in words
    evidence = causes.Evidence(
        memory=torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64),
        start=0,
        strides=(3, 1),
        size=(1, 3),
        row=0,
        got=torch.softmax(torch.tensor([-1.0, -2, -3, 0]).double(), 0)[:3],
        expected=torch.softmax(torch.tensor([-1.0, -2, -3]).double(), 0),
        dtype=torch.float32,
        unwritten=torch.zeros(3, dtype=torch.bool),
    )
    cause = causes.cause(evidence, lambda x: torch.softmax(x, 1), softmax=True)
    assert cause == (
        "A masked element took part in the maximum and in the sum, as 0. Which value "
        "never wins a maximum?"
    )
