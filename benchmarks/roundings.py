"""What roundings before the power do to an exponential, for chapter `program`.

from benchmarks import roundings
print(roundings.errors(-80))
"""

import math

import torch

LOG2_E = math.log2(math.e)
ROUNDED = torch.tensor(LOG2_E, dtype=torch.float32).item()


def exponentials(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Exponentials as powers of two, exact but for what is rounded to float32.

    Args:
        x: in float32.

    Returns:
        float64 exponentials, if only the product x · log2(e) is rounded ("product"), if
        only log2(e) is ("log2(e)"), and if both are ("both").
    """
    exponents = {
        "product": (x.double() * LOG2_E).float(),
        "log2(e)": x.double() * ROUNDED,
        "both": x * ROUNDED,
    }
    return {name: torch.exp2(each.double()) for name, each in exponents.items()}


def worst(y: torch.Tensor, x: torch.Tensor) -> float:
    """The largest relative error of y, exponentials of x, in units of 2^-23."""
    return (y.double() / x.double().exp() - 1).abs().max().item() * 2**23


def errors(low: float) -> dict[str, float]:
    """The worst errors of `exponentials`, for 2^20 values from low to 0."""
    x = torch.linspace(low, 0, 2**20)
    return {name: worst(y, x) for name, y in exponentials(x).items()}
