"""Triton's interpreter does less than it did, and computes and refuses the same."""

import dataclasses
import importlib
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels import cooperative, online, program
from kernels.lab import backend
from tests.helpers import assert_right, matrix

if not backend.INTERPRETED:  # the module would change an interpreter that is not used
    pytest.skip("kernels are compiled here", allow_module_level=True)

from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as tritons

from kernels.lab import interpreter

CHANGED = [
    (tritons.GridExecutor, "__call__"),
    (tritons, "_patch_lang"),
    (tritons, "_patch_attr"),
    (tritons, "_get_np_dtype"),
    (tritons.TensorHandle, "__post_init__"),
    (tl.core, "_unwrap_if_constexpr"),
    (tl.tensor, "__init__"),
    (tl.block_type, "__init__"),
    (TritonSemantic, "broadcast_impl_value"),
    (TritonSemantic, "binary_op_type_checking_impl"),
    (tritons.InterpreterBuilder, "binary_op"),
]
SCALARS = [
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float8e5),
    *(tl.pointer_type(tl.float16), tl.pointer_type(tl.float16, const=True)),
]
SHAPES = [1], [8], [32], [4, 8], [8, 4], [1, 1], [2, 4, 4]


@pytest.fixture
def slow(monkeypatch):
    """Gives a function that makes the interpreter Triton's own again."""

    def undo():
        for owner, name in CHANGED:
            monkeypatch.setattr(owner, name, vars(owner)[name].__wrapped__)
        monkeypatch.setattr(builder, "options", tritons.InterpreterOptions())

    builder = tritons.interpreter_builder
    return undo


@pytest.fixture
def replaced(monkeypatch):
    """The functions for which the language was replaced in earnest, in turn."""
    functions, replace = [], tritons._patch_lang.__wrapped__
    counted = interpreter.only_where_needed(
        lambda function: functions.append(function.__name__) or replace(function)
    )
    monkeypatch.setattr(tritons, "_patch_lang", counted)
    return functions


@pytest.mark.parametrize("softmax", [program.softmax, online.softmax])
def test_once_a_launch_however_many_functions_are_called(replaced, softmax):
    x = matrix(5, 33)
    softmax(x)
    assert_right(softmax(x), x)
    # What Triton's own functions see is replaced at the first call, and left so.
    assert replaced.count("softmax_kernel") == 2 and len(replaced) <= 3


