"""Softmax as PyTorch users write it: every line is a kernel of its own.

Builds on: nothing but torch.
Changes: nothing yet; this is what every later chapter is compared with.
Costs: 5MN + 2M values read and 3MN + 2M written, and M indices, by five kernels.
Source: the definition; `torch.softmax`'s documentation.
"""

import functools
import warnings
from collections.abc import Callable

import torch

from kernels.lab import backend

Softmax = Callable[[torch.Tensor], torch.Tensor]


def five_lines(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row of x (M, N): five operations, five kernels."""
    row_max = x.max(dim=1, keepdim=True)[0]
    shifted = x - row_max
    numerator = torch.exp(shifted)
    denominator = numerator.sum(dim=1, keepdim=True)
    return numerator / denominator


def unshifted(x: torch.Tensor) -> torch.Tensor:
    """The definition taken literally: overflows where exp(x) does. Do not use."""
    numerator = torch.exp(x)
    return numerator / numerator.sum(dim=1, keepdim=True)


def shift_thrown_away(x: torch.Tensor) -> torch.Tensor:
    """Computes the shift and then exponentiates x itself. Do not use.

    This is the softmax that the announcement of Triton 1.0 gives to TorchScript.
    """
    row_max = x.max(dim=1)[0]
    shifted = x - row_max[:, None]  # noqa: F841 - never used: that is the mistake
    numerator = torch.exp(x)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


@functools.cache
def scripted(function: Softmax) -> torch.jit.ScriptFunction:
    """`function` as a TorchScript graph, the older way to make graphs of PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is shown as history
        return torch.jit.script(function)


@functools.cache
def compiled(function: Softmax) -> Softmax:
    """`function` compiled by torch.compile, anew for every shape."""
    return torch.compile(function, dynamic=False)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, by `five_lines`.

    Args:
        x: (M, N), float32, float16 or bfloat16, any strides.

    Returns:
        (M, N) in x's dtype; empty if x is.

    Raises:
        TypeError, ValueError: x is not such a matrix (see `backend.validate`).
    """
    backend.validate(x)
    if x.numel() == 0:  # the maximum of no numbers is not defined
        return torch.empty_like(x)
    return five_lines(x)
