"""Softmax as PyTorch users write it: every line is a kernel of its own.

Builds on: nothing but torch.
Changes: nothing yet; this is what every later chapter is compared with.
Costs: 5MN + 2M values read and 3MN + 2M written, and M indices, by five kernels.
Source: the definition. `shift_thrown_away` is from OpenAI's announcement of Triton 1.0.
"""

import functools
import re
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
    """Computes the shift and then exponentiates x itself. Do not use."""
    row_max = x.max(dim=1)[0]
    shifted = x - row_max[:, None]  # noqa: F841 - never used: that is the mistake
    numerator = torch.exp(x)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


# ---- the same five lines as a graph --------------------------------------------------


@functools.cache
def scripted(function: Softmax) -> torch.jit.ScriptFunction:
    """`function` as a TorchScript graph, which first watches a call, then optimises.

    Args:
        function: of a module: TorchScript compiles its source.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it is shown as history
        return torch.jit.script(function)


@functools.cache
def compiled(function: Softmax, backend: str | Callable = "inductor") -> Softmax:
    """`function` compiled by torch.compile, anew for every shape and dtype.

    By default torch.compile gives up after 8 of them and runs the others eagerly, and a
    benchmark of many shapes measures something else than it says. Here it goes on, in
    the whole process, and at 1024 it raises an error (`fullgraph`) instead.

    Args:
        function: what to compile.
        backend: what makes code of the graph; the default writes Triton for a GPU.
    """
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)


def written_by_compile(function: Softmax, x: torch.Tensor) -> str:
    """The Triton kernels that torch.compile writes for `function(x)`.

    Raises:
        RuntimeError: there is no GPU to write for; for a CPU it writes C++.
    """
    if backend.INTERPRETED:
        raise RuntimeError("torch.compile writes Triton for a GPU only: there is none")
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(compiled(function), x)
    kernels = re.findall(r"(@triton\.jit\n.*?)\n'''", "\n".join(sources), re.DOTALL)
    return "\n\n".join(kernels)


# ---- the chapter's softmax -----------------------------------------------------------


def traffic(n_rows: int, n_cols: int) -> tuple[int, int]:
    """Values read and values written by the five lines; `max` also writes M indices."""
    size = n_rows * n_cols
    return 5 * size + 2 * n_rows, 3 * size + 2 * n_rows


def softmax(x: torch.Tensor) -> torch.Tensor:
    """The softmax of every row, by `five_lines`.

    Rows of float16 longer than 65504 are computed in float32: the sum of that many ones
    overflows.

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
    if x.shape[1] > torch.finfo(x.dtype).max:
        return five_lines(x.float()).to(x.dtype)
    return five_lines(x)
