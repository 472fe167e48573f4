"""A call like an earlier one is repeated, and no other call is taken for one."""

import contextlib
import ctypes
import gc
import types
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import fastest
from kernels.lab import backend, direct, operator
from tests.helpers import assert_right, matrix


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor of that shape and dtype whose memory starts there."""
    memory = (ctypes.c_byte * (like.numel() * like.element_size())).from_address(
        address
    )
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class Calls:
    """Calls of `softmax` by a Triton whose launches write what PyTorch computes.

    Attributes:
        direct: how many launches there were without Triton's Python.
        others: the arguments of each call that was not like an earlier one.
    """

    def __init__(self, monkeypatch) -> None:
        self.direct, self.others = 0, []
        rules, run = kernels.operator.rules(), operator.Rules.run
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(operator, "_current_device", lambda: -1)
        monkeypatch.setattr(rules, "launches", {})
        monkeypatch.setattr(rules, "prepare", self.prepare)
        monkeypatch.setattr(
            operator.Rules,
            "run",
            lambda *a, **how: self.others.append(a[1:]) or run(*a, **how),
        )
        fastest.known.clear()

    def prepare(self, y, x, dim):
        def launch_at(y_address, x_address):
            self.direct += 1
            there = at(x_address, torch.empty(size, dtype=x_dtype))
            there = there.as_strided(x_shape, x_stride)
            at(y_address, torch.empty(y_shape, dtype=y_dtype)).copy_(
                torch.softmax(there, dim, dtype=y_dtype)
            )

        (x_shape, x_stride, x_dtype), size = (x.shape, x.stride(), x.dtype), span_of(x)
        y_shape, y_dtype = y.shape, y.dtype
        launch = lambda y, x: launch_at(y.data_ptr(), x.data_ptr())  # noqa: E731
        launch.direct = launch_at
        return launch


def span_of(x):
    return direct.span(x) // x.element_size()


@pytest.fixture
def calls(monkeypatch):
    if not backend.INTERPRETED:
        pytest.skip("a GPU is faked with CPU tensors; see test_fastest_launches")
    yield Calls(monkeypatch)
    fastest.known.clear()


def is_repeated(calls: Calls, x: object, *args: object, **how: object) -> bool:
    """Whether a call is done as an earlier one. Its result must be right anyway."""
    n_others, n_direct = len(calls.others), calls.direct
    before = x.detach().clone()
    y = fastest.softmax(x, *args, **how)
    dim, dtype = args[0] if args else -1, how.get("dtype")
    torch.testing.assert_close(y, torch.softmax(before, dim, dtype=dtype))
    return len(calls.others) == n_others and calls.direct > n_direct


FORMS = {
    "rows": lambda: (matrix(3, 8),),
    "columns": lambda: (matrix(3, 8), 0),
    "strided": lambda: (matrix(6, 8)[::2],),
    "transposed": lambda: (matrix(8, 3).t(),),
    "dtype": lambda: (matrix(3, 8), -1, torch.float64),
    "16 bits": lambda: (matrix(3, 8, torch.bfloat16),),
    "offset": lambda: (matrix(3, 8, offset=1),),
    "double": lambda: (matrix(3, 8, torch.float64),),
    "gradient": lambda: (matrix(3, 8).requires_grad_(),),
    "other shape": lambda: (matrix(8, 3),),
    "three dimensions": lambda: (matrix(3, 8).view(3, 2, 4), 1),
}


def call_of(form: str) -> tuple[tuple, dict]:
    """New arguments of a form for `is_repeated`."""
    made = FORMS[form]()
    x, dim, dtype = (*made, *(-1, None)[len(made) - 1 :])
    return (x, dim), {"dtype": dtype}


@pytest.mark.parametrize("form", FORMS)
def test_the_third_call_of_a_form_is_like_the_second(calls, form):
    answers = []
    for _ in range(4):
        args, how = call_of(form)
        answers.append(is_repeated(calls, *args, **how))
    assert answers == [False, False, True, True]


@pytest.mark.parametrize("moved", ["x", "x, in place", "x beside out", "out"])
def test_a_tensor_that_starts_elsewhere_is_not_like_an_aligned_one(calls, moved):
    """The launch of an aligned tensor moves 16 bytes at once, from multiples of 16."""

    def call(offset):
        x = matrix(3, 8, offset=0 if moved == "out" else offset)
        out = {"x": None, "x, in place": x}.get(moved, matrix(3, 8))
        out = matrix(3, 8, offset=offset) if moved == "out" else out
        return is_repeated(calls, x, 1, out=out)

    answers = [call(offset) for offset in (0, 0, 0, 1, 0)]
    assert answers == [False, False, True, False, True]


def test_forms_of_one_shape_do_not_disturb_each_other(calls, monkeypatch):
    monkeypatch.setattr(operator, "MOST_FORMS", len(FORMS))
    for _ in range(3):
        answers = []
        for form in FORMS:
            args, how = call_of(form)
            answers.append(is_repeated(calls, *args, **how))
    assert all(answers)


def test_so_many_forms_of_a_shape_are_kept_and_no_more(calls, monkeypatch):
    monkeypatch.setattr(operator, "MOST_FORMS", 2)
    for form in [form for form in FORMS for _ in range(3)]:
        args, how = call_of(form)
        is_repeated(calls, *args, **how)
    assert {len(known) for known in fastest.known.values()} <= {1, 2}


def test_a_repeated_call_is_recorded_where_a_gradient_is_wanted(calls):
    for _ in range(4):
        x = matrix(3, 8).requires_grad_()
        y = fastest.softmax(x, 1)
        y[:, 0].sum().backward()
        theirs = x.detach().requires_grad_()
        torch.softmax(theirs, 1)[:, 0].sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)
        with torch.no_grad():
            assert not fastest.softmax(x, 1).requires_grad
    assert len(calls.others) == 2


@pytest.mark.parametrize("offset", [0, 1])
def test_calls_with_out_are_repeated(calls, offset):
    answers = []
    for _ in range(4):
        x, out = matrix(3, 8), matrix(3, 8, offset=offset)
        version = out._version
        answers.append(is_repeated(calls, x, 1, out=out))
        assert out._version > version
        assert_right(out, x)
    assert answers == [False, False, True, True]


def test_calls_in_place_are_repeated(calls):
    answers = []
    for _ in range(4):
        x = matrix(3, 8)
        version = x._version
        answers.append(is_repeated(calls, x, 1, out=x))
        assert x._version > version
    assert answers == [False, False, True, True]
    assert not is_repeated(calls, x, 1, out=x.view(3, 8))
    assert not is_repeated(calls, x, 1)


def test_an_out_that_is_not_apart_is_not_like_one_that_is(calls):
    buffer, answers = matrix(1, 64).view(-1), []
    x = buffer[16:40].view(3, 8)
    for start in (40, 40, 40, 20, 24, 4, 16, 36, 40):  # multiples of 16 bytes
        out = buffer[start : start + 24].view(3, 8)
        before = x.clone()
        answers.append(is_repeated(calls, x, 1, out=out))
        x.copy_(before)
    assert answers == [False, False, True, *[False] * 5, True]
    for _ in range(3):
        before = x.clone()
        assert_right(fastest.softmax(x, 1, out=x), before)
    x = matrix(3, 8).requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            fastest.softmax(x, 1, out=out)
        with pytest.raises(RuntimeError, match="x requires a gradient"):
            fastest.softmax(x, 1, out=out)


def known_calls(calls: Calls) -> torch.Tensor:
    """A tensor whose calls are known: with out, without, and in place."""
    x, out, place = matrix(3, 8), matrix(3, 8), matrix(3, 8)
    for _ in range(3):
        fastest.softmax(x, 1)
        fastest.softmax(x, 1, out=out)
        fastest.softmax(place, 1, out=place)
    calls.others.clear()
    calls.direct = 0
    return x


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def softmax_1(x: torch.Tensor) -> torch.Tensor:
    return fastest.softmax(x, 1)


def with_out(x: torch.Tensor) -> torch.Tensor:
    return fastest.softmax(x, 1, out=torch.empty_like(x))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    return fastest.softmax(y, 1, out=y)


def inside(
    mode: contextlib.AbstractContextManager,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    with mode:
        return fastest.softmax(x, 1, out=out)


def fake(x: torch.Tensor) -> torch.Tensor:
    """A softmax of fake tensors, which has no values, and the right one."""
    with FakeTensorMode() as mode:
        assert isinstance(softmax_1(mode.from_tensor(x)), FakeTensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(softmax_1(x), FakeTensor)
    return torch.softmax(x, 1)


def with_a_tangent(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(softmax_1(forward_ad.make_dual(x, x.sin())))
        assert tangent is not None
        return y


UNLIKE = {
    "a negative view": lambda x: softmax_1(torch._neg_view(-x)),
    "a subclass": lambda x: softmax_1(x.as_subclass(Subclass)).as_subclass(
        torch.Tensor
    ),
    "a parameter": lambda x: softmax_1(torch.nn.Parameter(x)).detach(),
    "a mode": lambda x: inside(Mode(), x),
    "a mode for functions": lambda x: inside(BaseTorchFunctionMode(), x),
    "such a mode, with out": lambda x: inside(
        BaseTorchFunctionMode(), x, torch.empty_like(x)
    ),
    "such a mode, in place": lambda x: inside(
        BaseTorchFunctionMode(), y := x.clone(), y
    ),
    "a fake tensor": fake,
    "a tangent": with_a_tangent,
    "a level of forward differentiation": lambda x: inside(forward_ad.dual_level(), x),
    "such a level, with out": lambda x: inside(
        forward_ad.dual_level(), x, torch.empty_like(x)
    ),
    "such a level, in place": lambda x: inside(
        forward_ad.dual_level(), y := x.clone(), y
    ),
    "vmap": lambda x: torch.vmap(softmax_1)(x.expand(2, 3, 8))[1],
    "in vmap": lambda x: torch.vmap(lambda s: s * softmax_1(x))(torch.ones(2))[1],
    "in grad": lambda x: torch.func.vjp(lambda s: s * softmax_1(x), torch.ones(1))[0],
    "functionalize": lambda x: torch.func.functionalize(softmax_1)(x),
    "make_fx": lambda x: make_fx(softmax_1)(x)(x),
    "make_fx, with out": lambda x: make_fx(with_out)(x)(x),
    "make_fx, in place": lambda x: make_fx(in_place)(x)(x),
    "make_fx before dispatch": lambda x: make_fx(softmax_1, pre_dispatch=True)(x)(x),
    "a batch of autograd": lambda x: torch._vmap_internals._vmap(softmax_1)(x[None])[0],
    "torch.jit": lambda x: torch.jit.trace(softmax_1, (x,), check_trace=False)(x),
    "torch.compile": lambda x: torch.compile(softmax_1, backend="aot_eager")(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_not_plain_is_not_like_what_is(calls, kind):
    """It goes its own way and is right, though shape, strides and dtype are known."""
    x = known_calls(calls)
    y = UNLIKE[kind](x)
    torch.testing.assert_close(y, torch.softmax(x, 1))
    assert calls.direct <= len(calls.others)  # a repeated call is not among the others
    assert is_repeated(calls, x, 1)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu")])
def test_calls_are_repeated_within_inference_and_autocast(calls, mode):
    x = known_calls(calls)
    with mode():
        assert [is_repeated(calls, x, 1) for _ in range(3)] == [False, True, True]
        assert softmax_1(x).is_inference() == torch.is_inference_mode_enabled()
    assert is_repeated(calls, x, 1)


def test_calls_are_repeated_where_a_default_device_is_set(calls):
    """It is a mode for functions, too, but of no interest to a softmax."""
    x = known_calls(calls)
    with torch.device(backend.DEVICE):
        assert is_repeated(calls, x, 1)
        with BaseTorchFunctionMode():
            assert not is_repeated(calls, x, 1)
        assert is_repeated(calls, x, 1)
    with BaseTorchFunctionMode(), torch.device(backend.DEVICE):
        assert not is_repeated(calls, x, 1)


@pytest.mark.parametrize(
    ("change", "dim", "error"),
    [
        (lambda x: x.tolist(), 1, TypeError),
        (lambda x: x.numpy(force=True), 1, TypeError),
        (lambda x: x.int(), 1, TypeError),
        (lambda x: x.to("meta"), 1, ValueError),
        (lambda x: x.to_sparse(), 1, ValueError),
        (lambda x: x, True, TypeError),
        (lambda x: x, 1.0, TypeError),
        (lambda x: x, 2, IndexError),
    ],
)
def test_bad_input_is_named_where_calls_of_its_shape_are_known(
    calls, change, dim, error
):
    x = change(known_calls(calls))
    with pytest.raises(error, match="must be"):
        fastest.softmax(x, dim)
    with pytest.raises(error, match="must be"):
        fastest.softmax(x, dim, out=matrix(3, 8))


def test_a_nested_tensor_is_named():
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"must be strided, got a nested.*to_padded_"):
        fastest.softmax(nested, 1)


def test_memory_that_is_gone_is_named(calls):
    x = known_calls(calls)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x must have memory"):
        fastest.softmax(x, 1)


def test_an_out_whose_memory_is_gone_is_named(calls):
    x, out = known_calls(calls), matrix(3, 8)
    out.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"out must have memory.*\(3, 8\)"):
        fastest.softmax(x, 1, out=out)
    new = matrix(5, 8)
    gone = torch.empty_like(new)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="out must have memory"):  # the first call
        fastest.softmax(new, 1, out=gone)


def test_dims_that_python_makes_anew_are_repeated(calls):
    """Python keeps one object for each of the integers from -5 to 256 only."""
    x, dim = matrix(3, 8).view(1, 1, 1, 1, 3, 8), int("-6")
    for _ in range(3):
        is_repeated(calls, x, dim)
    assert is_repeated(calls, x, int("-6"))
    assert not is_repeated(calls, x, int("-5"))


def test_nothing_is_recorded_of_an_inference_tensor(calls):
    with torch.inference_mode():
        x = matrix(3, 8).requires_grad_()
    for _ in range(3):
        assert not fastest.softmax(x, 1).requires_grad
    for _ in range(3):
        assert fastest.softmax(matrix(3, 8).requires_grad_(), 1).requires_grad


def test_an_out_of_inference_mode_is_not_written_to_outside(calls):
    x = matrix(3, 8)
    with torch.inference_mode():
        out = torch.empty_like(x)
        for _ in range(3):
            fastest.softmax(x, 1, out=out)
    with pytest.raises(RuntimeError, match=r"made inside; out\.clone\(\) would do"):
        fastest.softmax(x, 1, out=out)


def test_another_device_than_the_current_one_is_not_repeated(calls, monkeypatch):
    current = [-1]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    x = known_calls(calls)
    for out in (None, matrix(3, 8), x):
        is_repeated(calls, x, 1, out=out)
        assert is_repeated(calls, x, 1, out=out)
        current[0] = 0
        assert not is_repeated(calls, x, 1, out=out)
        current[0] = -1


def test_no_tensor_of_a_call_is_kept(calls):
    kept = []
    for _ in range(3):
        x, out = matrix(3, 8), matrix(3, 8)
        kept += map(weakref.ref, (x, out, fastest.softmax(x)))
        fastest.softmax(x, out=out)
    del x, out
    calls.others.clear()
    gc.collect()
    assert not any(reference() is not None for reference in kept)


@pytest.mark.parametrize("lost", ["TensorGuards", "_empty_strided_cpu"])
def test_without_a_part_of_pytorch_calls_are_as_before(calls, lost, monkeypatch):
    parts = types.SimpleNamespace(**vars(torch._C._dynamo.guards))
    delattr(parts, lost)
    monkeypatch.setattr(torch._C._dynamo, "guards", parts)
    assert [is_repeated(calls, matrix(3, 8)) for _ in range(4)] == [False] * 4
    assert not any(fastest.known.values())
