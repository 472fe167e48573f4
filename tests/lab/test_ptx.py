"""What is carried out of a kernel's PTX is what the kernel's source says."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import compile, ptx

FLOAT = compile.pointer(torch.float32)
OUT = 2**30


@triton.jit
def copy_kernel(output_ptr, input_ptr, n, step, BLOCK: tl.constexpr):
    """One program copies every step-th of BLOCK elements."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(input_ptr + places * step, places < n)
    tl.store(output_ptr + places, x, places < n)


def copied(n, step, program=0, dtype=torch.float32, num_warps=1):
    """Output element → input element, and the accesses."""
    pointer = compile.pointer(dtype)
    made = compile.aot(copy_kernel, pointer, pointer, n, step, 128, num_warps=num_warps)
    found = ptx.accesses(made, OUT, 0, n, step, program=(program, 0, 0))
    moved = ptx.stored(found)
    return {(to - OUT) // 4: at // 4 for to, at in moved.items()}, found


@pytest.mark.parametrize("step", [1, 3, 7, 16])
@pytest.mark.parametrize("n", [1000, 1024])
@pytest.mark.parametrize("program", [0, 3, 7])
def test_values_go_where_the_source_says(n, step, program):
    moved, _ = copied(n, step, program)
    wanted = range(128 * program, min(128 * program + 128, n))
    assert moved == {place: place * step for place in wanted}


def test_widths_and_masks():
    _, found = copied(1024, 1)
    assert {(a.kind, a.space, a.n_bytes) for a in found} == {
        ("ld", "global", 16),
        ("st", "global", 16),
    }
    _, found = copied(100, 3)
    off = [np.count_nonzero(a.addresses == ptx.OFF) for a in found if a.kind == "ld"]
    assert sum(off) == 28


def test_what_is_not_known_stays_unknown():
    made = compile.aot(copy_kernel, FLOAT, FLOAT, 1000, 3, 128)
    assert ptx.accesses(made) == []  # no pointers, no addresses
    assert len(ptx.accesses(made, OUT, 0, 1000, 3, space="global")) == 2
    assert ptx.accesses(made, OUT, 0, 1000, 3, space="shared") == []
    with pytest.raises(TypeError, match=r"compiled must be.*got str"):
        ptx.accesses("ptx")


def carried_out(made, lines):
    """The registers after a few lines of PTX."""
    block = ptx._Block(32, (), (5, 0, 0))
    for line in lines.strip().splitlines():
        block.step(line.strip().rstrip(";"))
    return {name: value.tolist()[3] for name, value in block.registers.items()}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("add.s32 %r9, %r1, %r2", 2**32 - 4),
        ("sub.s32 %r9, %r1, 1", 2),
        ("mul.lo.s32 %r9, %r2, %r2", 49),
        ("mul.wide.s32 %r9, %r2, 4", -28),
        ("mul.wide.u32 %r9, %r1, 4", 12),
        ("mad.lo.s32 %r9, %r1, 5, 2", 17),
        ("shl.b32 %r9, %r1, 31", 2**31),
        ("shr.u32 %r9, %r2, 28", 15),
        ("shr.s32 %r9, %r2, 1", 2**32 - 4),
        ("and.b32 %r9, %r1, 2", 2),
        ("or.b32 %r9, %r1, 4", 7),
        ("xor.b32 %r9, %r1, 1", 2),
        ("not.b32 %r9, %r1", 2**32 - 4),
        ("neg.s32 %r9, %r1", 2**32 - 3),
        ("bfe.u32 %r9, %r1, 1, 1", 1),
        ("bfe.s32 %r9, %r1, 1, 1", 2**32 - 1),
        ("min.s32 %r9, %r1, %r2", 2**32 - 7),
        ("max.u32 %r9, %r1, %r2", 2**32 - 7),
        ("setp.lt.s32 %r9, %r2, %r1", 1),
        ("setp.gt.u32 %r9, %r2, %r1", 1),
        ("setp.ne.b32 %r9, %r1, 3", 0),
        ("cvt.s64.s32 %r9, %r2", -7),
        ("cvt.u64.u32 %r9, %r2", 2**32 - 7),
        ("lop3.b32 %r9, %r1, 5, 6, 0x96", 3 ^ 5 ^ 6),
        ("selp.b32 %r9, 8, 9, %p1", 8),
        ("@%p1 mov.b32 %r8, 1", None),
        ("add.f32 %r9, %r1, %r2", None),
        ("ex2.approx.f32 %r9, %r1", None),
        ("mov.u32 %r9, %ctaid.x", 5),
    ],
)
def test_instructions(line, wanted):
    block = ptx._Block(32, (), (5, 0, 0))
    block.registers |= {
        "%r1": block.of(3),
        "%r2": block.of(2**32 - 7),
        "%r9": block.of(77),
    }
    block.registers["%p1"] = block.of(1)
    if not line.startswith("@"):
        block.step(line)
        left = block.registers.get("%r9")
        assert (None if left is None else left.tolist()[3]) == wanted
    else:
        block.step(line)
        assert block.registers["%r8"].tolist()[3] == 1


def test_a_guarded_instruction_changes_its_threads_only():
    block = ptx._Block(32, (), (0, 0, 0))
    for line in ("mov.u32 %r1, %tid.x", "mov.b32 %r2, 7", "setp.lt.u32 %p1, %r1, 4"):
        block.step(line)
    block.step("@%p1 mov.b32 %r2, 9")
    assert block.registers["%r2"].tolist() == [9] * 4 + [7] * 28
    block.step("@!%p1 mov.b32 %r2, 5")
    assert block.registers["%r2"].tolist() == [9] * 4 + [5] * 28


def test_shared_memory_keeps_what_is_stored():
    block = ptx._Block(32, (), (0, 0, 0))
    for line in (
        "mov.u32 %r1, %tid.x",
        "shl.b32 %r2, %r1, 2",
        "xor.b32 %r3, %r2, 4",
        "st.shared.b32 [%r2+128], %r1",
        "ld.shared.b32 %r4, [%r3+128]",
        "ld.shared.b32 %r5, [%r3]",
    ):
        block.step(line)
    assert block.registers["%r4"].tolist() == [lane ^ 1 for lane in range(32)]
    assert "%r5" not in block.registers  # nothing was stored there
    assert [(a.kind, a.n_bytes) for a in block.found] == [
        ("st", 4),
        ("ld", 4),
        ("ld", 4),
    ]


def test_matrices_move_rows_of_four_words():
    """Lane 8m + r names row r of matrix m; lane l moves word l % 4 of row l // 4."""
    block = ptx._Block(32, (), (0, 0, 0))
    block.registers |= {"%r9": np.arange(32) * 16}
    block.registers |= {f"%r{i}": np.arange(32) + 100 * i for i in range(4)}
    block.step(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r9+64], {%r0, %r1, %r2, %r3}"
    )
    wanted = {
        64 + 128 * m + 4 * lane: lane + 100 * m for m in range(4) for lane in range(32)
    }
    assert block.shared == wanted
    assert [a.n_bytes for a in block.found] == [4] * 4
