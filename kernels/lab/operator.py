"""A row operator as PyTorch's machinery sees it: checks, derivatives, batches, modes.

PyTorch's dispatcher takes a call of a registered operator through autograd, through the
transforms of `torch.func`, and through whatever traces, before it reaches a kernel. The
rules here are for operators `f(x, dim, dtype)` that keep x's shape and compute each
line of values along `dim` by itself. A module that defines one imports this module at
its first call. A call that is like an earlier one needs no rule.

Weighed: `torch.library.custom_op` with `register_autograd`. It loses the tangents of
forward differentiation without an error, does not work in `torch.func.grad`, and takes
longer for each call that needs a gradient.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernels.lab import backend, description, direct
from kernels.lab.direct import records, span

DTYPES = (*backend.DTYPES, torch.float64)
MOST_LAUNCHES = 4096
MOST_FORMS = 8  # of the calls of one shape that are repeated

_current_device = getattr(torch._C, "_cuda_getDevice", None)  # where there is CUDA


# ---- arguments -----------------------------------------------------------------------


_transforms_are_active = torch._C._are_functorch_transforms_active
_n_dispatch_modes = torch._C._len_torch_dispatch_stack
_n_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch
_tracing_state = torch._C._get_tracing_state


def is_watched() -> bool:
    """Whether PyTorch traces, records, transforms or differentiates forward a call."""
    return (
        is_dynamo_compiling()
        or _transforms_are_active()
        or direct.is_heard()
        or _n_dispatch_modes() + _n_early_modes() > 0
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
    )


def is_virtual(x: torch.Tensor) -> bool:
    """Whether x has no memory of its own: zeros, or a batch (`is_grads_batched`)."""
    return x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x)


def stands_for_an_argument(x: object) -> bool:
    """Whether x is what a tracer passes in place of an argument, as `torch.fx` does."""
    return hasattr(type(x), "__torch_function__") and not isinstance(x, torch.Tensor)


def is_plain(*tensors: object) -> bool:
    """Whether a kernel may take tensors by address; otherwise the operator takes them.

    The operator takes subclasses, tensors without memory, values that differ from those
    in memory, and calls of which `is_watched` is true.
    """
    return not is_watched() and all(
        type(x) is torch.Tensor and not x.is_neg() and not is_virtual(x)
        for x in tensors
    )


def validate(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None, address: int | None = None
) -> None:
    """Checks the input of a row operator.

    Args:
        x: what the caller passed; should be a real tensor where kernels run.
        dim: should be one of x's dimensions.
        dtype: should be one of DTYPES, or None where x has one of DTYPES.
        address: of x's memory, 0 if it has none; None if no memory is needed.

    Raises:
        TypeError, ValueError: x is not such a tensor, or dtype or dim of a wrong type.
        IndexError: x has no such dimension.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(
            f"dtype must be float32, float16, bfloat16, float64 or None, got {dtype!r}"
        )
    convertible = dtype is not None and not (x.dtype.is_complex or x.is_quantized)
    if x.dtype not in DTYPES and not convertible:
        advice = "x.dequantize() would do" if x.is_quantized else "x.float() would do"
        advice = "x.real or x.abs() would do" if x.dtype.is_complex else advice
        raise TypeError(
            f"x must be float32, float16, bfloat16 or float64, got {x.dtype}; {advice}"
        )
    _refuse_layout(x)
    if x.device.type != backend.DEVICE:
        raise ValueError(description.elsewhere(x, "x"))
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {dim!r}")
    validate_dim(dim, x)
    if address == 0 and x.numel():
        raise no_memory("x", x)


def validate_dim(dim: int, x: torch.Tensor, n_outer: int = 0) -> None:
    """Raises IndexError where x, less its first n_outer dimensions, has no such dim."""
    n_dims = max(x.ndim - n_outer, 1)
    if not -n_dims <= dim < n_dims:
        raise IndexError(
            f"dim must be from {-n_dims} to {n_dims - 1} for shape "
            f"{tuple(x.shape[n_outer:])}, got {dim}"
        )


def _refuse_layout(x: torch.Tensor) -> None:
    if x.layout != torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else x.layout
        to = "to_padded_tensor(-float('inf'))" if x.is_nested else "to_dense()"
        raise ValueError(f"x must be strided, got {layout}; x.{to} would do")


def no_memory(name: str, x: torch.Tensor) -> ValueError:
    """The error for a tensor of values without memory, such as that of a subclass."""
    return ValueError(
        f"{name} must have memory, got a {type(x).__name__} of shape {tuple(x.shape)} "
        "whose values lie at no address"
    )


