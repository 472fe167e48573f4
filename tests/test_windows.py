"""Rows of a wider matrix through shared memory: right wherever a row starts."""

import dataclasses
import functools

import pytest
import torch

from kernels import fastest, online, staged, unaligned, windows
from kernels.lab import backend, compile, gpu, launch, meter, shared
from kernels.lab.launch import ceil_div
from tests.helpers import TRITON, assert_right, fewer, matrix, meta_matrix
from tests.shared_memory import stand_in

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 3, 8, 15, 63, 64, 65, 130, 300)  # the last one in two blocks
N_ROWS = fewer(3, 5)
SMALL_PARTS = windows.Config(32, 0, 32, 32, 1, 1)  # 64 columns each
SMALL_SPLIT = windows.Config(64, 32, 32, 32, 1, 1)  # 192 columns each
# The gap between two rows of the input, and where its first row starts.
PLACES = ((0, 0), (1, 0), (2, 3), (5, 7), (8, 1))


@pytest.fixture
def memory(monkeypatch):
    return stand_in(monkeypatch, staged, windows)


def softmax(x, config=None):
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    windows.launch_for(output, x, config)(output, x)
    return output


def assert_all_right(dtype=torch.bfloat16, lengths=LENGTHS, config=None) -> None:
    """From every place to two places; beside the input's rows is NaN."""
    for n_cols in lengths:
        for gap, offset in PLACES:
            x = matrix(N_ROWS, n_cols, dtype, stride=n_cols + gap, offset=offset)
            room = torch.full((N_ROWS, n_cols + 3), 7, dtype=dtype, device=x.device)
            for first in (0, 3):
                room.fill_(7)
                output = room[:, first : first + n_cols]
                windows.launch_for(output, x, config)(output, x)
                assert_right(output, x)
                beside = torch.cat([room[:, :first], room[:, first + n_cols :]], 1)
                assert (beside == 7).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_from_every_place_to_every_place(dtype):
    assert_all_right(dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_parts_from_every_place_to_every_place(dtype):
    few = (130,) if dtype == torch.float16 else (1, 65, 300)
    assert_all_right(dtype, fewer(few, LENGTHS), config=SMALL_PARTS)
    few = (300,) if dtype == torch.float16 else (191, 300)
    assert_all_right(dtype, fewer(few, (191, 192, 300)), config=SMALL_SPLIT)


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_by_shared_memory(memory, dtype):
    few = (2, 65, 300) if dtype == torch.float16 else LENGTHS
    assert_all_right(dtype, fewer(few, LENGTHS))


def test_parts_by_shared_memory(memory):
    assert_all_right(lengths=(64, 130), config=SMALL_PARTS)
    assert_all_right(lengths=(300,), config=SMALL_SPLIT)


def assert_special_rows_right(dtype, config):
    x = matrix(6, 130, dtype, stride=133)
    x[0] = -float("inf")
    x[1, :100] = -float("inf")  # a part has no finite value
    x[2, 7] = float("inf")
    x[3, 129] = float("nan")
    x[4] = torch.finfo(dtype).max / 2
    assert_right(softmax(x, config), x)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("config", [None, SMALL_PARTS])
def test_rows_of_minus_infinity_and_others(dtype, config):
    assert_special_rows_right(dtype, config)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("config", [None, SMALL_PARTS])
def test_rows_of_minus_infinity_by_shared_memory(memory, dtype, config):
    assert_special_rows_right(dtype, config)


def test_a_neighbour_that_is_not_blanked_is_caught(memory, monkeypatch):
    monkeypatch.setattr(windows, "store_values", lambda *args: None)
    with pytest.raises(AssertionError):
        assert_all_right(lengths=[65])


def test_a_window_at_another_place_is_caught(memory, monkeypatch):
    def load(address, inside, BITS):
        return memory.load(address - address % 8, inside, BITS)

    monkeypatch.setattr(shared, "load", load)
    with pytest.raises(AssertionError):
        assert_all_right(lengths=[65])


@pytest.mark.gpu
def test_long_rows_are_right_and_the_same_in_every_run():
    for n_cols in (12345, 50257):
        x = matrix(300, n_cols, torch.bfloat16, stride=n_cols + 47)
        y = softmax(x)
        assert_right(y, x)
        impatient = dataclasses.replace(windows.choose_config(n_cols), patience=1)
        assert all(softmax(x, impatient).equal(y) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [781, 1000, 2049, 4097, 8191, 16_383])
def test_many_rows(n_cols):
    x = matrix(3000, n_cols, torch.float16, stride=n_cols + 19)
    assert_right(softmax(x), x)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [1001, 50257])
