"""One prepared call of a kernel: what to launch, on which grid, with which numbers.

From chapter `tiled` on, a chapter's `launch_for(output, x)` makes a `Launch`. You can
call it, compile it ahead of time (`compile.aot(launch, gpu="T4")`), ask for its
occupancy (`occupancy.of(launch)`), and keep it for the next call on tensors of the same
form (`CachedLaunch`).

A `Launch` holds no tensors. So it can be made from tensors on the "meta" device, which
have a shape, strides and a dtype, but no memory. That is how the course compiles and
explains launches on matrices that would not fit this machine.

Weighed: Triton's `preload` and its ahead-of-time tools (from a signature by hand).
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
    """What the compiler sees of a tensor, and nothing else of it.

    Triton takes it in a tensor's place wherever a kernel is compiled and not run.

    Attributes:
        dtype: the dtype of the elements.
        aligned: whether the first element's address is a multiple of 16 bytes.
    """

    dtype: torch.dtype
    aligned: bool = True

    def data_ptr(self) -> int:
        """An address with the tensor's alignment, which is all that Triton looks at."""
        return 0 if self.aligned else 1


def pointer_to(tensor: torch.Tensor) -> Pointer:
    """Returns what the compiler sees of a tensor, which may be on any device."""
    return Pointer(tensor.dtype, tensor.data_ptr() % 16 == 0)


OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch: not constexprs


def constants_of(config: Any) -> dict[str, Any]:
    """Returns the fields of a chapter's Config as the constants of a launch.

    Args:
        config: a dataclass. Its fields are the kernel's constexprs, in the kernel's
            order and in lower case, and any of OPTIONS.
    """
    return {
        name if name in OPTIONS else name.upper(): value
        for name, value in vars(config).items()
    }


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that a call passes to it, except the tensors.

    The kernel's parameters must come in this order: the tensors, the words and the tag
    of the workspace if there is one, the scalars, the constants. A kernel with a
    workspace must say `do_not_specialize=["tag"]`: the tag differs from call to call.

    Attributes:
        kernel: a `@triton.jit` function.
        grid: the number of programs along each of up to three axes.
        scalars: the integers that follow the tensors.
        constants: the kernel's constexprs, in capitals and in the kernel's order, and
            options of the launch such as num_warps.
        pointers: what the compiler sees of each tensor.
        workspace: memory that the programs of one call share; None if there is none.
    """

    kernel: Any
    grid: tuple[int, ...]
    scalars: tuple[int, ...]
    constants: Mapping[str, Any]
    pointers: tuple[Pointer, ...]
    workspace: "Workspace | None" = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Launches the kernel on these tensors.

        Args:
            tensors: tensors of the shape, strides, dtype and alignment of those that
                the launch was made from. Nothing checks this.

        Returns:
            Triton's compiled kernel; None in the interpreter.
        """
        extra = self.workspace.take(tensors[-1].device) if self.workspace else ()
        return self.kernel[self.grid](*tensors, *extra, *self.scalars, **self.constants)

    @property
    def arguments(self) -> tuple:
        """The positional arguments of a call, with a `Pointer` for each tensor."""
        extra = (Pointer(torch.int64), 1) if self.workspace else ()
        return (*self.pointers, *extra, *self.scalars)


class CachedLaunch:
    """A launch that looks its compiled kernel up once.

    Triton inspects every argument of every call to find the compiled kernel. But two
    calls of one `Launch` differ only in the tensors' addresses and in the tag, neither
    of which decides what Triton compiles. So the kernel that the first call finds
    serves all later calls, by `kernels.lab.direct` where it can. In the interpreter
    there is no compiled kernel, and every call is like the first.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.grid = (*launch.grid, 1, 1)[:3]
        self.take = launch.workspace.take if launch.workspace else None
        # A compiled kernel takes every argument by position, its constexprs too.
        constexprs = [value for key, value in launch.constants.items() if key.isupper()]
        self.rest = (*launch.scalars, *constexprs)
        self.compiled: Any = None
        self.direct: Any = None  # launches what is compiled, given addresses

    def __call__(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Launches the kernel on tensors like those that the launch was made from."""
        if self.compiled is None:
            self.compiled = self.launch(output, x)
            if self.compiled is not None:
                from kernels.lab import direct  # the interpreter never needs it

                n = 2 if self.take is None else 4
                self.direct = direct.bind(self.compiled, self.grid, n, self.rest)
            return
        extra = () if self.take is None else self.take(x.device)
        if self.direct is None:
            self.compiled[self.grid](output, x, *extra, *self.rest)
        elif self.take is None:
            self.direct(output.data_ptr(), x.data_ptr())
        else:
            words, tag = extra
            self.direct(output.data_ptr(), x.data_ptr(), words.data_ptr(), tag)


# ---- memory that the programs of one call share --------------------------------------

LAST_TAG = 2**31 - 1  # tags are 1 to this; 0 is what a cleared word holds


@dataclass(frozen=True)
class Workspace:
    """Memory in which the programs of one call exchange values.

    Every word that a program writes carries the tag of its call. Words that an earlier
    call left carry another tag, so nothing is cleared between calls. Calls on one
    stream run one after the other, so they share the words of that stream.

    Attributes:
        n_words: how many 64-bit words a call needs.
    """

    n_words: int

    def take(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """Returns words for one call on the current stream of a device, and its tag.

        A call that a CUDA graph captures gets words of its own. They live as long as
        the graph, and every replay clears them first.

        Args:
            device: where the call will run.

        Returns:
            At least n_words words (int64), in which no word carries the tag.
        """
        if backend.INTERPRETED or torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.n_words, dtype=torch.int64, device=device), 1
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        return words_of(device.index, stream).take(self.n_words, device)


class StreamWords:
    """The words that the calls on one stream share, and the tags that are left.

    Threads may launch on one stream at the same time. So the words and their tags are
    replaced together, and each call reads the pair once: whatever the other threads do
    meanwhile, its words are enough, and no earlier call on these words had its tag.
    """

    def __init__(self) -> None:
        self.current = torch.empty(0, dtype=torch.int64), itertools.count(1)

    def take(self, n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """See `Workspace.take`."""
        words, tags = self.current
        tag = next(tags)
        if tag > LAST_TAG:  # a word may carry any tag, so the next calls get new words
            words, tags = words[:0], itertools.count(1)
            tag = next(tags)
        if len(words) < n_words:
            size = triton.next_power_of_2(n_words)
            words = torch.zeros(size, dtype=torch.int64, device=device)
            self.current = words, tags
        return words, tag


@functools.cache
def words_of(device_index: int, stream: int) -> StreamWords:
    """The words of a stream, which is named by its handle."""
    return StreamWords()
