"""What the judge runs in its process: the inputs, and the sentences about them."""

import functools
import linecache

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, trials
from kernels.lab.trials import Outcome

HALF = torch.float16


def made(inputs, seeds=2, dtypes=backend.DTYPES):
    return list(trials.inputs_of(inputs, dtypes, seeds))


def test_inputs_are_the_same_each_time_and_leave_the_generator_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = made([(3, 5), (2, 2)]), made([(3, 5), (2, 2)])
    assert torch.equal(torch.get_rng_state(), state)
    for (a,), (b,) in zip(first, second, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_every_shape_has_every_dtype_and_other_numbers_for_each_seed():
    inputs = made([(3, 5), ((2, 4), (4,))])
    assert [len(args) for args in inputs] == [1] * 4 + [2] * 4
    dtypes = [args[0].dtype for args in inputs]
    assert dtypes == [*backend.DTYPES, torch.float32, *backend.DTYPES, HALF]
    assert not torch.equal(inputs[0][0], inputs[3][0])


def test_make_is_called_once_for_each_seed_and_may_return_one_tensor():
    def make(seed):
        return torch.randn(seed + 1)

    lengths = [x.shape[0] for (x,) in made(make, seeds=4)]
    assert lengths == [1, 2, 3, 4]
    assert torch.equal(made(make)[1][0], made(make)[1][0])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.ones(3, 5),), "3 × 5 (float32)"),
        ((torch.ones(3, 5), torch.ones(5).half()), "3 × 5 and 5 values (float32 and f"),
        ((torch.ones(3, 5).t(), 0.5), "5 × 3 with strides (1, 5) and 0.5 (float32)"),
        ((torch.tensor(1.0),), "a scalar (float32)"),
    ],
)
def test_inputs_in_words(args, words):
    assert trials.describe(args).startswith(words)


def test_strides_stay_where_kernels_run():
    x = torch.arange(24.0).view(4, 6)[:, 1:4]
    there = trials.on_device(x)
    assert there.stride() == x.stride() and torch.equal(there.cpu(), x)
    assert trials.on_device(3) == 3


OPTIONS = {"dtypes": [torch.float32], "seeds": 1}


def outcome(function, reference, inputs, **options) -> Outcome:
    return trials.of_operator(function, reference, inputs, **OPTIONS | options)


def test_rounding_is_allowed_and_not_more():
    def nearly(by):
        return lambda x: x * (1 + by * torch.finfo(x.dtype).eps)

    shapes, same = [(50, 7), (3, 3)], lambda x: x.clone()
    assert outcome(nearly(4), same, shapes).failure is None
    assert outcome(nearly(400), same, shapes).failure


def test_a_sum_that_is_rounded_on_the_way_is_seen():
    """Sums above 2048 stay where they are if 1 is added in float16."""

    def low(x):
        return x.half().cumsum(0)[-1:].float()

    def make(seed):
        return torch.rand(4000 + seed)

    right = lambda x: x.sum(0, keepdim=True)  # noqa: E731
    assert outcome(low, right, make, seeds=2).failure
    assert outcome(lambda x: x.sum(0, keepdim=True), right, make, seeds=2).tried


def test_integers_must_be_equal():
    def make(seed):
        return torch.arange(5 + seed)

    assert outcome(lambda x: x + 1, lambda x: x + 1, make, seeds=2).failure is None
    assert "element 0 of the result is 2, not 1" in (
        outcome(lambda x: x + 2, lambda x: x + 1, make, seeds=2).failure
    )


def test_infinities_and_nan_must_be_where_they_are_right():
    def make(seed):
        return torch.tensor([float("inf"), float("nan"), 1.0, *[2.0] * seed])

    assert outcome(torch.neg, torch.neg, make, seeds=2).failure is None
    wrong = outcome(lambda x: x.nan_to_num(0), lambda x: 1 * x, make, seeds=2)
    assert wrong.failure


def test_several_results_are_numbered():
    def both(x):
        return x.amax(0), x.amin(0)

    swapped = outcome(lambda x: both(x)[::-1], both, [(3, 5), (2, 2)])
    assert "element 0 of result 0 is" in swapped.failure