def test_more_than_2_to_31_values(n_cols):
    n_rows, width = 2**31 // n_cols + 5, n_cols + 7
    needed = 2 * n_rows * (n_cols + width)
    if gpu.free_bytes() < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")
    like = {"dtype": torch.bfloat16, "device": backend.DEVICE}
    x = torch.empty(n_rows, width, **like).normal_()[:, :n_cols]
    y = fastest.softmax(x)
    for rows in (slice(0, 2), slice(n_rows // 2, n_rows // 2 + 2), slice(-3, None)):
        assert_right(y[rows], x[rows])


@pytest.mark.parametrize("n_cols", [781, 1000, 4097, 50257])
def test_what_the_compiler_makes(n_cols):
    """Rows are read by 16 bytes and written by words, and threads hardly spill."""
    y = meta_matrix(4096, n_cols, torch.bfloat16)
    x = meta_matrix(4096, n_cols, torch.bfloat16, stride=n_cols + 47)
    prepared = windows.launch_for(y, x)
    made = compile.aot(prepared)
    assert made.spills <= (16 if TRITON < (3, 9) else 96)  # of parts; others have none
    assert made.spills == 0 or prepared.n_words
    assert made.registers <= 96
    assert made.count(r"ld\.global\S*\.v2\.b64") > 0
    assert (
        made.count(r"st\.global\S*\.b32")
        >= prepared.constants["WORDS"] // (prepared.constants["THREADS"])
    )


def test_nothing_beside_the_rows_is_read(memory):
    """Not even within the chunk of 16 bytes in which a row begins or ends."""
    for gap, offset in PLACES:
        for n_cols in (63, 130, 300):
            x = matrix(3, n_cols, torch.bfloat16, stride=n_cols + gap, offset=offset)
            moved = meter.count(softmax, x)
            # A row's first and last chunk may be read twice; nothing is written twice.
            n_bytes = x.numel() * x.element_size()
            assert n_bytes <= moved.read_bytes <= n_bytes + 3 * 32
            assert moved.written_values == x.numel()
            meter.count(functools.partial(softmax, config=SMALL_PARTS), x)


def test_a_read_beyond_the_last_row_is_caught(memory, monkeypatch):
    load_chunks = windows.load_chunks

    def unmasked(tile, FIRST, COUNT, masked):
        return load_chunks(tile, FIRST, COUNT, masked & False)

    monkeypatch.setattr(windows, "load_chunks", unmasked)
    x = matrix(5, 63, torch.bfloat16)
    with pytest.raises(meter.OutOfBounds):
        meter.count(softmax, x)


def test_what_is_not_of_16_bits_is_for_other_chapters():
    for dtype, n_cols in ((torch.float32, 33), (torch.float32, 40_000)):
        y, x = (
            meta_matrix(3, n_cols, dtype),
            meta_matrix(3, n_cols, dtype, stride=50_001),
        )
        other = unaligned if n_cols <= unaligned.MAX_COLS else online
        assert windows.launch_for(y, x) == other.launch_for(y, x)
    half = meta_matrix(3, 33, torch.bfloat16)
    wider = meta_matrix(3, 33, torch.float32)
    assert windows.launch_for(wider, half).kernel is not windows.softmax_kernel


@pytest.mark.parametrize("n_cols", [1, 700, 781, 2049, 6001, 8193, 11_001, 16_384])
def test_two_blocks_hold_a_row_wherever_it_starts(n_cols):
    config = windows.choose_config(n_cols)
    assert config.block_parts == 1
    n_words = n_cols // 2 + 1  # one of them half, or two
    assert config.words + config.rest >= n_words
    assert config.words % config.threads == config.rest % config.threads == 0
    assert config.threads == 32 * config.num_warps


def test_a_small_gpu_runs_the_parts_of_three_rows_at_once(monkeypatch):
    """So `fastest` need not ask whether they are resident."""
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (14, 1024))
    config = windows.choose_config(fastest.WINDOWS[-1])
    n_words = fastest.WINDOWS[-1] // 2 + 1
    n_parts = ceil_div(n_words, config.words + config.rest)
    at_once = launch.programs_at_once(config.num_warps, config.maxnreg)
    assert 3 * n_parts <= at_once


def test_the_rule_and_the_chapter_agree_on_the_longest_row():
    assert fastest.WINDOWS.stop == windows.MAX_COLS + 1
