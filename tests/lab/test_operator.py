"""What is true of any row operator; `tests/test_operator.py` shows softmax."""

import contextlib
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import softmax
from kernels.lab import operator
from tests.helpers import assert_right, matrix


def addresses(x: torch.Tensor) -> set[int]:
    """The addresses of all of x's bytes."""
    places = torch.arange(x.untyped_storage().nbytes() // x.element_size())
    first = x.data_ptr() - x.storage_offset() * x.element_size()
    places = places.as_strided(x.shape, x.stride(), x.storage_offset()).flatten()
    starts = (first + place * x.element_size() for place in places.tolist())
    return {start + byte for start in starts for byte in range(x.element_size())}


VIEWS = (
    *[lambda b: b[:12].view(3, 4), lambda b: b[11:23].view(3, 4)],
    *[lambda b: b[12:24].view(3, 4), lambda b: b[:24:2].view(3, 4)],
    *[lambda b: b[24:39].view(3, 5)[:, :4], lambda b: b[24:28].expand(3, 4)],
    *[lambda b: b[12:24].view(4, 3).t(), lambda b: b[3:4].expand(3, 4)],
)


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.int16, torch.float32)])
def test_a_kernel_can_write_where_no_address_is_common(dtypes):
    memory = torch.zeros(40 * 4, dtype=torch.uint8)
    for out_of, x_of in itertools.product(VIEWS, VIEWS):
        out, x = (of(memory.view(t)) for of, t in zip((out_of, x_of), dtypes))  # noqa: B905
        answer = operator.can_write(out, x)
        if answer:
            assert out.is_contiguous() and not addresses(out) & addresses(x)
        if out.is_contiguous() and max(addresses(out)) < min(addresses(x)):
            assert answer
        if out.is_contiguous() and max(addresses(x)) < min(addresses(out)):
            assert answer


def test_a_kernel_can_write_over_its_input():
    x = torch.zeros(4, 6)
    assert operator.can_write(x, x)
    assert not operator.can_write(x[:, 1:], x[:, 1:])  # not contiguous
    assert not operator.can_write(x.t(), x.t())
    assert not operator.can_write(x.view(6, 4), x)
    columns = x.t()
    assert not operator.can_write(columns, columns)


def test_what_is_empty_is_nowhere():
    x = torch.empty(0, 3)
    assert not operator.can_write(x, x)


class Log(TorchDispatchMode):
    """Notes what is called, also inside the course's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return operator.call_in_mode(self, func, args, kwargs or {})


def test_a_mode_can_see_inside_the_courses_operators():
    x = matrix(3, 64)
    softmax(x)
    with Log() as log:
        y = softmax(x)
    assert log.names[:2] == ["softmax", "empty_like"]
    assert_right(y, x)
    with Log() as log:
        torch.softmax(x, 1)
    assert log.names == ["_softmax"]


def test_an_address_of_0_is_no_memory():
    x = matrix(3, 64)
    operator.validate(x, 1, None, address=x.data_ptr())
    operator.validate(x[:0], 1, None, address=0)
    with pytest.raises(ValueError, match=r"x must have memory, got a Tensor of shape"):
        operator.validate(x, 1, None, address=0)


def test_the_rules_know_no_chapter():
    backward = lambda g, y, dim, dtype: g + y  # noqa: E731
    prepare = lambda y, x, dim: lambda y, x: y.copy_(x + dim)  # noqa: E731
    one = torch.ops.kernels.softmax.default
    rules = operator.Rules(one, prepare, backward, torch.softmax, {})
    x = matrix(3, 64).requires_grad_()
    y = rules.apply(lambda x, dim, dtype: x.detach() + 1, x, 1, None)
    y.backward(torch.ones_like(x))
    torch.testing.assert_close(x.grad, x.detach() + 2)
    fake = rules.fake(torch.empty(3, 4, device="meta").t(), 0, torch.float64)
    assert (fake.shape, fake.stride(), fake.dtype) == ((4, 3), (3, 1), torch.float64)
    assert fake.device.type == "meta"


class There(torch.Tensor):
    """A tensor that says it lies on the second GPU."""

    def get_device(self) -> int:
        return 1


def test_nothing_is_done_before_the_tensors_gpu_is_the_current_one(monkeypatch):
    """A new output, too, belongs to the stream that is current on its own GPU."""
    current, seen = [0], []

    @contextlib.contextmanager
    def on(index):
        current.append(index)
        yield
        current.pop()

    def empty_like(x, **kwargs):
        seen.append(("allocate", current[-1]))
        return torch.zeros(3, 64)

    def prepare(y, x, dim):
        seen.append(("prepare", current[-1]))
        return lambda y, x: seen.append(("launch", current[-1]))

    monkeypatch.setattr(operator, "_current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    one = torch.ops.kernels.softmax.default
    rules = operator.Rules(one, prepare, torch.add, torch.softmax, {})
    x = matrix(3, 64).as_subclass(There)
    for _ in range(2):
        rules.run(x, 1)
    first, again = ["allocate", "prepare", "launch"], ["allocate", "launch"]
    assert seen == [(step, 1) for step in first + again]
    assert current == [0]
