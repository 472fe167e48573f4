"""The meter: how many bytes a function reads and writes, operation by operation.

`count` runs a function once and records two kinds of operations in one table:

- PyTorch's, through a dispatch mode. An operation reads every distinct element of its
  tensor arguments (a broadcast view has fewer than its shape says) and writes every
  distinct element of the tensors that it makes or changes. Views and allocations move
  nothing. What only part of a tensor is needed for (indexing) counts as all of it.
- Triton's launches, in the interpreter. Every lane of a load or a store whose mask is
  true counts; an atomic both reads and writes.

These are the bytes that the code asks for. What the memory then serves may be less:
caches answer a part, which only a GPU's own counters can tell.

Every access of a kernel is checked before it is made. In the interpreter a pointer is
a 64-bit integer of which an address uses 48 bits. The meter writes the number of the
argument into the upper 16: they survive the kernel's arithmetic on the pointer, so
each lane says itself which tensor it was derived from, wherever it points.

Weighed, and not used:

- `torch.profiler` records operations, shapes and the memory that is allocated, not
  what is read; `torch.utils.flop_counter` is such a dispatch mode, for arithmetic.
- `triton-viz` 3.0 patches the interpreter as well. Its profiler sums the bytes of one
  decorated kernel and knows no PyTorch operations; its sanitizer proves bounds with
  z3, refuses tensors without a stride of 1 and ends the process at the first error.
  It brings z3, Flask, cairo and Arrow along.
- NVIDIA's `compute-sanitizer` needs a GPU and sees allocations, of which PyTorch's
  allocator makes few and large ones; a view's neighbours are inside.
"""

import html
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.lab import process


class OutOfBounds(IndexError):
    """A kernel was about to touch memory that is no element of its tensor."""


class Values(NamedTuple):
    """Numbers moved: floating-point values, and integers apart from them."""

    read: int
    written: int
    indices: int
    """Integers written, such as the positions that `max` returns beside its values."""


def naive(n_rows: int, n_cols: int) -> Values:
    """What the five-line softmax moves: each line reads, and writes, a whole tensor.

    Source: Triton's fused-softmax tutorial, whose 5MN+2M and 3MN+2M leave out the M
    int64 indices that `x.max(dim=1)` writes as well.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    _require_shape(n_rows, n_cols)
    size = n_rows * n_cols
    return Values(5 * size + 2 * n_rows, 3 * size + 2 * n_rows, n_rows)


def fused(n_rows: int, n_cols: int) -> Values:
    """What a softmax moves that reads each value once and writes each value once.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    _require_shape(n_rows, n_cols)
    return Values(n_rows * n_cols, n_rows * n_cols, 0)


def _require_shape(n_rows: int, n_cols: int) -> None:
    for name, size in {"n_rows": n_rows, "n_cols": n_cols}.items():
        if not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}")


@dataclass(frozen=True)
class Op:
    """What one PyTorch operation, or one launch of a Triton kernel, moved.

    Attributes:
        name: the operation's or the kernel's name.
        grid: the programs of a launch along each axis; None for PyTorch's operations.
        read_values, written_values: floating-point values.
        read_indices, written_indices: integers and booleans.
        read_bytes, written_bytes: both kinds together, in bytes.
    """

    name: str
    grid: tuple[int, ...] | None = None
    read_values: int = 0
    written_values: int = 0
    read_indices: int = 0
    written_indices: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, repr=False)
