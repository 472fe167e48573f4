"""The direct launch passes to Triton's C function what Triton itself passes."""

import functools
import itertools
import sys
import types
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import triton
from triton import knobs

import kernels
from kernels import fastest
from kernels.lab import backend, compile, direct, launch, process
from kernels.lab import words as words_module
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
    monkeypatch.setattr(direct, "_compiled", {})


def installed_launcher():
    """The launcher of the Triton that is installed, without a kernel."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = object.__new__(CudaLauncher)
    sizes = ("global_scratch_size", "profile_scratch_size")
    aligns = ("global_scratch_align", "profile_scratch_align")
    flags = ("launch_cooperative_grid", "launch_pdl", "gsan_enabled")
    vars(launcher).update(dict.fromkeys(sizes, 0) | dict.fromkeys(aligns, 1))
    vars(launcher).update(dict.fromkeys(flags, False), num_ctas=1)
    vars(launcher).update(arg_annotations=["an"], kernel_signature=b"signature")
    return launcher


LAUNCHERS = [FlatLauncher, NestedLauncher, installed_launcher]


@pytest.mark.parametrize("make", LAUNCHERS)
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_passed_is_what_triton_passes(make, n, monkeypatch):
    if backend.INTERPRETED:  # Triton 3.9 asks for a driver, and there is none
        monkeypatch.setattr(triton.runtime.driver, "_active", object())
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


class Noting:
    """Stands in for a kernel: notes how Triton is asked to launch it."""

    def __init__(self, modes):
        self.modes, self.launches = modes, []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.launches.append((grid, args, constants, self.modes[-1]))

        return run


def test_what_a_graph_replays_is_another_kernel(monkeypatch):
    """Triton gets None for its tag, and may load it, but only then."""
    modes, compiled = [0], Compiled(NestedLauncher())

    def exchange(mode):
        held = modes[-1]
        modes.append(mode._obj.value)
        mode._obj.value = held
        return 0

    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(direct.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(direct.backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel, words = Noting(modes), torch.zeros(6, dtype=torch.int64)
    pointers = launch.Pointer(torch.float32), launch.Pointer(torch.bfloat16)
    made = launch.Launch(kernel, (3, 2), (7, 8), {"BLOCK": 64}, pointers, n_words=6)
    tags = iter([5, None, 6])
    launch_it = direct.bind(
        compiled,
        GRID,
        2,
        REST,
        lambda stream: (words, next(tags)),
        functools.partial(direct.launch_replayed, made),
    )
    for _ in range(3):
        launch_it(16, 32)
    address = words.data_ptr()
    passed = [(16, 32, address, 5, *REST), (16, 32, address, 6, *REST)]
    assert [call[-1] for call in compiled.passed] == passed
    ((grid, args, constants, mode),) = kernel.launches
    assert (grid, constants, mode, modes) == ((3, 2), {"BLOCK": 64}, 2, [0, 2, 0])
    assert [(each.dtype, each.data_ptr()) for each in args[:2]] == [
        (torch.float32, 16),
        (torch.bfloat16, 32),
    ]
    assert args[2] is words and args[3:] == (None, 7, 8)
    kernel.launches = None  # the next launch fails
    with pytest.raises(AttributeError):
        direct.launch_replayed(made, (16, 32), words)
    assert modes[-1] == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with direct.relaxed():
        assert modes[-1] == 0


def test_a_captured_first_call_finds_no_kernel_for_later_calls(monkeypatch):
    """It launches what is replayed, with words of the room."""
    kernel, room = Noting([0]), [torch.ones(6, dtype=torch.int64)]
    kernel.arg_names = ["output_ptr", "input_ptr", "words_ptr", "tag", "n_cols"]
    monkeypatch.setattr(direct, "_compiled", {})
    monkeypatch.setattr(direct.backend, "INTERPRETED", True)  # tensors are the CPU's
    monkeypatch.setattr(direct.words, "of_room", lambda n_words, device: room[0])
    x, y = torch.zeros(2, 3), torch.zeros(2, 3)
    pointers = launch.pointer_to(y), launch.pointer_to(x)
    made = launch.Launch(kernel, (3,), (7,), {"BLOCK": 64}, pointers, n_words=6)
    cached = direct.CachedLaunch(made)
    for _ in range(2):
        cached(y, x)
    assert cached.compiled is None and direct._compiled == {}
    for grid, args, constants, _ in kernel.launches:
        assert [each.data_ptr() for each in args[:2]] == [y.data_ptr(), x.data_ptr()]
        assert (grid, args[2], args[3:]) == ((3,), room[0], (None, 7))
        assert constants == {"BLOCK": 64}
    room[0] = None  # no room, or nothing is captured: Triton is asked, with a tag
    cached(y, x)
    assert len(kernel.launches) == 3 and kernel.launches[2][1][3] == 1


@pytest.mark.parametrize("change", [scratch, arguments_first, no_c_function, two_calls])
def test_an_unknown_launcher_is_left_to_triton(change):
    launcher = type("Another", (FlatLauncher,), {})()
    assert direct.bind(Compiled(launcher), GRID, 2, REST) is not None
    compiled = Compiled(launcher)
    change(launcher)
    assert direct.bind(compiled, GRID, 2, REST) is None
    assert direct.bind(types.SimpleNamespace(), GRID, 2, REST) is None


# ---- which launches share a compiled kernel ------------------------------------------


def some_lengths(n: int = 970, longest: int = 10**6) -> list[int]:
    """Lengths that any row may have: as many between 10 and 100 as beyond 100,000."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(n, generator=generator, dtype=torch.float64)
    return (longest**share).int().tolist()


