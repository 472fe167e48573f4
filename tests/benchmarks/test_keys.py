"""The judge of keys: which it lets pass, and what it says of the others."""

from dataclasses import fields

import pytest

from benchmarks import keys
from kernels.lab.launch import Launch


def judge(key):
    said = keys.judge(key)
    assert max(map(len, said.splitlines())) <= 80
    return " ".join(said.split())


def right(x, dim):
    return x.shape, x.stride(), x.dtype, dim, x.data_ptr() % 16


def test_a_key_of_all_that_decides_the_launch_is_right():
    assert judge(right) == (
        "Right: right keeps apart the calls whose launches differ, and finds the "
        "launch again for a tensor of the same form; 10 calls tried."
    )


def unwritten(x, dim):
    return ...


WRONG = {  # what a key lacks, and the call that it mixes up
    "the shape": (lambda x, dim: (x.stride(), x.dtype, dim, x.data_ptr() % 16), "rows"),
    "strides": (lambda x, dim: (x.shape, x.dtype, dim, x.data_ptr() % 16), "wider"),
    "the dtype": (lambda x, dim: (x.shape, x.stride(), dim, x.data_ptr() % 16), "16"),
    "dim": (lambda x, dim: (x.shape, x.stride(), x.dtype, x.data_ptr() % 16), "dim=0"),
    "alignment": (lambda x, dim: (x.shape, x.stride(), x.dtype, dim), "4 bytes"),
}


@pytest.mark.parametrize("lacks", WRONG)
def test_a_key_that_lacks_something_hears_which_call_it_mixes_up(lacks):
    key, words = WRONG[lacks]
    said = judge(key)
    assert said.startswith("Wrong: <lambda> is the same for a 96 × 96 float32 matrix")
    assert words in said and " must " in said


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (lambda x: (x.shape, x.stride(), x.itemsize, x.data_ptr() % 16), "float16"),
        (lambda x: (x.shape, x.is_contiguous(), x.dtype, x.data_ptr() % 16), "third"),
        (lambda x: (x.shape, x.stride(), x.dtype, x.storage_offset()), "Useless"),
    ],
)
def test_what_only_seems_to_decide_the_launch_is_no_key(instead, words):
    said = judge(lambda x, dim: (*instead(x), dim))
    assert words in said and "Right" not in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (unwritten, 'Not yet: line 2 of unwritten still has "..." in it.'),
        (lambda x, dim: (x.data_ptr(), dim), "Useless: <lambda> differs for a 96"),
        (lambda x, dim: (*right(x, dim), x.data_ptr()), "Useless"),
        (lambda x, dim: [x.shape], "cannot be a key of a dict"),
        (lambda x, dim: x.shape[7], "<lambda> fails: IndexError"),
    ],
)
def test_what_is_no_key_gets_a_sentence(key, words):
    assert words in judge(key)
    assert "Right" not in judge(key)


def test_every_difference_of_two_launches_has_a_reason():
    names = {field.name for field in fields(Launch)}
    assert set(keys.WHY) == names - {"n_words"}
    launches = [keys.launch_of(*call).launch for call in keys.calls().values()]
    assert all(launch.n_words == 0 for launch in launches)
    assert keys.difference(launches[0], launches[1]) == ""
