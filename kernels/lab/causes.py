"""The likely cause of a wrong row of a result.

`check` finds that a row is wrong, and passes the `Evidence` on to `cause`: the row and
the memory around it. For each known mistake this module computes the result that the
mistake would give for the same row. It names the mistake whose values are what the
function returned.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kernels.lab.guards import UNDEFINED

Operator = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Evidence:
    """A wrong row, and the memory that it was computed from.

    Attributes:
        memory: the buffer around the matrix, float64, with NaN outside the matrix.
        start: the place of the matrix's first element in the buffer.
        strides, size, dtype: of the matrix.
        row: the number of the first wrong row.
        got, expected: this row of the result and of the right result, float64.
        unwritten: for each element of this row of the result, whether the function
            never wrote it.
    """

    memory: torch.Tensor
    start: int
    strides: tuple[int, int]
    size: tuple[int, int]
    row: int
    got: torch.Tensor
    expected: torch.Tensor
    dtype: torch.dtype
    unwritten: torch.Tensor

    def at(self, row_stride: int, col_stride: int, n: int) -> torch.Tensor:
        """The n elements that a kernel with these strides reads for the row."""
        places = self.start + self.row * row_stride + torch.arange(n) * col_stride
        inside = (places >= 0) & (places < len(self.memory))
        values = self.memory[places.clamp(0, len(self.memory) - 1)]
        return torch.where(inside, values, math.nan)

    @functools.cached_property
    def values(self) -> torch.Tensor:
        """The elements of the row."""
        return self.at(*self.strides, self.size[1])

    @functools.cached_property
    def matrix(self) -> torch.Tensor:
        """The whole matrix."""
        return self.memory.as_strided(self.size, self.strides, self.start)

    @functools.cached_property
    def block(self) -> int:
        """The row's length, rounded up to a power of two."""
        return 1 << max(self.size[1] - 1, 0).bit_length()

    def off(self, values: torch.Tensor) -> float:
        """The distance of these values from the result, in units of the error.

        The error is the distance of the right values from the result. Values whose
        absolute sum differs by more than 20 % are infinitely far: zeros are near a row
        that was divided by too much, but don't explain it.
        """
        sizes = [v[v.isfinite()].abs().sum().item() for v in (self.got, values)]
        if not math.isclose(*sizes, rel_tol=0.2, abs_tol=1e-7):
            return math.inf
        return _distance(self.got, values) / _distance(self.got, self.expected)

    def equals(self, values: torch.Tensor, roundings: int = 16) -> bool:
        """Whether the result has these values, up to so many roundings."""
        size = values.abs().nan_to_num(0, 0, 0).sum().item()
        allowed = roundings * torch.finfo(self.dtype).eps * size
        return _distance(self.got, values) <= allowed


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    difference = torch.where((a == b) | a.isnan(), 0.0, (a - b).abs())
    return difference.max().item() if difference.numel() else 0.0


def cause(
    evidence: Evidence,
    operator: Operator,
    *,
    softmax: bool,
    mistakes: Mapping[str, Operator] | None = None,
) -> str:
    """Names the likely cause of a wrong row in a sentence; empty if none is known.

    Args:
        evidence: the wrong row.
        operator: computes the right result of a matrix.
        softmax: whether that is a softmax.
        mistakes: for a sentence, the operator that makes the mistake.
    """
    e = evidence
    if e.unwritten.any():
        return _why_unwritten(e)
    if softmax and (said := _why_unshifted(e)):
        return said
    for said, mistaken in (mistakes or {}).items():
        if e.equals(mistaken(e.matrix)[e.row].reshape(-1).double()):
            return said
    if e.expected.isnan().any():
        return ""
    return (
        _likeliest_reading(e, operator, softmax)
        or _why_nan(e, softmax)
        or _why_undefined(e)
    )


def _why_unwritten(e: Evidence) -> str:
    if e.unwritten.all():
        return "Is there a program for every row?"
    first = int(e.unwritten.nonzero()[0])
    if e.unwritten[first:].all() and first & (first - 1) == 0 and first > 1:
        return (
            f"All columns from {first} on are lost. Does the block have {first} "
            f"elements, fewer than the row's {len(e.unwritten)}?"
        )
    return "Does the mask of the store leave out too much?"


def _why_unshifted(e: Evidence) -> str:
    """A number other than the row's maximum was subtracted, or none.

    Then exponentials overflow, or are all 0.
    """
    if (e.values == -math.inf).all() and e.block > e.size[1] and (e.got == 0).all():
        return (
            "Does a masked element hold a finite number? It is then the maximum of "
            "this row."
        )
    if not e.values.isfinite().all() or not e.got.isnan().any():
        return ""
    most, limit = e.values.max().item(), 11 if e.dtype == torch.float16 else 88
    if most > limit:
        return (
            f"The exponential of {most:.5g} is infinite, and inf/inf is NaN. Was the "
            "row's maximum subtracted before the exponential?"
        )
    if most < -80:
        return (
            "All exponentials of the row are 0, and 0/0 is NaN. The largest value is "
            f"{most:.5g}: was a larger number than that subtracted? A masked element "
            "that holds 0 may have won the maximum."
        )
    spread = most - e.values.min().item()
    if spread > limit and not e.got.isnan().all():
        return (
            f"The exponential of {spread:.5g} is infinite. Was something smaller than "
            "the row's maximum subtracted?"
        )
    return ""