def keys_of(launches: list[launch.Launch]) -> list[tuple[int, str]]:
    """Our key of each launch, as a number, and Triton's. In the compiler's world."""
    triton.runtime.driver.set_active(compile.Target(90))
    ours, theirs = {}, []
    hook = lambda **told: theirs.append(told["key"]) or True  # noqa: E731 - do not compile
    triton.knobs.runtime.jit_cache_hook = hook
    for kernel in {made.kernel for made in launches}:
        kernel.device_caches.clear()  # what is compiled would not be asked for again
    numbers = [ours.setdefault(direct.key_of(made), len(ours)) for made in launches]
    for made in launches:
        kernel, args, constants = compile.bare(made)
        kernel.warmup(*args, grid=(1,), **constants)
    triton.knobs.runtime.jit_cache_hook = None
    kernels = [made.kernel.__module__ for made in launches]
    return list(zip(numbers, map(str, zip(kernels, theirs, strict=True)), strict=True))


def launches_for(
    shapes: list[tuple[int, int]], dtype: torch.dtype, offset: int = 0
) -> list[launch.Launch]:
    """What the product launches for matrices on an H200, offset elements off."""
    made = []
    with patch.object(launch, "sms_and_threads", lambda: (132, 2048)):
        for n_rows, n_cols in shapes:
            y = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
            x = torch.empty(n_rows * n_cols + offset, dtype=dtype, device="meta")
            x = x[offset:].view(n_rows, n_cols)
            made.append(fastest.prepare(y, x, 1).launch)
    return made


def kernels_needed(*shapes: object) -> list[tuple[int, str]]:
    return keys_of(launches_for(*shapes))


@pytest.mark.parametrize(
    ("n_rows", "dtype", "most"),
    [
        (1, torch.float32, 24),
        (1, torch.bfloat16, 24),
        (100, torch.float32, 24),
        (4096, torch.float32, 104),
        (4096, torch.bfloat16, 110),
    ],
)
def test_lengths_of_one_class_share_a_kernel(n_rows, dtype, most):
    shapes = [(n_rows, n_cols) for n_cols in some_lengths()]
    needed = process.call_in("compiler", kernels_needed, shapes, dtype)
    ours, theirs = map(set, zip(*needed, strict=True))
    assert len(theirs) <= most
    assert len(set(needed)) == len(ours) <= len(theirs) * 1.1  # ours is no coarser


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_launches_that_share_a_kernel_are_alike_to_triton(offset):
    """Or a launch would run a kernel that was compiled for another."""
    rows = (1, 2, 3, 16, 31, 200, 5000)
    shapes = [*itertools.product(rows, (1, 2, 4, 16, 17, 48, 1000, 1001, 9000, 50_000))]
    shapes += [(65535, 2**16), (65535, 2**16 + 1), (2**31 - 1, 2)]  # strides, tiles
    needed = process.call_in("compiler", kernels_needed, shapes, torch.float32, offset)
    of_key = dict(needed)
    assert [theirs for _, theirs in needed] == [of_key[ours] for ours, _ in needed]


# ---- a cached launch -----------------------------------------------------------------


