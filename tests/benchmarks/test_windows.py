"""Rows of a wider matrix through shared memory: right wherever a row starts."""

import dataclasses
import functools

import pytest
import torch

from benchmarks import windows
from kernels import staged
from kernels.lab import compile, meter, shared
from tests.helpers import assert_right, matrix, meta_matrix
from tests.shared_memory import stand_in

HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 3, 8, 15, 63, 64, 65, 130, 300)  # the last one in two blocks
SMALL_PARTS = windows.PartsConfig(32, 32, 1, 32)  # 64 columns each
# The gap between two rows of the input, and where its first row starts.
PLACES = ((0, 0), (1, 0), (2, 3), (5, 7), (8, 1))


@pytest.fixture
def memory(monkeypatch):
    return stand_in(monkeypatch, staged, windows)


def assert_all_right(dtype=torch.bfloat16, lengths=LENGTHS, config=None) -> None:
    """From every place to two places; beside the input's rows is NaN."""
    for n_cols in lengths:
        for gap, offset in PLACES:
            x = matrix(5, n_cols, dtype, stride=n_cols + gap, offset=offset)
            room = torch.full((5, n_cols + 3), 7, dtype=dtype, device=x.device)
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
    assert_all_right(dtype, config=SMALL_PARTS)


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_by_shared_memory(memory, dtype):
    assert_all_right(dtype)


def test_parts_by_shared_memory(memory):
    assert_all_right(lengths=(3, 64, 130), config=SMALL_PARTS)


@pytest.mark.parametrize("config", [None, SMALL_PARTS])
def test_rows_of_minus_infinity_and_others(config):
    x = matrix(6, 130, torch.bfloat16, stride=133)
    x[0] = -float("inf")
    x[1, :100] = -float("inf")  # a part has no finite value
    x[2, 7] = float("inf")
    x[3, 129] = float("nan")
    x[4] += 3e38
    assert_right(windows.softmax(x, config), x)


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
        y = windows.softmax(x)
        assert_right(y, x)
        impatient = dataclasses.replace(windows.choose_config(n_cols), patience=1)
        assert all(windows.softmax(x, impatient).equal(y) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [781, 1000, 2049, 4097, 8191])
def test_many_rows(n_cols):
    x = matrix(3000, n_cols, torch.float16, stride=n_cols + 19)
    assert_right(windows.softmax(x), x)


@pytest.mark.parametrize("n_cols", [781, 1000, 4097, 50257])
def test_what_the_compiler_makes(n_cols):
    """Rows are read by 16 bytes and written by words, and threads hardly spill."""
    y = meta_matrix(4096, n_cols, torch.bfloat16)
    x = meta_matrix(4096, n_cols, torch.bfloat16, stride=n_cols + 47)
    launch = windows.launch_for(y, x)
    made = compile.aot(launch)
    assert made.spills <= 8  # Triton 3.9: 8 at 80 registers; 3.6 and 3.7: none
    assert made.registers <= 96
    assert made.count(r"ld\.global\S*\.v2\.b64") > 0
    assert (
        made.count(r"st\.global\S*\.b32")
        >= launch.constants["WORDS"] // (launch.constants["THREADS"])
    )


def test_nothing_beside_the_rows_is_read(memory):
    """Not even within the chunk of 16 bytes in which a row begins or ends."""
    for gap, offset in PLACES:
        for n_cols in (63, 130, 200, 300):
            x = matrix(5, n_cols, torch.bfloat16, stride=n_cols + gap, offset=offset)
            moved = meter.count(windows.softmax, x)
            # A row's first and last chunk may be read twice, its ends written twice.
            n_bytes = x.numel() * x.element_size()
            assert n_bytes <= moved.read_bytes <= n_bytes + 5 * 32
            assert x.numel() <= moved.written_values <= x.numel() + 5 * 2
            meter.count(functools.partial(windows.softmax, config=SMALL_PARTS), x)


def test_a_read_beyond_the_last_row_is_caught(memory, monkeypatch):
    load_chunks = windows.load_chunks

    def unmasked(tile, FIRST, COUNT, masked):
        return load_chunks(tile, FIRST, COUNT, masked & False)

    monkeypatch.setattr(windows, "load_chunks", unmasked)
    x = matrix(5, 63, torch.bfloat16)
    with pytest.raises(meter.OutOfBounds):
        meter.count(windows.softmax, x)
