"""Every access of a kernel in the interpreter: checked before it is made, and counted.

This is the half of the meter that watches Triton's launches; `kernels.lab.meter` is the
other half, with the public functions. Every lane of a load or a store whose mask is
true counts. An atomic both reads and writes.

Every access is checked before it is made. In the interpreter a pointer is a 64-bit
integer of which an address uses 48 bits. This module writes the number of the kernel's
argument into the upper 16 bits. They survive the kernel's arithmetic on the pointer. So
each lane tells which tensor its pointer was derived from, wherever the pointer points.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError


class OutOfBounds(IndexError):
    """A kernel was about to touch memory that is no element of its tensor.

    Attributes:
        meant: the offset of an element, if an overflow of 32 bits turns it into the one
            that was used; else None.
    """

    meant: int | None = None


def add(
    counts: Counter, direction: str, number: int, itemsize: int, floating: bool
) -> None:
    """Adds so many elements that were "read" or "written" to the counts of an `Op`."""
    counts[f"{direction}_{'values' if floating else 'indices'}"] += number
    counts[f"{direction}_bytes"] += number * itemsize


class View:
    """The exact set of a tensor's elements, by their offset from the first element."""

    def __init__(self, tensor: torch.Tensor, name: str = "") -> None:
        self.name = name
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        self.start, self.itemsize = tensor.data_ptr(), tensor.element_size()
        # Longest stride first. An axis of one element, or of stride 0, adds none.
        axes = zip(self.strides, self.shape, strict=True)
        self.axes = sorted((a for a in axes if a[0] and a[1] != 1), reverse=True)
        self.span = sum(stride * (size - 1) for stride, size in self.axes) + 1
        self.table = None
        if 0 in self.shape:
            self.axes, self.span = [(1, 0)], 0
        elif self._overlaps():
            strides, sizes = zip(*self.axes, strict=True)
            self.table = np.zeros(self.span, bool)
            np.lib.stride_tricks.as_strided(self.table, sizes, strides)[...] = True

    def _overlaps(self) -> bool:
        """Whether an axis steps into what the axes of shorter strides cover."""
        reach = 0
        for stride, size in reversed(self.axes):
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False

    def __len__(self) -> int:
        """The number of distinct elements."""
        if self.table is not None:
            return int(self.table.sum())
        return math.prod(size for _, size in self.axes)

    def has(self, offsets: np.ndarray) -> np.ndarray:
        """Which of these offsets, in elements, are those of elements."""
        inside = (offsets >= 0) & (offsets < self.span)
        if self.table is not None:
            inside[inside] = self.table[offsets[inside]]
            return inside
        for stride, size in self.axes:
            index, offsets = np.divmod(offsets, stride)
            inside &= index < size
        return inside & (offsets == 0)

    def allows(self, start: np.ndarray, width: int) -> np.ndarray:
        """Which accesses of `width` bytes at these byte offsets stay inside."""
        inside = start % min(width, self.itemsize) == 0
        for byte in range(0, width, self.itemsize):
            inside &= self.has((start + byte) // self.itemsize)
        return inside

    def outside(self, start: int, width: int) -> int:
        """The first offset of an access that is no element's."""
        offsets = (start + np.arange(0, width, self.itemsize)) // self.itemsize
        return int(offsets[np.argmin(self.has(offsets))])

    def meant(self, offset: int) -> int | None:
        """The offset of an element that an overflow of 32 bits turns into this one."""
        equal = np.arange(2**31 + (offset - 2**31) % 2**32, self.span, 2**32)
        found = equal[self.has(equal) & (equal != offset)]
        return int(found[0]) if found.size else None

    def describe(self, start: int, width: int) -> str:
        """Says in words where an access lies that is not allowed."""
        offset = self.outside(start, width)
        if self.span == 0:
            place = "which has no elements"
        elif offset < 0:
            place = "whose first element is 0"
        elif offset >= self.span:
            place = f"whose last element is {self.span - 1}"
        elif start % min(width, self.itemsize):
            place = f"not at the start of an element but at byte {start}"
        else:
            place = "which lies between the elements of this view"
        text = (
            f"offset {offset} of {self.name}, {place}\n"
            f"{self.name} has shape {self.shape} and strides {self.strides}"
        )
        if self.span and len(self.shape) == 2 and min(self.strides) > 0:
            position = [0, 0]
            for axis in sorted((0, 1), key=self.strides.__getitem__, reverse=True):
                position[axis], offset = divmod(offset, self.strides[axis])
            text += f": this would be row {position[0]}, column {position[1]}"
        return text


# ---- the running launch --------------------------------------------------------------

_TAG_BITS = 48  # above the bits of an address
_ADDRESS = np.uint64(2**_TAG_BITS - 1)
_HALF = np.uint64(2 ** (_TAG_BITS - 1))  # addresses of user memory are below it


class _Launch:
    """A launch in progress: its tensors, and what it has moved so far."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.counts: Counter = Counter()
        self.views: list[View] = []
        self.numbers: dict[int, int] = {}

    def bind(self, arguments: dict[str, Any]) -> None:
        """Numbers the kernel's tensors from 1."""
        for argument, value in arguments.items():
            for name, tensor in _pointers(argument, value):
                self.views.append(View(interpreter._unwrap_tensor(tensor), name))
                self.numbers[id(tensor)] = len(self.views)

    def tag(self, pointer: Any, tensor: Any) -> None:
        number = np.uint64(self.numbers[id(tensor)] << _TAG_BITS)
        pointer.handle.data = pointer.handle.data + number

    def access(
        self,
        kind: str,
        pointers: interpreter.TensorHandle,
        mask: np.ndarray,
        width: int,
    ) -> interpreter.TensorHandle:
        """Checks and counts one access of `width` bytes a lane; removes the tags."""
        lanes = np.flatnonzero(np.broadcast_to(mask, pointers.data.shape))
        addresses = pointers.data.ravel()[lanes]
        self._check(kind, addresses, lanes, pointers.data.shape, width)
        floating = pointers.get_element_ty().is_floating()
        for direction in _DIRECTIONS[kind]:
            add(self.counts, direction, lanes.size, width, floating)
        return interpreter.TensorHandle(pointers.data & _ADDRESS, pointers.dtype)

    def _check(
        self,
        kind: str,
        addresses: np.ndarray,
        lanes: np.ndarray,
        shape: tuple[int, ...],
        width: int,
    ) -> None:
        numbers = (addresses + _HALF) >> _TAG_BITS
        inside = np.zeros(lanes.size, bool)
        for number, view in enumerate(self.views, 1):
            mine = numbers == number
            if mine.any():
                start = addresses[mine] - np.uint64((number << _TAG_BITS) + view.start)
                inside[mine] = view.allows(start.astype(np.int64), width)
        if inside.all():
            return
        first = int(np.argmin(inside))
        number, meant = int(numbers[first]), None
        if 1 <= number <= len(self.views):
            view = self.views[number - 1]
            start = int(addresses[first]) - (number << _TAG_BITS) - view.start
            place = view.describe(start, width)
            meant = view.meant(view.outside(start, width))
        else:
            place = "an address that no tensor argument leads to"
        program = interpreter.interpreter_builder.grid_idx[: len(_grid())]
        element = tuple(map(int, np.unravel_index(lanes[first], shape)))
        error = OutOfBounds(
            f"{self.kernel}, program {_plain(program)}: {kind} at {place}\n"
            f"{np.count_nonzero(~inside)} of {math.prod(shape)} elements are outside, "
            f"the first is element {_plain(element)}"
        )
        error.meant = meant
        raise error


_DIRECTIONS = {
    "load": ["read"],
    "store": ["written"],
    "atomic": ["read", "written"],
}

Observer = Callable[[str, tuple[int, ...], Counter], None]
"""Is told a kernel's name, its grid and what it moved, when its launch has ended."""

_observers: list[Observer] = []  # a count may run inside another count
_launch: _Launch | None = None  # what the interpreter is running


def is_launching() -> bool:
    """Whether a kernel is running now, in the interpreter."""
    return _launch is not None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While active, launches in the interpreter are checked and told to the observer.

    Raises:
        OutOfBounds: from the launch, in place of Triton's own error.
    """
    with ExitStack() as stack:
        if not _observers:
            for patches in _interpreter_patches():
                stack.enter_context(patches)
        _observers.append(observer)
        stack.callback(_observers.remove, observer)
        yield


def _pointers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors in a kernel's argument, with a name for each."""
    if isinstance(value, interpreter.TensorDescriptor):
        yield name, value.base
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _pointers(f"{name}[{i}]", item)
    elif hasattr(value, "data_ptr"):
        yield name, value


def _grid() -> tuple[int, ...]:
    """The running launch's grid, without the axes of 1 that Triton appends."""
    grid = [int(size) for size in interpreter.interpreter_builder.grid_dim]
    while len(grid) > 1 and grid[-1] == 1:
        grid.pop()
    return tuple(grid)


def _plain(index: tuple[int, ...]) -> str:
    return str(index[0]) if len(index) == 1 else str(index)


def _interpreter_patches() -> list:
    """Makes the interpreter report launches, pointers and accesses to `_launch`."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    run, to_host = executor.__call__, executor._init_args_hst
    convert = interpreter._implicit_cvt
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def metered_run(self: Any, *args: Any, **kwargs: Any) -> None:
        global _launch
        _launch = launch = _Launch(self.fn.__name__)
        try:
            run(self, *args, **kwargs)
        except InterpreterError as error:
            cause = error  # Triton wraps an exception once for every function it leaves
            while isinstance(cause, InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, OutOfBounds):
                raise cause from None
            raise
        finally:
            _launch = None
        for observer in _observers:
            observer(launch.kernel, _grid(), launch.counts)

    def metered_to_host(self: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        args, kwargs = to_host(self, args, kwargs)
        _launch.bind(inspect.getcallargs(self.fn, *args, **kwargs))
        return args, kwargs

    def metered_convert(value: Any) -> Any:
        result = convert(value)
        if hasattr(value, "data_ptr"):
            _launch.tag(result, value)
        return result

    def metered_load(
        self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        pointers = _launch.access("load", pointers, mask.data, width)
        return load(self, pointers, mask, *rest, **named)

    def metered_store(
        self: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        width = value.data.itemsize
        pointers = _launch.access("store", pointers, mask.data, width)
        return store(self, pointers, value, mask, *rest)

    def metered_rmw(
        self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        width = value.data.itemsize
        pointers = _launch.access("atomic", pointers, mask.data, width)
        return rmw(self, op, pointers, value, mask, *rest)

    def metered_cas(self: Any, pointers: Any, old: Any, value: Any, *rest: Any) -> Any:
        width = value.data.itemsize
        pointers = _launch.access("atomic", pointers, np.True_, width)
        return cas(self, pointers, old, value, *rest)

    return [
        patch.object(interpreter, "_implicit_cvt", metered_convert),
        patch.multiple(executor, __call__=metered_run, _init_args_hst=metered_to_host),
        patch.multiple(
            builder,
            create_masked_load=metered_load,
            create_masked_store=metered_store,
            create_atomic_rmw=metered_rmw,
            create_atomic_cas=metered_cas,
        ),
    ]
