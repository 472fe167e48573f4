"""Calls at the same time, in streams and threads: none harms another, none is stuck."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels import cooperative, gradient
from kernels.lab import backend, gpu, process
from kernels.lab import launch as launch_module
from kernels.lab.direct import CachedLaunch
from tests.helpers import assert_is_gradient, assert_right, in_company, like, matrix
from tests.test_cooperative import LONGEST, config_for, parts_of

MINUTE = 60.0


@pytest.mark.gpu
def test_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(8)]
    shapes = [(3, 70_001), (40, 2**17), (1, 2**20), (200, 50_257)]
    inputs = [matrix(*shape, seed=i) for i, shape in enumerate(2 * shapes)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(cooperative.softmax(x))
    torch.cuda.synchronize()
    for y, x in zip(outputs, itertools.cycle(inputs), strict=False):
        assert_right(y, x)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_values():
    for shape in ((3, 2**18), (300, 50_257)):
        x = matrix(*shape)
        cooperative.softmax(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, z = cooperative.softmax(x), cooperative.softmax(x.neg())
        for seed in range(5):
            x.copy_(matrix(*shape, seed=seed))
            y.fill_(7)
            graph.replay()
            cooperative.softmax(x)  # on the same stream, with words of its own
            assert_right(y, x)
            assert_right(z, x.neg())


@triton.jit
def hold_kernel(end_ptr, duration):
    """One program stays on its SM for so many nanoseconds."""
    begin = cuda.globaltimer()
    now = begin
    while now - begin < duration:
        now = cuda.globaltimer()
    tl.store(end_ptr + tl.program_id(0), now)


def beside_a_kernel_that_holds_the_gpu(n_calls: int) -> bool:
    """Calls on streams of their own, begun while half an SM is free: all end."""
    shape, hold_s = (4, 2**17), 3.0
    n_held = 2 * gpu.current().sms - 1  # two of 32 warps fill an SM
    ends = torch.zeros(n_held, dtype=torch.int64, device=backend.DEVICE)
    inputs = [matrix(*shape, seed=seed) for seed in range(n_calls)]
    holder, *streams = (torch.cuda.Stream() for _ in range(1 + n_calls))

    def call_all() -> list[torch.Tensor]:
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(cooperative.softmax(x))
        for stream in streams:
            stream.synchronize()
        return results

    def hold(seconds: float) -> None:
        with torch.cuda.stream(holder):
            how = {"num_warps": 32, "maxnreg": 32}
            hold_kernel[(n_held,)](ends, int(1e9 * seconds), **how)

    hold(1e-3)
    call_all()  # compiles, and leaves memory to be used again
    torch.cuda.synchronize()
    hold(hold_s)
    time.sleep(0.1)
    assert not holder.query()  # still holding
    outputs = call_all()
    torch.cuda.synchronize()
    for y, x in zip(outputs, inputs, strict=True):
        assert_right(y, x)
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("n_calls", [2, 4])
def test_calls_end_beside_a_kernel_that_holds_the_gpu(n_calls):
    x = matrix(4, 2**17)
    n_parts = cooperative.launch_for(like(x), x).scalars[-1]
    assert n_parts > 16  # more than run on half an SM
    helper = process.Helper("compiler", hide_gpu=False)
    try:
        call = beside_a_kernel_that_holds_the_gpu, (n_calls,)
        assert helper.call(*call, limit_s=MINUTE)
    finally:
        helper.stop()


@pytest.mark.gpu
def test_more_than_2_to_31_values():
    n_rows, n_cols = 2**11 + 3, 2**20
    if gpu.free_bytes() < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    x = torch.zeros(n_rows, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
    x[-1].normal_()
    y = cooperative.softmax(x)
    assert (y[:-1] == 2.0**-20).all()
    assert_right(y[-1:], x[-1:])


@pytest.mark.gpu
def test_a_row_with_more_parts_than_can_be_resident_ends():
    x = matrix(1, LONGEST)
    config = config_for(x, x, 1024, num_warps=4)
    here = gpu.current()
    n_parts = parts_of(LONGEST, config)
    assert n_parts > here.sms * here.threads_per_sm // (4 * here.warp_size)
    y = torch.empty_like(x)
    cooperative.launch_for(y, x, config)(y, x)
    assert_right(y, x)


def microseconds(function: Callable[[], None]) -> float:
    """The least of five times of a function that starts and ends on the GPU."""
    function()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def in_turn_and_at_once(launches: list[Callable[[], None]]) -> tuple[float, float]:
    """The time of two launches on one stream, and on two; µs."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def on(*used: torch.cuda.Stream) -> None:
        for stream, launch in zip(used, launches, strict=True):
            with torch.cuda.stream(stream):
                launch()

    in_turn = microseconds(lambda: on(streams[0], streams[0]))
    return in_turn, microseconds(lambda: on(*streams))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("share", "changes"),
    [
        (0.6, {}),  # nearly as long as `kernels.softmax` has it take
        (0.9, {"block_cols": 8192, "block_parts": 1024, "num_warps": 4}),
    ],
)
@in_company
def test_two_streams_whose_rows_do_not_fit_together(share, changes):
    """They end within twice the time of one after the other."""
    n_held = launch_module.programs_at_once(num_warps=4, maxnreg=80)
    n_cols = int(share * n_held) * 8192
    x = torch.randn(16, n_cols, device=backend.DEVICE)
    outputs = torch.empty_like(x), torch.empty_like(x)
    config = cooperative.choose_config(16, n_cols, 4, 4, True)
    config = dataclasses.replace(config, **changes)
    launches = [
        functools.partial(CachedLaunch(cooperative.launch_for(y, x, config)), y, x)
        for y in outputs
    ]
    in_turn, at_once = in_turn_and_at_once(launches)
    assert at_once < 2 * in_turn
    for y in outputs:
        assert_right(y, x)


@pytest.mark.gpu
@in_company
def test_two_streams_whose_gradients_do_not_fit_together():
    """The longest rows of which `gradient` takes all parts in one launch."""
    part_bytes, *options = gradient.LONG_PARTS
    n_parts = int(launch_module.programs_at_once(*options) / 1.5)
    n_cols = n_parts * part_bytes // 4
    y = torch.softmax(torch.randn(16, n_cols, device=backend.DEVICE), 1)
    g = torch.randn_like(y)
    outputs = torch.empty_like(y), torch.empty_like(y)
    assert gradient.steps_for(outputs[0], g, y) is None
    launches = [
        functools.partial(CachedLaunch(gradient.launch_for(x, g, y)), x, g, y)
        for x in outputs
    ]
    in_turn, at_once = in_turn_and_at_once(launches)
    assert at_once < 2 * in_turn
    for x in outputs:
        assert_is_gradient(x, g, y)
