"""Numba CUDA, where it is installed: kernels written for one thread.

Chapter 3 sets such a kernel beside Triton's. Numba is an optional dependency that takes
half a second to import, so `@cuda.jit` here waits until a kernel is launched. Without a
GPU kernels then run in Numba's simulator, which has to be asked for before Numba is
imported; so nobody else imports it. In the simulator each thread of a block is a thread
of Python: blocks should be small.

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
        numba_cuda = _import()
        self.fn.__globals__["cuda"] = numba_cuda  # the name that its code looks up
        return numba_cuda.jit(self.fn)


cuda = SimpleNamespace(jit=ThreadKernel)
"""Stands in for `numba.cuda` in a kernel's module until a kernel is launched."""


def _import() -> ModuleType:
    """Numba's `cuda`, or a RuntimeError that says what is missing."""
    if backend.INTERPRETED:
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # few are meant
    try:
        from numba import cuda
    except ImportError:
        raise RuntimeError(
            "Numba is not installed, so its kernel is shown and not run here; "
            "pip install numba-cuda"
        ) from None
    if not cuda.is_available():
        raise RuntimeError(
            "Numba finds no GPU or no CUDA toolkit, so its kernel is shown and not run "
            "here; pip install 'numba-cuda[cu13]' brings a toolkit"
        )
    return cuda


def ready() -> bool:
    """Whether Numba's kernels can run here; if not, prints one line that says why."""
    try:
        _import()
    except RuntimeError as error:
        print(error)
        return False
    return True


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
