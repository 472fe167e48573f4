"""The pieces of a call on the host: each does what a table says of it."""

import pytest
import torch

from benchmarks import host


def test_every_call_gives_the_softmax_or_its_gradient_or_is_a_piece():
    results = {name: call() for name, call in host.calls().items()}
    whole = results["torch.softmax"]
    for name, result in results.items():
        if "softmax" in name and "and its gradient" not in name:
            torch.testing.assert_close(result.detach(), whole)
    (ours,) = results["kernels.softmax and its gradient"]
    (theirs,) = results["torch.softmax and its gradient"]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_few_kernels_serve_many_lengths():
    ours, every = host.kernels_for(970)
    assert ours <= 24 < every


def test_without_a_gpu_nothing_is_timed(monkeypatch):
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    with pytest.raises(RuntimeError, match="nothing can be timed"):
        host.pieces()


@pytest.mark.gpu
def test_pieces_are_timed():
    rows = host.pieces()
    assert [row["call"] for row in rows] == [
        *host.calls(),
        "kernels.softmax, a new length",
    ]
    assert all(0 < row["us"] < 2000 for row in rows)