class Kernel:
    """A kernel that launches nothing, and returns what is compiled already."""

    do_not_specialize = ("n_cols",)

    def __init__(self, compiled: Compiled, with_words: bool) -> None:
        words = ["words_ptr", "tag"] if with_words else []
        names = ["output_ptr", "input_ptr", *words, "stride", "n_cols"]
        self.arg_names = [*names, "BLOCK", "EDGES"]
        self.compiled, self.n_launches = compiled, 0

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.n_launches += 1
            return self.compiled

        return run


@pytest.mark.parametrize("with_words", [False, True])
def test_a_cached_launch_is_direct_from_the_second_call_on(with_words, monkeypatch):
    compiled, x, y = Compiled(NestedLauncher()), matrix(3, 4), matrix(3, 4)
    words, streams = torch.zeros(8, dtype=torch.int64), []
    monkeypatch.setattr(words_module, "take", lambda n, device: (words, 5))
    take = lambda stream: streams.append(stream) or (words, 5)  # noqa: E731
    monkeypatch.setattr(words_module, "taker", lambda n, device: take)
    prepared = launch.Launch(
        kernel=Kernel(compiled, with_words),
        grid=(7,),
        scalars=(100, 1000),
        constants={"BLOCK": 64, "EDGES": True, "num_warps": 4},
        pointers=(launch.pointer_to(y), launch.pointer_to(x)),
        n_words=8 if with_words else 0,
    )
    cached = direct.CachedLaunch(prepared)
    for _ in range(3):
        cached(y, x)
    addresses = [y.data_ptr(), x.data_ptr()]
    addresses += [words.data_ptr(), 5] if with_words else []
    assert [passed[-1] for passed in compiled.passed] == [(*addresses, *REST)] * 2
    assert compiled.through_triton == [] and prepared.kernel.n_launches == 1
    assert streams == ([STREAM] * 2 if with_words else [])

    # Another launch that needs the same kernel is direct from the first call on.
    other = replace(prepared, grid=(9, 2), scalars=(200, 2000))
    direct.CachedLaunch(other)(y, x)
    assert compiled.passed[-1][:3] == (9, 2, 1)
    assert compiled.passed[-1][-1] == (*addresses, 200, 2000, *REST[2:])
    assert prepared.kernel.n_launches == 1

    for change in (
        {"scalars": (208, 1000)},  # a multiple of 16
        {"scalars": (1, 1000)},
        {"scalars": (2**31, 1000)},
        {"constants": other.constants | {"num_warps": 8}},
        {"constants": other.constants | {"BLOCK": 32}},
        {
            "pointers": (
                launch.Pointer(torch.float32, aligned=False),
                *other.pointers[1:],
            )
        },
        {"pointers": (launch.Pointer(torch.float16), *other.pointers[1:])},
        {"kernel": Kernel(compiled, with_words)},
    ):
        direct.CachedLaunch(replace(other, **change))(y, x)
    assert prepared.kernel.n_launches == 1 + 7


class Parameters:
    """Stands in for a kernel: its parameters, and those that forgo special cases."""

    def __init__(self, arg_names, do_not_specialize):
        self.arg_names, self.do_not_specialize = arg_names, do_not_specialize


def test_integers_of_64_bits_have_kernels_of_their_own_whatever_is_general():
    def key(n_cols, general):
        names = "output_ptr", "input_ptr", "n_cols"
        kernel = Parameters(names, general)
        pointers = launch.Pointer(torch.float32), launch.Pointer(torch.float32)
        # The key holds the kernel, which is another one each time.
        return direct.key_of(launch.Launch(kernel, (3,), (n_cols,), {}, pointers))[1:]

    assert key(5, ["n_cols"]) == key(16, ["n_cols"]) == key(1, ["n_cols"])
    assert key(5, ["n_cols"]) != key(2**31, ["n_cols"])
    assert len({key(n, []) for n in (1, 5, 16, 2**31)}) == 4


@pytest.mark.gpu
def test_this_triton_launches_as_expected(monkeypatch):
    monkeypatch.undo()
    fastest.known.clear()
    monkeypatch.setattr(kernels.operator.rules(), "launches", {})
    for shape in ((300, 64), (300, 33), (2, 2**17)):
        for seed in range(3):
            x = matrix(*shape, seed=seed)
            assert_right(fastest.softmax(x), x)
    assert all(
        prepared.direct is not None
        for prepared in kernels.operator.rules().launches.values()
    )
    assert "kernels.lab.direct" in sys.modules
    assert len(fastest.known) == 3  # the third call was like the second
