"""What is missing, raised or wrong: each has its sentence."""

import functools

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, check, compile, verdict
from tests.helpers import TRITON
from tests.lab.test_check import refuses_long_rows, row_softmax


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


def exp(x): ...


def calls_a_method(x):
    return x.exp() + torch.exp(x)  # neither is the function of this module


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
        (calls_a_method, None),
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


@triton.jit
def filled_kernel(output_ptr, input_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(input_ptr + cols)
    tl.store(output_ptr + cols, tl.where(cols < 2, x, -float("inf")))


@pytest.mark.skipif(not backend.INTERPRETED, reason="is about the interpreter")
def test_numbers_that_the_interpreter_lacks_are_explained():
    x = torch.zeros(4, dtype=torch.bfloat16)
    try:
        filled_kernel[(1,)](x.clone(), x, BLOCK=4)
    except Exception as error:
        words = verdict.raised(error, filled_kernel)
        assert "interpreter lacks numbers in bfloat16" in words
        assert words.endswith("`.to(tl.float32)`")
    else:
        assert TRITON >= (3, 9)


@triton.jit
def zero_kernel(output_ptr, BLOCK: tl.constexpr):
    tl.store(output_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))


def test_a_grid_that_is_no_tuple_is_explained(capsys):
    def launch(x):
        zero_kernel[4](x, BLOCK=8)

    def measures(x):
        return len(4)

    tuples = "`zero_kernel[4](x, BLOCK=8)`. The grid is a tuple: `kernel[(n,)](…)`."
    assert tuples in said(launch, capsys)
    assert said(measures, capsys).endswith("no len(), in the line `return len(4)`.")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (nameless_kernel, "NameError('nowhere is not defined'), in the line `y = tl."),
        (ragged_kernel, "index 0: 8 and 16, in the line `y = tl.arange(0, BLOCK)"),
    ],
)
def test_compilers_error_names_the_kernels_line(kernel, words):
    with pytest.raises(triton.CompilationError) as raised:
        compile.aot(kernel, compile.pointer(torch.float32), BLOCK=8)
    said = verdict.raised(raised.value, kernel)
    said = said.replace("16'), in", "16, in")  # as before Triton 3.9
    assert said.startswith("CompilationError: ") and words in said


@pytest.mark.parametrize(
    ("got", "expected", "texts"),
    [
        (1.5, 2.0, ("1.5", "2")),
        (1.0000011, 1.0, ("1.000001", "1")),
        (0.5, 0.5, ("0.5", "0.5")),
        ("inf values", 1.0, ("inf values", "1")),
    ],
)
def test_numbers_that_differ_look_different(got, expected, texts):
    assert verdict.told_apart(got, expected) == texts


def test_exception_without_words():
    def silent(x):
        raise RuntimeError

    assert verdict.raised(RuntimeError(), silent) == "RuntimeError"


# ---- words ---------------------------------------------------------------------------


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
