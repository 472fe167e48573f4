"""A stand-in for shared memory in the interpreter, which has none."""

from types import ModuleType

import numpy as np
import pytest
import triton.language as tl

from kernels.lab import backend, shared


class SharedMemory:
    """The shared memory of one program at a time, for the interpreter.

    Every address must lie in what the program has reserved, and fit its access.
    `patches` puts its methods in the place of the functions of `shared`.
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

    def patches(self, monkeypatch) -> None:
        for name in ("reserve", "load", "store", "load_chunk", "store_chunk"):
            monkeypatch.setattr(shared, name, getattr(self, name))
        monkeypatch.setattr(tl, "debug_barrier", lambda: None)


def stand_in(monkeypatch, *modules: ModuleType) -> SharedMemory:
    """A stand-in with which the modules' kernels take the way of a GPU."""
    if not backend.INTERPRETED:
        pytest.skip("the interpreter's shared memory is a stand-in")
    memory = SharedMemory()
    memory.patches(monkeypatch)
    for module in modules:
        monkeypatch.setattr(module, "INTERPRETED", False)
    return memory