def test_the_first_input_alone_may_be_tried():
    calls = []

    def counted(x):
        calls.append(1)
        return x + 0

    shapes = [(3, 5), (2, 2)]
    trials.of_operator(counted, lambda x: x, shapes, **OPTIONS, first=True)
    assert len(calls) == 1


# ---- formulas ------------------------------------------------------------------------


def formula(function, **options) -> Outcome:
    cases = [(3, torch.float16), (4, torch.float32)]
    options = {"mistakes": {}, "within": 1e-9} | options
    return trials.of_formula(
        function, lambda n, dtype: n * dtype.itemsize, cases, **options
    )


def test_a_formula_is_tried_call_by_call():
    assert formula(lambda n, dtype: dtype.itemsize * n) == Outcome(None, "2 calls")

    def halves(n, dtype):
        return n * 2

    failure = formula(halves).failure
    assert failure.startswith("halves(4, float32) ") and "8" in failure
    hint = {"How many bytes has a value?": lambda n, dtype: 2 * n}
    assert formula(halves, mistakes=hint).failure.endswith(
        "How many bytes has a value?"
    )


def test_functions_and_tensors_of_a_call_are_named():
    x = torch.zeros(2, 3)
    cases = [([torch.exp, torch.sin], x, torch.half, "a"), ([], x, torch.half, "a")]
    found = trials.of_formula(lambda *_: 1, lambda *_: 2, cases, {}, 0)
    call = "<lambda>([exp, sin], 2 × 3 (float32), float16, a)"
    assert found.failure == f"{call} should be 2, not 1."


def test_a_formula_that_raises_or_returns_too_much():
    assert "ZeroDivisionError" in formula(lambda n, dtype: n / 0).failure
    assert "asked for" in formula(lambda n, dtype: (n, n)).failure


def test_a_formulas_values_are_numbered_or_named():
    def tried(right, wrong):
        options = {"mistakes": {}, "within": 0}
        cases = [(3,), (4,)]
        return trials.of_formula(lambda n: wrong, lambda n: right, cases, **options)

    said = tried((5, 6), (5, 7)).failure
    assert said.startswith("Value 1 of <lambda>(3) should be 6, not 7.")
    said = tried({"all": 6}, {"all": 7}).failure
    assert said.startswith("<lambda>(3) should return, for all, 6, not 7.")
    assert tried(3, 2.9999999).failure == "<lambda>(3) should be 3, not 2.9999999."
    assert tried(3, "3").failure == "<lambda>(3) should be 3, not '3'."


def test_a_formula_without_return_is_told_so():
    """And no mistake that returns None, or nothing for a name, is blamed for it."""
    blame = {"You forgot the alignment.": lambda n, dtype: None}
    said = formula(lambda n, dtype: None, mistakes=blame).failure
    assert said.endswith("returns None. Is its `return` missing?")


def test_a_part_that_is_none_is_no_mistake_of_a_known_kind():
    blame = {"You forgot the alignment.": lambda n: {}}
    right, wrong = {"all": 6}, {"all": None}
    found = trials.of_formula(lambda n: wrong, lambda n: right, [(3,)], blame, 0)
    assert found.failure == "<lambda>(3) should return, for all, 6, not None."


@pytest.mark.parametrize(
    "number",
    [np.float64, np.float32, np.array, torch.tensor, lambda n: np.array([n])[0]],
)
def test_numbers_of_other_libraries_are_answers(number):
    assert formula(lambda n, dtype: number(n * dtype.itemsize)).failure is None
    assert trials.parts_of(number(3)) == {"": 3}


def test_truths_and_lists_of_other_libraries_are_answers():
    for truth in (np.bool_(True), torch.tensor(1) > 0, np.ones(3).all()):
        assert trials.alike(trials.parts_of(truth)[""], True)
    for both in (
        torch.tensor([5, 6]),
        np.array([5, 6]),
        [np.int64(5), torch.tensor(6)],
    ):
        assert trials.parts_of(both) == {0: 5, 1: 6}


# ---- bandwidth -----------------------------------------------------------------------


@pytest.fixture
def microseconds(monkeypatch):
    """A clock by which the copy takes 2 µs, and everything else 4 µs."""

    def device_us(function, *args):
        function(*args)
        us = 2 if function is torch.Tensor.copy_ else 4
        return 0, us, 0

    monkeypatch.setattr(trials.clock, "device_us", device_us)


