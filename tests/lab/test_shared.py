"""Shared memory at addresses: the PTX of each function, and values that come back."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import backend, compile, shared
from tests.shared_memory import SharedMemory

THREADS = 128


@triton.jit
def reverse_kernel(y_ptr, x_ptr, COUNT: tl.constexpr):
    """Every thread reads what another one wrote."""
    address = shared.reserve(COUNT * x_ptr.dtype.element_ty.primitive_bitwidth // 8)
    BITS: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    place = tl.arange(0, COUNT)
    x = tl.load(x_ptr + place)
    shared.store(address + BITS // 8 * place, x, place >= 0)
    tl.debug_barrier()
    last = COUNT - 1 - place
    # Of an odd place nothing is read: the result is 0.
    y = shared.load(address + BITS // 8 * last, place % 2 == 0, BITS)
    tl.store(y_ptr + place, y)


@triton.jit
def chunk_kernel(y_ptr, x_ptr, COUNT: tl.constexpr):
    """Chunks of two integers, in the reverse order."""
    address = shared.reserve(16 * COUNT)
    place = tl.arange(0, COUNT)
    shared.store_chunk(
        address + 16 * place, tl.load(x_ptr + 2 * place), tl.load(x_ptr + 2 * place + 1)
    )
    tl.debug_barrier()
    one, two = shared.load_chunk(address + 16 * (COUNT - 1 - place))
    tl.store(y_ptr + 2 * place, one)
    tl.store(y_ptr + 2 * place + 1, two)


@pytest.fixture
def memory(monkeypatch):
    memory = SharedMemory()
    if backend.INTERPRETED:
        memory.patches(monkeypatch)
    return memory


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_values_come_back(memory, dtype):
    x = torch.arange(1, THREADS + 1, dtype=dtype, device=backend.DEVICE)
    y = torch.empty_like(x)
    reverse_kernel[(1,)](y, x, COUNT=THREADS)
    even = torch.arange(THREADS, device=x.device) % 2 == 0
    assert torch.equal(y, x.flip(0) * even)


def test_chunks_come_back(memory):
    x = torch.arange(2 * THREADS, device=backend.DEVICE)
    y = torch.empty_like(x)
    chunk_kernel[(1,)](y, x, COUNT=THREADS)
    assert torch.equal(y.view(-1, 2), x.view(-1, 2).flip(0))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int16, 16), (torch.int32, 32)])
def test_an_access_is_one_instruction(dtype, bits):
    pointer = compile.pointer(dtype)
    made = compile.aot(reverse_kernel, pointer, pointer, COUNT=THREADS)
    assert made.count(rf"ld\.shared\.b{bits}") == 1
    assert made.count(rf"st\.shared\.b{bits}") == 1
    assert made.count(r"bar\.sync") == 1


def test_a_chunk_is_one_access_of_16_bytes():
    pointer = compile.pointer(torch.int64)
    made = compile.aot(chunk_kernel, pointer, pointer, COUNT=THREADS)
    assert made.count(r"LDS\.128", "sass") == 1
    assert made.count(r"STS\.128", "sass") == 1
