"""A compiled kernel's launch without Triton's Python, which takes longer than the rest.

Before Triton reaches its C function for launches, its Python describes the launch for
the hooks of profilers, asks for the device and the stream, and looks for memory that
few kernels need. That takes some microseconds of a call. After the first call all of it
is known but the stream and the addresses. So `bind` prepares the C function's call.

The order of the C function's arguments is private to Triton and differs between its
versions, so this module does not know it. For each kernel, `bind` has Triton's own
launcher call a stand-in for the C function once, and notes what the stand-in is passed.
Where Triton's parts are not as expected, `bind` returns None, and launches go Triton's
way.

Launches of other sizes often need the same compiled kernel. `launch_to_find` knows what
decides that, so that such a launch does not go through Triton even the first time.

A call on tensors like those of an earlier call needs still less. `repeat` makes a
function of what the earlier call found out. It asks PyTorch's guards one question,
allocates without the dispatcher, and calls Triton's C function.

Weighed: `cuLaunchKernel` by ctypes, which is slower than Triton's C function; and a C
extension of our own, which needs a compiler wherever the course is installed.
"""

import contextlib
import copy
import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from triton import knobs

from kernels.lab import backend, words
from kernels.lab.launch import Launch


class CachedLaunch:
    """A launch that looks its compiled kernel up once.

    Triton inspects the arguments of every call to find the compiled kernel. But the
    calls of a `Launch` differ only in addresses and in the tag. Unless the tag is None,
    they decide nothing: the kernel of the first call serves later calls, through `bind`
    where it can. The interpreter has none, and Triton is called.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.grid = (*launch.grid, 1, 1)[:3]
        # A compiled kernel takes every argument by position, its constexprs too.
        constexprs = [value for key, value in launch.constants.items() if key.isupper()]
        self.rest = (*launch.scalars, *constexprs)
        self.compiled: Any = None
        self.direct: Any = None  # launches what is compiled, given addresses

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches the kernel on tensors like those that the launch was made from."""
        if self.compiled is None and launch_to_find(self, tensors):
            return
        if self.direct is None:
            words = self.launch.take_words(tensors[-1])
            self.compiled[self.grid](*tensors, *words, *self.rest)
        else:
            self.direct(*[tensor.data_ptr() for tensor in tensors])


def key_of(launch: Launch) -> tuple:
    """What decides the machine code: launches of one key share a compiled kernel.

    Beside the constants, Triton distinguishes integers that are 1, that are multiples
    of 16, and that need 64 bits. A kernel may forgo the first two, for any parameter.
    """
    first = len(launch.pointers) + (2 if launch.n_words else 0)
    sizes = [
        value > LARGEST
        if is_general
        else (value == 1, value % 16 == 0, value > LARGEST)
        for is_general, value in zip(
            _are_general(launch.kernel, first), launch.scalars, strict=False
        )
    ]
    constants = *launch.constants, *launch.constants.values()
    return launch.kernel, launch.pointers, constants, *sizes


LARGEST = 2**31 - 1  # that an integer of 32 bits holds; scalars are not negative


@functools.lru_cache(maxsize=64)
def _are_general(kernel: Any, first: int) -> tuple[bool, ...]:
    """Whether a kernel forgoes special cases, for each parameter from the first on."""
    general = getattr(kernel, "do_not_specialize", ())
    return tuple(name in general for name in kernel.arg_names[first:])


