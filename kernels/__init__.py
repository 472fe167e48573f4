"""Softmax, from five eager PyTorch lines to the speed of memory, one chapter a module.

The ladder (what each chapter's module changes, and what that buys):

    eager       five PyTorch operations      right answers, five kernels
    traffic     the bytes they move          a prediction of the time, and the ceiling
    program     one Triton program per row   one read, one write
    strided     strides, masks, 64-bit       any layout, any size, no stray access
    meta        warps chosen by measurement  the same kernel, at its best launch
    persistent  programs that take tiles     short rows share one, long rows load ahead
"""

from kernels.lab import backend as _backend  # picks the world before Triton is imported

CHAPTERS = ("eager", "traffic", "program", "strided", "meta", "persistent")

__all__ = ["CHAPTERS"]

del _backend
