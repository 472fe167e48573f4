"""What a test in company forgives, and what it does not."""

import pytest

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