def validate_out(out: torch.Tensor, x: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Checks where the result for x is to be written. x and dtype are checked already.

    Args:
        out: what the caller passed; should be a tensor of x's shape and device, of the
            result's dtype.
        dtype: of the result; None means x's.

    Raises:
        TypeError, ValueError: out is not such a tensor.
        RuntimeError: x or out requires a gradient, or has a tangent.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if out.dtype != (dtype or x.dtype):
        wanted = f"{x.dtype} as x is" if dtype is None else f"{dtype} as dtype says"
        raise TypeError(f"out must be {wanted}, got {out.dtype}")
    new = f"torch.empty_like(x{f', dtype={dtype}' if dtype else ''}) would do"
    if out.layout != torch.strided or out.is_nested:
        layout = "a nested tensor" if out.is_nested else out.layout
        raise ValueError(f"out must be strided, got {layout}; {new}")
    if out.shape != x.shape or out.device != x.device:
        raise ValueError(
            f"out must be like x, {tuple(x.shape)} on {str(x.device)!r}, got "
            f"{tuple(out.shape)} on {str(out.device)!r}; {new}"
        )
    if out.numel() and any(
        n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)
    ):
        raise ValueError(
            "out must have memory of its own for each element, got strides "
            f"{out.stride()} for shape {tuple(out.shape)}; {new}"
        )
    for name, tensor in {"x": x, "out": out}.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"out must be None where {name} requires a gradient, got a tensor; "
                "leave it out, or use torch.no_grad()"
            )
        if forward_ad._current_level >= 0 and has_tangent(tensor):
            raise RuntimeError(
                f"out must be None where {name} has a tangent, got a tensor; leave it "
                "out, or use torch.autograd.forward_ad.unpack_dual(x).primal"
            )


def by_rows(
    launch_for: Callable, x: torch.Tensor, max_rows: int, max_cols: int
) -> torch.Tensor:
    """What a chapter's launch writes for a matrix x; see `tiled.softmax`."""
    validate_rows(x, max_rows=max_rows, max_cols=max_cols)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        x = x if x.stride(1) == 1 else x.contiguous()
        launch_for(output, x)(output, x)
    return output


def validate_rows(
    x: torch.Tensor,
    *,
    max_rows: int | None = None,
    max_cols: int | None = None,
    contiguous: bool = False,
) -> None:
    """Checks the input of a softmax over the rows of a matrix.

    Args:
        x: what the caller passed; should be a float tensor (n_rows, n_cols).
        max_rows: the most rows that the kernel's grid has room for; None means any.
        max_cols: the longest row that the kernel takes; None means any.
        contiguous: whether the kernel needs rows that follow each other in memory.

    Raises:
        TypeError: x is not a tensor, or not float32, float16 or bfloat16.
        ValueError: x is not a strided matrix, lies on a device that kernels cannot
            reach here, has no memory, or other values there (a negative view), has more
            or longer rows than the kernel takes, or is not contiguous where the kernel
            needs it.
        RuntimeError: kernels are interpreted here, and the interpreter does not work
            with the NumPy that is installed.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in backend.DTYPES:
        raise TypeError(
            f"x must be float32, float16 or bfloat16, got {x.dtype}; "
            "convert it with x.float()"
        )
    if x.ndim != 2:
        raise ValueError(
            f"x must have 2 dimensions (rows, columns), got shape {tuple(x.shape)}; "
            "x.reshape(-1, x.shape[-1]) makes a matrix of the last dimension's rows"
        )
    _refuse_layout(x)
    if x.device.type != backend.DEVICE:
        raise ValueError(description.elsewhere(x, "x"))
    if x.is_neg():
        raise ValueError(
            "x must have its values in memory, got a negative view; x.resolve_neg() "
            "would do"
        )
    if x.numel() and not x.data_ptr():
        raise no_memory("x", x)
    if max_rows is not None and x.shape[0] > max_rows:
        raise ValueError(
            f"x must have at most {max_rows} rows for this kernel, got {x.shape[0]}; "
            "rows do not depend on each other, so call the function on parts of x"
        )
    if max_cols is not None and x.shape[1] > max_cols:
        raise ValueError(
            f"x must have at most {max_cols} columns for this kernel, got "
            f"{x.shape[1]}; torch.softmax takes longer rows"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous for this kernel, got strides {x.stride()} for shape "
            f"{tuple(x.shape)}; x.contiguous() copies it, and kernels.strided.softmax "
            "takes it as it is"
        )
    if backend.INTERPRETED:
        description.require_interpreter()


def has_tangent(x: torch.Tensor) -> bool:
    """Whether x is a dual tensor, of forward differentiation."""
    return forward_ad.unpack_dual(x).tangent is not None


def can_write(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a kernel can write to out while it reads x.

    Then out is contiguous, and is x or has no address in common with it. Two storages
    can be one memory (DLPack), so the addresses decide, not the storages. A kernel may
    write over x, because a program writes only where it has read for the last time.

    Args:
        out, x: tensors with memory.
    """
    if not out.is_contiguous() or not x.numel():
        return False
    if out is x:
        return True
    x_end = x.data_ptr() + span(x)
    out_end = out.data_ptr() + span(out)
    return out_end <= x.data_ptr() or x_end <= out.data_ptr()


