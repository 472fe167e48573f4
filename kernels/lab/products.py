"""Matrix products: what their operands must be, and a checker of their results.

`check` tries a function of two matrices on plain and on ragged shapes, and compares
with the product in float64. It stops at the first case that goes wrong and says what it
found. The same traps are set as in `check.softmax`: the operands lie in NaN, and the
result in poison, inside larger buffers. So a block that reaches over an edge shows.

Weighed: `torch.testing.assert_close`, which needs one tolerance for all K, and does not
know which shapes to try.
"""

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.lab import backend, description
from kernels.lab.guards import POISON, GuardAllocations, Guarded
from kernels.lab.verdict import raised, unfinished

DTYPES = (torch.float16, torch.bfloat16)
MAX_SIZE = 2**30
"""A size plus the size of a block must fit 32 bits."""
SIZES = (  # M, N, K: whole tiles, then ragged, then empty
    *((16, 16, 16), (32, 48, 64), (64, 64, 128)),
    *((16, 16, 17), (16, 17, 16), (17, 16, 16), (1, 1, 1), (5, 7, 9), (33, 47, 65)),
    *((100, 40, 72), (3, 130, 31), (4, 5, 0), (0, 5, 4), (5, 0, 4)),
)
LAYOUTS = ("contiguous", "transposed A", "transposed B", "sliced")
ROUNDINGS = 4
"""Allowed error of a float32 sum of K products, in sqrt(K) roundings of its terms."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Reference = Callable[[torch.Tensor], torch.Tensor]


def validate(a: torch.Tensor, b: torch.Tensor, softmax_cols: int | None = None) -> None:
    """Checks the operands of a product.

    Args:
        a, b: what the caller passed; should be (M, K) and (K, N), of one of DTYPES.
        softmax_cols: the largest N for a softmax in the same kernel; None if there is
            no softmax.

    Raises:
        TypeError: an operand is no tensor, or of another dtype.
        ValueError: an operand is no matrix, too large, or not where kernels run; or the
            two do not fit together.
        RuntimeError: as `backend.validate`.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float16 or bfloat16, got {x.dtype}; convert it with "
                f"{name}.bfloat16()"
            )
        if x.ndim != 2:
            raise ValueError(
                f"{name} must have 2 dimensions, got shape {tuple(x.shape)}; torch.bmm "
                "multiplies batches of matrices"
            )
        if x.device.type != backend.DEVICE:
            raise ValueError(description.elsewhere(x, name))
        if max(x.shape) > MAX_SIZE:
            raise ValueError(
                f"{name} must have at most {MAX_SIZE} rows and columns, got "
                f"{tuple(x.shape)}; the product of its parts can be taken"
            )
    if a.dtype != b.dtype:
        raise TypeError(
            f"b must have a's dtype, {a.dtype}, got {b.dtype}; convert it with "
            "b.to(a.dtype)"
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"b must have as many rows as a has columns, {a.shape[1]}, got "
            f"{tuple(b.shape)}; b.t() swaps rows and columns"
        )
    if softmax_cols is not None and b.shape[1] > softmax_cols:
        raise ValueError(
            f"b must have at most {softmax_cols} columns for a softmax in the same "
            f"kernel, got {b.shape[1]}; call torch.softmax on the product"
        )
    if backend.INTERPRETED:
        description.require_interpreter()


def launched(kernel: Any, block: int = 16) -> Product:
    """A function of two matrices that launches a kernel, with a program for each tile.

    Args:
        kernel: takes c_ptr, a_ptr, b_ptr, m, n, k and BLOCK; the matrices are
            contiguous. The grid has the tiles of a row along its first axis, and those
            of a column along its second.
        block: the tile's rows and columns.
    """

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        validate(a, b)
        a, b = a.contiguous(), b.contiguous()
        c = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)
        if c.numel():
            grid = triton.cdiv(c.shape[1], block), triton.cdiv(len(c), block)
            kernel[grid](c, a, b, *c.shape, a.shape[1], BLOCK=block)
        return c

    return multiply


# ---- what is right -------------------------------------------------------------------


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float64."""
    return a.double() @ b.double()


def allowed(a: torch.Tensor, b: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far each element of a right result may be from `expected`, in float64.

    A sum of K products in float32 errs by about sqrt(K) roundings of the terms'
    magnitudes (Higham and Mary, 2019). Rounding the sum to the dtype errs by eps / 2;
    the interpreter truncates bfloat16, which errs by eps.

    Args:
        a, b: the operands.
        expected: the right result in float64: the product, or a function of it whose
            differences are no larger than the product's.
    """
    terms = a.double().abs() @ b.double().abs()
    summed = ROUNDINGS * math.sqrt(a.shape[1]) * 2.0**-23 * terms
    finfo = torch.finfo(a.dtype)
    spread = summed if terms.shape == expected.shape else summed.amax()
    return spread + finfo.eps * expected.abs() + finfo.smallest_normal


