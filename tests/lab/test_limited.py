"""A limited launch is the launch, with shared memory for just so many programs."""

import ctypes
from collections import namedtuple
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from kernels import strided
from kernels.lab import backend, gpu, launch, limited, occupancy, words
from kernels.lab.limited import LimitedLaunch
from tests.helpers import assert_right, matrix

GPUS = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200", "RTX 5090")
Metadata = namedtuple("Metadata", "num_warps num_ctas shared target")


@pytest.mark.parametrize("name", GPUS)
def test_as_many_programs_fit_as_asked_for(name):
    on = gpu.named(name)
    for k in range(1, on.blocks_per_sm + 1):
        shared = limited.shared_for(k, on)
        assert shared <= on.shared_per_block
        found = occupancy.resident(on, num_warps=1, registers=16, shared=shared)
        assert found.limits["shared memory"] == k, (k, str(found))


@pytest.mark.parametrize("wrong", [0, 33, -1, 1.5, None])
def test_a_number_that_never_fits_is_named(wrong):
    with pytest.raises(ValueError, match="programs_per_sm must be from 1 to 32"):
        limited.shared_for(wrong, gpu.named("H200"))


class Kernel:
    """What Triton compiled, as far as a limited launch looks into it."""

    def __init__(self, shared: int) -> None:
        self.metadata = Metadata(4, 1, shared, GPUTarget("cuda", 90, 32))
        self.packed_metadata = (4, 1, shared)
        self.module, self.function, self._run = "module", 1, "run"
        self.launched: list = []

    def _init_handles(self) -> None:
        assert self.module is None and self._run is None  # not loaded yet
        self.module, self.function = "loaded", 1000 + self.metadata.shared

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args: self.launched.append((grid, args, self.packed_metadata))


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the driver; the H200 is here."""
    calls = []
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "here", lambda: gpu.named("H200"))
    monkeypatch.setattr(gpu, "driver", lambda *args: calls.append(args))
    return calls


def test_a_copy_is_loaded_with_more_shared_memory(asked):
    compiled = Kernel(shared=64)
    more = limited.with_shared(compiled, 5000)
    assert more.metadata.shared == 5000 and more.packed_metadata == (4, 1, 5000)
    assert more.module == "loaded" and more.function == 6000
    assert compiled.metadata.shared == 64 and compiled.packed_metadata == (4, 1, 64)
    assert compiled.module == "module" and compiled.function == 1
    ((name, function, attribute, percent),) = asked
    assert (name, attribute, percent) == ("cuFuncSetAttribute", 9, 100)
    assert isinstance(function, ctypes.c_void_p) and function.value == 6000


def test_a_kernel_keeps_the_shared_memory_that_it_uses(asked):
    assert limited.with_shared(Kernel(shared=9000), 5000).metadata.shared == 9000


def softmax_launch(x: torch.Tensor) -> launch.Launch:
    pointers = (launch.pointer_to(x),) * 2
    scalars, constants = (*x.stride(), *x.stride(), x.shape[1]), {"BLOCK_COLS": 64}
    return launch.Launch(
        strided.softmax_kernel, (len(x),), scalars, constants, pointers
    )


def test_every_call_passes_the_arguments_by_position(asked, monkeypatch):
    compiled, warmed = Kernel(shared=64), []

    def warmup(*args: Any, **options: Any) -> Kernel:
        warmed.append((args, options))
        return compiled

    x = matrix(7, 33)
    y, how = torch.empty_like(x), softmax_launch(x)
    monkeypatch.setattr(strided.softmax_kernel, "warmup", warmup, raising=False)
    limit = LimitedLaunch(how, 2)
    limit(y, x)
    limit(y, x)
    scalars = 33, 1, 33, 1, 33
    assert warmed == [((y, x, *scalars), {"grid": (7,), "BLOCK_COLS": 64})]
    call = (7, 1, 1), (y, x, *scalars, 64), (4, 1, limited.shared_for(2))
    assert compiled.launched == [call, call]  # a copy shares the list


def test_a_launch_with_words_takes_them_for_each_call(asked, monkeypatch):
    compiled, calls = Kernel(shared=0), iter([("words", 1), ("words", 2)])
    how = replace(softmax_launch(matrix(7, 33)), n_words=8)
    monkeypatch.setattr(words, "take", lambda n, device: next(calls) if n == 8 else ())
    monkeypatch.setattr(
        strided.softmax_kernel, "warmup", lambda *_, **__: compiled, raising=False
    )
    x, limit = matrix(7, 33), LimitedLaunch(how, 2)
    limit(x, x)
    limit(x, x)
    assert [args[2:4] for _, args, _ in compiled.launched] == [
        ("words", 1),
        ("words", 2),
    ]


def test_in_the_interpreter_it_is_the_launch():
    x = matrix(7, 33)
    y = torch.empty_like(x)
    LimitedLaunch(softmax_launch(x), 1)(y, x)
    assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_driver_gives_as_many_programs_a_place(k):
    import dataclasses

    from kernels.lab import compile

    x = torch.empty(64, 64, device="meta")
    made = compile.aot(softmax_launch(x), gpu=gpu.current())
    reserved = dataclasses.replace(made, shared=limited.shared_for(k))
    assert occupancy.by_driver(reserved) == k
