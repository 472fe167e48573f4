"""Each sentence of the checker is earned by a function that deserves it."""

import functools
import math

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import check, compile, verdict
from kernels.lab.cases import FINITE
from tests.lab.test_check import (
    FLAWED_KERNELS,
    ignores_the_offset,
    refuses_long_rows,
    row_softmax,
)


def said(function, capsys, **chosen) -> str:
    """What is printed of a function, in one line."""
    assert not check.softmax(function, **chosen)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return " ".join(out.split())


# ---- what is still to be written -----------------------------------------------------


@triton.jit
def helper(x):
    return ...


@triton.jit
def stub_kernel(output_ptr, input_ptr, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + cols, mask=cols < n_cols, other=...)
    tl.store(output_ptr + cols, x, mask=cols < n_cols)


@triton.jit
def calling_kernel(output_ptr, BLOCK: tl.constexpr):
    tl.store(output_ptr + tl.arange(0, BLOCK), helper(1))


def stub(x):
    output = torch.empty_like(x)
    stub_kernel[(len(x),)](output, x, x.shape[1], BLOCK=16)
    return output


def calls_a_helper(x):
    calling_kernel[(1,)](x, BLOCK=16)


def passed_on(x, kernel):
    return kernel[(1,)](x)


def of_a_closure():
    kernel = stub_kernel
    return lambda x: kernel[(1,)](x)


def calls_python(x):
    return written_later(x)


def written_later(x):
    """Exponentials, as in "..."; these dots are no gap."""
    ...
    return x[..., None]


def complete(x: tuple[int, ...]):
    return x[..., 0]  # nothing is missing here: ...


tuned_kernel = triton.autotune([triton.Config({"BLOCK": 16})], key=[])(stub_kernel)


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (stub, ("stub_kernel", 3)),
        (calls_a_helper, ("helper", 2)),
        (functools.partial(passed_on, kernel=stub_kernel), ("stub_kernel", 3)),
        (of_a_closure(), ("stub_kernel", 3)),
        (calls_python, ("written_later", 3)),
        (lambda x: tuned_kernel[(1,)](x), ("stub_kernel", 3)),
        (stub_kernel, ("stub_kernel", 3)),
        (complete, None),
        (row_softmax, None),
        (torch.softmax, None),
        (torch.nn.Softmax(dim=1), None),
    ],
)
def test_dots_are_found_in_what_a_function_names(function, place):
    assert verdict.unfinished(function) == place


def test_dots_are_found_before_anything_runs(capsys):
    def stops(x):
        raise KeyboardInterrupt(...)

    words = 'Not yet: line {} of {} still has "..." in it.'
    assert said(stub, capsys) == words.format(3, "stub_kernel")
    assert said(stops, capsys) == words.format(2, "stops")


# ---- what was raised -----------------------------------------------------------------


@triton.jit
def nameless_kernel(output_ptr, BLOCK: tl.constexpr):
    y = tl.exp(nowhere)  # noqa: F821
    tl.store(output_ptr + tl.arange(0, BLOCK), y)


@triton.jit
def ragged_kernel(output_ptr, BLOCK: tl.constexpr):
    y = tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(output_ptr + tl.arange(0, BLOCK), y)


def launches(kernel, *arguments, **constants):
    def launch(x):
        kernel[(1,)](x, *arguments, **constants)

    return launch


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (launches(nameless_kernel, BLOCK=8), "`y = tl.exp(nowhere) # noqa: F821`."),
        (launches(nameless_kernel, BLOCK=8), "launch fails with a 13 × 10 matrix"),
        (launches(ragged_kernel, BLOCK=8), "incompatible dimensions at index 0: 8"),
        (launches(ragged_kernel, BLOCK=7), "range must be a power of 2, in the line `"),
        (launches(ragged_kernel), "TypeError: "),
        (lambda x: x[13], "IndexError: index 13 is out of bounds for dimension 0"),
        (lambda x: x.softmaxed(), "AttributeError: "),
        (lambda: 0, "TypeError: "),
        (refuses_long_rows, "(float32): ValueError: too long: 1025 columns."),
    ],
)
def test_exception_becomes_a_sentence(function, words, capsys):
    assert words in said(function, capsys, max_cols=2000)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (nameless_kernel, "NameError('nowhere is not defined'), in the line `y = tl."),
        (ragged_kernel, "index 0: 8 and 16'), in the line `y = tl.arange(0, BLOCK)"),
    ],
)
def test_compilers_error_names_the_kernels_line(kernel, words):
    with pytest.raises(triton.CompilationError) as raised:
        compile.aot(kernel, compile.pointer(torch.float32), BLOCK=8)
    said = verdict.raised(raised.value, kernel)
    assert said.startswith("CompilationError: ") and words in said


def test_exception_without_words():
    def silent(x):
        raise RuntimeError

    assert verdict.raised(RuntimeError(), silent) == "RuntimeError"


# ---- what went wrong in a row --------------------------------------------------------


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
    "padding with 0": "held 0, and exp(0 - maximum) is above 0. Which value has",
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
    evidence = verdict.Evidence(
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
    said = verdict.cause(evidence, lambda x: torch.softmax(x, 1), softmax=True)
    assert words in said and said.startswith("NaN lies around the matrix")


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


def test_one_maximum_is_found_by_the_checker(capsys):
    assert "or have all rows one maximum?" in said(one_maximum, capsys)


def test_zero_that_wins_the_maximum_of_negative_numbers_is_named(capsys):
    words = said(flaw("padding with 0"), capsys, max_cols=3, layouts=["broadcast"])
    assert "Row 0" in words and "its values sum to" in words
    evidence = verdict.Evidence(
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
    said_of = verdict.cause(evidence, lambda x: torch.softmax(x, 1), softmax=True)
    assert said_of == (
        "A masked element took part in the maximum and in the sum, as 0. Which value "
        "never wins a maximum?"
    )


@pytest.mark.parametrize(("n_rows", "words"), [(8, "an 8 ×"), (13, "a 13 ×")])
def test_a_matrix_has_its_article(n_rows, words):
    where = {"shape": (n_rows, 3), "dtype": torch.float32, "layout": "contiguous"}
    failure = verdict.Failure("f", verdict.Fault.INPUT, **where)
    assert failure.sentence.startswith(f"f changes its input, {words} 3 matrix")


@pytest.mark.parametrize(
    ("words", "said"),
    [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")],
)
def test_words_are_listed(words, said):
    assert verdict.listed(words) == said


def test_a_sentence_is_wrapped_and_no_word_is_cut():
    long = "x" * 100
    assert verdict.wrapped(f"one  two\n{long}") == f"one two\n{long}"