# ---- the check -----------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What `check` found. It is true if all cases passed; as text it is a sentence.

    Attributes:
        cases: how many were tried, those after a failure included.
        failure: what went wrong first; None if nothing did.
    """

    cases: int
    failure: str | None = None

    def __bool__(self) -> bool:
        return self.failure is None

    def __repr__(self) -> str:
        if self.failure:
            return textwrap.fill(f"Not yet. {self.failure}", 80)
        most = max(max(sizes) for sizes in SIZES)
        return textwrap.fill(
            f"Right in all {self.cases} cases: sizes from 0 to {most}, "
            f"{', '.join(LAYOUTS)}.",
            80,
        )


@dataclass(frozen=True)
class _Case:
    m: int
    n: int
    k: int
    dtype: torch.dtype
    layout: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        return f"A of {self.m} × {self.k}, B of {self.k} × {self.n}, {dtype}{layout}"

    def operands(self) -> tuple[Guarded, Guarded]:
        generator = torch.Generator().manual_seed(self.m + 10**3 * self.n + self.k)

        def lay(rows: int, cols: int, transposed: bool) -> Guarded:
            strides = (1, max(rows, 1)) if transposed else (max(cols, 1), 1)
            if self.layout == "sliced":
                strides = (cols + 11, 1)
            where = {"dtype": self.dtype, "device": backend.DEVICE}
            poison = math.nan
            offset = 3 if self.layout == "sliced" else 0
            laid = Guarded((rows, cols), strides, poison=poison, offset=offset, **where)
            laid.tensor.copy_(torch.randn(rows, cols, generator=generator))
            return laid.arm()

        return (
            lay(self.m, self.k, self.layout == "transposed A"),
            lay(self.k, self.n, self.layout == "transposed B"),
        )


def _cases(dtypes: Iterable[torch.dtype], max_cols: int | None) -> Iterator[_Case]:
    sizes = [each for each in SIZES if max_cols is None or each[1] <= max_cols]
    for dtype in dtypes:
        yield from (_Case(*each, dtype, LAYOUTS[0]) for each in sizes)
        for layout in LAYOUTS[1:]:
            yield from (_Case(*each, dtype, layout) for each in sizes if max(each) < 70)


def check(
    function: Product,
    *,
    dtypes: Iterable[torch.dtype] = DTYPES,
    activation: Reference | None = None,
    max_cols: int | None = None,
) -> Verdict:
    """Tries a product of two matrices on shapes and layouts that break kernels.

    Exceptions of the function are failures too and are not raised. The operands are the
    same on every machine.

    Args:
        function: takes a (M, K) and b (K, N) and returns a new tensor (M, N) of their
            dtype, on their device.
        dtypes: of the operands to try.
        activation: what the function does to the product; None if nothing.
        max_cols: the largest N that the function takes; None means any.
    """
    if not callable(function):
        what = type(function).__name__
        raise TypeError(f"function must be callable on two matrices, got {what}")
    if place := unfinished(function):
        return Verdict(0, 'Line {1} of {0} still has "..." in it.'.format(*place))
    cases = list(_cases(dtypes, max_cols))
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        failures = (_failure(function, case, activation) for case in cases)
        return Verdict(len(cases), next(filter(None, failures), None))


def _failure(
    function: Product, case: _Case, activation: Reference | None
) -> str | None:
    """What goes wrong in a case, as sentences; None if nothing does."""
    traps = case.operands()
    a, b = (trap.tensor for trap in traps)
    with GuardAllocations() as guards:
        try:
            got = function(a, b)
            if a.is_cuda:
                torch.cuda.synchronize()  # so that a failed launch is reported here
        except Exception as error:
            return f"With {case}, the function raises {raised(error, function)}."
    if not isinstance(got, torch.Tensor):
        return f"With {case}, the function returns no tensor: {type(got).__name__}."
    want = (case.m, case.n), case.dtype, a.device
    for what, is_, right in zip(
        ("shape", "dtype", "device"),
        (tuple(got.shape), got.dtype, got.device),
        want,
        strict=True,
    ):
        if is_ != right:
            return f"With {case}, the result's {what} is {is_}; {right} is right."
    for name, trap in zip("AB", traps, strict=True):
        if any(trap.damage()):
            return f"With {case}, the function writes to {name} or beside it."
    for made in guards.allocated:
        if stray := made.damage()[1]:
            return (
                f"With {case}, the function writes outside its result, at offset "
                f"{stray[0]} from the first element: the store needs a mask."
            )
    return _wrong_value(case, a, b, got, activation)


def _wrong_value(
    case: _Case,
    a: torch.Tensor,
    b: torch.Tensor,
    got: torch.Tensor,
    activation: Reference | None,
) -> str | None:
    expected = (activation or (lambda product: product))(exact(a, b))
    difference = (got.double() - expected).abs()
    wrong = ~(difference <= allowed(a, b, expected))  # NaN is wrong
    if not wrong.any():
        return None
    row, col = wrong.nonzero()[0].tolist()
    found, right = got[row, col].item(), expected[row, col].item()
    says = f"With {case}, C[{row}, {col}] is {found:.4g}; {right:.4g} is right. "
    says += f"{int(wrong.sum())} of {wrong.numel()} elements are wrong."
    if found == POISON:
        says += " That is what the memory held before: nothing was stored there."
    elif math.isnan(found):
        says += " Around A and B lies NaN: a block was read past an edge."
    return says
