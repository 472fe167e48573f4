"""The judge of operators: inputs and results of any number, shape and dtype."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import judge
from tests.lab.test_judge import FAST, of_rows, said

SHAPES = [((3, 5), (5, 7)), ((8, 8), (8, 3))]


def test_an_operator_of_several_inputs():
    assert said(judge.operator(torch.matmul, torch.matmul, SHAPES)) == (
        "Right: matmul passes 8 inputs of 6 shapes and dtypes, in float32, float16 and "
        "bfloat16."
    )
    transposed = judge.operator(lambda a, b: a @ b * 1.5, torch.matmul, SHAPES)
    assert said(transposed).startswith(
        "With 3 × 5 and 5 × 7 (float32), element (0, 0) of the result is "
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a, b: None, "returns nothing for 3 × 5 and 5 × 7 (float32)"),
        (lambda a, b: (a @ b, a), "returns Tensor and Tensor for 3 × 5"),
        (lambda a, b: (a @ b)[0], "returns 7 values for 3 × 5 and 5 × 7 (float32)"),
        (lambda a, b: (a @ b).double(), "returns float64 for 3 × 5"),
        (lambda a, b: a.mul_(2) @ b / 2, "changes its input, 3 × 5 and 5 × 7"),
        (lambda a, b: b @ a, "fails with 3 × 5 and 5 × 7 (float32): RuntimeError"),
        (lambda a, b: torch.empty(3, 7, device=a.device), "is never written."),
    ],
)
def test_each_mistake_of_an_operator_has_its_sentence(function, words):
    assert words in said(judge.operator(function, torch.matmul, SHAPES))


def test_a_known_mistake_of_an_operator_has_its_sentence():
    known = {"Half is missing.": lambda a, b: a @ b / 2, "Never.": lambda a, b: a}
    half = judge.operator(lambda a, b: a @ b / 2, torch.matmul, SHAPES, mistakes=known)
    assert said(half).endswith(". Half is missing.")
    other = judge.operator(lambda a, b: a @ b / 3, torch.matmul, SHAPES, mistakes=known)
    assert "missing" not in said(other)


def test_integers_that_are_never_written_are_seen():
    def unwritten(x):
        return torch.empty_like(x)

    def make(seed):
        return torch.arange(3 + seed)

    wrong = judge.operator(unwritten, torch.neg, make)
    assert said(wrong).endswith("element 0 of the result is never written.")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_real_inputs_may_have_results_that_are_exact(dtype):
    def first(x):
        return x.argmax(dim=1).to(dtype)

    def next_one(x):
        return x.argmax(dim=1).add(1).to(dtype)

    def unwritten(x):
        return torch.empty(len(x), dtype=dtype, device=x.device)

    known = {"The next one.": lambda x: x.argmax(dim=1).add(1).to(dtype)}
    few = {"result": dtype, "values": judge.FINITE[:1], "name": "exact"}
    assert judge.rows(first, first, **FAST | few)
    wrong = judge.rows(next_one, first, **FAST | few, mistakes=known)
    assert said(wrong).endswith("The next one.")
    assert not judge.rows(unwritten, first, **FAST | few)
    shapes = [(3, 5), (2, 9)]
    assert judge.operator(first, first, shapes, name="exact")
    assert not judge.operator(next_one, first, shapes, name="exact")


def test_rows_of_integers_that_are_never_written_are_seen():
    def unwritten(x):
        return torch.empty(len(x), dtype=torch.int32, device=x.device)

    wrong = of_rows(unwritten, result=torch.int32)
    assert "was never written. Is there a program for every row?" in said(wrong)


def test_inputs_may_be_made():
    def make(seed):
        return torch.randn(seed + 2, 3).t(), seed

    def scaled(x, by):
        return x * by

    assert judge.operator(scaled, scaled, make)
    wrong = said(judge.operator(lambda x, by: x * 2, scaled, make))
    assert wrong.startswith("With 3 × 2 with strides (1, 3) and 0 (float32), element")


def test_one_shape_is_not_enough():
    with pytest.raises(ValueError, match="must have two shapes or more"):
        judge.operator(torch.neg, torch.neg, [(3, 5)])
    with pytest.raises(ValueError, match="more than one shape"):
        judge.operator(torch.neg, torch.neg, lambda seed: torch.randn(3))


@triton.jit
def far_kernel(output_ptr, input_ptr, row_stride, n_cols, WIDE: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, 4)
    row = row.to(tl.int64) if WIDE else row
    x = tl.load(input_ptr + row * row_stride + cols, mask=cols < n_cols, other=0)
    tl.store(output_ptr + row, tl.sum(x.to(tl.float32), axis=0))


def far_sum(x, wide=False):
    output = torch.empty(len(x), device=x.device)
    far_kernel[(len(x),)](output, x, x.stride(0), x.shape[1], WIDE=wide)
    return output


def far_rows(seed):
    """Rows that lie 2^30 elements apart, in memory that is hardly touched."""
    x = torch.empty_strided((3, 2 + seed % 2), (2**30, 1), dtype=torch.int8)
    return x.zero_()


def test_an_offset_that_overflows_is_caught_before_it_is_used():
    options = {"seeds": 2}
    right = lambda x: x.sum(dim=1).float()  # noqa: E731
    wide = lambda x: far_sum(x, wide=True)  # noqa: E731
    assert judge.operator(wide, right, far_rows, **options)
    wrong = said(judge.operator(far_sum, right, far_rows, **options))
    assert "load at offset -2147483648 of input_ptr" in wrong
    assert "An element lies at 2147483648, too large for a signed integer" in wrong
    assert wrong.endswith("Did a product overflow?")
