"""Kernels whose programs share a row count the replays of a call that a graph holds."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from kernels import cooperative, gradient, windows
from kernels.lab import backend, compile
from tests.helpers import assert_is_gradient, assert_right, matrix


def rows(seed: int) -> tuple[torch.Tensor]:
    return (matrix(2, 40_001, seed=seed),)


def slices(seed: int) -> tuple[torch.Tensor]:
    return (matrix(2, 20_001, torch.bfloat16, stride=20_004, offset=1, seed=seed),)


def pairs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, g = matrix(2, 40_001, seed=seed), matrix(2, 40_001, seed=seed + 1)
    return g, torch.softmax(x, 1)


OPS = r"\bld\.global", r"\bst\.global"
KINDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "cooperative": (cooperative.launch_for, rows, assert_right),
    "windows": (windows.launch_for, slices, assert_right),
    "gradient": (gradient.launch_for, pairs, assert_is_gradient),
}


def replay(kind: str, tag: int | None, times: int) -> torch.Tensor:
    """Launches on new values with the same words and tag; returns the words."""
    make, inputs, check = KINDS[kind]
    words = None
    for seed in range(times):
        tensors = inputs(seed)
        output = torch.empty_like(tensors[-1], memory_format=torch.contiguous_format)
        launch = make(output, *tensors)
        if words is None:
            words = torch.zeros(launch.n_words, dtype=torch.int64).to(backend.DEVICE)
        run = launch.kernel[launch.grid]
        run(output, *tensors, words, tag, *launch.scalars, **launch.constants)
        check(output, *tensors)
    return words[-math.prod(launch.grid) :]


@pytest.mark.parametrize("kind", KINDS)
def test_replays_find_no_words_of_earlier_ones(kind):
    counts = replay(kind, None, times=4)
    assert counts.tolist() == [4] * len(counts)


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", ["T4", "H200", "B200"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_replay_counts(kind, gpu):
    """Both kernels compile ahead of time; that of other calls loads and stores less."""
    make, inputs, _ = KINDS[kind]
    tensors = inputs(0)
    launch = make(torch.empty_like(tensors[-1]), *tensors)
    made = {
        tag: compile.aot(
            launch.kernel,
            *launch.pointers,
            compile.pointer(torch.int64),
            tag,
            *launch.scalars,
            gpu=gpu,
            **launch.constants,
        )
        for tag in (1, None)
    }
    for op in OPS:
        assert made[None].count(op) > made[1].count(op), op


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_tag_they_would(kind):
    with pytest.raises(AssertionError):
        replay(kind, 1, times=100)  # on a GPU, not every time


CAPTURE = """
import sys

import torch

from kernels import softmax
from kernels.gradient import softmax_backward

is_known = sys.argv[1] == "known"
modes = zip(("global", "thread_local", "relaxed"), ("float32", "float16", "bfloat16"))
for mode, dtype in modes:  # each dtype has kernels of its own
    x = torch.randn(4, 50_257, device="cuda", dtype=getattr(torch, dtype))
    g = torch.rand_like(x)
    if is_known:
        softmax_backward(g, softmax(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = softmax(x)
        dx = softmax_backward(g, y)
    for _ in range(3):
        x.normal_()
        graph.replay()
        right = torch.softmax(x.double(), 1)
        torch.testing.assert_close(y.double(), right, rtol=1e-2, atol=1e-6)
        inner = (g.double() * right).sum(1, keepdim=True)
        right = right * (g.double() - inner)
        torch.testing.assert_close(dx.double(), right, rtol=2e-2, atol=1e-6)
print("right")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["known", "new"])
def test_a_kernel_is_loaded_while_a_graph_is_captured(form):
    """In a process that has loaded none."""
    command = [sys.executable, "-c", CAPTURE, form]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=backend.ROOT)
    assert ran.stdout == "right\n", ran.stderr
