"""What every chapter's softmax promises about its input and its output."""

import importlib

import pytest
import torch

import kernels
from kernels.lab import backend

MODULES = {
    stem: importlib.import_module(f"kernels.{stem}") for stem in kernels.CHAPTERS
}
SOFTMAXES = {
    stem: module.softmax
    for stem, module in MODULES.items()
    if hasattr(module, "softmax")
}


@pytest.fixture(params=SOFTMAXES)
def softmax(request):
    return SOFTMAXES[request.param]


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=backend.DEVICE)


def test_every_chapter_but_the_traffic_has_one():
    assert set(kernels.CHAPTERS) - set(SOFTMAXES) == {"traffic"}


@pytest.mark.parametrize(
    ("x", "got"),
    [
        ([[1.0]], "list"),
        (None, "NoneType"),
        (matrix(2, 2, dtype=torch.int32), "torch.int32"),
        (matrix(2, 2, dtype=torch.bool), "torch.bool"),
        (matrix(2, 2, dtype=torch.float64), "torch.float64"),
        (matrix(2, 2, dtype=torch.complex64), "torch.complex64"),
    ],
)
def test_wrong_type_is_named(softmax, x, got):
    with pytest.raises(TypeError, match=rf"x must be .*got {got}"):
        softmax(x)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_wrong_rank_is_named(softmax, shape):
    with pytest.raises(ValueError, match=r"2 dimensions.*reshape"):
        softmax(matrix(*shape))


def test_unreachable_device_is_named(softmax):
    with pytest.raises(ValueError, match=r"got a tensor on 'meta'.*x\.to"):
        softmax(torch.ones(2, 2, device="meta"))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty_gives_empty(softmax, shape):
    for dtype in backend.DTYPES:
        x = matrix(*shape, dtype=dtype)
        result = softmax(x)
        assert (result.shape, result.dtype, result.device) == (x.shape, dtype, x.device)


def test_row_beyond_the_limit_is_named(softmax, request):
    stem = request.node.callspec.params["softmax"]
    if stem == "eager":
        assert not hasattr(MODULES[stem], "MAX_COLS")  # PyTorch has no limit to name
        return
    limit = MODULES[stem].MAX_COLS
    with pytest.raises(ValueError, match=rf"at most {limit} columns.*got {limit + 1}"):
        softmax(matrix(1, limit + 1))


def test_no_rows_beyond_the_limit_are_still_an_error(softmax, request):
    module = MODULES[request.node.callspec.params["softmax"]]
    if hasattr(module, "MAX_COLS"):
        with pytest.raises(ValueError, match="columns"):
            softmax(matrix(0, module.MAX_COLS + 1))
