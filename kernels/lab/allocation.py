"""How the compiler packs a kernel's buffers into shared memory, by its own account.

Triton's allocation pass finds out from where to where each buffer is needed, and gives
the same bytes to buffers that are never needed at the same time. `buffers` runs that
pass again on the TTGIR of a compiled kernel, and reads what the pass prints when it is
asked to debug itself: size, offset and live range of every buffer.

Weighed: the attribute `allocation.offset` of the IR after the pass (it has offsets,
but no live ranges, and sizes only from Triton 3.9 on); computing live ranges from the
TTGIR ourselves (a second opinion, where the first one can be read).

Source: `lib/Analysis/Allocation.cpp` of Triton.
"""

import os
import re
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from kernels.lab import process
from kernels.lab.compile import Compiled

DEBUG = "TRITON_LLVM_DEBUG_ONLY"  # the pass whose debugging output Triton prints
PTX_VERSION = 80  # decides which instructions exist, not how much memory they need


class Buffer(NamedTuple):
    """Bytes of shared memory that an operation needs.

    Attributes:
        operation: that needs it: "local_alloc" holds values that the kernel keeps in
            shared memory; others, such as "reduce" and "convert_layout", need it while
            they run.
        shape: of what local_alloc holds, with its dtype, as "3x64x32xf16"; else "".
        size, offset: in bytes.
        begin, end: its live range: it is needed from operation `begin` of the kernel
            until before operation `end`.
    """

    operation: str
    shape: str
    size: int
    offset: int
    begin: int
    end: int


def buffers(compiled: Compiled) -> list[Buffer]:
    """The buffers of a kernel in shared memory, in the order of their live ranges.

    Args:
        compiled: what `compile.aot` returned.

    Raises:
        TypeError: compiled is no compiled kernel.
        RuntimeError: this version of Triton does not print its allocation as expected.
    """
    if not isinstance(compiled, Compiled):
        what = type(compiled).__name__
        raise TypeError(f"compiled must be what compile.aot returns, got {what}")
    capability = compiled.gpu.compute_capability
    said = process.call_in("compiler", _allocate, compiled.ttgir, capability)
    found = parse(said)
    if max((each.offset + each.size for each in found), default=0) != compiled.shared:
        raise RuntimeError(
            "this version of Triton must place the buffers in "
            f"{compiled.shared} bytes, as in the compiled kernel, got {found}"
        )
    return found


def _allocate(ttgir: str, capability: int) -> str:
    """What the allocation pass prints for a kernel; runs in the compiler's world."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", capability, 32)).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(manager)  # as the compiler does before it allocates
    allocate = nvidia.passes.ttgpuir.add_allocate_shared_memory_nv
    allocate(manager, capability, PTX_VERSION)
    with tempfile.TemporaryFile("w+") as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            os.environ[DEBUG] = "allocation-shared-memory"
            manager.enable_debug()
            manager.run(module, "allocation")
        finally:
            os.environ[DEBUG] = "nothing"  # Triton keeps it on until it hears another
            ir.pass_manager(context).enable_debug()
            del os.environ[DEBUG]
            os.dup2(stderr, 2)
            os.close(stderr)
        said.seek(0)
        return said.read()


def parse(text: str) -> list[Buffer]:
    """The buffers from what Triton's allocation pass prints."""
    text = re.sub(r"\[allocation-shared-memory\]: ", "", text)
    owners = {
        int(number): operation
        for number, operation in re.findall(
            r"-- buffer (\d+); value: (.*?)(?=\n-- buffer|\nDump|\Z)", text, re.DOTALL
        )
    }
    last = text.rpartition("Dump bufferRange")[2]
    rows = re.findall(r"^-- (\d+) (\d+) (\d+) interval (\d+) (\d+)", last, re.MULTILINE)
    found = []
    for number, size, offset, begin, end in (map(int, row) for row in rows):
        operation = owners.get(number, "")
        name = re.search(r"(?:tt|ttg|ttng|nvg)\.(\w+)", operation)
        shape = re.search(r"memdesc<([\dx]+\w+),", operation)
        found.append(
            Buffer(
                name[1] if name else "other",
                shape[1] if shape and name[1] == "local_alloc" else "",
                *(size, offset, begin, end),
            )
        )
    return sorted(found, key=lambda each: (each.begin, each.offset))


def peak_bytes(found: Iterable[Buffer]) -> int:
    """The most bytes that buffers need at one time: no packing can take fewer."""
    found = list(found)
    live = [[b.size for b in found if b.begin <= a.begin < b.end] for a in found]
    return max(map(sum, live), default=0)
