"""Memory that shows where a function writes: guard bands and poison.

A tensor inside a larger buffer, its guard bands, must leave the buffer as it is. Poison
fills the tensor until something else is written. `check.softmax` lays its input into
such a buffer, and gives one to every tensor that the checked function allocates.

Masked elements of a load without `other` are undefined. The interpreter makes them 0,
which many wrong kernels need. `undefined_without_other` makes them poison of their own:
NaN, which spoils a sum, a large number, which wins a maximum, and its opposite, which
wins a minimum. (A kernel's maximum and minimum ignore NaN.) On a GPU such elements stay
as the GPU leaves them.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.lab import operator

GUARD = 8192  # elements on each side; their bytes are a multiple of any alignment
POISON = 54272.0
"""What output holds until it is overwritten: exact in float16, bfloat16 and float32."""
INTEGER_POISON = 85
"""The same for integers of any width."""
UNDEFINED = 50176.0
"""A number that no input holds, exact in the three dtypes as well."""

FLOATING = (tl.float64, tl.float32, tl.float16, tl.bfloat16)

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison_of(dtype: torch.dtype) -> float:
    """What output of this dtype holds until it is overwritten."""
    return POISON if dtype.is_floating_point else INTEGER_POISON


class Guarded:
    """A tensor inside a larger buffer; both are filled with poison."""

    def __init__(
        self,
        size: Sequence[int],
        strides: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: float,
        offset: int = 0,
    ) -> None:
        self.start = GUARD + offset
        self.last = sum(max(n - 1, 0) * s for n, s in zip(size, strides, strict=True))
        length = 2 * self.start + self.last + 1
        self.buffer = torch.full((length,), poison, dtype=dtype, device=device)
        self.view = (size, strides, self.start)
        self.tensor = self.buffer.as_strided(*self.view)

    def arm(self) -> "Guarded":
        """Remembers what the buffer holds now, for `damage` to compare with."""
        self.before = self.buffer.clone()
        return self

    def damage(self) -> tuple[bool, list[int]]:
        """Compares the buffer with what it held when it was armed, bit by bit.

        Returns:
            Whether an element of the tensor changed, and the places outside the tensor
            that changed, as offsets in elements from the tensor's first element.
        """
        bits = BITS[self.buffer.itemsize]
        changed = self.before.view(bits) != self.buffer.view(bits)
        if not changed.any():
            return False, []
        inside = changed.as_strided(*self.view).any().item()
        places = torch.arange(len(changed), device=changed.device)
        changed[places.as_strided(*self.view).reshape(-1)] = False
        return inside, (changed.nonzero().flatten() - self.start).tolist()


_aten = torch.ops.aten
EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted)
EMPTY += (_aten.new_empty, _aten.new_empty_strided)
FILLED = (_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.full, _aten.full_like)
FILLED += (_aten.clone,)


class GuardAllocations(TorchDispatchMode):
    """While active, every tensor that PyTorch allocates gets guard bands and poison."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Guarded] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile runs the function without compiling it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = operator.call_in_mode(self, func, args, kwargs or {})
        packet = func.overloadpacket
        if packet not in EMPTY + FILLED or made.itemsize not in BITS:
            return made
        where = {"dtype": made.dtype, "device": made.device}
        poison = poison_of(made.dtype)
        guarded = Guarded(made.size(), made.stride(), poison=poison, **where)
        if packet in FILLED:
            guarded.tensor.copy_(made)
        self.allocated.append(guarded.arm())
        return guarded.tensor


@contextlib.contextmanager
def undefined_without_other() -> Iterator[None]:
    """While active, the interpreter loads NaN and ±UNDEFINED, in turn, without `other`.

    Weighed: to wrap `InterpreterBuilder.create_masked_load`. It is given no `other`
    either if the kernel's `other` is a single 0.
    """
    load = TritonSemantic.load
    poison = np.array([math.nan, UNDEFINED, -UNDEFINED], np.float32)

    def load_poison(self: Any, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        interpreted = isinstance(self.builder, InterpreterBuilder)
        if interpreted and mask is not None and other is None:
            ptr_ty = ptr.type.scalar
            if ptr_ty.is_ptr() and ptr_ty.element_ty in FLOATING:
                values = np.resize(poison, ptr.handle.data.shape)
                form = ptr.type.with_element_ty(tl.float32)
                other = tl.tensor(TensorHandle(values, tl.float32), form)
        return load(self, ptr, mask, other, *rest)

    with patch.object(TritonSemantic, "load", load_poison):
        yield
