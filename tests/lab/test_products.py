"""The checker of products: right functions pass, each wrong one is caught and named."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, products

DTYPES = products.DTYPES


def right(a, b):
    return (a.double() @ b.double()).to(a.dtype)


def relu(product):
    return product.clamp(min=0)


def test_a_right_product_passes():
    verdict = products.check(right)
    assert verdict and verdict.failure is None
    assert repr(verdict).startswith(f"Right in all {verdict.cases} cases")


def test_a_right_activation_passes_and_a_missing_one_does_not():
    assert products.check(lambda a, b: relu(right(a, b)), activation=relu)
    assert not products.check(right, activation=relu)


def test_softmax_is_judged_where_the_function_takes_it():
    def softmax(product):
        return product.softmax(1)

    widths = set()

    def function(a, b):
        widths.add(b.shape[1])
        return softmax(a.double() @ b.double()).to(a.dtype)

    assert products.check(function, activation=softmax, max_cols=64)
    assert max(widths) == 64


def test_sums_in_the_dtype_itself_are_too_coarse():
    def coarse(a, b):
        total = torch.zeros(len(a), b.shape[1], dtype=a.dtype, device=a.device)
        for i in range(a.shape[1]):
            total += a[:, i : i + 1] * b[i]
        return total

    assert "elements are wrong" in products.check(coarse).failure


def unaligned_only(wrong):
    """Right where 16 divides all sizes, else the wrong function."""

    def function(a, b):
        whole = not any(size % 16 for size in (*a.shape, b.shape[1]))
        return right(a, b) if whole else wrong(a, b)

    return function


def beyond_the_edge(a, b):
    """Takes one row more of B, which is NaN, with a 0 of A."""
    wider = torch.cat([a, torch.zeros_like(a[:, :1])], dim=1)
    return right(wider, b.as_strided((len(b) + 1, b.shape[1]), b.stride()))


def beside_the_result(a, b):
    output = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    output.copy_(right(a, b))
    output.as_strided((1,), (1,), output.storage_offset() + output.numel()).fill_(1)
    return output


def into_the_operand(a, b):
    a.mul_(2)
    return right(a, b)


def raising(a, b):
    raise RuntimeError("out of resource")


def not_stored(a, b):
    output = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
    output[:-1] = right(a, b)[:-1]
    return output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (beyond_the_edge, r"is nan.*lies NaN: a block was read past an edge"),
        (beside_the_result, "writes outside its result, at offset 256"),
        (into_the_operand, "writes to A or beside it"),
        (raising, "raises RuntimeError: out of resource"),
        (not_stored, "nothing was stored there"),
        (lambda a, b: right(a, b)[:, 1:], r"shape is \(16, 15\); \(16, 16\) is right"),
        (lambda a, b: right(a, b).float(), "dtype is torch.float32"),
        (lambda a, b: None, "returns no tensor: NoneType"),
        (lambda a, b: right(a[:, :16], b[:16]), "elements are wrong"),
    ],
)
def test_a_wrong_product_is_caught_and_named(wrong, words):
    verdict = products.check(unaligned_only(wrong), dtypes=[torch.float16])
    assert not verdict
    assert repr(verdict).startswith("Not yet. With A of 16 × 1")
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(" ".join(repr(verdict).split()))


def test_every_dtype_and_layout_is_tried():
    seen = set()

    def function(a, b):
        seen.add((a.dtype, a.stride(1) == 1, b.stride(1) == 1, a.storage_offset() % 8))
        return right(a, b)

    assert products.check(function, dtypes=DTYPES)
    for dtype in DTYPES:
        ways = {(rows, cols) for kind, rows, cols, _ in seen if kind == dtype}
        assert {(True, True), (False, True), (True, False)} <= ways
        assert any(start for kind, *_, start in seen if kind == dtype)


def test_a_product_that_is_still_to_be_written():
    def stub(a, b):
        return ...

    said = 'Not yet. Line 2 of stub still has "..." in it.'
    assert repr(products.check(stub)) == said


def test_what_is_no_function_is_named():
    with pytest.raises(TypeError, match=r"function must be callable.*got int"):
        products.check(3)


@triton.jit
def each_kernel(c_ptr, a_ptr, b_ptr, m, n, k, BLOCK: tl.constexpr):
    """One program stores its place in the grid in each element of its tile."""
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    place = 100 * tl.program_id(1) + tl.program_id(0) + 0.0 * (rows + cols) + k
    tl.store(c_ptr + rows * n + cols, place, mask=(rows < m) & (cols < n))


def test_a_kernel_is_launched_with_a_program_for_each_tile():
    multiply = products.launched(each_kernel, block=16)
    c = multiply(ones(40, 3), ones(3, 20))
    wanted = 3 + 100 * (torch.arange(40) // 16)[:, None] + torch.arange(20) // 16
    assert torch.equal(c.cpu(), wanted.half())
    assert multiply(ones(0, 3), ones(3, 20)).shape == (0, 20)
    with pytest.raises(ValueError, match="b must have as many rows"):
        multiply(ones(2, 3), ones(2, 3))


# ---- the operands --------------------------------------------------------------------


def ones(*shape, dtype=torch.float16):
    return torch.ones(shape, dtype=dtype, device=backend.DEVICE)


@pytest.mark.parametrize(
    ("a", "b", "error", "words"),
    [
        ([[1.0]], ones(1, 1), TypeError, r"a must be a torch\.Tensor, got list"),
        (ones(1, 1), None, TypeError, r"b must be a torch\.Tensor, got NoneType"),
        (
            ones(2, 2, dtype=torch.float32),
            ones(2, 2),
            TypeError,
            r"a must be float16 or bfloat16, got torch\.float32; convert",
        ),
        (ones(2, 2), ones(2, 2, dtype=torch.bfloat16), TypeError, "b must have a's"),
        (ones(2), ones(2, 2), ValueError, r"a must have 2 dimensions.*\(2,\)"),
        (ones(2, 2), ones(1, 2, 2), ValueError, "b must have 2 dimensions.*bmm"),
        (ones(2, 3), ones(2, 3), ValueError, r"b must have as many rows.* 3, got"),
        (
            torch.ones(2, 2, dtype=torch.float16, device="meta"),
            ones(2, 2),
            ValueError,
            r"a must be on .*got a tensor on 'meta'",
        ),
        (
            ones(1, 1).expand(1, products.MAX_SIZE + 1),
            ones(1, 1),
            ValueError,
            "a must have at most",
        ),
    ],
)
def test_operands_that_do_not_fit_are_named(a, b, error, words):
    with pytest.raises(error, match=words):
        products.validate(a, b)


def test_operands_that_fit_pass():
    for dtype in DTYPES:
        for shapes in (((2, 3), (3, 4)), ((0, 3), (3, 0)), ((2, 0), (0, 2))):
            assert products.validate(*(ones(*s, dtype=dtype) for s in shapes)) is None
