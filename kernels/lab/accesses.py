"""Every access of a kernel in the interpreter: checked before it is made, and counted.

This is the half of the meter that watches Triton's launches; `kernels.lab.meter` is the
other half, with the public functions. Every lane of a load or a store whose mask is
true counts. An atomic both reads and writes.

Every access is checked before it is made. In the interpreter a pointer is a 64-bit
integer of which an address uses 48 bits. This module writes the number of the kernel's
argument into the upper 16 bits. They survive the kernel's arithmetic on the pointer. So
each lane tells which tensor its pointer was derived from, wherever the pointer points.

The judge also asks whether programs wait for each other; `kernels.lab.races` knows.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton._C.libtriton import ir as _ir
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.lab import races
from kernels.lab.guards import INTEGER_POISON, POISON


class OutOfBounds(IndexError):
    """A kernel was about to touch memory that is no element of its tensor.

    Attributes:
        meant: the offset of an element, if an overflow of 32 bits turns it into the one
            that was used; else None.
    """

    meant: int | None = None


@dataclass
class Notes:
    """What may explain a wrong result, in words; the first one first.

    Attributes:
        early: what a program looked at only once, before another one had written it.
        unset: atomics that add to the poison of `guards`.
    """

    early: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)


class Race(RuntimeError):
    """Two programs touched the same element, and neither waited for the other."""


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

    def __init__(self, kernel: str, order: races.Order | None) -> None:
        self.kernel, self.order = kernel, order
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
    ) -> tuple[interpreter.TensorHandle, np.ndarray]:
        """Checks and counts one access of `width` bytes a lane.

        Returns:
            The pointers without tags, and the lanes whose mask is true.
        """
        if mask.shape != pointers.data.shape:
            mask = np.broadcast_to(mask, pointers.data.shape)
        lanes = np.flatnonzero(mask)
        addresses = pointers.data.ravel()[lanes]
        self._check(kind, addresses, lanes, pointers.data.shape, width)
        floating = pointers.get_element_ty().is_floating()
        for direction in _DIRECTIONS[kind]:
            add(self.counts, direction, lanes.size, width, floating)
        if self.order is not None:
            self.begin(interpreter.interpreter_builder.grid_idx)
        return interpreter.TensorHandle(pointers.data & _ADDRESS, pointers.dtype), lanes

    def begin(self, program: tuple[int, ...] | None) -> None:
        """Notes which program runs, None at the end, and what the last one missed."""
        last = self.order.program
        for address, event in self.order.begin(program).items():
            said = f"{self.kernel}, program {_named(last)}, looked once at "
            said += f"{self._place(address)}, before program {_named(event.program)} "
            _notes.early.append(said + "had written there")

    def note_unset(self, address: int) -> None:
        """Notes that an atomic adds to an element that nobody set."""
        said = f"{self.kernel}, program {_named(self.order.program)}: atomic at "
        _notes.unset.append(f"{said}{self._place(address)}")

    def refuse(
        self, kind: str, raced: dict[int, races.Event], how: str = "wrote"
    ) -> None:
        """Raises a `Race` if there is any."""
        for address, event in raced.items():
            raise Race(
                f"{self.kernel}, program {_named(self.order.program)}: {kind} at "
                f"{self._place(address)}, which program {_named(event.program)} {how}"
            )

    def _place(self, address: int) -> str:
        """An element in words, from its address without a tag."""
        for view in self.views:
            start = address - view.start
            if view.allows(np.array([start]), view.itemsize).all():
                return f"offset {start // view.itemsize} of {view.name}"
        return f"address {address}"

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
        for number in dict.fromkeys(numbers.tolist()):
            if 1 <= number <= len(self.views):
                mine, view = numbers == number, self.views[number - 1]
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
        program = _named(interpreter.interpreter_builder.grid_idx)
        element = tuple(map(int, np.unravel_index(lanes[first], shape)))
        error = OutOfBounds(
            f"{self.kernel}, program {program}: {kind} at {place}\n"
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

_SEM = _ir.MEM_SEMANTIC

_observers: list[Observer] = []  # a count may run inside another count
_launch: _Launch | None = None  # what the interpreter is running
_notes: Notes | None = None  # where programs are taken to run at the same time


def is_launching() -> bool:
    """Whether a kernel is running now, in the interpreter."""
    return _launch is not None


@contextmanager
def at_the_same_time() -> Iterator[Notes]:
    """While active, no program of an observed launch may rely on another's having run.

    A program's first look at what another one wrote gives the old value; see `races`.

    Yields:
        Notes, to which the launches add.

    Raises:
        Race: from the launch, in place of Triton's own error.
    """
    global _notes
    outer, _notes = _notes, Notes()
    try:
        yield _notes
    finally:
        _notes = outer


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


def _named(program: tuple[int, ...]) -> str:
    """A program's index along the axes of `_grid`, as text."""
    return _plain(program[: len(_grid())])


def _plain(index: tuple[int, ...]) -> str:
    return str(index[0]) if len(index) == 1 else str(index)


_POISON = {"f": POISON, "i": INTEGER_POISON}
_ADDING = [getattr(_ir.ATOMIC_OP, name) for name in ("ADD", "OR", "XOR")]


def _places(pointers: Any, lanes: np.ndarray) -> list[int]:
    """The addresses of lanes."""
    return pointers.data.ravel()[lanes].tolist()


