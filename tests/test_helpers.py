"""What a test in company forgives, and what it does not; the order of files."""

from pathlib import Path

import pytest

import conftest
from tests.helpers import in_company


@pytest.mark.parametrize(("n_bad", "n_tried"), [(0, 1), (1, 2), (2, 3)])
def test_a_test_in_company_passes_if_one_of_three_tries_does(n_bad, n_tried):
    tried = []

    @in_company
    def disturbed():
        tried.append(1)
        assert len(tried) > n_bad

    disturbed()
    assert len(tried) == n_tried


def test_what_is_wrong_fails_in_company_too():
    tried = []

    @in_company
    def wrong():
        tried.append(1)
        assert not tried

    with pytest.raises(AssertionError):
        wrong()
    assert len(tried) == 3


def test_an_error_is_not_tried_again():
    tried = []

    @in_company
    def broken():
        tried.append(1)
        raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert len(tried) == 1


def test_notebooks_start_early_among_the_largest_files():
    n_tests = {Path(name): 1 + place for place, name in enumerate("abcdef")}
    n_tests |= {Path(name): 9 for name in ("01.ipynb", "02.ipynb")}
    order = [path.name for path in conftest.in_turn(n_tests)]
    assert order == ["01.ipynb", "f", "e", "02.ipynb", "d", "c", "b", "a"]


def test_no_file_is_lost_where_there_are_more_notebooks():
    n_tests = dict.fromkeys(map(Path, ("a", "1.ipynb", "2.ipynb", "3.ipynb")), 1)
    assert sorted(conftest.in_turn(n_tests)) == sorted(n_tests)


def test_slow_files_start_first():
    slow = conftest.SLOW_ON_A_GPU[0]
    n_tests = {Path("a"): 9, Path("b"): 8, Path(slow): 1}
    assert [path.name for path in conftest.in_turn(n_tests)] == [slow, "a", "b"]
    names = {path.name for path in (conftest.ROOT / "tests").rglob("test_*.py")}
    assert set(conftest.SLOW_ON_A_GPU) <= names
