"""The backward pass as PyTorch's machinery sees it, shown of softmax's."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.gradient import softmax_backward
from kernels.lab import backend, backward
from kernels.lab.backward import Backward, validate
from tests.helpers import matrix

SINGLE = torch.float32
operator = torch.ops.kernels.softmax_backward.default


def inputs(n_rows: int = 3, n_cols: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    return matrix(n_rows, n_cols, seed=1), torch.softmax(matrix(n_rows, n_cols), 1)


def assert_near(got: torch.Tensor, g: torch.Tensor, y: torch.Tensor) -> None:
    expected = y * (g - (g * y).sum(-1, keepdim=True))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


class Log(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        return func(*args, **(kwargs or {}))


# ---- who takes a call ----------------------------------------------------------------


def test_plain_tensors_meet_no_operator():
    g, y = inputs()
    with torch.profiler.profile() as profile:
        assert_near(softmax_backward(g, y), g, y)
    names = {event.name for event in profile.events()}
    assert not names & {"kernels::softmax_backward", "aten::_softmax_backward_data"}


def test_modes_see_one_operator():
    g, y = inputs()
    with Log() as log:
        x = softmax_backward(g, y)
    assert log.called == [operator]
    assert_near(x, g, y)


def test_autograd_records_one_operator():
    g, y = inputs()
    x = softmax_backward(g.requires_grad_(), y)
    assert x.requires_grad
    with torch.no_grad():
        assert not softmax_backward(g, y).requires_grad


def test_a_result_that_was_a_softmax_needs_no_record_in_backward():
    """y requires a gradient there, and autograd records only for create_graph."""
    g, y = inputs()
    y.requires_grad_()
    with torch.no_grad():
        assert torch.equal(softmax_backward(g, y), softmax_backward(g, y.detach()))


def test_tracing_records_one_operator():
    traced = make_fx(lambda g, y: softmax_backward(g, y, 1))(*inputs())
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert called == [operator]
    assert_near(traced(*inputs()), *inputs())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fake_tensors_have_the_results_form(dtype):
    with FakeTensorMode() as mode:
        g, y = (mode.from_tensor(t) for t in inputs())
        x = softmax_backward(g, y.t().contiguous().t(), 1, dtype)
    assert (x.shape, x.dtype, x.stride()) == (y.shape, dtype or y.dtype, (33, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_calls_the_operator(dynamic):
    function = torch.compile(
        lambda g, y: 2 * softmax_backward(g, y, 1),
        backend="aot_eager",
        dynamic=dynamic,
        fullgraph=True,
    )
    g, y = inputs()
    assert_near(function(g, y) / 2, g, y)
    x = function(g.requires_grad_(), y)
    outer = matrix(3, 33, seed=5)
    (for_g,) = torch.autograd.grad(x, g, outer)
    assert_near(for_g / 2, outer, y)


def test_opcheck():
    g, y = (t.requires_grad_() for t in inputs(2, 5))
    torch.library.opcheck(operator, (g, y, 1, None))
    torch.library.opcheck(operator, (g, y, 0, torch.bfloat16))


def test_transforms_and_forward_differentiation_are_pytorchs():
    g, y = inputs()
    batched = torch.vmap(softmax_backward)(g, y)
    assert_near(batched, g, y)
    tangent = matrix(3, 33, seed=5)
    _, moved = torch.func.jvp(lambda g: softmax_backward(g, y), (g,), (tangent,))
    assert_near(moved, tangent, y)
    slope = torch.func.grad(lambda g: (softmax_backward(g, y) * tangent).sum())(g)
    assert_near(slope, tangent, y)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(g, tangent)
        result = torch.autograd.forward_ad.unpack_dual(softmax_backward(dual, y))
    assert_near(result.tangent, tangent, y)


class Named(torch.Tensor):
    """A subclass that knows PyTorch's operators, and no operator of the course."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_are_pytorchs():
    g, y = inputs()
    x = softmax_backward(g.as_subclass(Named), y)
    assert isinstance(x, Named)
    assert_near(x.as_subclass(torch.Tensor), g, y)


def test_a_negative_view_has_its_values_negated():
    g, y = inputs()
    negative = torch.complex(g, -g).conj().imag
    assert negative.is_neg()
    assert_near(softmax_backward(negative, y), g, y)


