"""Softmax, from five eager PyTorch lines to the speed of memory, one chapter a module.

The ladder (what each chapter's module changes, and what that buys):

    eager       five PyTorch operations      right answers, five kernels
    traffic     the bytes they move          a prediction of the time, and the ceiling
    program     one Triton program per row   one read, one write
    strided     strides, masks, 64-bit       any layout, any size, no stray access
    residency   a limit on living programs   how many are enough, and why
    meta        warps chosen by measurement  the same kernel, at its best launch
    persistent  programs that take tiles     short rows share one, long rows load ahead
    debugging   kernels with one fault each  the tools that find out why
    profiling   a kernel with a slow line    a clue from every profiler
    compiler    one operation a line         the same machine code, now readable
    layouts     elements change threads      no bank conflict, no byte kept too long
    cuda        a warp, or a block, per row  the same softmax in CUDA C++, by hand
    matmul      a tile of a product each     tensor cores, and steps that move no bytes
    tiled       tiles in wide accesses       the copy's speed, for rows that are aligned
    unaligned   a head, a body and a tail    the copy's speed, wherever rows start
    online      running (max, sum) pairs     rows of any length, in two readings
    cooperative programs that share a row    long rows, in one reading
    fastest     the kernel that fits         one softmax for every shape
    gradient    two inputs, one reduction    the backward pass at the speed of memory
    operator    a call, prepared once        a cheap call, which PyTorch knows by name
    staged      rows in shared memory        short rows, wherever they start
    windows     words between two words      rows that start elsewhere in the output
    columns     neighbours in other columns  the softmax along another dimension
"""

from kernels.lab import backend as _backend  # picks the world before Triton is imported

CHAPTERS = (
    *("eager", "traffic", "program", "strided", "residency", "meta", "persistent"),
    *("debugging", "profiling", "compiler", "layouts", "cuda", "matmul"),
    *("tiled", "unaligned", "online", "cooperative", "fastest", "gradient", "operator"),
    *("staged", "windows", "columns"),
)

__all__ = ["CHAPTERS", "softmax"]

from kernels import operator as _operator  # noqa: E402 - after the world is chosen
from kernels.fastest import softmax  # noqa: E402

del _backend, _operator


def __getattr__(name: str) -> object:
    from kernels.lab.description import no_such_name  # only a mistake needs it

    raise no_such_name(name, __path__[0])
