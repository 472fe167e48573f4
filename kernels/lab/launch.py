"""One prepared call of a kernel: what to launch, on which grid, with which numbers.

From `tiled` on, a chapter's `launch_for(output, x)` makes a `Launch`. You can call it,
compile it ahead of time (`compile.aot`), ask for its occupancy (`occupancy.of`), and
keep it (`direct.CachedLaunch`). It holds no tensors, so tensors on "meta" will do.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lab import backend


@dataclass(frozen=True)
class Pointer:
    """What the compiler sees of a tensor, for which it stands where nothing is run."""

    dtype: torch.dtype
    aligned: bool = True  # whether the address is a multiple of 16 bytes

    def data_ptr(self) -> int:
        """An address with the tensor's alignment, which is all that Triton looks at."""
        return 0 if self.aligned else 1


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """Returns what the compiler sees of a tensor, which may be on any device."""
    return _pointer(tensor.dtype, tensor.data_ptr() % 16 == 0)


_pointer = functools.cache(Pointer)
_properties_of = functools.cache(torch.cuda.get_device_properties)
SIZES = ("tag", "n_cols", "n_parts", "output_shift")  # compiled for any value
SIZES += ("output_row_stride", "input_row_stride")
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # no constexprs


def row_shift(x: torch.Tensor) -> int:
    """How many elements x's first element lies after a multiple of 16 bytes."""
    return x.data_ptr() % 16 // x.element_size()


@functools.cache  # equal configs share what is returned
def constants_of(config: Any) -> Mapping[str, Any]:
    """A Config's fields as a launch's constants: constexprs in order, and OPTIONS."""
    names = (name if name in OPTIONS else name.upper() for name in vars(config))
    return dict(zip(names, vars(config).values(), strict=True))


def ceil_div(n: int, step: int) -> int:
    """How many steps reach n. `triton.cdiv` is for kernels too, and takes 2 µs here."""
    return -(-n // step)


def power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 if n is below 1."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that a call passes to it, except the tensors.

    The kernel's parameters must come in this order: the tensors, the words and a tag if
    there are words, the scalars, the constants. Triton compiles a kernel anew where an
    integer is 1 or a multiple of 16, unless it has `do_not_specialize=SIZES`.

    Attributes:
        kernel, grid: a `@triton.jit` function; programs along up to three axes.
        scalars: the integers that follow the tensors.
        constants: the kernel's constexprs, in its order and in capitals, and OPTIONS.
        pointers: what the compiler sees of each tensor.
        n_words: 64-bit words through which the programs of one call exchange values.
    """

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    constants: Mapping[str, Any]
    pointers: tuple[Pointer, ...]
    n_words: int = 0

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Launches the kernel on tensors like those that the launch was made from.

        They must have the same shape, strides, dtype and alignment; nothing checks it.
        Returns Triton's compiled kernel; None in the interpreter.
        """
        words = self.take_words(tensors[-1])
        return self.kernel[self.grid](*tensors, *words, *self.scalars, **self.constants)

    def take_words(self, x: torch.Tensor) -> tuple:
        """The words of one call on x's device, and its tag, if it needs them."""
        if self.n_words:
            from kernels.lab import words  # few launches need it
        return words.take(self.n_words, x.device) if self.n_words else ()


def by_rows(*how: Any) -> torch.Tensor:
    """What a chapter's launch writes for a matrix; see `operator.by_rows`."""
    from kernels.lab import operator  # the product never calls this

    return operator.by_rows(*how)


def sms_and_threads() -> tuple[int, int]:
    """The SMs of the current GPU, under MIG of its part, and the threads of an SM."""
    if backend.INTERPRETED:
        return 132, 2048  # an H200's
    here = _properties_of(torch.cuda.current_device())
    return here.multi_processor_count, here.max_threads_per_multi_processor


def programs_at_once(num_warps: int, maxnreg: int) -> int:
    """How many programs run at once, or more, with maxnreg registers in each thread."""
    sms, threads = sms_and_threads()  # an SM has four parts of 16384 registers each
    return sms * min(min(threads // 4, 16384 // maxnreg) // 32 * 4 // num_warps, 16)
