"""One prepared call of a kernel: what to launch, on which grid, with which numbers.

From chapter `tiled` on, a chapter's `launch_for(output, x)` makes a `Launch`. It can be
called, compiled ahead of time (`compile.aot(launch, gpu="T4")`), measured for occupancy
(`occupancy.of(launch)`), and kept for the next call of the same shape (`CachedLaunch`).

`Launch` holds no tensors. So it can be made from tensors on the "meta" device, which
have a shape, strides and a dtype, and no memory: that is how the course compiles and
explains launches on matrices that would not fit this machine.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.lab import backend


@dataclass(frozen=True)
class Pointer:
    """Stands in for a tensor: the compiler sees no more of a tensor than this.

    Attributes:
        dtype: of the elements.
        aligned: whether the first element's address is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    aligned: bool = True

    def data_ptr(self) -> int:
        """An address that is as aligned as the tensor's (Triton looks at no more)."""
        return 0 if self.aligned else 1


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """The stand-in for a tensor, which may be on any device."""
    return Pointer(tensor.dtype, tensor.data_ptr() % 16 == 0)


OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Fields of a configuration that are options of the launch, not constexprs."""


def constants_of(config: Any) -> dict[str, Any]:
    """The fields of a chapter's Config as a launch's constants.

    Args:
        config: a dataclass whose fields are the kernel's constexprs, in their order and
            in lower case, and OPTIONS.
    """
    return {
        name if name in OPTIONS else name.upper(): value
        for name, value in vars(config).items()
    }


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that a call passes to it, except the tensors.

    The kernel's parameters must come in this order: the tensors, what the workspace
    gives, the scalars, the constants.

    Attributes:
        kernel: a `@triton.jit` function.
        grid: the number of programs along each of up to three axes.
        scalars: the numbers that follow the tensors.
        constants: the kernel's constexprs in their order, in capitals, and options of
            the launch such as num_warps.
        pointers: what the compiler needs to know of each tensor.
        workspace: memory that the programs of one call share; None if there is none.
    """

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    constants: Mapping[str, Any]
    pointers: tuple[Pointer, ...]
    workspace: "Workspace | None" = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Launches the kernel on these tensors; returns Triton's compiled kernel.

        Args:
            tensors: as those that the launch was made from, in shape, strides, dtype
                and alignment. They are not checked.
        """
        extra = self.workspace.take(tensors[-1].device) if self.workspace else ()
        return self.kernel[self.grid](*tensors, *extra, *self.scalars, **self.constants)

    @property
    def arguments(self) -> tuple:
        """The positional arguments of a call, with stand-ins for the tensors."""
        extra = (Pointer(torch.int64), 1) if self.workspace else ()
        return (*self.pointers, *extra, *self.scalars)


class CachedLaunch:
    """A launch that looks its compiled kernel up once.

    Triton inspects every argument of every call to find the compiled kernel. Calls of
    one `Launch` differ in nothing that Triton would find, so the first call's kernel
    serves all others. In the interpreter there is no compiled kernel to keep, and each
    call is the first.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.grid = (*launch.grid, 1, 1)[:3]
        self.take = launch.workspace.take if launch.workspace else None
        constexprs = [name for name in launch.constants if name.isupper()]
        values = tuple(launch.constants[name] for name in constexprs)
        self.rest = (*launch.scalars, *values)
        self.compiled: Any = None

    def __call__(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Launches the kernel on tensors like those that the launch was made from."""
        if self.compiled is None:
            self.compiled = self.launch(output, x)
        elif self.take is None:
            self.compiled[self.grid](output, x, *self.rest)
        else:
            extra = self.take(x.device)
            self.compiled[self.grid](output, x, *extra, *self.rest)


# ---- memory that the programs of one call share --------------------------------------


@dataclass(frozen=True)
class Workspace:
    """So many 64-bit words for the programs of one call to exchange values in.

    Every word that a call writes carries the call's tag. Words that an earlier call left
    have another tag, so nothing is cleared between calls. Calls on one stream follow
    each other, and they share the words of that stream.
    """

    n_words: int

    def take(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """At least n_words words, and the tag of the call that will use them.

        A call that a CUDA graph captures gets words of its own: they live as long as
        the graph, and each replay clears them.
        """
        if backend.INTERPRETED or torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.n_words, dtype=torch.int64, device=device), 1
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        return words_of(device.index, stream).take(self.n_words, device)


class StreamWords:
    """The words of one stream's calls."""

    def __init__(self) -> None:
        self.words = torch.empty(0, dtype=torch.int64)
        self.tags = itertools.count()

    def take(self, n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
        words = self.words
        if len(words) < n_words:
            size = triton.next_power_of_2(n_words)
            words = torch.zeros(size, dtype=torch.int64, device=device)
            self.words = words
        return words, next(self.tags) % (2**31 - 1) + 1


@functools.cache
def words_of(device_index: int, stream: int) -> StreamWords:
    return StreamWords()
