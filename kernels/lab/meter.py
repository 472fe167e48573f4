"""The meter: how many bytes a function reads and writes, operation by operation.

`count` runs a function once and records two kinds of operations in one table:

- PyTorch's operations, through a dispatch mode. An operation reads every distinct
  element of its tensor arguments (a broadcast view has fewer than its shape says) and
  writes every distinct element of the tensors that it makes or changes. Views and
  allocations move nothing. An operation that needs only a part of a tensor (indexing)
  counts as if it read all of it.
- Triton's launches, in the interpreter, access by access. `kernels.lab.accesses` does
  this, and stops an access that is out of bounds before it is made.

These are the bytes that the code asks for. Caches answer a part of them, so the memory
may serve fewer; only a GPU's own counters can tell (`kernels.lab.counters`).

The formulas `naive`, `fused` and `passes` say what softmaxes of the course move.

Weighed, and not used:

- `torch.profiler` records operations, shapes and the memory that is allocated, not
  what is read; `torch.utils.flop_counter` is such a dispatch mode, for arithmetic.
- `triton-viz` 3.0 patches the interpreter as well. Its profiler sums the bytes of one
  decorated kernel and knows no PyTorch operations; its sanitizer proves bounds with
  z3, refuses tensors without a stride of 1 and ends the process at the first error.
  It brings z3, Flask, cairo and Arrow along.
- NVIDIA's `compute-sanitizer` needs a GPU. It sees allocations, and PyTorch's allocator
  makes few and large ones, so that the neighbours of a view are inside.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.lab import accesses, operator, process, show
from kernels.lab.accesses import OutOfBounds

__all__ = [
    "Op",
    "OutOfBounds",
    "Traffic",
    "Values",
    "count",
    "fused",
    "naive",
    "passes",
]


class Values(NamedTuple):
    """How many numbers are moved.

    Attributes:
        read: floating-point values read.
        written: floating-point values written.
        indices: integers written, such as the positions that `max` returns beside its
            values.
    """

    read: int
    written: int
    indices: int


def naive(n_rows: int, n_cols: int) -> Values:
    """What the five-line softmax moves: every line reads and writes whole tensors.

    Source: Triton's fused-softmax tutorial, whose 5MN+2M and 3MN+2M leave out the M
    int64 indices that `x.max(dim=1)` writes as well.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    _require_counts(n_rows=n_rows, n_cols=n_cols)
    size = n_rows * n_cols
    return Values(5 * size + 2 * n_rows, 3 * size + 2 * n_rows, n_rows)


def fused(n_rows: int, n_cols: int) -> Values:
    """What a softmax moves that reads each value once and writes each value once.

    Raises:
        TypeError, ValueError: a size is not an integer, or is negative.
    """
    return passes(n_rows, n_cols, 1)


def passes(n_rows: int, n_cols: int, passes: int) -> Values:
    """What a softmax moves that reads each value `passes` times and writes it once.

    Raises:
        TypeError, ValueError: an argument is not an integer, or is negative.
    """
    _require_counts(n_rows=n_rows, n_cols=n_cols, passes=passes)
    return Values(passes * n_rows * n_cols, n_rows * n_cols, 0)


def _require_counts(**counts: int) -> None:
    for name, size in counts.items():
        if not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}")


@dataclass(frozen=True)
class Op:
    """What one PyTorch operation, or one launch of a Triton kernel, moved.

    Attributes:
        name: the name of the operation or the kernel.
        grid: the programs of a launch along each axis; None for PyTorch's operations.
        read_values, written_values: how many floating-point values.
        read_indices, written_indices: how many integers and booleans.
        read_bytes, written_bytes: values and indices together, in bytes.
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
    """The operations of one call, in the order in which they ran, and their totals.

    Attributes:
        rows: the operations. Every number that an `Op` has, `Traffic` has too: the sum
            over all rows.
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
        """The totals in the form of the formulas: `naive`, `fused` and `passes`."""
        return Values(self.read_values, self.written_values, self.written_indices)

    def _total(self, field: str) -> int:
        return sum(getattr(row, field) for row in self.rows)

    def table(self) -> show.Table:
        """The operations and their total; integers have columns if there are any."""
        fields = ["read_values", "written_values", "read_indices", "written_indices"]
        fields = [f for f in fields if f.endswith("values") or self._total(f)]
        fields += ["bytes"]
        rows = [
            [f"{row.name}[{row.grid}]" if row.grid else row.name]
            + [f"{getattr(row, field):,}" for field in fields]
            for row in self.rows
        ]
        rows.append(["total", *(f"{self._total(field):,}" for field in fields)])
        titles = [" ".join(reversed(field.split("_"))) for field in fields]
        return show.table(rows, ["operation", *titles])

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def count(function: Callable, *args: Any, **kwargs: Any) -> Traffic:
    """Runs `function(*args, **kwargs)` and counts what it reads and writes.

    Kernels run in Triton's interpreter. So on a machine with a GPU the whole call runs
    in a helper process, on CPU copies of its arguments. A function that is counted may
    itself count.

    Args:
        function: any mixture of PyTorch operations and Triton launches. What it
            returns is dropped.

    Raises:
        TypeError: function cannot be called.
        OutOfBounds: a kernel was about to load or store outside the tensor that it was
            given. Inside are exactly the elements of the view, so the columns beside a
            slice are outside. Raised before the access.
        RuntimeError: Triton's interpreter does not work with this NumPy.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    return process.call_in("interpreter", _count, function, args, kwargs)


def _count(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Traffic:
    mode = _Mode()
    with accesses.observed(mode.add_launch), mode:
        function(*args, **kwargs)
    return Traffic(tuple(mode.rows))


# ---- PyTorch's operations ------------------------------------------------------------


class _Mode(TorchDispatchMode):
    """Records every operation that reaches PyTorch's dispatcher, and every launch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Op] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        n_rows = len(self.rows)
        result = operator.call_in_mode(self, func, args, kwargs)
        # What a launch does, or a kernel of the course, is counted one by one.
        if not accesses.is_launching() and len(self.rows) == n_rows:
            counts = _operation_counts(func, args, kwargs, result)
            if counts:
                self.rows.append(Op(func.overloadpacket.__name__, **counts))
        return result

    def add_launch(self, kernel: str, grid: tuple[int, ...], counts: Counter) -> None:
        self.rows.append(Op(kernel, grid, **counts))


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
            number = len(accesses.View(tensor))
            accesses.add(counts, direction, number, tensor.element_size(), floating)
    return counts


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
