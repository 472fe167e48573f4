"""Rows that pass through shared memory: right, and with no access outside of it."""

import numpy as np
import pytest
import torch
import triton.language as tl

from benchmarks import edges, staging
from kernels import unaligned
from kernels.lab import backend, compile, meter
from tests.helpers import assert_right, matrix, meta_matrix

LENGTHS = (2, 3, 4, 5, 7, 8, 15, 31, 32, 33, 47, 62, 63, 64)
HALVES = (torch.float16, torch.bfloat16)


class SharedMemory:
    """The shared memory of one program at a time, for the interpreter.

    Every address must lie in what the program has reserved, and fit its access.
    """

    def reserve(self, BYTES):
        self.held = np.full(int(BYTES), 0x7F, np.uint8)
        return tl.program_id(0) * 0

    def places(self, address: np.ndarray, size: int) -> np.ndarray:
        first = address.astype(np.int64)
        assert (first >= 0).all() and (first + size <= len(self.held)).all(), first
        assert (first % size == 0).all(), first
        return first[..., None] + np.arange(size)

    def load(self, address, inside, BITS):
        result = (address + inside.to(tl.int32) * 0).to(
            {16: tl.int16, 32: tl.int32, 64: tl.int64}[int(BITS)]
        )
        shape, size = result.handle.data.shape, int(BITS) // 8
        parts = (part.handle.data for part in (address, inside))
        addresses, where = (np.broadcast_to(part, shape) for part in parts)
        where = where.astype(bool)
        raw = np.ascontiguousarray(self.held[self.places(addresses[where], size)])
        result.handle.data = np.zeros(shape, f"int{8 * size}")
        result.handle.data[where] = raw.view(f"int{8 * size}")[..., 0]
        return result

    def store(self, address, bits, inside):
        parts = (part.handle.data for part in (address, bits, inside))
        addresses, values, where = np.broadcast_arrays(*parts)
        where = where.astype(bool)
        values = np.ascontiguousarray(values[where])
        raw = values.view(np.uint8).reshape(-1, values.dtype.itemsize)
        self.held[self.places(addresses[where], values.dtype.itemsize)] = raw

    def load_chunk(self, address):
        assert not (address.handle.data % 16).any()
        every = address >= 0
        return self.load(address, every, 64), self.load(address + 8, every, 64)

    def store_chunk(self, address, one, two):
        assert not (address.handle.data % 16).any()
        self.store(address, one, address >= 0)
        self.store(address + 8, two, address >= 0)


@pytest.fixture
def shared(monkeypatch):
    """PTX is not interpreted: a stand-in takes the five helpers' place."""
    if not backend.INTERPRETED:
        pytest.skip("the interpreter's shared memory is a stand-in")
    memory = SharedMemory()
    for name, instead in {
        "reserve": memory.reserve,
        "load_shared": memory.load,
        "store_shared": memory.store,
        "load_chunk": memory.load_chunk,
        "store_chunk": memory.store_chunk,
        "INTERPRETED": False,
    }.items():
        monkeypatch.setattr(staging, name, instead)
    monkeypatch.setattr(tl, "debug_barrier", lambda: None)
    return memory


def assert_all_right(dtypes=HALVES, lengths=LENGTHS) -> None:
    """Also of a last tile of any height."""
    for dtype in dtypes:
        for n_cols in lengths:
            tile = staging.choose_config(n_cols).rows
            for n_rows in (1, 3, tile + 1):
                x = matrix(n_rows, n_cols, dtype).contiguous()
                assert_right(staging.softmax(x), x)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_length(dtype):
    assert_all_right([dtype])


def test_every_length_by_shared_memory(shared):
    assert_all_right([torch.bfloat16])


def test_float16_by_shared_memory(shared):
    assert_all_right([torch.float16], [7, 33])


def test_no_rows():
    x = torch.empty(0, 7, dtype=torch.float16, device=backend.DEVICE)
    assert staging.softmax(x).shape == (0, 7)


@pytest.mark.parametrize("n_cols", [7, 36, 63])
def test_values_are_read_and_written_once(n_cols):
    x = matrix(130, n_cols, torch.bfloat16).contiguous()
    assert meter.count(staging.softmax, x).values == meter.fused(130, n_cols)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", LENGTHS)
def test_nothing_is_written_beyond_the_output(n_cols):
    for n_rows in (1, 3, 1001):
        x = matrix(n_rows, n_cols, torch.bfloat16).contiguous()
        room = torch.full((x.numel() + 512,), 7, dtype=x.dtype, device=x.device)
        output = room[: x.numel()].view(x.shape)
        staging.launch_for(output, x)(output, x)
        assert_right(output, x)
        assert (room[x.numel() :] == 7).all()


def test_a_store_beyond_a_row_is_caught(shared, monkeypatch):
    """Words that a row lacks are written, too: they are the next row's."""

    def everywhere(address, bits, inside):
        shared.store(address, bits, inside | (inside == 0))

    monkeypatch.setattr(staging, "store_shared", everywhere)
    with pytest.raises(AssertionError):
        assert_all_right([torch.bfloat16], [7])


def test_an_address_beyond_what_is_reserved_is_caught(shared, monkeypatch):
    def late(address, inside, BITS):
        return shared.load(address + 8192, inside, BITS)

    monkeypatch.setattr(staging, "load_shared", late)
    with pytest.raises(Exception, match="array"):  # the addresses
        assert_all_right([torch.bfloat16], [7])


def test_a_last_value_that_is_not_copied_is_caught(shared, monkeypatch):
    def none(tile, THREADS):
        place = tl.arange(0, THREADS)
        return place, place < 0

    monkeypatch.setattr(staging, "find_last", none)
    with pytest.raises(AssertionError):
        assert_all_right([torch.bfloat16], [7])


def instructions(launch, n_cols: int) -> float:
    """Of all threads, for each value."""
    made = compile.aot(launch)
    assert made.spills == 0
    threads = 32 * launch.constants["num_warps"]
    count = threads * made.count(r"^    (?!NOP)", "sass")
    return count / (launch.constants["ROWS"] * n_cols)


@pytest.mark.parametrize("n_cols", [15, 33, 63])
def test_instructions_fit_the_time_of_the_copy(n_cols):
    x = meta_matrix(4096, n_cols, torch.bfloat16)
    staged = instructions(staging.launch_for(x, x), n_cols)
    assert staged < 0.8 * edges.budget(x.element_size())
    assert staged < instructions(unaligned.launch_for(x, x), n_cols)


@pytest.mark.parametrize("n_cols", [7, 31, 33, 63])
def test_the_threads_of_a_row_exchange_nothing(n_cols):
    """One barrier for the tile's last values, one before rows, and one after them."""
    x = meta_matrix(4096, n_cols, torch.bfloat16)
    made = compile.aot(staging.launch_for(x, x))
    assert made.count(r"shfl\.") == 0
    assert made.count(r"bar\.sync") == 3


def test_matrices_that_are_refused():
    on = {"device": backend.DEVICE, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match="contiguous"):
        staging.softmax(torch.ones(4, 16, **on)[:, :7])
    with pytest.raises(ValueError, match="an address that 16 divides"):
        staging.softmax(torch.ones(29, **on)[1:].view(4, 7))
    with pytest.raises(ValueError, match="65"):
        staging.softmax(torch.ones(4, 65, **on))
    for x in (torch.ones(4, 1, **on), torch.ones(4, 7, device=backend.DEVICE)):
        with pytest.raises(ValueError, match="of 16 bits, got"):
            staging.softmax(x)