class Traffic:
    """The operations of one call in the order in which they ran, and their totals.

    Attributes:
        rows: the operations. Each number of an `Op` is also one of the whole: its sum
            over the rows.
    """

    rows: tuple[Op, ...]

    read_values = property(lambda self: self._total("read_values"))
    written_values = property(lambda self: self._total("written_values"))
    read_indices = property(lambda self: self._total("read_indices"))
    written_indices = property(lambda self: self._total("written_indices"))
    read_bytes = property(lambda self: self._total("read_bytes"))
    written_bytes = property(lambda self: self._total("written_bytes"))
    bytes = property(lambda self: self._total("bytes"))

    @property
    def values(self) -> Values:
        """The totals in the form of the formulas `naive` and `fused`."""
        return Values(self.read_values, self.written_values, self.written_indices)

    def _total(self, field: str) -> int:
        return sum(getattr(row, field) for row in self.rows)

    def _cells(self) -> list[list[str]]:
        fields = ["read_values", "written_values", "read_indices", "written_indices"]
        fields = [f for f in fields if f.endswith("values") or self._total(f)]
        fields += ["bytes"]
        titles = [" ".join(reversed(field.split("_"))) for field in fields]
        rows = [
            [f"{row.name}[{row.grid}]" if row.grid else row.name]
            + [f"{getattr(row, field):,}" for field in fields]
            for row in self.rows
        ]
        totals = [f"{self._total(field):,}" for field in fields]
        return [["operation", *titles], *rows, ["total", *totals]]

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *numbers in cells:
            padded = map(str.rjust, numbers, widths[1:])
            lines.append("  ".join([name.ljust(widths[0]), *padded]))
        rule = "-" * len(lines[0])
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _repr_html_(self) -> str:
        def line(row: list[str], tag: str) -> str:
            cells = [f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row]
            return f"<tr>{''.join(cells)}</tr>"

        head, *body, total = self._cells()
        lines = [line(row, "td") for row in body]
        return (
            f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(lines)}</tbody>"
            f"<tfoot>{line(total, 'th')}</tfoot></table>"
        )


def count(function: Callable, *args: Any, **kwargs: Any) -> Traffic:
    """Runs `function(*args, **kwargs)` and counts what it reads and writes.

    Kernels run in Triton's interpreter; on a GPU machine the whole call therefore runs
    in a helper process, on CPU copies of its arguments. Counts may nest.

    Args:
        function: any mixture of PyTorch operations and Triton launches. What it
            returns is dropped.

    Raises:
        TypeError: function cannot be called.
        OutOfBounds: a kernel was about to load or store outside the tensor that it was
            given: exactly the elements of the view, so that the columns beside a slice
            are outside as well. Raised before the access.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    return process.call_in("interpreter", _count, function, args, kwargs)


def _count(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Traffic:
    mode = _Mode()
    with ExitStack() as stack:
        if not _modes:
            for patches in _interpreter_patches():
                stack.enter_context(patches)
        _modes.append(mode)
        stack.callback(_modes.remove, mode)
        stack.enter_context(mode)
        function(*args, **kwargs)
    return Traffic(tuple(mode.rows))


def _add(
    counts: Counter, direction: str, number: int, itemsize: int, floating: bool
) -> None:
    counts[f"{direction}_{'values' if floating else 'indices'}"] += number
    counts[f"{direction}_bytes"] += number * itemsize


class _View:
    """The exact set of elements of a tensor, by their offset from its first one."""

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
        """Whether an axis steps back into what the shorter strides cover."""
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
        """Which of these offsets, counted in elements, are elements."""
        inside = (offsets >= 0) & (offsets < self.span)
        if self.table is not None:
            inside[inside] = self.table[offsets[inside]]
            return inside
        for stride, size in self.axes:
            index, offsets = np.divmod(offsets, stride)
            inside &= index < size
        return inside & (offsets == 0)

    def allows(self, start: np.ndarray, width: int) -> np.ndarray:
        """Which accesses of `width` bytes, from these byte offsets on, stay inside."""
        inside = start % min(width, self.itemsize) == 0
        for byte in range(0, width, self.itemsize):
            inside &= self.has((start + byte) // self.itemsize)
        return inside

    def describe(self, start: int, width: int) -> str:
        """Says where an access lies that is not allowed."""
        offsets = (start + np.arange(0, width, self.itemsize)) // self.itemsize
        offset = int(offsets[np.argmin(self.has(offsets))])
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


# ---- PyTorch's operations ------------------------------------------------------------


class _Mode(TorchDispatchMode):
    """Records every operation that reaches PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _launch is None:  # a launch counts its own accesses
            counts = _operation_counts(func, args, kwargs, result)
            if counts:
                self.rows.append(Op(func.overloadpacket.__name__, **counts))
        return result


