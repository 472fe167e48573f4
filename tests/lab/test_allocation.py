"""The buffers are those that the compiler allocated, and share bytes as it says."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from kernels import persistent
from kernels.lab import allocation, compile
from kernels.lab.allocation import Buffer

HALF = compile.pointer(torch.float16)


@triton.jit
def sums_kernel(output_ptr, input_ptr, SIDE: tl.constexpr):
    """One program: the sum of each column, the maximum of all; a transposed tile."""
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    x = tl.load(input_ptr + i * SIDE + j)
    x = x - tl.sum(x, axis=0, keep_dims=True) - tl.max(x)
    tl.store(output_ptr + i * SIDE + j, x.T)


def overlap(one: Buffer, other: Buffer) -> bool:
    """Whether two buffers have a byte in common at the same time."""
    live = one.begin < other.end and other.begin < one.end
    ends = [(each.offset, each.offset + each.size) for each in (one, other)]
    return live and max(a for a, _ in ends) < min(b for _, b in ends)


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", ["T4", "A100", "H200", "B200", "RTX 5090"])
def test_buffers_are_those_of_the_compiled_kernel(gpu):
    pipelined = (HALF, HALF, 1024, 1, 1024, 1, 4096, 1024, 4, 1024, 3)
    for made in (
        compile.aot(sums_kernel, HALF, HALF, 64, gpu=gpu),
        compile.aot(persistent.softmax_kernel, *pipelined, gpu=gpu),
    ):
        found = allocation.buffers(made)
        assert found
        assert max(each.offset + each.size for each in found) == made.shared
        assert allocation.peak_bytes(found) <= made.shared
        for one, other in itertools.combinations(found, 2):
            assert not overlap(one, other), (one, other)


def test_a_kernel_that_needs_none():
    made = compile.aot(sums_kernel, HALF, HALF, 4, num_warps=1)
    assert made.shared == max(
        (b.offset + b.size for b in allocation.buffers(made)), default=0
    )


def test_later_kernels_are_compiled_in_silence(capfd):
    made = compile.aot(sums_kernel, HALF, HALF, 32)
    assert allocation._allocate(made.ttgir, 90)
    assert allocation.DEBUG not in allocation.os.environ
    allocation._allocate(made.ttgir, 90)
    assert "bufferRange" not in capfd.readouterr().err


SAID = """-- buffer 0; value: %9 = ttg.local_alloc : () -> !ttg.memdesc<2x64xf16, #s>
-- buffer 1; value: %13 = "tt.reduce"(%12) <{axis = 0 : i32}> ({
^bb0(%arg4: f32, %arg5: f32):
}) : (tensor<1024xf32, #blocked>) -> f32
[allocation-shared-memory]: Dump bufferRange: id size offset ---------
-- 0 256 0 interval 4 9
-- 1 16 0 interval 8 19
[allocation-shared-memory]: Dump interference graph: 
-- color 0 0
[allocation-shared-memory]: Dump bufferRange: id size offset ---------
-- 1 16 256 interval 8 19
-- 0 256 0 interval 4 9
"""


def test_parse():
    found = allocation.parse(SAID)
    assert found == [
        Buffer("local_alloc", "2x64xf16", 256, 0, 4, 9),
        Buffer("reduce", "", 16, 256, 8, 19),
    ]
    assert allocation.peak_bytes(found) == 272
    assert allocation.parse("nothing") == [] and allocation.peak_bytes([]) == 0


def test_another_allocation_is_refused(monkeypatch):
    made = compile.aot(sums_kernel, HALF, HALF, 64)
    monkeypatch.setattr(allocation.process, "call_in", lambda *_: SAID)
    with pytest.raises(RuntimeError, match=f"must place .* {made.shared} bytes"):
        allocation.buffers(made)
    with pytest.raises(TypeError, match=r"compiled must be.*got int"):
        allocation.buffers(3)
