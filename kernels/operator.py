"""One operator: what PyTorch's autograd, compiler and transforms see of the softmax.

Builds on: `fastest`, the forward pass, and `gradient`, the backward pass.
Changes: nothing on the GPU. PyTorch knows the function by a name, `kernels::softmax`.
Costs: no bytes; but a compiler can fuse nothing into an operator.
Source: PyTorch's documentation of `torch.library`.
"""

import functools

import torch
from torch import Tensor
from torch.library import Library, register_vmap

from kernels import fastest


def backward(gradient: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The gradient for x, in x's dtype, from the gradient for y = softmax(x, dim)."""
    from kernels.gradient import softmax_backward  # only training needs it

    return softmax_backward(gradient, y, dim, dtype)


@functools.cache
def rules() -> object:
    """What the operator does at each of PyTorch's levels: a `lab.operator.Rules`."""
    from kernels.lab import operator  # a call like an earlier one does not need it

    one = torch.ops.kernels.softmax.default
    return operator.Rules(one, fastest.prepare, backward, torch.softmax, fastest.known)


def register() -> Library:
    """Registers `kernels::softmax`, which lasts as long as the returned library."""
    lib = Library("kernels", "FRAGMENT")
    schema = "softmax(Tensor x, int dim, ScalarType? dtype=None) -> Tensor"
    lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    lib.impl("softmax", lambda *a: rules().run(*a), "CUDA")  # values, on a GPU
    lib.impl("softmax", lambda *a: rules().run(*a), "CPU")  # in the interpreter
    lib.impl("softmax", lambda *a: rules().fake(*a), "Meta")  # a shape, no values
    lib.impl("softmax", lambda *a: rules().autograd(*a), "Autograd", with_keyset=True)
    register_vmap("kernels::softmax", lambda *a: rules().batched(*a), lib=lib)
    return lib


_library = register()
