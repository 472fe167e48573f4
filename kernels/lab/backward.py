"""The backward pass of a softmax, as PyTorch's machinery sees it.

A `Backward` computes y * (g - sum(g * y)): the gradient for x from y = softmax(x, dim)
and the gradient g for y. One of three takes a call:

- The kernel, at once, where both are plain tensors and autograd records nothing.
- An operator of the course around the kernel, where autograd records, `torch.compile`
  traces, or a dispatch mode watches.
- PyTorch's operator of the same values, for float64, for empty tensors, where a
  dimension longer than 1 follows `dim`, for more than MOST_ROWS rows, in the transforms
  of `torch.func`, in forward differentiation, and for subclasses of tensors. They all
  know it.

Other tensors that are not contiguous are copied first.

Weighed: rules for all of these levels, as `kernels.lab.operator` has them for the way
forth. A gradient of a gradient is rarely asked for, and PyTorch's operator is right.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from kernels.lab import backend, description
from kernels.lab.direct import CachedLaunch, records
from kernels.lab.launch import Launch
from kernels.lab.operator import is_plain, no_memory

DTYPES = (*backend.DTYPES, torch.float64)
TRACED = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
MOST_LAUNCHES = 4096
MOST_ROWS = 2**31 - 2**10  # a kernel numbers rows in 32 bits


class Backward:
    """A function of (gradient, y, dim, dtype), and the operator of that name."""

    def __init__(
        self,
        name: str,
        launch_for: Callable[..., Launch],
        steps_for: Callable[..., tuple[Launch, Launch] | None],
    ) -> None:
        """Registers the operator `torch.ops.kernels.<name>`.

        Args:
            name: of the operator.
            launch_for: takes matrices (output, gradient, y), contiguous, aligned to 16
                bytes, not empty and not float64, and returns the launch that writes the
                output.
            steps_for: takes the same, and returns two launches where they should do
                that instead; otherwise None. Each program has one part of a row. The
                first launch writes a float32 for each part to a fourth tensor. The
                second takes another fourth tensor: for each row, the sum of its parts'.
        """
        self.launch_for, self.steps_for = launch_for, steps_for
        self.launches: dict[tuple, Callable[..., None] | None] = {}
        schema = "(Tensor gradient, Tensor y, int dim, ScalarType? dtype) -> Tensor"
        self.operator = torch.library.custom_op(
            f"kernels::{name}", self.run, mutates_args=(), schema=schema
        )
        self.operator.register_fake(_fake)
        self.operator.register_autograd(self._differentiate, setup_context=_keep_inputs)

    def __call__(
        self,
        gradient: torch.Tensor,
        y: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The gradient for x. Can be differentiated as often as you like.

        Args:
            gradient: the gradient for y, of y's shape, dtype and device, any strides.
            y: float32, float16, bfloat16 or float64, any shape and strides.
            dim: the dimension along which y's values sum to 1.
            dtype: of the result, any of y's; None means y's.

        Returns:
            A new contiguous tensor of y's shape; empty if y is.

        Raises:
            TypeError, ValueError, IndexError: an argument is not such.
        """
        if _is_plain(gradient, y) and type(dim) is int:
            return self.run(gradient, y, dim, dtype)
        validate(gradient, y, dim, dtype)
        known = type(gradient) in TRACED and type(y) in TRACED
        transformed = torch._C._are_functorch_transforms_active()
        if known and not transformed and forward_ad._current_level < 0:
            return self.operator(gradient, y, dim, dtype)
        return self._by_reference(gradient, y, dim, dtype)

    def run(
        self,
        gradient: torch.Tensor,
        y: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """The same from the tensors' memory, where nothing records."""
        if y.is_cuda and y.get_device() != torch.cuda.current_device():
            with torch.cuda.device(y.device):
                return self.run(gradient, y, dim, dtype)
        forms = y.shape, y.dtype, y.device, gradient.shape, gradient.dtype
        key = (*forms, gradient.device, dim, dtype)
        try:
            launch = self.launches[key]
        except (KeyError, TypeError):  # TypeError: dtype is not hashable
            validate(gradient, y, dim, dtype)
            if len(self.launches) >= MOST_LAUNCHES:
                self.launches.clear()
            launch = self.launches[key] = self._prepare(y, dim, dtype)
        if launch is None:
            return self._by_reference(gradient, y, dim, dtype).contiguous()
        gradient, y = _aligned(gradient, "gradient"), _aligned(y, "y")
        output = torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)
        launch(output, gradient, y)
        return output

    def _prepare(
        self, y: torch.Tensor, dim: int, dtype: torch.dtype | None
    ) -> Callable[..., None] | None:
        """What launches on tensors like y; None where PyTorch's operator takes them."""
        sizes = y.shape or (1,)
        dim = dim % len(sizes)
        if y.dtype == torch.float64 or not y.numel() or math.prod(sizes[dim + 1 :]) > 1:
            return None
        shape = y.numel() // sizes[dim], sizes[dim]
        if shape[0] > MOST_ROWS:
            return None
        output = torch.empty(shape, dtype=dtype or y.dtype, device="meta")
        matrix = torch.empty(shape, dtype=y.dtype, device="meta")
        steps = self.steps_for(output, matrix, matrix)
        if steps is None:
            return CachedLaunch(self.launch_for(output, matrix, matrix))
        return functools.partial(_in_steps, *map(CachedLaunch, steps), shape[0])

    def _by_reference(
        self,
        gradient: torch.Tensor,
        y: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        theirs = torch.ops.aten._softmax_backward_data.default
        result = theirs(gradient, y, dim, y.dtype)
        return result if dtype is None else result.to(dtype)

    def _differentiate(self, ctx: Any, outer: torch.Tensor) -> tuple:
        """The gradients for `gradient` and y, from the gradient for the result.

        The result is linear in `gradient`, by a symmetric matrix, so that this
        derivative is the operator itself. The other is the product rule.
        """
        (gradient, y), dim = ctx.saved_tensors, ctx.dim
        outer = outer.to(y.dtype)
        dots = [(t * y).sum(dim, keepdim=True) for t in (gradient, outer)]
        for_y = outer * (gradient - dots[0]) - gradient * dots[1]
        return self(outer, y, dim), for_y, None, None


def _in_steps(
    first: CachedLaunch,
    second: CachedLaunch,
    n_rows: int,
    output: torch.Tensor,
    gradient: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """Runs two launches, which exchange the parts' sums through the call's memory."""
    n_parts = first.grid[0] // n_rows
    sums = torch.empty(n_rows, n_parts, dtype=torch.float32, device=y.device)
    first(output, gradient, y, sums)
    second(output, gradient, y, sums.sum(1))


def _keep_inputs(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    gradient, y, ctx.dim, _ = inputs
    ctx.save_for_backward(gradient, y)


def _fake(
    gradient: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """The result's shape, strides and dtype, without values."""
    return torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)


def _is_plain(*tensors: object) -> bool:
    """Whether a kernel may take the tensors by their addresses, unrecorded."""
    return (
        is_plain(*tensors)
        and all(t.layout is torch.strided and not t.is_nested for t in tensors)
        and not (any(t.requires_grad for t in tensors) and records())
    )


def _aligned(x: torch.Tensor, name: str) -> torch.Tensor:
    """x, or a copy of it, contiguous and at a multiple of 16 bytes."""
    if not x.data_ptr():
        raise no_memory(name, x)
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def validate(
    gradient: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> None:
    """Checks the arguments of a `Backward`.

    Raises:
        TypeError: gradient or y is not a tensor, or not of one of DTYPES; dtype is
            neither None nor one of DTYPES; dim is not an int.
        ValueError: a tensor is on a device that kernels cannot reach here, or is not
            strided; gradient does not have y's shape, dtype and device.
        IndexError: y has no such dimension.
    """
    for name, tensor in {"gradient": gradient, "y": y}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(tensor).__name__}"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be float32, float16, bfloat16 or float64, got "
                f"{tensor.dtype}; convert it with {name}.float()"
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            layout = "a nested tensor" if tensor.is_nested else tensor.layout
            to = "to_padded_tensor(0)" if tensor.is_nested else "to_dense()"
            raise ValueError(
                f"{name} must be strided, got {layout}; {name}.{to} would do"
            )
        if tensor.device.type != backend.DEVICE:
            raise ValueError(description.elsewhere(tensor, name))
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(
            f"dtype must be float32, float16, bfloat16, float64 or None, got {dtype!r}"
        )
    if gradient.dtype != y.dtype:
        raise TypeError(f"gradient must be {y.dtype} as y is, got {gradient.dtype}")
    if gradient.shape != y.shape or gradient.device != y.device:
        raise ValueError(
            f"gradient must be like y, {tuple(y.shape)} on {str(y.device)!r}, got "
            f"{tuple(gradient.shape)} on {str(gradient.device)!r}"
        )
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {dim!r}")
    n_dims = max(y.ndim, 1)
    if not -n_dims <= dim < n_dims:
        raise IndexError(
            f"dim must be from {-n_dims} to {n_dims - 1} for shape {tuple(y.shape)}, "
            f"got {dim}"
        )
