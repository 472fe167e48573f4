"""Each rounding before the power is applied alone, and its error is found."""

import torch

from benchmarks import roundings


def test_what_is_not_rounded_is_exact():
    x = torch.tensor([0.0, -1.0, -64.0])
    powers = roundings.exponentials(x)
    assert all(y[0] == 1 for y in powers.values())
    # A product with a power of two needs no rounding: the constant's is left.
    assert torch.equal(powers["both"], powers["log2(e)"])
    assert roundings.worst(powers["log2(e)"][1:], x[1:]) > 0.1


def test_an_error_is_counted_in_units_of_float32():
    x = torch.linspace(-4, 0, 9)
    assert roundings.worst(x.double().exp(), x) == 0
    off = x.double().exp() * (1 - 3 * 2**-23)
    assert round(roundings.worst(off, x), 3) == 3