def _why_nan(e: Evidence, softmax: bool) -> str:
    """NaN in every element of the result of a finite row."""
    if not e.values.isfinite().all() or not e.got.isnan().all():
        return ""
    if softmax and (value := _spoiler(e)):
        said = (
            f"NaN lies around the matrix, and another row holds {value}: was something "
            "outside of the row read, or does a maximum or a sum run over several rows?"
        )
        if e.block > e.size[1]:
            said += (
                " Or, in a kernel, does a masked element hold ∞ or NaN, as it may "
                "without `other`?"
            )
        return said
    return (
        "NaN lies around the matrix: was something outside of the row read? Or "
        "does a line make NaN, as 0/0 does? Or did a masked element take part, in a "
        "load without `other`?"
    )


def _why_undefined(e: Evidence) -> str:
    """A number about as large as `UNDEFINED`; the row and its right result are not."""
    found, row, right = (
        part.nan_to_num(0, 0, 0).abs() for part in (e.got, e.values, e.expected)
    )
    large = (found > UNDEFINED / 2) & (found < 3 * UNDEFINED)
    if large.any() and max(row.max(), right.max()) < UNDEFINED / 2:
        return "Did a masked element take part, in a load without `other`?"
    return ""


def _spoiler(e: Evidence) -> str:
    """The value of another row that would spoil this row, if all had one maximum."""
    most = e.matrix.max().item()  # NaN, if any element is NaN
    if math.isnan(most):
        return "NaN"
    return f"{most:.5g}" if most - e.values.max().item() > 80 else ""


def _likeliest_reading(e: Evidence, operator: Operator, softmax: bool) -> str:
    """Names the mistake whose result is nearest to what was found, if it is near."""
    n_cols = e.size[1]

    def result_of(values: torch.Tensor) -> torch.Tensor:
        rows = values.expand(e.row + 1, -1)  # a result may depend on the row's number
        result = operator(rows)[e.row].reshape(-1).double()
        return result[:n_cols] if e.got.shape == (n_cols,) else result

    fillings = [each for each in (0.0, -math.inf) if not _spoils(e, each, operator)]
    results = [
        (result_of(values), said) for values, said in _readings(e, fillings, softmax)
    ]
    results += _halfway(e) if softmax else []
    # A neighbour's value may be near by chance. In float32 a mistake's is much nearer.
    results = [each for each in results if e.equals(each[0], roundings=1024)]
    offs = [(e.off(values), said) for values, said in results]
    near = [(off, said) for off, said in offs if off < 0.1]
    return min(near, key=lambda each: each[0])[1] if near else ""


def _spoils(e: Evidence, filling: float, operator: Operator) -> bool:
    """Whether masked elements of this value would make an earlier row wrong.

    The earlier rows are right. So if they would, this value isn't the cause.
    """
    n_cols, before = e.size[1], e.matrix[: e.row]
    if not e.row:
        return False
    padded = torch.nn.functional.pad(before, (0, e.block - n_cols), value=filling)
    right, found = (operator(x).reshape(e.row, -1).double() for x in (before, padded))
    found = found[:, : right.shape[1]]
    spoilt = (found - right).abs() > 0.1 * right.abs().amax(1, keepdim=True)
    return bool((spoilt | (found.isnan() & ~right.isnan())).any())


def _readings(
    e: Evidence, fillings: Iterable[float], softmax: bool
) -> Iterator[tuple[torch.Tensor, str]]:
    """Yields the values that each mistake would read as the row, and its sentence."""
    n_cols = e.size[1]
    row_stride, col_stride = e.strides
    if e.row and row_stride != n_cols:
        yield (
            e.at(n_cols, col_stride, n_cols),
            "The kernel took the elements that follow the row before. From a row to "
            f"the next it is x.stride(0) elements: {row_stride} here, not {n_cols}.",
        )
    if col_stride != 1:
        for rows_apart in {row_stride, n_cols}:
            yield (
                e.at(rows_apart, 1, n_cols),
                "The kernel took neighbours in memory. From a column to the next it is "
                f"x.stride(1) elements: {col_stride} here, not 1.",
            )
    if e.block == n_cols:
        return
    count = e.block - n_cols
    after = "element" if count == 1 else f"{count} elements"
    yield (
        e.at(*e.strides, e.block),
        f"The {after} after the row took part. A block of "
        f"{e.block} is longer than the row: does the load have a mask?",
    )
    for filling in fillings:
        padded = torch.nn.functional.pad(e.values, (0, e.block - n_cols), value=filling)
        yield padded, _masked(e, filling, softmax)


def _masked(e: Evidence, filling: float, softmax: bool) -> str:
    """The sentence for masked elements that took part with this value."""
    count = e.block - e.size[1]
    elements = "A masked element" if count == 1 else "Masked elements"
    if softmax and filling == 0:
        if e.values.max() < 0:
            return (
                f"{elements} took part in the maximum and in the sum, as 0. Which "
                "value never wins a maximum?"
            )
        return (
            f"{elements} took part in the sum, as 0, and exp(0 - maximum) is above 0. "
            "Which value has the exponential 0?"
        )
    last = "last holds" if count == 1 else f"last {count} hold"
    return (
        f"This is the result of a row of {e.block} elements, of which the {last} "
        f"{filling:g}. {elements} took part. Which value changes nothing?"
    )


def _halfway(e: Evidence) -> Iterator[tuple[torch.Tensor, str]]:
    """Yields the steps on the way to a softmax, and the sentence for stopping there."""
    shifted = e.values - e.values.max()
    yield shifted.exp(), "That is exp(x - maximum). Was it divided by the row's sum?"
    yield shifted, "That is x - maximum. Was the exponential taken?"