def launch_to_find(cached: CachedLaunch, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Finds the compiled kernel of a launch that has none yet.

    Args:
        cached: the launch; gets what was found, which is nothing in the interpreter.
        tensors: those of its first call.

    Returns:
        Whether that took a launch on the tensors, because only Triton could find it.
    """
    n_words, device = cached.launch.n_words, tensors[-1].device
    key = device.index, key_of(cached.launch)
    compiled = _compiled.get(key)
    is_new = compiled is None
    if is_new:
        room = words.of_room(n_words, device) if n_words else None
        if room is not None:  # captured: what is launched serves no call outside
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            launch_replayed(cached.launch, addresses, room)
            return True
        with relaxed():
            compiled = cached.launch(*tensors)
        if compiled is None:
            return True
        _compiled[key] = compiled
    take = words.taker(n_words, device) if n_words else None
    shared = take, functools.partial(launch_replayed, cached.launch)
    cached.direct = bind(compiled, cached.grid, len(tensors), cached.rest, *shared)
    cached.compiled = compiled
    return is_new


def launch_replayed(
    launch: Launch, addresses: tuple[int, ...], words: torch.Tensor
) -> None:
    """Launches what a graph replays: the kernel that counts the replays itself.

    Triton compiles it and loads it where it is launched for the first time.
    """
    pairs = zip(launch.pointers, addresses, strict=True)
    tensors = [Address(pointer.dtype, address) for pointer, address in pairs]
    run = launch.kernel[launch.grid]
    with relaxed():
        _replayed.add(run(*tensors, words, None, *launch.scalars, **launch.constants))


@dataclass(frozen=True)
class Address:
    """What Triton takes for a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Lets this thread load kernels while it captures a graph.

    CUDA forbids it otherwise, as a kernel may need memory, which is not the graph's.
    """
    if backend.INTERPRETED or not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    exchange = driver.cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_compiled: dict[tuple, Any] = {}
"""The compiled kernel for each device and each `key_of` a launch."""
_replayed: set = set()  # compiled kernels, kept loaded for the graphs that replay them


def bind(
    compiled: Any,
    grid: tuple[int, int, int],
    n_tensors: int,
    rest: tuple,
    take: Callable[[int], tuple[torch.Tensor, int | None]] | None = None,
    replayed: Callable[[tuple[int, ...], torch.Tensor], None] | None = None,
) -> Callable[..., None] | None:
    """Prepares the launches of a compiled kernel on the current device.

    Args:
        compiled: what a launch through Triton returned; the caller keeps it alive.
        grid: the number of programs along each of three axes.
        n_tensors: how many of the kernel's first arguments are tensors of the caller.
        rest: the arguments after those and after the words, the constexprs too.
        take: gives each launch words and a tag, as `words.taker`; None if the kernel
            takes none.
        replayed: launches, from addresses and words, where the tag is None.

    Returns:
        A function of n_tensors addresses. It launches the kernel on the device's
        current stream. The device must be the current one. None if this Triton does not
        launch as expected here.
    """
    try:
        known = _known.get(compiled)
        if known is None:
            n_varying = n_tensors + (0 if take is None else 2)
            known = _known[compiled] = _places(compiled, n_varying, rest)
        launch, after, are_nested = known
        runtime, stream_of = knobs.runtime, torch._C._cuda_getCurrentRawStream
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        _ = enter.calls, leave.calls
        device = torch.cuda.current_device()
    except (AttributeError, TypeError, ValueError):
        return None

    def launch_at(*addresses: int) -> None:
        stream = stream_of(device)
        if take is not None:
            words, tag = take(stream)  # the name keeps the words until the launch
            if tag is None:
                return replayed(addresses, words)
            addresses = (*addresses, words.data_ptr(), tag)
        if (
            enter.calls
            or leave.calls
            or runtime.launch_enter_hook is not enter
            or runtime.launch_exit_hook is not leave
        ):  # a profiler wants to hear of launches, of which Triton tells it
            compiled[grid](*addresses, *rest)
        elif are_nested:
            launch(*grid, stream, *after, (*addresses, *rest))
        else:
            launch(*grid, stream, *after, *addresses, *rest)

    return launch_at


def repeat(
    launch_at: Callable[[int, int], None],
    call: tuple[torch.Tensor, int, torch.dtype | None, torch.Tensor | None],
    y: torch.Tensor,
    record: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor | None] | None:
    """Prepares calls of an operator that are like a call that was just made.

    The guards of `torch.compile` tell whether tensors are like the call's. They compare
    type, sizes, strides, dtype, device and `requires_grad`, and what the dispatcher
    would do with the tensors now. So a call within a transform, a mode (but that of a
    default device) or a tracer is not like a call outside, nor is a fake tensor or a
    negative view like a plain one.

    Args:
        launch_at: what `bind` made for the call's launch.
        call: its x, dim, dtype and out, as they were passed.
        y: where the result was written; out if that was given.
        record: `record(f, x, dim, dtype)` is `f(x, dim, dtype)`, recorded for autograd.

    Returns:
        A function of any x, dim, dtype and out. If they are like the call's, it does
        what the call did and returns the output. Otherwise it does nothing and returns
        None. Instead of the function, None where this PyTorch lacks a part of it, where
        x's device is not current, and where out is given and a tensor requires a
        gradient or out is an inference tensor, which only its mode may write to.
    """
    x, dim, dtype, given = call
    tensors = (x,) if given is None or given is x else (x, y)
    requires_grad = x.requires_grad and not x.is_inference()
    try:
        guards, current_device = torch._C._dynamo.guards, torch._C._cuda_getDevice
        is_like = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        empty = getattr(guards, f"_empty_strided_{x.device.type}")
        form = tuple(y.shape), tuple(y.stride()), y.dtype
        device, is_elsewhere = x.get_device(), current_device() != x.get_device()
    except (AttributeError, RuntimeError, TypeError):
        return None
    if (
        is_elsewhere
        or not is_like(*tensors)
        or not _allocates(empty, x.device, y.dtype)
        or (given is not None and (x.requires_grad or y.requires_grad))
        or (given is not None and y.is_inference())
    ):
        return None
    x_place = x.data_ptr() & 15
    n_modes = torch._C._len_torch_dispatch_stack  # the guards miss some modes

    def write(x: torch.Tensor, *_: object) -> torch.Tensor:
        y = empty(*form)
        launch_at(y.data_ptr(), x.data_ptr())
        return y

    def again(x: Any, its_dim: Any, its_dtype: Any, out: Any) -> torch.Tensor | None:
        if (
            out is None
            and (its_dim is dim or (type(its_dim) is int and its_dim == dim))
            and its_dtype is dtype
            and is_like(x)
            and not n_modes()
            and not is_heard()
            and forward_ad._current_level < 0
            and current_device() == device
            and (address := x.data_ptr())
            and address & 15 == x_place
        ):
            if requires_grad and records():
                return record(write, x, dim, dtype)
            return write(x)
        return None

    def again_in_place(
        x: Any, its_dim: Any, its_dtype: Any, out: Any
    ) -> torch.Tensor | None:
        if (
            out is x
            and (its_dim is dim or (type(its_dim) is int and its_dim == dim))
            and its_dtype is dtype
            and is_like(x)
            and not n_modes()
            and not is_heard()
            and forward_ad._current_level < 0
            and current_device() == device
            and (address := x.data_ptr())
            and address & 15 == x_place
        ):
            launch_at(address, address)
            torch.autograd.graph.increment_version(x)
            return x
        return None

    if given is None or given is x:
        return again if given is None else again_in_place
    x_size, y_size, y_place = span(x), span(y), y.data_ptr() & 15

    def again_into(
        x: Any, its_dim: Any, its_dtype: Any, out: Any
    ) -> torch.Tensor | None:
        if (
            out is not None
            and (its_dim is dim or (type(its_dim) is int and its_dim == dim))
            and its_dtype is dtype
            and is_like(x, out)
            and not n_modes()
            and not is_heard()
            and forward_ad._current_level < 0
            and current_device() == device
            and (first := x.data_ptr())
            and first & 15 == x_place
            and (target := out.data_ptr())
            and target & 15 == y_place
            and (target + y_size <= first or first + x_size <= target)
        ):
            launch_at(target, first)
            torch.autograd.graph.increment_version(out)
            return out
        return None

    return again_into


def is_heard() -> bool:
    """Whether a mode hears of each function that is called, as a recorder would.

    The modes of a default device (`torch.set_default_device`, `with torch.device(...)`)
    do not count: they change only those functions that make tensors.
    """
    if n_modes := torch._C._len_torch_function_stack():
        modes = map(torch._C._get_function_stack_at, range(n_modes))
        return not all(isinstance(mode, DeviceContext) for mode in modes)
    return False


def records() -> bool:
    """Whether autograd records. Inference mode goes before the mode of gradients."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@functools.cache
def _allocates(empty: Callable, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a private function of PyTorch allocates as it does for Inductor."""
    try:
        made = empty((2, 3), (3, 1), dtype)
        form = made.shape, made.stride(), made.dtype, made.device
    except (AttributeError, RuntimeError, TypeError):
        return False
    return form == ((2, 3), (3, 1), dtype, device)


def span(x: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last; 0 if empty."""
    if not x.numel():
        return 0
    steps = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size()


_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""What `_places` has found for each compiled kernel, which many grids share."""


def _places(
    compiled: Any, n_varying: int, rest: tuple
) -> tuple[Callable[..., None], tuple, bool]:
    """How Triton's launcher calls its C function for a compiled kernel.

    Returns:
        The C function, whose first arguments are the grid and the stream; what it is
        passed between the stream and the kernel's arguments; and whether the kernel's
        arguments are passed as one tuple, or singly.

    Raises:
        AttributeError, TypeError, ValueError: the launcher calls no such function.
    """
    launcher, spy = compiled.run, copy.copy(compiled.run)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise ValueError("Triton allocates memory for each launch")
    calls: list[tuple] = []
    spy.launch = lambda *passed: calls.append(passed)
    # No value of a launch equals these, and no two of these are equal.
    *grid, stream = (object() for _ in range(4))
    arguments = (*(object() for _ in range(n_varying)), *rest)
    hooks = None, None, None  # the launch's description, and whom to tell of it
    spy(*grid, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments)
    (passed,) = calls
    are_nested = isinstance(passed[-1], tuple | list)
    if are_nested:
        passed = (*passed[:-1], *passed[-1])
    end = len(passed) - len(arguments)
    if passed[:4] != (*grid, stream) or passed[end:] != arguments or end < 4:
        raise ValueError("the launch's arguments are in another order")
    return launcher.launch, passed[4:end], are_nested
