"""Answers and guesses: what a learner writes down is judged in one sentence."""

import math

import numpy as np
import pytest

from kernels.lab import judge
from tests.lab.test_judge import said


@pytest.mark.parametrize(
    ("answer", "want", "sentence"),
    [
        (4096, 4096, "Right: 4,096."),
        (4096.0, 4096, "Right: 4096."),
        (4095, 4096, "Not yet: 4,095 is not right."),
        (..., 3, 'Not yet: replace the "..." by your answer.'),
        (None, 3, 'Not yet: replace the "..." by your answer.'),
        ("Registers ", "registers", "Right: Registers ."),
        ((1, ...), (1, 2), 'Not yet: replace the "..." by your answer (1).'),
        ((1, 3), (1, 2), "Not yet: 3 at place 2 of 2 is not right."),
        ((1, 2, 3), (1, 2), "Not yet: 2 values are asked for, got (1, 2, 3)."),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "Right: {'a': 1, 'b': 2}."),
        ({"a": 1, "b": 3}, {"b": 2, "a": 1}, "Not yet: 3 for b is not right."),
        ("3", 3, "Not yet: 3 is not right."),
        (8, 16, "Not yet: 8 is not right."),
    ],
)
def test_answers(answer, want, sentence):
    verdict = judge.value(answer, want)
    assert said(verdict) == sentence
    assert bool(verdict) == sentence.startswith("Right")


def test_numpys_numbers_are_numbers():
    assert judge.value(np.int64(3), 3) and judge.value(np.float32(0.5), 0.5)
    assert judge.guess({"a": np.int64(3)}, {"a": np.float64(3.5)})


MEASURED = {"sliced": 1.0, "offset": 1.2, "broadcast": 0.9, "transposed": 11.2}


@pytest.mark.parametrize(
    ("guessed", "sentence"),
    [
        (
            {"sliced": 1, "offset": 1, "broadcast": 0.5, "transposed": 1},
            "2 of 4 guesses are within a factor of 1.5; furthest off: transposed "
            "(guessed 1, found 11.2 copies).",
        ),
        (
            {"sliced": 1, "offset": 1, "broadcast": 1, "transposed": 10},
            "4 of 4 guesses are within a factor of 1.5.",
        ),
        (
            {"sliced": 0, "offset": 1, "broadcast": 9, "transposed": 100},
            "1 of 4 guesses is within a factor of 1.5; furthest off: sliced (guessed "
            "0, found 1 copies).",
        ),
        (
            {"sliced": 1, "offset": ..., "broadcast": 1, "another": 5},
            "2 of 2 guesses are within a factor of 1.5; no guess for offset and "
            "transposed.",
        ),
        (dict.fromkeys(MEASURED, ...), "No guess yet: write down a number for each."),
    ],
)
def test_guesses(guessed, sentence):
    verdict = judge.guess(guessed, MEASURED, "copies")
    assert said(verdict) == sentence
    assert bool(verdict) == sentence.startswith("4 of 4")


@pytest.mark.parametrize(
    ("guessed", "found", "sentence"),
    [
        (3, 12.5, "Guessed 3, found 12.5 µs, not within a factor of 1.5."),
        (9, 12.5, "Guessed 9, found 12.5 µs, within a factor of 1.5."),
        ({"a": 1, "b": 2}, {"b": 9}, "b: guessed 2, found 9 µs, not within a factor "),
        ([1, 2], [1.1, 2.9], "2 of 2 guesses are within"),
        ({8: 1}, {8: None}, "Nothing was found that a guess can be compared with."),
        ({8: 1, 9: 1}, {8: math.nan, 9: 0}, "9: guessed 1, found 0 µs, not within"),
        ({8: 0, 9: math.nan}, {8: 0, 9: 1}, "1 of 1 guess is within a factor of 1.5; "),
        ([5, 1408], [5, 6144], "(guessed 1,408, found 6,144 µs)."),
    ],
)
def test_guesses_of_any_form(guessed, found, sentence):
    assert sentence in said(judge.guess(guessed, found, "µs"))


def test_a_guess_may_have_to_be_exact():
    verdict = judge.guess({1: 1, 32: 1}, {1: 1, 32: 32}, "passes", of="apart", within=1)
    assert not verdict and said(verdict) == (
        "1 of 2 guesses is right; furthest off: 32 apart (guessed 1, found 32 passes)."
    )
    assert judge.guess({1: 1, 32: 32}, {1: 1, 32: 32}, within=1)
