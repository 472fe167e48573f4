"""A training step's softmax: every provider gets the same pair, and must be right."""

import pandas as pd
import pytest
import torch

from benchmarks import peers, training
from kernels.lab import backend, record

SINGLE, HALF = torch.float32, torch.bfloat16


def expected(both: torch.Tensor) -> torch.Tensor:
    gradient, x = both.double()
    y = torch.softmax(x, -1)
    return y * (gradient - (gradient * y).sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("shape", [(3, 33), (64, 64), (1, 1)])
def test_a_pair_is_two_aligned_matrices(dtype, shape):
    both = training.pair(dtype, *shape)
    assert both.shape == (2, *shape) and both.dtype == dtype
    for matrix in both:
        assert matrix.is_contiguous() and matrix.data_ptr() % 16 == 0
    assert torch.equal(both, training.pair(dtype, *shape))
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize("providers", [training.steps, training.ways_back])
def test_all_providers_but_the_stream_are_gradients(providers):
    both = training.pair(SINGLE, 3, 33)
    found = providers()
    names = ["stream", "gradient", "torch", "torch.compile", "liger", "quack"]
    assert list(found) == names + ["eager"] * (providers is training.steps)
    assert torch.equal(found["stream"](both), both[0] + both[1])
    for name in {"gradient", "torch", "eager"} & {*found}:
        for _ in range(2):
            result = found[name](both)
            training.verify(both, result)
            torch.testing.assert_close(
                result, expected(both).float(), rtol=1e-4, atol=1e-6
            )


def test_the_way_back_computes_the_way_forth_once():
    calls = []

    def softmax(x):
        calls.append(x.shape)
        return torch.softmax(x, -1)

    back = training.WayBack(softmax)
    one, other = (training.pair(SINGLE, n, 8) for n in (2, 3))
    for both in (one, one, other, other, one):
        training.verify(both, back(both))
    assert [shape[0] for shape in calls] == [2, 3, 2]


def test_a_gradient_of_a_gradient_is_the_hessians():
    both = training.pair(SINGLE, 1, 5).double()
    found = training.twice(peers.native, both)
    (g,), (x,) = both
    hessian = torch.func.hessian(lambda x: g @ torch.softmax(x, 0))(x)
    torch.testing.assert_close(found[0], hessian @ g)


def test_cases_are_pairs():
    (case, _) = training.cases([64], [SINGLE, HALF], n_bytes=1024)
    assert case == record.Case(SINGLE, 4, 64, "pair")


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_verify_finds_what_is_wrong(dtype):
    both = training.pair(dtype, 50, 200)
    right = expected(both).to(dtype)
    training.verify(both, right)
    training.verify(both, training.stream(both))
    y = torch.softmax(both[1], -1)
    wrongs = {
        "wrong result": right[:-1],
        "wrong result.*dtype|wrong result: expected torch": right.double(),
        "wrong gradient at row": both[0] * y,
        "row 49": torch.cat([right[:-1], 2 * right[-1:]]),
        "got nan": torch.full_like(right, float("nan")),
    }
    for words, wrong in wrongs.items():
        with pytest.raises(ValueError, match=words):
            training.verify(both, wrong)


def test_peers_have_their_own_loaders():
    for providers in (training.steps(), training.ways_back()):
        for peer in peers.OPTIONAL:
            if peer.name in providers:
                mine = providers[peer.name]
                assert isinstance(mine, record.OptionalProvider)
                assert (mine.package, mine.apart) == (peer.package, peer.apart)
                assert mine.load is not peer.load


@pytest.mark.gpu
def test_peers_that_are_here_are_right():
    both = training.pair(HALF, 64, 1024)
    for providers in (training.steps(), training.ways_back()):
        for name, provider in providers.items():
            if isinstance(provider, record.OptionalProvider):
                continue
            if name != "stream":
                training.verify(both, provider(both))
    assert backend.DEVICE == "cuda"


def test_shares_are_of_the_stream():
    rows = [("copy", 64, 1.0), ("stream", 64, 2.0), ("torch", 64, 4.0)]
    rows += [("copy", 65, 1.0), ("stream", 65, 3.0), ("torch", 65, 3.0)]
    df = pd.DataFrame(rows, columns=["provider", "n_cols", "p50_us"])
    df["dtype"] = "float32"
    shares = training.shares(df, SINGLE)
    assert list(shares) == ["torch"]
    assert shares["torch"].to_dict() == {64: 0.5, 65: 1.0}


def test_ranges_are_of_each_provider_in_each_dtype():
    single = pd.DataFrame({"torch": [0.5, 0.25], "quack": [0.75, float("nan")]})
    half = pd.DataFrame({"torch": [0.125, 1.0], "quack": [0.5, float("nan")]})
    assert training.ranges({SINGLE: single, HALF: half}) == [
        ["torch", "0.25 to 0.50", "0.12 to 1.00", "2 of 2"],
        ["quack", "0.75 to 0.75", "0.50 to 0.50", "1 of 2"],
    ]
