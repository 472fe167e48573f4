"""Stand-ins for what only a GPU has: a compiled kernel, and the CUDA driver."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from kernels.lab import backend, gpu


class FakeCompiled:
    """Stands in for the compiled kernel that a launch on a GPU returns.

    Subscripted by a grid and called with every argument of the kernel in order, it runs
    the kernel, in the interpreter too, so that a wrong argument makes a wrong result.
    As a compiled kernel, it takes no names, no fewer arguments and no shorter grid.

    Attributes:
        calls: (grid, arguments) of each call.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[int, ...], tuple]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        x, y, z = grid

        def run(*args: Any) -> None:
            n_params = len(self.kernel.arg_names)
            if len(args) != n_params:
                raise TypeError(f"expected {n_params} arguments, got {len(args)}")
            self.calls.append((grid, args))
            self.kernel[x, y, z](*args)

        return run


class FakeKernel:
    """Stands in for a `@triton.jit` kernel of which each launch returns what it used.

    In the interpreter a launch returns None. This one runs the kernel and returns a
    `FakeCompiled`, so that the path of later calls can be tested without a GPU:

        kernel = FakeKernel(tiled.softmax_kernel)
        monkeypatch.setattr(tiled, "softmax_kernel", kernel)

    Attributes:
        calls: (grid, arguments, keywords) of each launch through Triton.
        compiled: what each launch returns.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        kept = getattr(kernel, "kwargs", None) or vars(kernel)  # interpreted, compiled
        self.do_not_specialize = kept.get("do_not_specialize") or ()
        self.calls: list[tuple[tuple[int, ...], tuple, dict[str, Any]]] = []
        self.compiled = FakeCompiled(kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **keywords: Any) -> FakeCompiled:
            self.calls.append((grid, args, keywords))
            self.kernel[grid](*args, **keywords)
            return self.compiled

        return launch


ATTRIBUTES = {  # of cuda.h, by number, with an H200's answers
    **{1: 1024, 10: 32, 12: 65536, 16: 132, 36: 3201000, 37: 6144, 38: 62914560},
    **{39: 2048, 75: 9, 76: 0, 81: 233472, 82: 65536, 97: 232448, 106: 32, 111: 1024},
}


class FakeDriver:
    """Stands in for the library of the CUDA driver, on a machine with one GPU.

    Args:
        name: of the GPU.
        attributes: answers of the GPU that are not an H200's, by number.
        failing: the function that returns an error; None where all succeed.
        blocks: the driver's answer to every question for occupancy.
        free, total: memory of the GPU in bytes.

    Attributes:
        calls: (function, arguments…) of each call, in order.
    """

    DEVICE = 7  # the handle of the only GPU

    def __init__(
        self,
        name: str = "NVIDIA H200",
        *,
        attributes: dict[int, int] | None = None,
        failing: str | None = None,
        blocks: int = 5,
        free: int = 140 * 10**9,
        total: int = 150 * 10**9,
    ) -> None:
        self.name, self.failing, self.blocks = name, failing, blocks
        self.attributes = ATTRIBUTES | (attributes or {})
        self.free, self.total = free, total
        self.calls: list[tuple] = []

    @property
    def names(self) -> list[str]:
        """The functions that were called, in order."""
        return [name for name, *_ in self.calls]

    def __getattr__(self, function: str) -> Any:
        answer = _ANSWERS.get(function)
        if answer is None:
            raise AttributeError(f"undefined symbol: {function}")

        def call(*arguments: Any) -> int:
            self.calls.append((function, *arguments))
            return 999 if function == self.failing else answer(self, *arguments) or 0

        return call


def _set(reference: Any, value: Any) -> None:
    """Writes through what ctypes.byref returned."""
    reference._obj.value = value


def _get_device(driver: FakeDriver, device: Any, ordinal: int) -> int:
    _set(device, driver.DEVICE)
    return 0 if ordinal == 0 else 101


def _get_name(driver: FakeDriver, buffer: Any, size: int, device: Any) -> None:
    assert len(driver.name) < size
    buffer.value = driver.name.encode()


def _get_attribute(driver: FakeDriver, value: Any, number: int, device: Any) -> None:
    assert device.value == driver.DEVICE
    _set(value, driver.attributes[number])


def _get_memory(driver: FakeDriver, free: Any, total: Any) -> None:
    _set(free, driver.free)
    _set(total, driver.total)


def _get_error_name(driver: FakeDriver, code: int, text: Any) -> None:
    known = {101: b"CUDA_ERROR_INVALID_DEVICE", 999: b"CUDA_ERROR_UNKNOWN"}
    _set(text, known[code])


def _nothing(driver: FakeDriver, *arguments: Any) -> None:
    """For calls of which only the success matters."""


_ANSWERS = {
    "cuInit": _nothing,
    "cuDeviceGet": _get_device,
    "cuDeviceGetCount": lambda driver, count: _set(count, 1),
    "cuDeviceGetName": _get_name,
    "cuDeviceGetAttribute": _get_attribute,
    "cuMemGetInfo_v2": _get_memory,
    "cuGetErrorName": _get_error_name,
    "cuDevicePrimaryCtxRetain": _nothing,
    "cuCtxPushCurrent_v2": _nothing,
    "cuCtxPopCurrent_v2": _nothing,
    "cuModuleLoadData": _nothing,
    "cuModuleUnload": _nothing,
    "cuModuleGetFunction": _nothing,
    "cuFuncSetAttribute": _nothing,
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
        lambda driver, blocks, *asked: _set(blocks, driver.blocks)
    ),
}


@contextlib.contextmanager
def fake_gpu(**facts: Any) -> Iterator[FakeDriver]:
    """While active, the CUDA driver's library is a `FakeDriver` of these facts.

    As a fixture:

        @pytest.fixture
        def driver():
            with fake_gpu(name="NVIDIA H20") as driver:
                yield driver
    """
    driver, load = FakeDriver(**facts), ctypes.CDLL

    def fake_load(name: Any, *rest: Any, **options: Any) -> Any:
        is_driver = name == "libcuda.so.1"
        return driver if is_driver else load(name, *rest, **options)

    gpu.current.cache_clear()
    with (
        patch.object(ctypes, "CDLL", fake_load),
        patch.object(backend, "has_gpu", lambda: True),
    ):
        yield driver
    gpu.current.cache_clear()
