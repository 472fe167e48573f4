"""A block runs as in CUDA, and each of its faults is told."""

import math

import pytest

from kernels.lab import block


def reduced(thread, value, shared, twice=False, barriers=(True, True), lanes=32):
    """A maximum as in block_reduce.cuh, then a second one by the same places."""
    lane, warp, warps = thread % 32, thread // 32, 4
    for turn in range(1 + twice):
        for distance in (16, 8, 4, 2, 1):
            value = max(value, (yield block.Shuffle(value, distance)))
        if turn and barriers[1]:
            yield block.BARRIER
        if lane == 0:
            shared[warp] = value
        if barriers[0] and lane < lanes:
            yield block.BARRIER
        value = shared[lane] if lane < warps else -math.inf
        for distance in (16, 8, 4, 2, 1):
            value = max(value, (yield block.Shuffle(value, distance)))
    return value


@pytest.mark.parametrize("twice", [False, True])
def test_a_block_runs_to_the_result_of_the_reduction(twice):
    values = [(37 * i) % 128 for i in range(128)]
    assert block.run_block(reduced, values, twice) == [127] * 128


@pytest.mark.parametrize(
    "count, arguments, words",
    [
        (128, (False, (False, True)), r"warp 0 reads shared\[1\], which no warp has"),
        (128, (True, (True, False)), r"warp 1 reads shared\[0\], which warp 0 writes"),
        (
            128,
            (False, (True, True), 9),
            "lane 0 .* at a barrier, and lane 9 .* shuffle",
        ),
        (112, (), "lane 15 of warp 3 shuffles with lane 31, .* 16"),
    ],
)
def test_a_block_with_a_fault_is_told(count, arguments, words):
    with pytest.raises(RuntimeError, match=words):
        block.run_block(reduced, range(count), *arguments)


def test_two_warps_that_write_a_place_are_told_in_either_case():
    def last(thread, value, shared, reader):
        if thread == reader:
            value = shared["x"]
        shared["x"] = value
        yield block.BARRIER

    with pytest.raises(RuntimeError, match=r"warp 1 writes .* warp 0 writes"):
        block.run_block(last, [1, 2], None, warp_size=1)
    with pytest.raises(RuntimeError, match=r"warp 1 reads .* warp 0 writes"):
        block.run_block(last, [1, 2], 1, warp_size=1)


def test_a_write_after_another_warps_read_is_told():
    def one_reads(thread, value, shared):
        shared[thread] = value
        yield block.BARRIER
        if thread == 0:
            value = shared[1]
        else:
            shared[1] = value

    with pytest.raises(RuntimeError, match=r"warp 1 writes .* warp 0 reads"):
        block.run_block(one_reads, [1, 2], warp_size=1)


def test_a_thread_that_yields_anything_else_is_told():
    def forgets(thread, value, shared):
        yield value

    with pytest.raises(TypeError, match="must yield a Shuffle or BARRIER, got 7"):
        block.run_block(forgets, [7, 8])
