"""The exact set of a view's elements; `test_meter` tries it on running kernels."""

import numpy as np
import pytest
import torch

from kernels.lab.accesses import View

X = torch.arange(24.0).view(4, 6)
VIEWS = {
    "contiguous": X,
    "slice": X[:, 1:4],
    "every other column": X[:, ::2],
    "transposed": X.t(),
    "transposed slice": X[1:3].t(),
    "broadcast": X[2:3].expand(4, 6),
    "overlapping": X.flatten().as_strided((5, 6), (3, 1)),
    "gaps in an overlap": X.flatten().as_strided((3, 3), (3, 2)),
    "no rows": X[:0],
    "one element": X[:1, :1],
}


def elements(view):
    """The offsets of the view's elements from its first, by indexing them."""
    grids = np.indices(tuple(view.shape)).reshape(view.ndim, -1).T
    return {int(np.dot(index, view.stride())) for index in grids}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_has_exactly_the_elements_of_the_view(view):
    offsets = np.arange(-10, 40)
    found = {int(i) for i in offsets[View(view).has(offsets)]}
    assert found == elements(view)
    assert len(View(view)) == len(found)


def test_offsets_beyond_32_bits():
    span = 2**31 + 8
    far = torch.empty(span, dtype=torch.int8)  # reserved, not touched
    view = View(far)
    assert view.has(np.array([span - 1, span])).tolist() == [True, False]
    assert view.meant(-(2**31)) == 2**31 and view.meant(8 - 2**31) is None
    assert view.meant(-8) is None and view.meant(span) is None
    assert View(far[:4]).meant(-4) is None


@pytest.mark.parametrize(
    ("start", "width", "allowed"),
    [(0, 16, True), (4, 16, False), (8, 8, False), (2, 4, False), (24, 4, True)],
)
def test_an_access_is_allowed_if_all_its_bytes_are_elements(start, width, allowed):
    """Rows of three float32 values in a stride of six: bytes 0 to 11, 24 to 35, …"""
    view = View(X[:, 1:4])
    width = min(width, 12)
    assert view.allows(np.array([start]), width).item() is allowed


@pytest.mark.parametrize(
    ("view", "start", "words"),
    [
        ("slice", 12, "lies between the elements of this view"),
        ("slice", -4, "whose first element is 0"),
        ("slice", 84, "row 3, column 3"),
        ("contiguous", 2, "not at the start of an element but at byte 2"),
        ("no rows", 0, "which has no elements"),
    ],
)
def test_a_stray_access_is_described(view, start, words):
    assert words in View(VIEWS[view], "x").describe(start, 4)
