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

Weighed: `cuLaunchKernel` by ctypes, which is slower than Triton's C function; and a C
extension of our own, which needs a compiler wherever the course is installed.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs

from kernels.lab.launch import CachedLaunch, Launch


def key_of(launch: Launch) -> tuple:
    """What decides the machine code: launches of one key share a compiled kernel.

    Beside the constants, Triton distinguishes integers that are 1, that are multiples
    of 16, and that need 64 bits. A kernel may forgo the first two, for any parameter.
    """
    first = len(launch.pointers) + (0 if launch.workspace is None else 2)
    general = getattr(launch.kernel, "do_not_specialize", ())
    names = launch.kernel.arg_names[first:]
    sizes = [
        value.bit_length() > 31
        if name in general
        else (value == 1, value % 16 == 0, value.bit_length() > 31)
        for name, value in zip(names, launch.scalars, strict=False)
    ]
    constants = tuple(launch.constants.items())
    return launch.kernel, launch.pointers, constants, tuple(sizes)


def launch_to_find(cached: CachedLaunch, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Finds the compiled kernel of a launch that has none yet.

    Args:
        cached: the launch; gets what was found, which is nothing in the interpreter.
        tensors: those of its first call.

    Returns:
        Whether that took a launch on the tensors, because only Triton could find it.
    """
    key = tensors[-1].get_device(), key_of(cached.launch)
    compiled = _compiled.get(key)
    is_new = compiled is None
    if is_new:
        compiled = cached.launch(*tensors)
        if compiled is None:
            return True
        _compiled[key] = compiled
    n_varying = len(tensors) + (0 if cached.take is None else 2)
    cached.direct = bind(compiled, cached.grid, n_varying, cached.rest)
    cached.compiled = compiled
    return is_new


_compiled: dict[tuple, Any] = {}
"""The compiled kernel for each device and each `key_of` a launch."""


def bind(
    compiled: Any, grid: tuple[int, int, int], n_varying: int, rest: tuple
) -> Callable[..., None] | None:
    """Prepares the launches of a compiled kernel on the current device.

    Args:
        compiled: what a launch through Triton returned; the caller keeps it alive.
        grid: the number of programs along each of three axes.
        n_varying: how many of the kernel's first arguments differ between launches.
        rest: the arguments after those, the constexprs too.

    Returns:
        A function of n_varying integers, which are addresses where the kernel takes
        tensors. It launches the kernel on the device's current stream. The device must
        be the current one. None if this Triton does not launch as expected here.
    """
    try:
        known = _known.get(compiled)
        if known is None:
            known = _known[compiled] = _places(compiled, n_varying, rest)
        launch, after, are_nested = known
        runtime, stream_of = knobs.runtime, torch._C._cuda_getCurrentRawStream
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        _ = enter.calls, leave.calls
        device = torch.cuda.current_device()
    except (AttributeError, TypeError, ValueError):
        return None

    def is_watched() -> bool:
        """Whether a profiler wants to hear of launches, of which Triton tells it."""
        same = runtime.launch_enter_hook is enter and runtime.launch_exit_hook is leave
        return not same or bool(enter.calls or leave.calls)

    def launch_nested(*varying: int) -> None:
        if is_watched():
            compiled[grid](*varying, *rest)
        else:
            launch(*grid, stream_of(device), *after, (*varying, *rest))

    def launch_flat(*varying: int) -> None:
        if is_watched():
            compiled[grid](*varying, *rest)
        else:
            launch(*grid, stream_of(device), *after, *varying, *rest)

    return launch_nested if are_nested else launch_flat


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
