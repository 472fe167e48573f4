"""A compiled kernel's launch without Triton's Python, which takes longer than the rest.

Before Triton reaches its C function for launches, its Python describes the launch for
the hooks of profilers, asks for the device and the stream, and looks for memory that
few kernels need. That takes some microseconds of a call. After the first call all of it
is known but the stream and the addresses. So `bind` prepares the C function's call.

The order of the C function's arguments is private to Triton and differs between its
versions, so this module does not know it. `bind` has Triton's own launcher call a
stand-in for the C function once, and notes where the stream and the kernel's arguments
are. Where Triton's parts are not as expected, `bind` returns None, and launches go
Triton's way.

Weighed: `cuLaunchKernel` by ctypes, which is slower than Triton's C function; and a C
extension of our own, which needs a compiler wherever the course is installed.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs


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
        launcher, runtime = compiled.run, knobs.runtime
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None  # Triton allocates memory for each launch
        stream, varying = object(), tuple(object() for _ in range(n_varying))
        arguments = (*varying, *rest)
        before, after, are_nested = _places(compiled, grid, stream, arguments)
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        _ = enter.calls, leave.calls
        launch, stream_of = launcher.launch, torch._C._cuda_getCurrentRawStream
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
            launch(*before, stream_of(device), *after, (*varying, *rest))

    def launch_flat(*varying: int) -> None:
        if is_watched():
            compiled[grid](*varying, *rest)
        else:
            launch(*before, stream_of(device), *after, *varying, *rest)

    return launch_nested if are_nested else launch_flat


def _places(
    compiled: Any, grid: tuple[int, int, int], stream: object, arguments: tuple
) -> tuple[tuple, tuple, bool]:
    """What Triton's launcher passes to its C function, besides stream and arguments.

    Args:
        stream: a stand-in, which no other argument equals.
        arguments: the kernel's, with stand-ins for those that vary.

    Returns:
        What comes before the stream; what comes between the stream and the kernel's
        arguments; and whether those are passed as one tuple, or singly.

    Raises:
        ValueError: they are elsewhere, or the C function is not called once.
    """
    calls: list[tuple] = []
    launcher = copy.copy(compiled.run)
    launcher.launch = lambda *passed: calls.append(passed)
    hooks = None, None, None  # the launch's description, and whom to tell of it
    launcher(
        *grid, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments
    )
    (passed,) = calls
    are_nested = isinstance(passed[-1], tuple | list)
    if are_nested:
        passed = (*passed[:-1], *passed[-1])
    end, place = len(passed) - len(arguments), passed.index(stream)
    if place >= end or passed[end:] != arguments:
        raise ValueError("the kernel's arguments do not come last")
    return passed[:place], passed[place + 1 : end], are_nested
