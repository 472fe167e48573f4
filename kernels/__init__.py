"""Softmax, from five eager PyTorch lines to the speed of memory, one chapter a module.

The ladder (what each chapter's module changes, and what that buys):

    eager       five PyTorch operations      right answers, five kernels
    traffic     the bytes they move          a prediction of the time, and the ceiling
    program     one Triton program per row   one read, one write
    strided     strides, masks, 64-bit       any layout, any size, no stray access
    meta        warps chosen by measurement  the same kernel, at its best launch
    persistent  programs that take tiles     short rows share one, long rows load ahead
    tiled       tiles in wide accesses       the copy's speed, wherever rows start
    online      running (max, sum) pairs     rows of any length, in two readings
    cooperative programs that share a row    any length, in one reading
    fastest     the kernel that fits         one softmax for every shape
"""

from kernels.lab import backend as _backend  # picks the world before Triton is imported

CHAPTERS = (
    *("eager", "traffic", "program", "strided", "meta", "persistent"),
    *("tiled", "online", "cooperative", "fastest"),
)

__all__ = ["CHAPTERS", "softmax"]

from kernels.fastest import softmax  # noqa: E402 - after the world is chosen

del _backend
