"""The way back through a row operator, as PyTorch's machinery sees it.

A `Backward` computes the gradient for x from y = f(x, dim) and the gradient for y. Here
f computes with each line of values along dim by itself. One of three takes a call:

- The kernel, at once, where both are plain tensors and autograd records nothing.
- An operator of the course around the kernel, where autograd records, `torch.compile`
  traces, or a dispatch mode watches.
- PyTorch's operator of the same values, for float64, for rows whose columns are not
  adjacent or that are more than MOST_ROWS, in the transforms of `torch.func`, in
  forward differentiation, and for subclasses of tensors. They all know it.

Weighed: rules for all of these levels, as `kernels.lab.operator` has them for the way
forth. A gradient of a gradient is rarely asked for, and PyTorch's operator is right.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernels.lab import backend, direct
from kernels.lab.launch import CachedLaunch, Launch

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
        derivatives: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        reference: Callable[..., torch.Tensor],
    ) -> None:
        """Registers the operator `torch.ops.kernels.<name>`.

        Args:
            name: of the operator.
            launch_for: takes matrices (output, gradient, y), contiguous, aligned to 16
                bytes, not empty and not float64, and returns the launch that writes the
                output.
            derivatives: takes the gradient for the result, gradient, y and dim, and
                returns the gradients for `gradient` and for y. It must be
                differentiable itself where derivatives of these are needed.
            reference: PyTorch's own operator of (gradient, y, dim, y's dtype).
        """
        self.launch_for, self.derivatives = launch_for, derivatives
        self.reference = reference
        self.launches: dict[tuple, CachedLaunch | None] = {}
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
        """The gradient for x. Whoever calls this documents it for its operator."""
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
        except KeyError:
            validate(gradient, y, dim, dtype)
            if len(self.launches) >= MOST_LAUNCHES:
                self.launches.clear()
            launch = self.launches[key] = self._prepare(y, dim, dtype)
        if launch is None:
            return self._by_reference(gradient, y, dim, dtype).contiguous()
        gradient, y = _aligned(gradient), _aligned(y)
        output = torch.empty(y.shape, dtype=dtype or y.dtype, device=y.device)
        _call(launch, output, gradient, y)
        return output

    def _prepare(
        self, y: torch.Tensor, dim: int, dtype: torch.dtype | None
    ) -> CachedLaunch | None:
        """The launch for tensors like y; None where PyTorch's operator takes them."""
        sizes = y.shape or (1,)
        dim = dim % len(sizes)
        if y.dtype == torch.float64 or not y.numel() or math.prod(sizes[dim + 1 :]) > 1:
            return None
        shape = y.numel() // sizes[dim], sizes[dim]
        if shape[0] > MOST_ROWS:
            return None
        output = torch.empty(shape, dtype=dtype or y.dtype, device="meta")
        matrix = torch.empty(shape, dtype=y.dtype, device="meta")
        return CachedLaunch(self.launch_for(output, matrix, matrix))

    def _by_reference(
        self,
        gradient: torch.Tensor,
        y: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        result = self.reference(gradient, y, dim, y.dtype)
        return result if dtype is None else result.to(dtype)

    def _differentiate(self, ctx: Any, outer: torch.Tensor) -> tuple:
        gradient, y = ctx.saved_tensors
        both = self.derivatives(outer.to(y.dtype), gradient, y, ctx.dim)
        return *both, None, None


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
    if (
        is_dynamo_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return False
    recorded = torch.is_grad_enabled()
    return all(
        type(t) is torch.Tensor
        and t.layout is torch.strided
        and not t.is_neg()
        and not (recorded and t.requires_grad)
        for t in tensors
    )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it, contiguous and at a multiple of 16 bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def _call(cached: CachedLaunch, *tensors: torch.Tensor) -> None:
    """`cached(*tensors)`, for any number of tensors."""
    if cached.compiled is None:
        cached.compiled = cached.launch(*tensors)
        if cached.compiled is not None:
            n = len(tensors) + (0 if cached.take is None else 2)
            cached.direct = direct.bind(cached.compiled, cached.grid, n, cached.rest)
        return
    extra = () if cached.take is None else cached.take(tensors[-1].device)
    if cached.direct is None:
        cached.compiled[cached.grid](*tensors, *extra, *cached.rest)
        return
    words = (extra[0].data_ptr(), extra[1]) if extra else ()
    cached.direct(*[tensor.data_ptr() for tensor in tensors], *words)


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
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name} must be strided, got {tensor.layout}; {name}.to_dense() would "
                "do"
            )
        if tensor.device.type != backend.DEVICE:
            raise ValueError(
                f"{name} must be on {backend.DEVICE!r}, where kernels run here, got a "
                f"tensor on {str(tensor.device)!r}; move it with "
                f"{name}.to({backend.DEVICE!r})"
            )
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
