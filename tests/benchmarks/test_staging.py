"""Rows that pass through shared memory: right, and with no access outside of it."""

import numpy as np
import pytest
import torch
import triton.language as tl

from benchmarks import edges, staging
from kernels import unaligned
from kernels.lab import backend, compile
from tests.helpers import TRITON, assert_right, matrix, meta_matrix


class SharedMemory:
    """The shared memory of one program at a time, for the interpreter.

    Every address must lie in what the program has reserved, and fit its access.
    """

    def reserve(self, BYTES):
        self.held = np.full(int(BYTES), 0x7F, np.uint8)
        return tl.program_id(0) * 0

    def places(self, address, inside, size: int) -> np.ndarray:
        address, inside = np.broadcast_arrays(address.handle.data, inside.handle.data)
        first = address[inside.astype(bool)].astype(np.int64)
        assert (first >= 0).all() and (first + size <= len(self.held)).all(), first
        assert (first % size == 0).all(), first
        return first[:, None] + np.arange(size)

    def store(self, address, value, inside):
        values, where = np.broadcast_arrays(value.handle.data, inside.handle.data)
        values = np.ascontiguousarray(values[where.astype(bool)])
        size = values.dtype.itemsize
        raw = values.view(np.uint8).reshape(-1, size)
        self.held[self.places(address, inside, size)] = raw

    def load(self, address, inside, BITS):
        whole = address + inside.to(tl.int32) * 0  # the shape of both
        result = whole.to({16: tl.int16, 32: tl.int32, 64: tl.int64}[int(BITS)])
        kind = np.dtype(f"int{int(BITS)}")
        data = np.zeros(result.handle.data.shape, kind)
        raw = self.held[self.places(address, inside, kind.itemsize)]
        where = np.broadcast_to(inside.handle.data, data.shape).astype(bool)
        data[where] = np.ascontiguousarray(raw).view(kind).reshape(-1)
        result.handle.data = data
        return result


@pytest.fixture
def shared(monkeypatch):
    """PTX is not interpreted: a stand-in takes the three helpers' place."""
    if not backend.INTERPRETED:
        pytest.skip("the interpreter's shared memory is a stand-in")
    memory = SharedMemory()
    for name, instead in {
        "shared_buffer": memory.reserve,
        "store_shared": memory.store,
        "load_shared": memory.load,
    }.items():
        monkeypatch.setattr(staging, name, instead)
    monkeypatch.setattr(tl, "debug_barrier", lambda: None)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [1, 2, 3, 7, 8, 15, 31, 32, 33, 47, 63, 64])
def test_every_length_and_a_last_tile_of_any_height(shared, dtype, n_cols):
    if n_cols * dtype.itemsize > staging.MAX_BYTES:
        pytest.skip("a row is longer than a thread holds")
    for n_rows, num_warps in ((1, 2), (3, 1), (129, 4)):
        x = matrix(n_rows, n_cols, dtype).contiguous()
        assert_right(staging.softmax(x, num_warps), x)


def test_no_rows(shared):
    assert staging.softmax(torch.empty(0, 7)).shape == (0, 7)


def everywhere(store):
    """Columns that a row lacks are written, too: they are the next row's."""
    return lambda address, value, inside: store(address, value, inside | (inside == 0))


def test_a_store_beyond_a_row_is_caught(shared, monkeypatch):
    monkeypatch.setattr(staging, "store_shared", everywhere(shared.store))
    x = matrix(129, 7)
    with pytest.raises(AssertionError):
        assert_right(staging.softmax(x), x)


def test_an_address_beyond_what_is_reserved_is_caught(shared, monkeypatch):
    def late(address, inside, BITS):
        return shared.load(address + 1024, inside, BITS)

    monkeypatch.setattr(staging, "load_shared", late)
    with pytest.raises(Exception, match="array"):  # the addresses
        staging.softmax(matrix(128, 7))


def instructions(launch, n_cols: int) -> float:
    """Of all threads, for each value."""
    made = compile.aot(launch)
    assert made.spills == 0
    threads = 32 * launch.constants["num_warps"]
    count = threads * made.count(r"^    (?!NOP)", "sass")
    return count / (launch.constants["ROWS"] * n_cols)


@pytest.mark.parametrize("n_cols", [33, 63])
def test_instructions_fit_the_time_of_the_copy(n_cols):
    x = meta_matrix(4096, n_cols, torch.bfloat16)
    staged = instructions(staging.launch_for(x, x), n_cols)
    assert staged < 0.75 * edges.budget(x.element_size())
    assert staged < instructions(unaligned.launch_for(x, x), n_cols)


@pytest.mark.skipif(TRITON != (3, 7), reason="says what Triton 3.7 makes of it")
def test_the_threads_of_a_row_exchange_nothing():
    x = meta_matrix(4096, 33, torch.bfloat16)
    made = compile.aot(staging.launch_for(x, x))
    assert made.count(r"shfl\.") == 0
    assert made.count(r"bar\.sync") == 2  # after loading, and before storing


def test_matrices_that_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        staging.softmax(torch.ones(4, 16, device=backend.DEVICE)[:, :7])
    with pytest.raises(ValueError, match="an address that 16 divides"):
        staging.softmax(torch.ones(29, device=backend.DEVICE)[1:].view(4, 7))


def test_rows_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="33"):
        staging.softmax(torch.ones(4, 33, device=backend.DEVICE))


def test_cases_are_256_mib():
    for case in staging.cases():
        row = case.n_cols * case.dtype.itemsize
        assert row <= staging.MAX_BYTES
        assert 2**28 - row < case.n_rows * row <= 2**28
