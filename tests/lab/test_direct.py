"""The direct launch passes to Triton's C function what Triton itself passes."""

import sys
import types

import pytest
import torch
from triton import knobs

from kernels.lab import backend, direct, launch
from tests.helpers import assert_right, matrix

GRID = (7, 1, 1)
REST = (100, 1000, 64, True)
STREAM, FUNCTION = 12345, 678


class FlatLauncher:
    """Launches as Triton 3.6 does: the kernel's arguments come singly, at the end."""

    def __init__(self) -> None:
        self.launch = lambda *passed: None
        self.global_scratch_size = self.profile_scratch_size = 0

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, False, True, None, None, *rest)


class NestedLauncher(FlatLauncher):
    """Launches as Triton 3.7 does: the kernel's arguments come as one tuple."""

    def __call__(
        self, x, y, z, stream, function, metadata, description, enter, leave, *args
    ):
        told = metadata, description, enter, leave
        annotations = ["of", "arguments"], b"signature"
        self.launch(x, y, z, stream, function, *told, None, None, *annotations, args)


class Compiled:
    """A compiled kernel whose launches, and those through Triton, are noted."""

    def __init__(self, launcher) -> None:
        self.run, self.function, self.packed_metadata = launcher, FUNCTION, (4, 1, 0)
        self.passed: list[tuple] = []
        self.through_triton: list[tuple] = []
        launcher.launch = lambda *passed: self.passed.append(passed)

    def __getitem__(self, grid):
        return lambda *args: self.through_triton.append((grid, args))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Without a GPU, PyTorch has no function for the stream."""
    streams = {0: STREAM}
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def installed_launcher():
    """The launcher of the Triton that is installed, without a kernel."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = object.__new__(CudaLauncher)
    sizes = ("global_scratch_size", "profile_scratch_size")
    aligns = ("global_scratch_align", "profile_scratch_align")
    flags = ("launch_cooperative_grid", "launch_pdl")
    vars(launcher).update(dict.fromkeys(sizes, 0) | dict.fromkeys(aligns, 1))
    vars(launcher).update(dict.fromkeys(flags, False), num_ctas=1)
    vars(launcher).update(arg_annotations=["an"], kernel_signature=b"signature")
    return launcher


LAUNCHERS = [FlatLauncher, NestedLauncher, installed_launcher]


@pytest.mark.parametrize("make", LAUNCHERS)
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_passed_is_what_triton_passes(make, n):
    compiled = Compiled(make())
    launch_it = direct.bind(compiled, GRID, n, REST)
    assert compiled.passed == []  # nothing is launched to find out
    for addresses in (range(16, 16 + n), range(32, 32 + n)):
        launch_it(*addresses)
        compiled.run(
            *GRID, STREAM, FUNCTION, (4, 1, 0), None, None, None, *addresses, *REST
        )
    ours, theirs = compiled.passed[::2], compiled.passed[1::2]
    assert ours == theirs and len(ours) == 2 and ours[0] != ours[1]
    assert compiled.through_triton == []


def test_the_stream_is_the_current_one_of_each_launch(monkeypatch):
    compiled = Compiled(NestedLauncher())
    streams = iter([1, 2])
    function = lambda index: next(streams)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", function)
    launch_it = direct.bind(compiled, GRID, 2, REST)
    launch_it(16, 32)
    launch_it(16, 32)
    assert [passed[3] for passed in compiled.passed] == [1, 2]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profilers_hook_is_told_by_triton(hook, monkeypatch):
    compiled = Compiled(NestedLauncher())
    launch_it = direct.bind(compiled, GRID, 2, REST)
    chain = getattr(knobs.runtime, hook)
    chain.add(print)
    launch_it(16, 32)
    chain.remove(print)
    launch_it(48, 64)
    monkeypatch.setattr(knobs.runtime, hook, print)
    launch_it(80, 96)
    through_triton = [(GRID, (16, 32, *REST)), (GRID, (80, 96, *REST))]
    assert compiled.through_triton == through_triton
    assert [passed[-1][:2] for passed in compiled.passed] == [(48, 64)]


def scratch(launcher):
    launcher.global_scratch_size = 8


def arguments_first(launcher):
    kind = type(launcher)
    kind.__call__ = lambda self, x, y, z, stream, f, *a: self.launch(a, stream, f)


def no_c_function(launcher):
    del launcher.launch


def two_calls(launcher):
    kind = type(launcher)
    kind.__call__ = lambda self, *a: (self.launch(*a), self.launch(*a))


def test_one_kernel_serves_many_grids():
    compiled = Compiled(NestedLauncher())
    first = direct.bind(compiled, GRID, 2, REST)
    compiled.run.__class__ = FlatLauncher  # is not asked again
    second = direct.bind(compiled, (5, 6, 1), 2, (1, *REST[1:]))
    first(16, 32)
    second(48, 64)
    grids = [(passed[:3], passed[-1][:3]) for passed in compiled.passed]
    assert grids == [(GRID, (16, 32, REST[0])), ((5, 6, 1), (48, 64, 1))]


@pytest.mark.parametrize("change", [scratch, arguments_first, no_c_function, two_calls])
def test_an_unknown_launcher_is_left_to_triton(change):
    launcher = type("Another", (FlatLauncher,), {})()
    assert direct.bind(Compiled(launcher), GRID, 2, REST) is not None
    compiled = Compiled(launcher)
    change(launcher)
    assert direct.bind(compiled, GRID, 2, REST) is None
    assert direct.bind(types.SimpleNamespace(), GRID, 2, REST) is None


@pytest.mark.parametrize("with_words", [False, True])
def test_a_cached_launch_is_direct_from_the_second_call_on(with_words, monkeypatch):
    compiled, x, y = Compiled(NestedLauncher()), matrix(3, 4), matrix(3, 4)
    words = torch.zeros(8, dtype=torch.int64)
    workspace = types.SimpleNamespace(taker=lambda: lambda device: (words, 5))
    prepared = launch.Launch(
        kernel={(7,): lambda *args, **constants: compiled},
        grid=(7,),
        scalars=(100, 1000),
        constants={"BLOCK": 64, "EDGES": True, "num_warps": 4},
        pointers=(launch.pointer_to(y), launch.pointer_to(x)),
        workspace=workspace if with_words else None,
    )
    cached = launch.CachedLaunch(prepared)
    for _ in range(3):
        cached(y, x)
    addresses = [y.data_ptr(), x.data_ptr()]
    addresses += [words.data_ptr(), 5] if with_words else []
    assert [passed[-1] for passed in compiled.passed] == [(*addresses, *REST)] * 2
    assert compiled.through_triton == []


def test_nothing_imports_it_before_a_launch_on_a_gpu():
    from tests.test_import import told

    code = "import sys, json\nfrom kernels import softmax\nimport torch\n"
    code += f"softmax(torch.ones(2, 3, device={backend.DEVICE!r}))\n"
    code += "print(json.dumps('kernels.lab.direct' in sys.modules))"
    assert told(code) is (backend.DEVICE == "cuda")


@pytest.mark.gpu
def test_this_triton_launches_as_expected(monkeypatch):
    from kernels import fastest

    monkeypatch.undo()
    monkeypatch.setattr(fastest, "_launches", {})
    for shape in ((300, 64), (300, 33), (2, 2**17)):
        for seed in range(3):
            x = matrix(*shape, seed=seed)
            assert_right(fastest.softmax(x), x)
    assert all(prepared.direct is not None for prepared in fastest._launches.values())
    assert "kernels.lab.direct" in sys.modules
