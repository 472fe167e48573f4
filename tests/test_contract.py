"""What every chapter's softmax promises about its input and its output."""

import functools
import gc
import importlib
import weakref

import pytest
import torch

import kernels
from kernels.lab import backend, launch
from tests.helpers import assert_right, matrix

MODULES = {
    stem: importlib.import_module(f"kernels.{stem}") for stem in kernels.CHAPTERS
}
SOFTMAXES = {
    stem: module.softmax
    for stem, module in MODULES.items()
    if hasattr(module, "softmax")
}
OF_ANY_TENSOR = {"fastest"}  # any rank, float64 too; all others take a matrix's rows
OF_ANY_LENGTH = {"eager", "online", "fastest", "columns"}  # no MAX_COLS to name
WITH_A_LAUNCH = [stem for stem in SOFTMAXES if hasattr(MODULES[stem], "launch_for")]


@pytest.fixture(params=SOFTMAXES)
def softmax(request):
    return SOFTMAXES[request.param]


@pytest.fixture(params=sorted(set(SOFTMAXES) - OF_ANY_TENSOR))
def softmax_of_rows(request):
    return SOFTMAXES[request.param]


@pytest.fixture(params=sorted(OF_ANY_TENSOR))
def softmax_of_any(request):
    return SOFTMAXES[request.param]


@pytest.fixture(params=sorted(set(SOFTMAXES) - OF_ANY_LENGTH))
def limited(request):
    return MODULES[request.param]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=backend.DEVICE)


def unread(n_rows: int, n_cols: int) -> torch.Tensor:
    """A matrix whose values are never read, so that its memory need not be touched."""
    return torch.empty(1, 1, device=backend.DEVICE).expand(n_rows, n_cols)


def test_every_chapter_has_one_but_those_about_something_else():
    others = {"traffic", "debugging", "matmul", "gradient", "operator"}
    assert set(kernels.CHAPTERS) - set(SOFTMAXES) == others


def test_the_course_exports_the_one_of_any_tensor():
    assert {stem for stem in SOFTMAXES if SOFTMAXES[stem] is kernels.softmax} == {
        "fastest"
    }


@pytest.mark.parametrize(
    ("x", "got"),
    [
        ([[1.0]], "list"),
        (None, "NoneType"),
        (ones(2, 2, dtype=torch.int32), "torch.int32"),
        (ones(2, 2, dtype=torch.bool), "torch.bool"),
        (ones(2, 2, dtype=torch.complex64), "torch.complex64"),
    ],
)
def test_wrong_type_is_named(softmax, x, got):
    with pytest.raises(TypeError, match=rf"x must be .*got {got}"):
        softmax(x)


def test_float64_is_a_wrong_type_of_rows(softmax_of_rows):
    with pytest.raises(TypeError, match=r"x must be .*got torch\.float64"):
        softmax_of_rows(ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_wrong_rank_is_named(softmax_of_rows, shape):
    with pytest.raises(ValueError, match=r"2 dimensions.*reshape"):
        softmax_of_rows(ones(*shape))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [*backend.DTYPES, torch.float64])
def test_any_rank_and_float64_where_they_are_promised(softmax_of_any, shape, dtype):
    x = ones(*shape, dtype=dtype)
    assert_right(softmax_of_any(x), x)


def test_unreachable_device_is_named(softmax):
    with pytest.raises(ValueError, match=r"got a tensor on 'meta'.*randn_like\(x"):
        softmax(torch.ones(2, 2, device="meta"))


def test_values_that_do_not_lie_in_memory_as_read_are_refused(softmax_of_rows):
    x = matrix(3, 5)
    sparse = r"^x must be strided, got torch\.sparse_coo; x\.to_dense\(\) would do$"
    with pytest.raises(ValueError, match=sparse):
        softmax_of_rows(x.to_sparse())
    with pytest.raises(ValueError, match=r"got a negative view; x\.resolve_neg\(\)"):
        softmax_of_rows(torch._neg_view(x))
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"^x must have memory, got a Tensor"):
        softmax_of_rows(x)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty_gives_empty(softmax, shape):
    for dtype in backend.DTYPES:
        x = ones(*shape, dtype=dtype)
        result = softmax(x)
        assert (result.shape, result.dtype, result.device) == (x.shape, dtype, x.device)


def test_a_limit_is_stated_wherever_there_is_one():
    stated = {stem for stem in SOFTMAXES if hasattr(MODULES[stem], "MAX_COLS")}
    assert stated == set(SOFTMAXES) - OF_ANY_LENGTH


def test_row_beyond_the_limit_is_named(limited):
    limit = limited.MAX_COLS
    with pytest.raises(ValueError, match=rf"at most {limit} columns.*got {limit + 1}"):
        limited.softmax(unread(1, limit + 1))


def test_no_rows_beyond_the_limit_are_still_an_error(limited):
    with pytest.raises(ValueError, match="columns"):
        limited.softmax(unread(0, limited.MAX_COLS + 1))


@pytest.mark.parametrize("stem", sorted(OF_ANY_LENGTH))
def test_rows_longer_than_any_program_where_no_limit_is_stated(stem):
    longest = max(MODULES[other].MAX_COLS for other in ("program", "tiled"))
    x = matrix(1, longest + 1)
    assert_right(SOFTMAXES[stem](x), x)


# ---- launches ------------------------------------------------------------------------


@pytest.mark.parametrize("stem", WITH_A_LAUNCH)
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_a_launch_is_made_from_shapes_and_called_with_tensors(stem, dtype):
    """Tensors on "meta" have no memory, and `compile.aot` needs none."""
    module, x = MODULES[stem], matrix(3, 300, dtype)
    output = torch.full_like(x, float("nan"))
    shapes = [torch.empty(3, 300, dtype=dtype, device="meta") for _ in range(2)]
    launch = module.launch_for(*shapes)
    assert launch == module.launch_for(output, x)
    launch(output, x)
    assert_right(output, x)


def test_residency_and_the_softmaxes_from_tiled_on_have_launches():
    from_tiled_on = list(SOFTMAXES)[list(SOFTMAXES).index("tiled") :]
    assert {*WITH_A_LAUNCH, "fastest"} == {"residency", *from_tiled_on}


def kept_by(softmax, *shape: int) -> list[str]:
    """Which of its two tensors something still holds when nobody needs them."""
    x = matrix(*shape)
    tensors = {"input": x, "output": softmax(x)}
    held = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    del x, tensors
    gc.collect()
    return [name for name, of in held.items() if of() is not None]


@pytest.mark.parametrize("shape", [(5, 64), (5, 33)])
def test_no_tensor_is_kept(softmax, shape):
    """Kept launches know sizes and alignment: memory of earlier calls must be free."""
    if softmax is SOFTMAXES["cuda"] and backend.INTERPRETED:
        pytest.skip("needs a CUDA GPU")
    assert kept_by(softmax, *shape) == []


def test_a_kept_tensor_is_found(monkeypatch):
    monkeypatch.setattr(launch, "row_shift", functools.cache(launch.row_shift))
    assert kept_by(MODULES["tiled"].softmax, 5, 64) == ["input", "output"]
