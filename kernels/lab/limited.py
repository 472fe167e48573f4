"""A launch of which an SM holds fewer programs than would fit.

`LimitedLaunch` reserves shared memory that the kernel does not use. So an SM has room
for fewer programs, while the machine code stays the same. What changes with the number
of resident programs then has no other cause.

Weighed: a grid of fewer programs that loop, which is another kernel with a schedule of
its own; more registers for each thread, which Triton cannot reserve (`maxnreg` only
takes registers away).
"""

import copy
import ctypes
from typing import Any

import torch
from triton.compiler import make_backend

from kernels.lab import backend, gpu
from kernels.lab.gpu import Gpu
from kernels.lab.launch import Launch

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of cuda.h, percent


def shared_for(programs_per_sm: int, on: Gpu | None = None) -> int:
    """Returns the bytes of shared memory of each program if so many fit an SM.

    Args:
        programs_per_sm: from 1 to the blocks that an SM can hold.
        on: the GPU; None means the one here (`gpu.here`).

    Raises:
        ValueError: an SM never holds so many.
    """
    on = on or gpu.here()
    if programs_per_sm not in range(1, on.blocks_per_sm + 1):
        raise ValueError(
            f"programs_per_sm must be from 1 to {on.blocks_per_sm}, the blocks that an "
            f"SM of the {on.name} can hold, got {programs_per_sm!r}"
        )
    each = on.shared_per_sm // programs_per_sm
    each -= each % on.shared_granularity
    return min(each - on.shared_reserved_per_block, on.shared_per_block)


def with_shared(compiled: Any, shared: int) -> Any:
    """Returns a compiled kernel whose launches reserve more shared memory.

    Args:
        compiled: what Triton compiled; it stays as it is.
        shared: bytes for each program, used or not.
    """
    limited = copy.copy(compiled)
    shared = max(shared, compiled.metadata.shared)  # what the kernel uses it must have
    limited.metadata = compiled.metadata._replace(shared=shared)
    pack = make_backend(compiled.metadata.target).pack_metadata
    limited.packed_metadata = pack(limited.metadata)
    limited.module = limited.function = limited._run = None
    limited._init_handles()  # loads the machine code again, with this size
    # The L1 cache is the rest of this memory: 100 % leaves every launch the same rest.
    function = ctypes.c_void_p(limited.function)
    gpu.driver("cuFuncSetAttribute", function, CARVEOUT, 100)
    return limited


class LimitedLaunch:
    """A launch of which an SM holds at most programs_per_sm programs at a time."""

    def __init__(self, launch: Launch, programs_per_sm: int) -> None:
        self.launch, self.shared = launch, shared_for(programs_per_sm)
        self.limited: Any = None  # the compiled kernel, after the first call

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches; the interpreter, which runs program after program, has no limit."""
        how = self.launch
        if backend.INTERPRETED:
            return how(*tensors)
        extra = how.take_words(tensors[-1])
        args = *tensors, *extra, *how.scalars
        if self.limited is None:
            compiled = how.kernel.warmup(*args, grid=how.grid, **how.constants)
            self.limited = with_shared(compiled, self.shared)
        # A compiled kernel takes every argument by position, its constexprs too.
        rest = [value for name, value in how.constants.items() if name.isupper()]
        self.limited[(*how.grid, 1, 1)[:3]](*args, *rest)
