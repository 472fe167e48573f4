"""Numba CUDA, where it is installed: kernels written for one thread.

Chapter `program` sets such a kernel beside Triton's. Numba is an optional dependency
that takes half a second to import, so a kernel that is marked with `@cuda.jit` from
here is compiled when it is first launched. Without a GPU, kernels run in Numba's
simulator, which must be asked for before Numba is imported; so no other module imports
Numba. In the simulator each thread of a block is a thread of Python: blocks should be
small.

Weighed: CUDA C++ through `torch.utils.cpp_extension` needs a compiler, and a GPU.
"""

import functools
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kernels.lab import backend


class ThreadKernel:
    """What one thread does; `kernel[blocks, threads](*arguments)` launches it."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __getitem__(self, configuration: tuple[int, int]) -> Callable:
        return self._compiled[configuration]

    @functools.cached_property
    def _compiled(self) -> Any:
        numba_cuda = _numba_cuda()
        self.fn.__globals__["cuda"] = numba_cuda  # the name that its code looks up
        return numba_cuda.jit(self.fn)


cuda = SimpleNamespace(jit=ThreadKernel)
"""Stands in for `numba.cuda` in a kernel's module until a kernel is launched."""


def ready() -> bool:
    """Whether Numba's kernels can run here; if not, prints one line that says why.

    The first call that finds Numba compiles and launches a small kernel, since a Numba
    that is installed may be unable to: it needs a compiler library (NVVM), and a driver
    that takes what this library writes.
    """
    try:
        _numba_cuda()
    except RuntimeError as error:
        print(error)
        return False
    return True


@functools.cache
def _numba_cuda() -> ModuleType:
    """Numba's `cuda`, once it has run a kernel; RuntimeError where it cannot."""
    if backend.INTERPRETED:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # few are meant
    try:
        from numba import cuda
    except ModuleNotFoundError:
        cuda, problem = None, ("Numba is not installed", "pip install numba-cuda")
    except Exception as error:  # such as a NumPy that is too new for it
        problem = f"Numba cannot be imported ({_first_line(error)})"
        cuda, problem = None, (problem, "pip install --upgrade numba-cuda")
    else:
        problem = _try(cuda)
    if problem:
        what, cure = problem
        raise RuntimeError(f"{what}, so its kernel is shown and not run here; {cure}")
    return cuda


def _try(cuda: ModuleType) -> tuple[str, str] | None:
    """Runs a small kernel; returns what went wrong and what would do, or None."""
    try:
        if not cuda.is_available():
            return (
                "Numba finds no GPU or no CUDA toolkit",
                "pip install 'numba-cuda[cu13]' brings a toolkit",
            )
        output = torch.zeros(1, device=backend.DEVICE)
        cuda.jit(_store_seven)[1, 1](array(output))
        stored = output.item()
        if stored != 7:
            raise RuntimeError(f"its kernel stored {stored} where 7 is right")
    except Exception as error:
        return (
            f"Numba cannot run a kernel ({_first_line(error)})",
            "a CUDA toolkit no newer than the driver would do, such as the one of "
            "pip install 'numba-cuda[cu12]'",
        )
    return None


def _store_seven(output_ptr: Any) -> None:
    output_ptr[0] = 7


def _first_line(error: Exception) -> str:
    """The error's type and the first line of its message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:150]}" if lines else repr(error)


def array(tensor: torch.Tensor) -> Any:
    """A tensor as a Numba kernel takes it, on the same memory.

    Args:
        tensor: float32 or float16, of any shape and strides; Numba has no bfloat16.

    Returns:
        The tensor itself on a GPU, a NumPy view of it in the simulator.

    Raises:
        TypeError: not a tensor, or of another dtype.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.float32, torch.float16):
        raise TypeError(
            f"tensor must be float32 or float16 for Numba, got {tensor.dtype}; "
            "convert it with tensor.float()"
        )
    return tensor.numpy() if backend.INTERPRETED else tensor
