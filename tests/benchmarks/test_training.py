"""A training step's softmax: every provider gets the same pair, and must be right."""

import pandas as pd
import pytest
import torch
import triton
import triton.language as tl

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
    assert list(found) == [
        *("stream", "gradient", "torch", "torch.compile", "liger", "quack")
    ]
    assert torch.equal(found["stream"](both), both[0] + both[1])
    for name in ("gradient", "torch"):
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


@triton.jit
def row_kernel(x_ptr, g_ptr, y_ptr, n_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    place, inside = tl.program_id(0) * n_cols + cols, cols < n_cols
    g = tl.load(g_ptr + place, mask=inside, other=0.0)
    y = tl.load(y_ptr + place, mask=inside, other=0.0)
    tl.store(x_ptr + place, y * (g - tl.sum(g * y, axis=0)), mask=inside)


def test_a_readers_kernel_has_a_program_for_each_row(capsys):
    training.judge(training.by_rows(row_kernel))
    assert capsys.readouterr().out.startswith("Right")


def test_the_judge_says_what_is_wrong(capsys):
    def right(g, y):
        return y * (g - (g * y).sum(1, keepdim=True))

    training.judge(right)
    assert "every value of 4 matrices" in capsys.readouterr().out
    wrongs = {
        "in row 0 of a 1 × 1 matrix, column 0": lambda g, y: g * y,
        "is nan": lambda g, y: right(g, y) * float("nan"),
        "this is no such matrix": lambda g, y: right(g, y)[0],
        "of a 4 × 64 matrix": lambda g, y: right(g, y) + (y.shape[1] > 60),
    }
    for words, wrong in wrongs.items():
        training.judge(wrong)
        assert words in capsys.readouterr().out


def test_shares_are_of_the_stream():
    rows = [("copy", 64, 1.0), ("stream", 64, 2.0), ("torch", 64, 4.0)]
    rows += [("copy", 65, 1.0), ("stream", 65, 3.0), ("torch", 65, 3.0)]
    df = pd.DataFrame(rows, columns=["provider", "n_cols", "p50_us"])
    df["dtype"] = "float32"
    shares = training.shares(df, SINGLE)
    assert list(shares) == ["torch"]
    assert shares["torch"].to_dict() == {64: 0.5, 65: 1.0}
