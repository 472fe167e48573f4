"""Makes Triton's interpreter do the same in a fifth of the time, without warnings.

Most of a short kernel's time goes into what the interpreter knows or throws away:

- Before each launch, it replaces the functions of `triton.language` with interpreted
  ones. In every call of another `@triton.jit` function, such as `tl.sum` or `tl.max`,
  it looks for more to replace.
- It computes each sum and product of integers again in 64 bits, to assert that there
  is no overflow. It then drops the assertion, as it drops every device assertion.
- For each result, it makes the objects that say its type and its shape.
- For each operator, it looks for the type of the result, also where both operands have
  that type. It passes each call of a built-in function through three others.

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

    known: dict[FunctionType, list[ModuleType]] = {}

    @functools.wraps(replace)
    def patch_lang(function: FunctionType) -> Any:
        if function not in known:
            seen = function.__globals__.values()
            known[function] = [it for it in seen if it is tl or it is tl.core]
        languages = known[function]
        if languages and all(map(is_replaced, languages)):
            return interpreter._LangPatchScope()  # nothing to be restored
        return replace(function)

    return patch_lang if hasattr(interpreter, "_LangPatchScope") else replace


def called_directly(patch: Callable[..., None]) -> Callable:
    """Returns `_patch_attr`, whose interpreted function calls the built-in one itself.

    Not through the wrapper that asks whether it was told the semantics.
    """
    asking = tl.core.builtin(lambda: None).__code__

    @functools.wraps(patch)
    def patch_attr(
        owner: Any, name: str, member: Any, builder: Any, scope: Any
    ) -> None:
        semantic = getattr(interpreter, "interpreter_semantic", None)
        semantic = semantic or TritonSemantic(builder)
        asks = getattr(member, "__code__", None) is asking
        function = member.__wrapped__ if asks else member

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, interpreted)

    return patch_attr


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


KEPT = {
    "int32": np.int32,
    "int64": np.int64,
    "fp32": np.float32,
    "fp64": np.float64,
}
"""Types that an operator leaves alone: of two operands, or of one and a number."""

INTEGERS = {np.int32: (-(2**31), 2**31 - 1), np.int64: (-(2**63), 2**63 - 1)}


def constant(value: Any, like: Any) -> Any:
    """A tensor of the type of another one, all of a value.

    None if an operator would give them another type, or refuse the value.
    """
    dtype = KEPT.get(like.dtype.name)
    if dtype in INTEGERS and type(value) is int:
        least, most = INTEGERS[dtype]
        if not least <= value <= most:
            return None
    elif dtype is None or dtype in INTEGERS or type(value) is not float:
        return None
    shape = like.handle.data.shape if like.type.is_block() else (1,)
    data = np.full(shape, value, dtype)
    return tl.tensor(interpreter.TensorHandle(data, like.dtype), like.type)


def if_types_differ(convert: Callable[..., tuple]) -> Callable:
    """Returns `binary_op_type_checking_impl`, which converts what is to be converted.

    Not two operands of one type, and not twice a number that becomes the other's type.
    """

    @functools.wraps(convert)
    def type_checking(self: Any, lhs: Any, rhs: Any, *args: Any, **how: Any) -> tuple:
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            name = lhs.dtype.name
            if name == rhs.dtype.name and name in KEPT:
                return self.broadcast_impl_value(lhs, rhs)
        elif not how.get("arithmetic_check", len(args) < 3 or args[2]):
            pass
        elif left and (made := constant(rhs, lhs)) is not None:
            return lhs, made
        elif right and (made := constant(lhs, rhs)) is not None:
            return made, rhs
        return convert(self, lhs, rhs, *args, **how)

    return type_checking


def if_it_may_be_wrapped(unwrap: Callable[[Any], Any]) -> Callable:
    """Returns `_unwrap_if_constexpr`, which returns a tensor or a number at once."""
    plain = {tl.tensor, int, float, bool, type(None)}

    @functools.wraps(unwrap)
    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    return unwrap_if_constexpr


def if_it_may_be_too_wide(check: Callable[[Any], None]) -> Callable:
    """Returns `TensorHandle.__post_init__`, for which most values fit at a glance."""

    @functools.wraps(check)
    def post_init(self: Any) -> None:
        bits = getattr(self.dtype, "primitive_bitwidth", 0)
        if self.data.itemsize * 8 > bits:
            check(self)

    return post_init


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
    (interpreter, "_patch_attr", called_directly),
    (interpreter, "_get_np_dtype", once_a_type),
    (interpreter.TensorHandle, "__post_init__", if_it_may_be_too_wide),
    (tl.core, "_unwrap_if_constexpr", if_it_may_be_wrapped),
    (tl.tensor, "__init__", with_known_shape),
    (tl.block_type, "__init__", with_known_name),
    (TritonSemantic, "broadcast_impl_value", if_shapes_differ),
    (TritonSemantic, "binary_op_type_checking_impl", if_types_differ),
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
