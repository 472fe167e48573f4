"""Triton's interpreter replaces its language once a launch, and computes the same."""

import importlib
import types

import pytest
import torch
import triton
import triton.language as tl

from kernels import online, program
from kernels.lab import backend
from tests.helpers import assert_right, matrix

if not backend.INTERPRETED:  # the module would change an interpreter that is not used
    pytest.skip("kernels are compiled here", allow_module_level=True)

from triton.runtime import interpreter as tritons

from kernels.lab import interpreter


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


def test_results_are_the_same_to_the_bit(monkeypatch):
    x = matrix(7, 300)
    quick = program.softmax(x), online.softmax(x)
    monkeypatch.setattr(tritons, "_patch_lang", tritons._patch_lang.__wrapped__)
    assert all(map(torch.equal, quick, (program.softmax(x), online.softmax(x))))


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
    before = tritons._patch_lang
    monkeypatch.delattr(tritons, "_LangPatchScope")
    importlib.reload(interpreter)
    assert tritons._patch_lang is before


@triton.jit
def without_language(x_ptr):
    return x_ptr


def test_a_kernel_without_the_language_still_fails(monkeypatch):
    run = without_language.rewrite()
    for name in [n for n, v in run.__globals__.items() if v is tl]:
        monkeypatch.delitem(run.__globals__, name)
    with pytest.raises(AssertionError, match=r"triton\.language must be visible"):
        without_language[(1,)](torch.zeros(1))