# ---- calls ---------------------------------------------------------------------------

RowOperator = Callable[[torch.Tensor, int, torch.dtype | None], torch.Tensor]
Prepared = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes the result for tensors (output, x) like those that it was prepared from."""


def call(
    operator: torch._ops.OpOverload,
    rules: Callable[[], "Rules"],
    x: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Calls a row operator with arguments that nothing is known of.

    Args:
        operator: the registered operator, for what is traced, transformed or watched.
        rules: returns the operator's rules. What is traced does not ask for them.
        x, dim, dtype, out: what the caller passed.

    Returns:
        out, or a new contiguous tensor.

    Raises:
        TypeError, ValueError, IndexError, RuntimeError: as `validate`, `validate_out`.
    """
    if out is None and type(dim) is int and is_plain(x):
        there = rules()
        if x.requires_grad and records() and not x.is_inference():
            return there.apply(there.run_and_note, x, dim, dtype)
        return there.run_and_note(x, dim, dtype)
    if out is None and (stands_for_an_argument(x) or stands_for_an_argument(dim)):
        return operator(x, dim, dtype)
    if not isinstance(dim, int) and hasattr(dim, "__index__"):
        dim = dim.__index__()  # of NumPy, a tensor's, or traced
    validate(x, dim, dtype)
    if not is_dynamo_compiling():
        _know_shards(operator)  # inference mode never reaches `Rules.autograd`
    if out is None:
        return operator(x, dim, dtype)
    validate_out(out, x, dtype)
    if not (is_plain(x, out) and can_write(out, x)):
        return out.copy_(operator(x, dim, dtype))
    if not out.data_ptr():
        raise no_memory("out", out)
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "out must be an ordinary tensor outside of torch.inference_mode(), got one "
            "that was made inside; out.clone() would do"
        )
    rules().run_and_note(x, dim, dtype, out)
    torch.autograd.graph.increment_version(out)
    return out


