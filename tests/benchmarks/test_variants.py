"""What chapter `online` measures are softmaxes that differ in what they say."""

import pytest
import torch

from benchmarks import variants
from kernels import online
from kernels.lab import backend, check, meter
from tests.helpers import assert_right, matrix

CHANGED = sorted(set(variants.ONLINE) - {"online", "online.three_pass"})


@pytest.mark.parametrize("name", CHANGED)
def test_variants_are_softmaxes(name):
    fewer = {"dtypes": [torch.float32], "layouts": ["sliced"]}
    summary = check.softmax(variants.ONLINE[name], max_cols=33, **fewer)
    assert summary, summary


@pytest.mark.gpu
@pytest.mark.parametrize("name", variants.ONLINE)
def test_variants_are_softmaxes_of_everything(name):
    summary = check.softmax(variants.ONLINE[name])
    assert summary, summary


@pytest.mark.parametrize("kind", check.VALUES)
def test_three_passes(kind):
    for n_cols in (1, 33, 20_000):
        rows = [check.VALUES[kind](row) for row in matrix(2, n_cols).cpu()]
        x = torch.stack(rows).to(backend.DEVICE)
        assert_right(variants.three_pass(x), x)


@pytest.mark.parametrize("n_cols", [1, 33, 17_000])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_three_passes_over_columns_that_are_apart(dtype, n_cols):
    x = matrix(n_cols, 3, dtype).t()
    y = variants.three_pass(x)
    assert y.is_contiguous()
    assert_right(y, x)


def test_an_empty_matrix_stays_empty():
    for shape in ((0, 5), (5, 0), (0, 0)):
        x = torch.empty(shape, device=backend.DEVICE)
        for function in variants.ONLINE.values():
            assert function(x).shape == shape


def test_errors_name_what_was_got():
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.int"):
        variants.three_pass(torch.ones(2, 2, dtype=torch.int32, device=backend.DEVICE))
    with pytest.raises(ValueError, match=r"2 dimensions .*got shape \(2, 3, 4\)"):
        variants.three_pass(torch.ones(2, 3, 4, device=backend.DEVICE))
    with pytest.raises(TypeError, match="warps"):
        variants.changed(matrix(2, 2), warps=4)


@pytest.mark.parametrize("shape", [(37, 33), (2, 20_000)])
@pytest.mark.parametrize("name", variants.ONLINE)
def test_passes_are_as_many_as_it_says(name, shape):
    counted = meter.count(variants.ONLINE[name], matrix(*shape))
    passes = 3 if name == "online.three_pass" else 2
    assert counted.values == meter.passes(*shape, passes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("online.per_block", {"accumulators": 1}),
        ("online.forwards", {"backwards": False}),
        ("online.unhinted", {"hints": False}),
        ("online", {}),
    ],
)
def test_a_variant_differs_in_one_constant(name, changes, monkeypatch):
    launched = []
    launch_for = online.launch_for

    def spy(output, x, config=None):
        launched.append(launch_for(output, x, config))
        return launched[-1]

    monkeypatch.setattr(online, "launch_for", spy)
    x = matrix(3, 50)
    variants.ONLINE[name](x)
    wanted = dict(launch_for(x, x).constants)
    wanted |= {key.upper(): value for key, value in changes.items()}
    (launch,) = launched
    assert launch.constants == wanted