def _operation_counts(func: Any, args: tuple, kwargs: dict, result: Any) -> Counter:
    """What an operation moved, from its schema; empty for views and allocations."""
    name = func.overloadpacket.__name__
    allocates = name.removeprefix("new_").startswith("empty")
    if allocates or torch.Tag.inplace_view in func.tags:
        return Counter()
    overwrites = (
        name in ("copy_", "fill_", "zero_")
        or torch.Tag.nondeterministic_seeded in func.tags
    )
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False))
    given |= kwargs
    read, written, storages = [], [], set()
    for argument in schema:
        tensors = list(_tensors(given.get(argument.name)))
        storages |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        changes = argument.alias_info is not None and argument.alias_info.is_write
        if changes:
            written += tensors
        if not argument.is_out and not (changes and overwrites):
            read += tensors
    results = list(_tensors(result))
    written += [t for t in results if t.untyped_storage().data_ptr() not in storages]
    if results and not written:
        return Counter()
    counts = Counter()
    for direction, tensors in {"read": read, "written": written}.items():
        for tensor in tensors:
            floating = tensor.is_floating_point() or tensor.is_complex()
            number = len(_View(tensor))
            _add(counts, direction, number, tensor.element_size(), floating)
    return counts


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# ---- Triton's launches ---------------------------------------------------------------

_TAG_BITS = 48  # above the bits of an address
_ADDRESS = np.uint64(2**_TAG_BITS - 1)
_HALF = np.uint64(2 ** (_TAG_BITS - 1))  # addresses of user memory are below it


class _Launch:
    """One launch: the tensors it was given, and what it has moved so far."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.counts: Counter = Counter()
        self.views: list[_View] = []
        self.numbers: dict[int, int] = {}

    def bind(self, arguments: dict[str, Any]) -> None:
        """Numbers the kernel's tensors from 1."""
        for argument, value in arguments.items():
            for name, tensor in _pointers(argument, value):
                self.views.append(_View(interpreter._unwrap_tensor(tensor), name))
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
            _add(self.counts, direction, lanes.size, width, floating)
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
        number = int(numbers[first])
        if 1 <= number <= len(self.views):
            view = self.views[number - 1]
            start = int(addresses[first]) - (number << _TAG_BITS) - view.start
            place = view.describe(start, width)
        else:
            place = "an address that no tensor argument leads to"
        program = interpreter.interpreter_builder.grid_idx[: len(_grid())]
        lane = tuple(map(int, np.unravel_index(lanes[first], shape)))
        raise OutOfBounds(
            f"{self.kernel}, program {_plain(program)}: {kind} at {place}\n"
            f"{np.count_nonzero(~inside)} of {math.prod(shape)} lanes are outside, "
            f"the first is lane {_plain(lane)}"
        )


_DIRECTIONS = {
    "load": ["read"],
    "store": ["written"],
    "atomic": ["read", "written"],
}

_modes: list[_Mode] = []  # of the counts in progress, one inside the other
_launch: _Launch | None = None  # what the interpreter is running


def _pointers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors that a kernel's argument brings, with a name for each."""
    if isinstance(value, interpreter.TensorDescriptor):
        yield name, value.base
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _pointers(f"{name}[{i}]", item)
    elif hasattr(value, "data_ptr"):
        yield name, value


def _grid() -> tuple[int, ...]:
    """The running launch's grid, without the axes of 1 that Triton fills it up with."""
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
        row = Op(launch.kernel, _grid(), **launch.counts)
        for mode in _modes:
            mode.rows.append(row)

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
