"""Softmax as PyTorch users write it: every line runs as a kernel of its own.

Builds on: nothing but PyTorch.
Changes: nothing yet; every later chapter is compared with this module.
Costs: five kernels read 5MN + 2M values and write 3MN + 2M values and M indices.
Source: the definition of softmax. `shift_thrown_away` comes from OpenAI's announcement
    of Triton 1.0.
"""

import functools
import warnings
from collections.abc import Callable

import torch

from kernels.lab import backend

Softmax = Callable[[torch.Tensor], torch.Tensor]


def five_lines(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row of x (M, N) in five operations."""
    row_max = x.max(dim=1, keepdim=True)[0]
    shifted = x - row_max
    numerator = torch.exp(shifted)
    denominator = numerator.sum(dim=1, keepdim=True)
    return numerator / denominator


def unshifted(x: torch.Tensor) -> torch.Tensor:
    """Computes the definition literally. Wrong: exp(x) overflows for large x."""
    numerator = torch.exp(x)
    return numerator / numerator.sum(dim=1, keepdim=True)


def shift_thrown_away(x: torch.Tensor) -> torch.Tensor:
    """Computes the shift, then exponentiates x itself. Wrong: overflows for large x."""
    row_max = x.max(dim=1)[0]
    shifted = x - row_max[:, None]  # noqa: F841 - never used: this is the mistake
    numerator = torch.exp(x)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


# ---- the same five lines as a graph --------------------------------------------------


@functools.cache
def scripted(function: Softmax) -> torch.jit.ScriptFunction:
    """Compiles a function with TorchScript.

    TorchScript profiles the first calls and optimises the graph afterwards, so call the
    result two or three times before you time it.

    Args:
        function: a function defined in a module, because TorchScript reads its source.
    """
    with warnings.catch_warnings():
        # TorchScript is deprecated; the course shows it as history.
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


@functools.cache
def compiled(function: Softmax, backend: str | Callable = "inductor") -> Softmax:
    """Compiles a function with torch.compile, once for every shape and dtype.

    By default torch.compile stops after 8 compilations and runs further shapes eagerly,
    so a benchmark of many shapes would time eager code. This function raises the limit
    to 1024 for the whole process. Beyond 1024, `fullgraph` makes it an error.

    Args:
        function: the function to compile.
        backend: what turns the graph into code. The default writes Triton for a GPU.
    """
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)


# ---- the chapter's softmax -----------------------------------------------------------


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Computes the softmax of every row with `five_lines`.

    Rows of float16 with more than 65504 columns are computed in float32, because the
    sum of so many exponentials can exceed 65504, float16's largest number.

    Args:
        x: (M, N), float32, float16 or bfloat16, any strides.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix (see `backend.validate`).
    """
    backend.validate(x)
    if x.numel() == 0:
        return torch.empty_like(x)  # a row without values has no maximum
    if x.shape[1] > torch.finfo(x.dtype).max:
        return five_lines(x.float()).to(x.dtype)
    return five_lines(x)