class Rules:
    """What the dispatcher calls at each of its levels for one operator.

    Attributes:
        apply: `apply(f, x, dim, dtype)` is `f(x, dim, dtype)`, and autograd can go back
            through it. Not for transforms of `torch.func`.
        launches: what was prepared for each shape, strides, dtypes, device, dim and
            alignment.
        known: how to repeat the last calls of each shape, by `direct.repeat`.
    """

    def __init__(
        self,
        operator: torch._ops.OpOverload,
        prepare: Callable[[torch.Tensor, torch.Tensor, int], Prepared],
        backward: Callable[..., torch.Tensor],
        reference: RowOperator,
        known: dict[torch.Size, tuple[Callable[..., Any], ...]],
    ) -> None:
        """Makes the rules.

        Args:
            operator: the registered operator.
            prepare: takes an output, x and dim, whose memory it does not touch.
            backward: takes the gradient for y, y, dim and x's dtype, and returns the
                gradient for x. It must be differentiable itself where derivatives of
                gradients are needed.
            reference: PyTorch's own operator for the same values. It takes over where
                transforms differentiate.
            known: where to note how calls are repeated; empty at first.
        """
        self.operator = operator
        self.prepare = prepare
        self.reference = reference
        self.launches: dict[tuple, Prepared] = {}
        self.known = known
        # The parent's `apply` is for tensors that no transform wraps, and takes 1 µs
        # less than `Function.apply`, which looks for transforms first.
        self.apply = super(torch.autograd.Function, _differentiable(backward)).apply

    def run(
        self,
        x: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        *,
        note: bool = False,
    ) -> torch.Tensor:
        """The operator at the level of kernels: on x's memory, where nothing records.

        Args:
            x, dim, dtype: the operator's arguments.
            out: where to write, by `can_write`; None means a new tensor.
            note: whether the second call of a form notes how to repeat it.
        """
        try:
            address, device = x.data_ptr(), x.get_device()
            place = address & 15 if out is None else (address & 15, out.data_ptr() & 15)
            key = (x.shape, x.stride(), x.dtype, device, dim, dtype, place)
            launch = self.launches.get(key) if address else None
        except (RuntimeError, TypeError):  # no memory; dtype is not hashable
            launch, address = None, 0
        if launch is None:
            validate(x, dim, dtype, address)
        if device >= 0 and device != _current_device():  # a CPU's is -1
            with torch.cuda.device(device):
                return self.run(x, dim, dtype, out)
        y = out
        if out is None and dtype is None and x.is_contiguous():
            y = torch.empty_like(x)
        elif out is None:
            contiguous = torch.contiguous_format
            y = torch.empty_like(x, dtype=dtype, memory_format=contiguous)
        if launch is None:
            if len(self.launches) >= MOST_LAUNCHES:
                self.launches.clear()
                self.known.clear()
            launch = self.launches[key] = self.prepare(y, x, dim)
            launch(y, x)
            return y
        launch(y, x)
        if note and (launch_at := getattr(launch, "direct", None)):
            call = x, dim, dtype, out
            if again := direct.repeat(launch_at, call, y, self.apply):
                earlier = self.known.get(x.shape, ())[: MOST_FORMS - 1]
                self.known[x.shape] = again, *earlier  # the latest is asked first
        return y

    def run_and_note(self, *args: Any) -> torch.Tensor:
        """`run`, for calls that may be repeated: see `direct.repeat`."""
        return self.run(*args, note=True)

    def fake(
        self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The result's shape, strides and dtype, without values."""
        validate_dim(dim, x)
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def autograd(
        self,
        keyset: torch._C.DispatchKeySet,
        x: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The operator at the level of autograd.

        Forward differentiation and the transforms of `torch.func` nest in any order and
        to any depth. PyTorch's own operator has rules for all of that.

        Args:
            keyset: the levels that the dispatcher has reached.
            x, dim, dtype: the operator's arguments.
        """
        _know_shards(self.operator)
        if _transforms_are_active() or forward_ad._current_level >= 0:
            # Without a dtype, `torch.autocast` would widen the result.
            return self.reference(x, dim, dtype=dtype or x.dtype)
        below = functools.partial(self._below_autograd, keyset)
        if x.requires_grad and torch.is_grad_enabled():
            return self.apply(below, x, dim, dtype)
        return below(x, dim, dtype)

    def _below_autograd(self, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            below = keyset & torch._C._after_autograd_keyset
            return self.operator.redispatch(below, *args)

    def batched(
        self,
        info: Any,
        in_dims: tuple[int | None, ...],
        x: torch.Tensor,
        dim: int,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, int]:
        """All examples of `torch.vmap` at once: results, and the dim that counts them.

        Args:
            info: about the batch; not used.
            in_dims: which dimension of x counts the examples, and None for the others.
            x: all examples.
            dim, dtype: the operator's arguments for one example.
        """
        x = x.movedim(in_dims[0], 0)
        validate_dim(dim, x, 1)
        if x.ndim == 1:  # an example is one value without a dimension
            return self.operator(x[:, None], 1, dtype)[:, 0], 0
        return self.operator(x, dim % (x.ndim - 1) + 1, dtype), 0


def _differentiable(backward: Callable[..., torch.Tensor]) -> type:
    """Returns the autograd function of `Rules.apply`."""

    class Differentiable(torch.autograd.Function):
        """Saves the result and no other tensor, because `backward` needs no other."""

        @staticmethod
        def forward(
            ctx: Any, f: RowOperator, x: torch.Tensor, dim: int, dtype: Any
        ) -> torch.Tensor:
            y = f(x, dim, dtype)
            ctx.dim, ctx.dtype = dim, x.dtype
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
            (y,) = ctx.saved_tensors
            return None, backward(gradient, y, ctx.dim, ctx.dtype), None, None

    return Differentiable


def _know_shards(operator: torch._ops.OpOverload) -> None:
    """Registers an operator's shards where there may be DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        _register_sharding(operator)


@functools.cache
def _register_sharding(operator: torch._ops.OpOverload) -> None:
    """Tells DTensor that an operator may take shards of every dimension but `dim`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(operator)
    def placements(x: Any, dim: int, *dtype: torch.dtype) -> list[tuple[list, list]]:
        apart = [Shard(d) for d in range(x.ndim) if d != dim % x.ndim]
        rest = [None] * (1 + len(dtype))
        return [([place], [place, *rest]) for place in (Replicate(), *apart)]


# ---- instruments that watch what is inside -------------------------------------------


def call_in_mode(
    mode: Any, function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Calls what a dispatch mode was asked to call.

    A dispatch mode sees an operator as one call. But an instrument that counts or
    guards what the course's operators do must see the allocations and copies inside
    them. So this calls their kernels with the mode active.

    Args:
        mode: the dispatch mode whose `__torch_dispatch__` was called.
        function, args, kwargs: what it was called with.
    """
    if function.namespace != "kernels":
        return function(*args, **kwargs)
    keys = torch._C.DispatchKey
    key = keys.CPU if backend.DEVICE == "cpu" else keys.CUDA
    with mode:
        return function.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