@triton.jit
def all_kinds(x_ptr, y_ptr, i_ptr, BLOCK: tl.constexpr):
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * BLOCK + lanes).to(tl.float32)
    i = lanes * 123456789 + row  # wraps around from the 18th lane on
    square = tl.trans(tl.reshape(x, (BLOCK // 4, 4))) + tl.full((4, 1), 0.5, x.dtype)
    flat = tl.reshape(square, (BLOCK,)) * (i % 7) - tl.max(x)
    tl.store(y_ptr + row * BLOCK + lanes, tl.where(i > 0, flat, -flat))
    tl.store(i_ptr + row * BLOCK + lanes, i - (lanes // 3) * 2000000000)


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_results_are_the_same_to_the_bit(slow, dtype):
    def results():
        x = matrix(7, 64, dtype)
        y, i = torch.empty(7, 64), torch.empty(7, 64, dtype=torch.int32)
        all_kinds[(7,)](x, y, i, BLOCK=64)
        softmaxes = [module.softmax(x) for module in (program, online, cooperative)]
        return [y, i, *softmaxes]

    quick = results()
    assert quick[1].min() < 0 < quick[1].max()
    slow()
    assert all(map(torch.equal, quick, results()))


def test_integers_are_added_once(monkeypatch, slow):
    def additions():
        sums.clear()
        x = torch.zeros(64)
        all_kinds[(1,)](x, x.clone(), torch.zeros(64, dtype=torch.int32), BLOCK=64)
        return len(sums)

    sums, add = [], tritons.InterpreterBuilder.create_add
    counted = lambda self, *values: sums.append(1) or add(self, *values)  # noqa: E731
    monkeypatch.setattr(tritons.InterpreterBuilder, "create_add", counted)
    quick = additions()
    slow()
    assert quick and additions() == 2 * quick


def test_only_the_assertion_of_overflow_is_left_out():
    options = tritons.interpreter_builder.options
    assert not options.sanitize_overflow
    whole = dataclasses.replace(options, sanitize_overflow=True)
    assert whole == tritons.InterpreterOptions()


def test_an_interpreter_that_asserts_still_does(monkeypatch):
    options = tritons.InterpreterOptions(debug=True)
    monkeypatch.setattr(tritons.interpreter_builder, "options", options)
    for owner, name in CHANGED:
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back at the end
    importlib.reload(interpreter)
    assert tritons.interpreter_builder.options is options


def facts(type_, handle):
    """All that Triton gives a type, and a tensor of it, in words."""
    tensor = tl.tensor(handle, type_)
    assert tensor.handle is handle and tensor.type is type_
    assert tensor.dtype is type_.scalar
    shape, numel = [repr(size) for size in tensor.shape], repr(tensor.numel)
    words = sorted((key, str(value)) for key, value in vars(type_).items())
    return words, shape, numel, str(tensor), sorted(vars(tensor))


def test_types_and_tensors_are_what_they_were(slow):
    def all_facts():
        blocks = [tl.block_type(one, shape) for shape in SHAPES for one in SCALARS]
        return [facts(one, object()) for one in (*SCALARS, *blocks)]

    quick = all_facts()
    assert quick == all_facts()  # found, where they may have been made before
    slow()
    assert quick == all_facts()
    assert len({str(words) for words, *_ in quick}) == len(quick)


def test_what_describes_a_type_is_made_once():
    first, second = (tl.block_type(tl.float16, [4, 16]) for _ in range(2))
    assert first is not second and first == second
    assert first.shape is second.shape and first.name is second.name
    tensors = [tl.tensor(None, one) for one in (first, second)]
    assert tensors[0].shape is tensors[1].shape


@pytest.mark.parametrize(
    "shape", [[7], [8.0], [4, 2.0], [], (8,), [None], [[8]], [2**21]], ids=str
)
def test_a_wrong_shape_is_refused_as_before(slow, shape):
    def refusal():
        refusals = TypeError, ValueError, AssertionError, AttributeError
        with pytest.raises(refusals) as caught:
            tl.block_type(tl.int8, shape)
        return caught.type, str(caught.value)

    for right in ([8], [4, 2]):
        tl.block_type(tl.int8, right)
    quick = refusal()
    slow()
    assert quick == refusal()


class Labelled:
    """A type, or a tensor, of a Triton that notes more about it than today's."""

    def __init__(self, first, second):
        self.label = self.handle = self.type = self.dtype = self.element_ty = first
        self.shape = self.numel = self.name = second


@pytest.mark.parametrize(
    "change, second", [("with_known_shape", tl.float32), ("with_known_name", [8])]
)
def test_what_another_triton_notes_is_kept(monkeypatch, change, second):
    changed = getattr(interpreter, change)(Labelled.__init__)
    monkeypatch.setattr(Labelled, "__init__", changed)
    for first in (tl.int8, tl.int8, tl.int16):
        assert Labelled(first, second).label is first


def test_numpys_types_are_looked_up_once():
    looked_up, find = [], tritons._get_np_dtype.__wrapped__
    quick = interpreter.once_a_type(lambda of: looked_up.append(of) or find(of))
    of = [*SCALARS, *(tl.block_type(one, [8]) for one in SCALARS)]
    for _ in range(2):
        assert [quick(one) for one in of] == [find(one) for one in of]
    assert len(looked_up) == len(of)
    with pytest.raises(KeyError):
        quick(tl.void)


def test_blocks_of_one_shape_are_not_broadcast(monkeypatch):
    def block(shape, scalar=tl.float32):
        type_ = tl.block_type(scalar, shape)
        data = np.zeros(shape, tritons._get_np_dtype(type_))
        return tl.tensor(tritons.TensorHandle(data, scalar), type_)

    asked, semantic = [], tritons.interpreter_semantic
    broadcast = TritonSemantic.broadcast_impl_value.__wrapped__
    counted = interpreter.if_shapes_differ(
        lambda *values: asked.append(1) or broadcast(*values)
    )
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", counted)
    left, right = block([4, 8]), block([4, 8], tl.int8)
    both = semantic.broadcast_impl_value(left, right)
    assert both[0] is left and both[1] is right and not asked
    for other in (block([1, 8]), block([4, 1]), block([8]), block([1, 1])):
        both = semantic.broadcast_impl_value(other, right)
        assert [list(one.type.shape) for one in both] == [[4, 8], [4, 8]]
    assert len(asked) == 4
    with pytest.raises(ValueError, match="incompatible dimensions"):
        semantic.broadcast_impl_value(block([8, 4]), right)


def tensor_of(scalar, shape=None, value=3):
    """A tensor of the interpreter; without a shape, a scalar."""
    type_ = tl.block_type(scalar, shape) if shape else scalar
    data = np.full(shape or (1,), value).astype(tritons._get_np_dtype(scalar))
    return tl.tensor(tritons.TensorHandle(data, scalar), type_)


NUMBERS = (0, 3, -3, True, 2**31 - 1, 2**31, -(2**31), 2**40, -(2**63), 2**64)
NUMBERS += (0.0, -0.5, 1e300, 1e-40, float("inf"), -float("inf"), float("nan"))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("allowed", [{}, {"allow_lhs_ptr": True}], ids=str)
@pytest.mark.parametrize(
    "how", [{}, {"div_or_mod": True}, {"arithmetic_check": False}], ids=str
)
def test_operands_are_converted_as_before(slow, how, allowed):
    def outcome(left, right):
        check = tritons.interpreter_semantic.binary_op_type_checking_impl
        try:
            both = check(left, right, **how, **allowed)
        except Exception as error:
            return type(error), str(error)
        handles = [one.handle for one in both]
        types = [f"{one.type} {one.dtype} {one.handle.dtype}" for one in both]
        data = [(h.data.dtype, h.data.shape, h.data.tobytes()) for h in handles]
        return types, data, [one.type.is_block() for one in both]

    def outcomes():
        tensors = [tensor_of(one, shape) for one in SCALARS for shape in (None, [2, 4])]
        pairs = [(one, other) for one in tensors for other in (*tensors, *NUMBERS)]
        pairs += [(other, one) for one in tensors for other in NUMBERS]
        return [outcome(left, right) for left, right in pairs]

    quick = outcomes()
    slow()
    assert quick == outcomes()
    assert len({str(one) for one in quick}) > 100


def test_what_is_converted_already_is_not_again(monkeypatch):
    asked, semantic = [], tritons.interpreter_semantic
    convert = TritonSemantic.binary_op_type_checking_impl.__wrapped__
    counted = interpreter.if_types_differ(
        lambda *values, **how: asked.append(1) or convert(*values, **how)
    )
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", counted)
    for scalar, number in ((tl.float32, 0.5), (tl.int32, 2), (tl.int64, 2**40)):
        one, other = tensor_of(scalar, [8]), tensor_of(scalar, [8])
        assert semantic.binary_op_type_checking_impl(one, other) == (one, other)
        kept, made = semantic.binary_op_type_checking_impl(one, number)
        assert kept is one and (made.handle.data == number).all()
        made, kept = semantic.binary_op_type_checking_impl(number, one)
        assert kept is one and made.type == one.type
    assert not asked
    semantic.binary_op_type_checking_impl(tensor_of(tl.int64, [8]), 0.5)
    semantic.binary_op_type_checking_impl(tensor_of(tl.float32), tensor_of(tl.int32))
    assert len(asked) == 2


def test_data_that_are_wider_than_their_type_are_still_refused():
    for wide, dtype in ((np.float64, tl.float32), (np.int16, tl.int1)):
        with pytest.raises(ValueError, match="exceeds dtype primitive_bitwidth"):
            tritons.TensorHandle(np.zeros(4, wide), dtype)
    tritons.TensorHandle(np.zeros(4, np.int8), tl.int1)
    tritons.TensorHandle(np.zeros(4, np.uint64), tl.pointer_type(tl.int8))


def test_what_wraps_a_constant_is_unwrapped_as_before():
    unwrap, block = tl.core._unwrap_if_constexpr, tensor_of(tl.int32, [8])
    assert unwrap(block) is block and unwrap(None) is None
    assert unwrap([tl.constexpr(2), (tl.constexpr("a"), 3)]) == [2, ("a", 3)]
    assert unwrap(tl.tuple([tl.constexpr(1), 2]))[0] == 1


def test_a_builtin_function_is_called_without_its_wrapper():
    scope, calls = tritons._LangPatchScope(), []
    holder = types.SimpleNamespace()
    built = tl.core.builtin(lambda x, _semantic: calls.append((x, _semantic)))
    tritons._patch_attr(holder, "one", built, tritons.interpreter_builder, scope)
    holder.one(1)
    holder.one(2, _semantic=None)
    assert [x for x, _ in calls] == [1, 2]
    assert all(isinstance(given, TritonSemantic) for _, given in calls)
    with pytest.raises(ValueError, match=r"Did you forget to add @triton\.jit"):
        built(3)


@triton.jit
def scalars_kernel(output_ptr, n):
    """Writes n to the first five of 8 places, if n is even and above 2."""
    place = tl.arange(0, 8)
    tl.store(output_ptr + place, n, (place < 5) & (n % 2 == 0) & (n > 2))


def test_a_mask_may_compare_scalars():
    for n, n_written in ((2, 0), (3, 0), (4, 5)):
        output = torch.zeros(8, dtype=torch.int32)
        scalars_kernel[(1,)](output, n)
        assert output.tolist() == [n] * n_written + [0] * (8 - n_written)


def test_what_compares_is_one_bit(slow):
    builder = tritons.interpreter_builder
    two, three = (tritons.TensorHandle(np.array([n]), tl.int64) for n in (2, 3))
    less = builder.binary_op(two, three, np.less)
    assert less.dtype == tl.int1 and less.data.all()
    assert builder.binary_op(two, three, np.add).dtype == tl.int64
    slow()
    assert builder.binary_op(two, three, np.less).dtype == tl.int64


def test_threads_launch_in_turn():
    """Triton's own interpreter takes functions away that another thread is using."""
    x = matrix(4, 33)
    with ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: program.softmax(x), range(100)):
            assert_right(y, x)


def test_an_autotuner_takes_its_first_configuration():
    """Triton's own interpreter asks for a GPU's driver, to time the second one."""
    blocks = [triton.Config({"BLOCK_COLS": block}) for block in (64, 128)]
    tuned = triton.autotune(blocks, key=["n_cols"])(program.softmax_kernel)
    x = matrix(4, 33)
    y = torch.empty_like(x)
    tuned[(4,)](y, x, 33)
    assert_right(y, x)
    assert tuned.best_config is blocks[0]


def test_a_launch_leaves_the_language_as_it_was():
    program.softmax(matrix(2, 9))
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
    assert not interpreter.is_replaced(tl)


@pytest.mark.parametrize("done", [{tl}, {tl.core}, set()], ids=len)
def test_every_module_that_a_function_sees_has_to_be_replaced(monkeypatch, done):
    known = set(done)
    monkeypatch.setattr(interpreter, "is_replaced", known.__contains__)
    names = {"tl": tl, "core": tl.core}
    function = types.FunctionType((lambda: None).__code__, names)
    replace = interpreter.only_where_needed(lambda function: "replaced")
    assert replace(function) == "replaced"
    known |= {tl, tl.core}
    assert replace(function) != "replaced"


def test_another_triton_is_left_alone(monkeypatch):
    for owner, name in CHANGED:
        monkeypatch.delattr(owner, name)
    importlib.reload(interpreter)
    assert not any(name in vars(owner) for owner, name in CHANGED)


def test_a_triton_without_scopes_replaces_as_it_did(monkeypatch):
    monkeypatch.delattr(tritons, "_LangPatchScope")
    replace = tritons._patch_lang.__wrapped__
    assert interpreter.only_where_needed(replace) is replace


@triton.jit
def without_language(x_ptr):
    return x_ptr


def test_a_kernel_without_the_language_still_fails(monkeypatch):
    run = without_language.rewrite()
    for name in [n for n, v in run.__globals__.items() if v is tl]:
        monkeypatch.delitem(run.__globals__, name)
    with pytest.raises(AssertionError, match=r"triton\.language must be visible"):
        without_language[(1,)](torch.zeros(1))