def _give(
    result: Any, lanes: np.ndarray, addresses: list[int], old: dict[int, Any]
) -> None:
    """Puts old values of elements into the result of a look."""
    for lane, address in zip(lanes, addresses, strict=True) if old else ():
        if address in old and old[address].dtype == result.data.dtype:
            result.data.flat[lane] = old[address]


def _note_atomic(
    result: Any,
    pointers: Any,
    lanes: np.ndarray,
    idle: np.ndarray,
    failed: np.ndarray,
    sem: Any,
    scope: Any,
) -> None:
    """Notes an atomic; one that changes nothing is a look, and may give old values.

    Args:
        result: the values before it.
        pointers, lanes, sem, scope: of the atomic.
        idle: for which elements it changes nothing, whatever they hold.
        failed: for which elements it compared, and wrote nothing.
    """
    order, addresses = _launch.order, _places(pointers, lanes)
    _launch.refuse("atomic", order.atomic_races(addresses), "stored")
    shape, wide = pointers.data.shape, scope != _ir.MEM_SYNC_SCOPE.CTA
    idle, failed = (np.broadcast_to(a, shape).ravel()[lanes] for a in (idle, failed))
    old = order.atomic(
        addresses,
        result.data.ravel()[lanes],
        idle.tolist(),
        failed.tolist(),
        acquires=wide and sem in (_SEM.ACQUIRE, _SEM.ACQUIRE_RELEASE),
        releases=wide and sem in (_SEM.RELEASE, _SEM.ACQUIRE_RELEASE),
    )
    _give(result, lanes, addresses, old)


def _interpreter_patches() -> list:
    """Makes the interpreter report launches, pointers and accesses to `_launch`."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    run, to_host = executor.__call__, executor._init_args_hst
    convert = interpreter._implicit_cvt
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def metered_run(self: Any, *args: Any, **kwargs: Any) -> None:
        global _launch
        order = None if _notes is None else races.Order()
        _launch = launch = _Launch(self.fn.__name__, order)
        try:
            run(self, *args, **kwargs)
            if order is not None:
                launch.begin(None)
        except InterpreterError as error:
            cause = error  # Triton wraps an exception once for every function it leaves
            while isinstance(cause, InterpreterError):
                cause = cause.__cause__
            if isinstance(cause, OutOfBounds | Race):
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
        self: Any, pointers: Any, mask: Any, other: Any, *how: Any, **named: Any
    ) -> Any:
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        pointers, lanes = _launch.access("load", pointers, mask.data, width)
        result = load(self, pointers, mask, other, *how, **named)
        if order := _launch.order:
            addresses = _places(pointers, lanes)
            if named.get("is_volatile", how[-1] if how else False):
                _give(result, lanes, addresses, order.look(addresses))
            else:
                _launch.refuse("load", order.load(addresses))
        return result

    def metered_store(
        self: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        width = value.data.itemsize
        pointers, lanes = _launch.access("store", pointers, mask.data, width)
        if order := _launch.order:
            addresses = _places(pointers, lanes)
            before = load(self, pointers, mask, None, *rest, False).data
            raced = order.store(addresses, before.ravel()[lanes])
            _launch.refuse("store", raced, "loaded")
        return store(self, pointers, value, mask, *rest)

    def metered_rmw(
        self: Any,
        op: Any,
        pointers: Any,
        value: Any,
        mask: Any,
        sem: Any,
        scope: Any,
        *rest: Any,
    ) -> Any:
        width = value.data.itemsize
        pointers, lanes = _launch.access("atomic", pointers, mask.data, width)
        result = rmw(self, op, pointers, value, mask, sem, scope, *rest)
        if order := _launch.order:
            unset = result.data.ravel()[lanes] == _POISON.get(result.data.dtype.kind)
            if op in (_ir.ATOMIC_OP.ADD, _ir.ATOMIC_OP.FADD) and unset.any():
                first = _places(pointers, lanes[unset])[0]
                if first not in order.written:
                    _launch.note_unset(first)
            idle = (value.data == 0) & (op in _ADDING)
            _note_atomic(result, pointers, lanes, idle, np.False_, sem, scope)
        return result

    def metered_cas(
        self: Any, pointers: Any, old: Any, value: Any, sem: Any, scope: Any
    ) -> Any:
        width = value.data.itemsize
        pointers, lanes = _launch.access("atomic", pointers, np.True_, width)
        result = cas(self, pointers, old, value, sem, scope)
        if _launch.order:
            idle, failed = old.data == value.data, result.data != old.data
            _note_atomic(result, pointers, lanes, idle, failed, sem, scope)
        return result

    def metered_atomic_store(
        self: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        width = value.data.itemsize
        pointers, lanes = _launch.access("store", pointers, mask.data, width)
        if _launch.order:
            before = load(self, pointers, mask, None, None, False)
            _note_atomic(before, pointers, lanes, np.False_, np.False_, sem, scope)
        return store(self, pointers, value, mask, None)

    since_3_9 = {}
    if hasattr(builder, "create_atomic_store"):
        since_3_9["create_atomic_store"] = metered_atomic_store
    return [
        patch.object(interpreter, "_implicit_cvt", metered_convert),
        patch.multiple(executor, __call__=metered_run, _init_args_hst=metered_to_host),
        patch.multiple(
            builder,
            create_masked_load=metered_load,
            create_masked_store=metered_store,
            create_atomic_rmw=metered_rmw,
            create_atomic_cas=metered_cas,
            **since_3_9,
        ),
    ]