def test_columns_that_are_not_adjacent_and_float64_are_pytorchs():
    for tensors, dim in ((inputs(), 0), ([t.double() for t in inputs()], 1)):
        with Log() as log:
            softmax_backward(*tensors, dim)
        assert log.called == [operator]
        with torch.profiler.profile() as profile:
            softmax_backward(*tensors, dim)
        names = {event.name for event in profile.events()}
        assert "aten::_softmax_backward_data" in names


def test_more_rows_than_a_kernel_numbers_are_pytorchs(monkeypatch):
    g, y = inputs(5, 8)
    taken = Backward("five_rows", _refused, _refused)
    monkeypatch.setattr(backward, "MOST_ROWS", 4)
    assert_near(taken(g, y, 1), g, y)


def _refused(*tensors):
    raise AssertionError("the kernel was asked")


# ---- memory --------------------------------------------------------------------------


def test_what_is_aligned_and_contiguous_is_not_copied():
    x = matrix(4, 8)
    assert backward._aligned(x, "y") is x
    for view in (x[:, :7], x.t(), x.flatten()[1:9], x[:1].expand(4, -1)):
        copy = backward._aligned(view, "y")
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
        assert torch.equal(copy, view)
    assert backward._aligned(x[1:], "y").data_ptr() == x[1:].data_ptr()


@pytest.mark.gpu
def test_several_devices_are_not_mixed():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    g, y = (t.to("cuda:1") for t in inputs())
    assert_near(softmax_backward(g, y), g, y)


@pytest.mark.gpu
def test_calls_after_the_first_are_right_too():
    for n_cols in (33, 64, 50_257):
        for seed in range(3):
            g = matrix(3, n_cols, seed=seed)
            y = torch.softmax(matrix(3, n_cols, seed=seed + 7), 1)
            assert_near(softmax_backward(g, y), g, y)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [33, 50_257])
def test_is_captured_by_a_graph(n_cols):
    g, y = inputs(3, n_cols)
    first = softmax_backward(g, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = softmax_backward(g, y)
    graph.replay()
    assert torch.equal(x, first)
    g.copy_(matrix(3, n_cols, seed=9))
    for _ in range(3):
        graph.replay()
        assert_near(x, g, y)


# ---- errors --------------------------------------------------------------------------

_, Y = inputs()
NESTED = torch.nested.nested_tensor([Y[0], Y[1, :5]])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([1.0], Y), TypeError, "gradient must be a torch.Tensor, got list"),
        ((Y, None), TypeError, "y must be a torch.Tensor, got NoneType"),
        ((Y.int(), Y), TypeError, "gradient must be float32, .*got torch.int32"),
        ((Y, Y > 0), TypeError, "y must be float32, .*got torch.bool"),
        ((Y.double(), Y), TypeError, "gradient must be torch.float32 as y is"),
        ((Y[:2], Y), ValueError, r"gradient must be like y, \(3, 33\) on .*\(2, 33\)"),
        ((Y.to("meta"), Y), ValueError, "gradient must be on .*'meta'; .*randn_like"),
        ((Y, Y.to_sparse()), ValueError, "y must be strided"),
        ((NESTED, Y), ValueError, "gradient must be strided, got a nested.*to_padded_"),
        ((Y, Y, 2), IndexError, "dim must be from -2 to 1 for shape .*got 2"),
        ((Y, Y, 1.0), TypeError, "dim must be an int, got 1.0"),
        ((Y, Y, True), TypeError, "dim must be an int, got True"),
        ((Y, Y, 1, torch.int32), TypeError, "dtype must be float32, .*got torch.int32"),
        ((Y, Y, 1, [SINGLE]), TypeError, r"dtype must be float32, .*got \["),
    ],
)
def test_errors_name_the_argument(arguments, error, words):
    softmax_backward(Y, Y, 1)  # a call that was right must not hide it
    with pytest.raises(error, match=words):
        softmax_backward(*arguments)


@pytest.mark.parametrize("name", ["gradient", "y"])
def test_memory_that_is_gone_is_named(name):
    """Some trainers free what a later pass is to bring back."""
    tensors = {"gradient": Y.clone(), "y": Y.clone()}
    softmax_backward(*tensors.values(), 1)
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"{name} must have memory.*\(3, 33\)"):
        softmax_backward(*tensors.values(), 1)


def test_what_is_right_raises_nothing():
    for dtype in (*backend.DTYPES, torch.float64):
        validate(Y.to(dtype), Y.to(dtype), -1, None)
        validate(Y, Y, 0, dtype)
