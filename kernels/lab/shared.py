"""Shared memory at addresses, for Triton kernels: five functions of inline PTX.

Triton decides by itself what passes through shared memory, and has no operation for an
address there. These functions have; addresses are 32-bit integers, in bytes. They must
lie in what the program has reserved, and be multiples of the access's bytes. Threads
that read what others wrote wait first: `tl.debug_barrier()`. Where the compiler gives
several threads the same element, all of them make its access.

The interpreter has no shared memory, and runs no PTX: a kernel asks
`kernels.tiled.INTERPRETED`, and does without.

Weighed: Gluon, Triton's language for layouts. Its shared memory has a layout, too, and
is read and written in blocks whose sides are powers of two, which rows of 33 values are
not. Source: PTX ISA, `ld.shared`, `st.shared`, and state spaces.
"""

import triton
import triton.language as tl


@triton.jit
def reserve(BYTES: tl.constexpr):
    """Reserves shared memory for a program. Returns its address, which 16 divides."""
    code: tl.constexpr = f"{{ .shared .align 16 .b8 tile[{BYTES}]; mov.u32 $0, tile; }}"
    return tl.inline_asm_elementwise(code, "=r", [], tl.int32, False, 1)


@triton.jit
def load(address, inside, BITS: tl.constexpr):
    """Reads integers of 16 or 32 bits from shared memory; 0 where not inside."""
    kinds: tl.constexpr = "=&h,r,r" if BITS == 16 else "=&r,r,r"
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"mov.b{BITS} $0, 0; @p ld.shared.b{BITS} $0, [$1]; }}"
    )
    args = [address, inside.to(tl.int32)]
    return tl.inline_asm_elementwise(
        code, kinds, args, tl.int16 if BITS == 16 else tl.int32, False, 1
    )


@triton.jit
def store(address, bits, inside):
    """Writes the integers that are inside to shared memory."""
    BITS: tl.constexpr = bits.dtype.primitive_bitwidth
    kinds: tl.constexpr = "=r,r,h,r" if BITS == 16 else "=r,r,r,r"
    # PTX must return something to Triton: zeros, which nobody uses.
    code: tl.constexpr = (
        f"{{ .reg .pred p; setp.ne.s32 p, $3, 0; "
        f"@p st.shared.b{BITS} [$1], $2; mov.b32 $0, 0; }}"
    )
    args = [address, bits, inside.to(tl.int32)]
    tl.inline_asm_elementwise(code, kinds, args, tl.int32, False, 1)


@triton.jit
def load_chunk(address):
    """Reads chunks of 16 bytes from shared memory, as two integers each."""
    code: tl.constexpr = "ld.shared.v2.b64 {$0, $1}, [$2];"
    return tl.inline_asm_elementwise(
        code, "=l,=l,r", [address], (tl.int64, tl.int64), False, 1
    )


@triton.jit
def store_chunk(address, one, two):
    """Writes chunks of 16 bytes to shared memory."""
    code: tl.constexpr = "st.shared.v2.b64 [$1], {$2, $3}; mov.b32 $0, 0;"
    args = [address, one, two]
    tl.inline_asm_elementwise(code, "=r,r,l,l", args, tl.int32, False, 1)