def test_bandwidth_counts_inputs_and_results_once(microseconds):
    neg = trials.bandwidth(torch.neg, (1000, 500), torch.float32)
    assert neg == pytest.approx((4e6 / 4 / 1e3, 4e6 / 2 / 1e3))
    shapes = ((1000, 500), (500,))
    scaled = trials.bandwidth(lambda x, w: x * w, shapes, torch.bfloat16)
    assert scaled[0] == pytest.approx((2e6 + 1000) / 4 / 1e3)
    made = trials.bandwidth(torch.neg, lambda seed: torch.ones(10, 50), torch.float32)
    assert made[1] == pytest.approx(4000 / 2 / 1e3)


def test_a_function_that_fails_has_no_bandwidth(microseconds):
    failed = trials.bandwidth(lambda x: x.sum(dim=2), (3, 5), torch.float32)
    assert "fails: IndexError" in failed.failure


# ---- what a trial is given -----------------------------------------------------------


def test_a_trial_finds_the_source_that_it_is_given(monkeypatch):
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))
    seen = trials.run(
        lambda: Outcome(linecache.getline("<here>", 2)), {"<here>": ["a\n", "b\n"]}
    )
    assert seen.failure == "b\n"


@triton.jit
def sum_kernel(output_ptr, input_ptr, n_cols, BLOCK: tl.constexpr, FORM: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    places, inside = input_ptr + row * n_cols + cols, cols < n_cols
    if FORM == "without other":
        x = tl.load(places, mask=inside)
    if FORM == "masked elements unused":
        x = tl.where(inside, tl.load(places, mask=inside), 0)
    if FORM == "zeros":
        x = tl.load(places, mask=inside, other=0)
    total = 0.0
    if FORM == "maximum":
        total = tl.max(tl.load(places, mask=inside).to(tl.float32), axis=0)
    elif FORM == "minimum":
        total = tl.min(tl.load(places, mask=inside).to(tl.float32), axis=0)
    elif FORM == "one by one":
        for col in range(BLOCK):
            place = input_ptr + row * n_cols + col
            total += tl.load(place, mask=col < n_cols, other=0).to(tl.float32)
    else:
        total = tl.sum(x.to(tl.float32), axis=0)
    tl.store(output_ptr + row, total)


def row_sum(x, form):
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    sum_kernel[(len(x),)](output, x, x.shape[1], BLOCK=block, FORM=form)
    return output


def tried(form, dtype=torch.float32, reference=lambda x: x.sum(dim=1)) -> str | None:
    """What is wrong with a function of this form, in one line."""
    function = functools.partial(row_sum, form=form)
    options = {"dtypes": [dtype], "layouts": ["contiguous"], "max_cols": 10}
    trial = functools.partial(trials.of_rows, function, reference, **options)
    failure = trials.run(trial, {}).failure
    return failure and " ".join(failure.split())


interpreted = pytest.mark.skipif(
    not backend.INTERPRETED, reason="is about the interpreter"
)


@interpreted
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_a_load_without_other_is_no_zero(dtype):
    failure = tried("without other", dtype)
    assert "its value is nan, not" in failure
    assert failure.endswith("take part, in a load without `other`?")


@interpreted
@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize(
    ("form", "reference"), [("maximum", torch.amax), ("minimum", torch.amin)]
)
def test_a_load_without_other_wins_a_maximum_and_a_minimum(form, reference, dtype):
    """A GPU's maximum ignores NaN."""
    failure = tried(form, dtype, lambda x: reference(x, 1))
    assert f"is {'-' * (form == 'minimum')}50176, not" in failure
    assert failure.endswith("take part, in a load without `other`?")


@pytest.mark.parametrize("form", ["zeros", "masked elements unused", "one by one"])
def test_masked_elements_that_take_no_part_are_right(form):
    """For a single `other` of 0, the interpreter's builder is given none."""
    assert tried(form) is None


@interpreted
def test_after_a_trial_the_interpreter_is_as_before():
    tried("without other")
    x = torch.ones(2, 5)
    assert row_sum(x, "without other").tolist() == [5, 5]


@interpreted
def test_integers_without_other_are_left_alone():
    x = torch.ones(2, 5, dtype=torch.int32)
    found = trials.run(lambda: Outcome(str(row_sum(x, "without other").tolist())), {})
    assert found.failure == "[5, 5]"
