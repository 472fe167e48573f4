"""Makes Triton's interpreter do the same in a quarter of the time, without warnings.

Most of a short kernel's time goes into what the interpreter knows or throws away:

- Before each launch, it replaces the functions of `triton.language` with interpreted
  ones. In every call of another `@triton.jit` function, such as `tl.sum` or `tl.max`,
  it looks for more to replace.
- It computes each sum and product of integers again in 64 bits, to assert that there
  is no overflow. It then drops the assertion, as it drops every device assertion.
- For each result, it makes the objects that say its type and its shape.

A launch also replaces functions that other threads are using: here, threads launch in
turn. An autotuner fails, because nothing can be timed: here, it takes its first
configuration. Triton 3.9 refuses a mask made with a comparison of two scalars, which
it compiles: here, it takes it.

`kernels.lab.backend` imports this where kernels are interpreted. Weighed: to wait for
a release of Triton. 3.6 to 3.9 all do so. What a Triton does not have is left alone.
"""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

# NumPy warns of inf - inf; a GPU makes its NaN in silence.
warnings.filterwarnings(
    "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
)


def is_replaced(language: ModuleType) -> bool:
    """Whether a module's functions, and a tensor's methods, are interpreted ones."""
    some = language.load, language.reduce, language.tensor.__add__
    return not any(map(tl.core.is_builtin, some))


def only_where_needed(replace: Callable[[FunctionType], Any]) -> Callable:
    """Returns `_patch_lang`, which replaces the language that a function sees."""

    @functools.wraps(replace)
    def patch_lang(function: FunctionType) -> Any:
        seen = function.__globals__.values()
        languages = [value for value in seen if value is tl or value is tl.core]
        if languages and all(map(is_replaced, languages)):
            return interpreter._LangPatchScope()  # nothing to be restored
        return replace(function)

    return patch_lang if hasattr(interpreter, "_LangPatchScope") else replace


def once_a_type(find: Callable[[Any], Any]) -> Callable:
    """Returns `_get_np_dtype`, which makes a table of all types to look one up."""
    known: dict[str, Any] = {}  # by names such as "fp32" and "<['8'], pointer<fp32>>"

    @functools.wraps(find)
    def np_dtype(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = find(of)
        return known[of.name]

    return np_dtype


def with_known_shape(make: Callable[..., None]) -> Callable:
    """Returns `tensor.__init__`; tensors of one type share one object `shape`."""
    known: dict[str, tuple] = {}

    @functools.wraps(make)
    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[type.name]
            return
        make(self, handle, type)
        if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            known[type.name] = self.shape, self.numel

    return init


def with_known_name(make: Callable[..., None]) -> Callable:
    """Returns `block_type.__init__`; equal types share `shape` and `name`."""
    known: dict[tuple, tuple] = {}

    @functools.wraps(make)
    def init(self: Any, element_ty: Any, shape: Sequence) -> None:
        if {*map(type, shape)} != {int}:  # 8.0 would be found as 8, and is refused
            return make(self, element_ty, shape)
        key = type(shape), element_ty.name, *shape
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
            return
        make(self, element_ty, shape)
        if vars(self).keys() == {"element_ty", "shape", "numel", "name"}:
            known[key] = self.shape, self.numel, self.name

    return init


def if_shapes_differ(broadcast: Callable[..., tuple]) -> Callable:
    """Returns `broadcast_impl_value`, which leaves two blocks of one shape alone."""

    @functools.wraps(broadcast)
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and [*left.shape] == [*right.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def with_truth_of_one_bit(compute: Callable[..., Any]) -> Callable:
    """Returns `binary_op`, which gives a comparison one bit, not its operands' type."""

    @functools.wraps(compute)
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable) -> Any:
        result = compute(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    return binary_op


def one_at_a_time(launch: Callable[..., None]) -> Callable:
    """Returns `GridExecutor.__call__`, in which a thread waits for the others."""
    turn = threading.RLock()

    @functools.wraps(launch)
    def in_turn(*args: Any, **kwargs: Any) -> None:
        with turn:
            launch(*args, **kwargs)

    return in_turn


for owner, name, change in (
    (interpreter.GridExecutor, "__call__", one_at_a_time),
    (interpreter, "_patch_lang", only_where_needed),
    (interpreter, "_get_np_dtype", once_a_type),
    (tl.tensor, "__init__", with_known_shape),
    (tl.block_type, "__init__", with_known_name),
    (TritonSemantic, "broadcast_impl_value", if_shapes_differ),
    (interpreter.InterpreterBuilder, "binary_op", with_truth_of_one_bit),
):
    if name in vars(owner):
        setattr(owner, name, change(vars(owner)[name]))


def once(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
    """In place of an autotuner's clock: runs a configuration, and times nothing."""
    call()
    return [0.0, 0.0, 0.0]


if isinstance(vars(Autotuner).get("do_bench"), functools.cached_property):
    Autotuner.do_bench = property(lambda tuner: tuner._do_bench or once)

options = interpreter.interpreter_builder.options
if hasattr(options, "sanitize_overflow") and not options.debug:
    options = dataclasses.replace(options, sanitize_overflow=False)
interpreter.interpreter_builder.options = options
