"""What the judge says about an operator that a learner registers with PyTorch."""

import pytest
import torch

from kernels.lab import judge, registration


def tempered(x: torch.Tensor, temperature: float) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y.copy_(torch.softmax(x / temperature, dim=1))


def fake(x, temperature):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def keep(ctx, inputs, output):
    ctx.temperature = inputs[1]
    ctx.save_for_backward(output)


def slope(y, gradient):
    return y * (gradient - (gradient * y).sum(dim=1, keepdim=True))


def backward(ctx, gradient):
    (y,) = ctx.saved_tensors
    return slope(y, gradient) / ctx.temperature, None


def registering(operator=tempered, fake=fake, backward=backward, keep=keep):
    """A learner's function, of these parts; None is a part that is left out."""

    def tempered_operator(name):
        made = torch.library.custom_op(name, operator, mutates_args=())
        if fake:
            made.register_fake(fake)
        if backward:
            made.register_autograd(backward, setup_context=keep)
        return made

    return tempered_operator


def by_torch(x, temperature):
    return torch.softmax(x / temperature, dim=1)


def make(seed):
    x = torch.randn((3, 5), dtype=[torch.float32, torch.float16][seed == 2])
    return [x, torch.randn(5, 3).mT, x[:2]][seed], 0.5


GRADIENTS = {"And 1 / temperature?": lambda x, t, g: slope(by_torch(x, t), g)}
OPTIONS = {"dtypes": (torch.float32,), "seeds": 3, "gradients": GRADIENTS}


def of(register):
    return registration.of_registered(register, by_torch, make, **OPTIONS)


def test_a_right_operator_is_right():
    found = of(registering())
    assert found.failure is None
    assert found.tried == "3 inputs of 3 shapes and dtypes, in float32 and float16"


def test_the_judge_has_it():
    assert judge.registered(registering(), by_torch, make, seeds=3, name="right")
    wrong = judge.registered(registering(fake=None), by_torch, make, seeds=3)
    assert "no fake function" in " ".join(repr(wrong).split())


# ---- mistakes ------------------------------------------------------------------------


def changes_x(x: torch.Tensor, temperature: float) -> torch.Tensor:
    x /= temperature
    return torch.softmax(x, dim=1)


def returns_x(x: torch.Tensor, temperature: float) -> torch.Tensor:
    return x.copy_(torch.softmax(x / temperature, dim=1))


def has_no_temperature(x: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.softmax(x, dim=1).contiguous()


def has_no_types(x, temperature):
    return tempered(x, temperature)


OPERATOR = {
    changes_x: "tempered_operator changes its input, 3 × 5 and 0.5 (float32).",
    returns_x: "RuntimeError: the result is an input, or shares its memory; it must be "
    "a new tensor.",
    has_no_temperature: "With 3 × 5 and 0.5 (float32), element (0, 0) of the result is",
    has_no_types: "tempered_operator cannot register its operator: ValueError: infer_",
}


@pytest.mark.parametrize("operator", OPERATOR, ids=lambda f: f.__name__)
def test_each_mistake_of_an_operator_has_its_sentence(operator):
    assert OPERATOR[operator] in of(registering(operator)).failure


FAKES = {
    "promises 3 × 1 values, not 3 × 5.": lambda x, t: x.new_empty(3, 1),
    "promises float32, not float16.": lambda x, t: x.new_empty(
        x.shape, dtype=torch.float32
    ),
    "promises strides (1, 3), and the operator's result has (5, 1). Compiled code "
    "would read wrong elements.": lambda x, t: torch.empty_like(x),
    "promises meta, not": lambda x, t: torch.empty(x.shape, device="meta"),
    "returns NoneType, not a tensor.": lambda x, t: None,
    "It gets tensors that have a shape, strides and no values.": (
        lambda x, t: torch.empty_like(x) * x.max().item()
    ),
}


@pytest.mark.parametrize("words", FAKES)
def test_each_mistake_of_a_fake_function_has_its_sentence(words):
    said = of(registering(fake=FAKES[words])).failure
    assert said.startswith("With ") and words in said
    assert "the fake function of tempered_operator" in said


def test_parts_that_are_missing():
    said = of(registering(fake=None)).failure
    assert said.endswith("no fake function; register one with register_fake.")
    said = of(registering(backward=None)).failure
    assert said.endswith("no gradient; register a formula with register_autograd.")
    assert of(lambda name: None).failure == (
        "<lambda> returns NoneType, not the registered operator. Does it end in a "
        "return?"
    )
    assert of(lambda name: tempered).failure == (
        "<lambda> returns function, not the registered operator."
    )


def without_temperature(ctx, gradient):
    return slope(*ctx.saved_tensors, gradient), None


def one_for_two(ctx, gradient):
    return slope(*ctx.saved_tensors, gradient) / ctx.temperature


def a_number_for_a_number(ctx, gradient):
    return slope(*ctx.saved_tensors, gradient) / ctx.temperature, 0.0


def changes_the_gradient(ctx, gradient):
    return gradient.zero_(), None


def changes_what_it_saved(ctx, gradient):
    (y,) = ctx.saved_tensors
    found = slope(y, gradient) / ctx.temperature
    y.zero_()
    return found, None


def fails(ctx, gradient):
    return gradient.nothing, None


def leaves_pytorch(ctx, gradient):
    gradient.detach().cpu().numpy()
    return backward(ctx, gradient)


ALL = "backward must return one value for each input of the operator: a gradient for"
GRADIENT = {
    without_temperature: " And 1 / temperature?",
    one_for_two: ALL,
    a_number_for_a_number: ALL,
    changes_the_gradient: "tempered_operator's gradient changes its input",
    changes_what_it_saved: "backward changes the operator's result, a saved tensor.",
    fails: "AttributeError: 'Tensor' object has no attribute 'nothing'",
    leaves_pytorch: "tempered_operator fails PyTorch's torch.library.opcheck: ",
}


@pytest.mark.filterwarnings("ignore:Error detected in")  # opcheck's, with the error
@pytest.mark.parametrize("wrong", GRADIENT, ids=lambda f: f.__name__)
def test_each_mistake_of_a_gradient_has_its_sentence(wrong):
    assert GRADIENT[wrong] in of(registering(backward=wrong)).failure


def test_the_sentence_about_a_gradient_says_so():
    said = of(registering(backward=without_temperature)).failure
    assert said.startswith("With 3 × 5, 0.5 and 3 × 5 (float32), element (0, 0) of the")
    assert "of the gradient is" in said


def test_one_shape_is_not_enough():
    with pytest.raises(ValueError, match="must have two shapes or more"):
        judge.registered(registering(), torch.neg, [(3, 5)])
