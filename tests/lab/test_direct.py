"""The direct launch passes to Triton's C function what Triton itself passes."""

import contextlib
import ctypes
import gc
import itertools
import sys
import types
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

import kernels
from kernels import fastest
from kernels.lab import backend, compile, direct, launch, operator, process
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
    shapes += [(2**16, 2**16), (2**16, 2**16 + 1), (2**31 - 1, 2)]  # strides, tiles
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
    words = torch.zeros(8, dtype=torch.int64)
    monkeypatch.setattr(words_module, "take", lambda n, device: (words, 5))
    taker = lambda n, device: lambda stream: (words, 5)  # noqa: E731
    monkeypatch.setattr(words_module, "taker", taker)
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


# ---- a call like an earlier one ------------------------------------------------------


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor of that shape and dtype whose memory starts there."""
    memory = (ctypes.c_byte * (like.numel() * like.element_size())).from_address(
        address
    )
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


class Calls:
    """Calls of `softmax` by a Triton whose launches write what PyTorch computes.

    Attributes:
        direct: how many launches there were without Triton's Python.
        others: the arguments of each call that was not like an earlier one.
    """

    def __init__(self, monkeypatch) -> None:
        self.direct, self.others = 0, []
        rules, run = kernels.operator.rules(), operator.Rules.run
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(operator, "_current_device", lambda: -1)
        monkeypatch.setattr(rules, "launches", {})
        monkeypatch.setattr(rules, "prepare", self.prepare)
        monkeypatch.setattr(
            operator.Rules,
            "run",
            lambda *a, **how: self.others.append(a[1:]) or run(*a, **how),
        )
        fastest.known.clear()

    def prepare(self, y, x, dim):
        def launch_at(y_address, x_address):
            self.direct += 1
            there = at(x_address, torch.empty(size, dtype=x_dtype))
            there = there.as_strided(x_shape, x_stride)
            at(y_address, torch.empty(y_shape, dtype=y_dtype)).copy_(
                torch.softmax(there, dim, dtype=y_dtype)
            )

        (x_shape, x_stride, x_dtype), size = (x.shape, x.stride(), x.dtype), span_of(x)
        y_shape, y_dtype = y.shape, y.dtype
        launch = lambda y, x: launch_at(y.data_ptr(), x.data_ptr())  # noqa: E731
        launch.direct = launch_at
        return launch


def span_of(x):
    return direct.span(x) // x.element_size()


@pytest.fixture
def calls(monkeypatch):
    if not backend.INTERPRETED:
        pytest.skip("a GPU is faked with CPU tensors; see test_fastest_launches")
    yield Calls(monkeypatch)
    fastest.known.clear()


def is_repeated(calls: Calls, x: object, *args: object, **how: object) -> bool:
    """Whether a call is done as an earlier one. Its result must be right anyway."""
    n_others, n_direct = len(calls.others), calls.direct
    before = x.detach().clone()
    y = fastest.softmax(x, *args, **how)
    dim, dtype = args[0] if args else -1, how.get("dtype")
    torch.testing.assert_close(y, torch.softmax(before, dim, dtype=dtype))
    return len(calls.others) == n_others and calls.direct > n_direct


FORMS = {
    "rows": lambda: (matrix(3, 8),),
    "columns": lambda: (matrix(3, 8), 0),
    "strided": lambda: (matrix(6, 8)[::2],),
    "transposed": lambda: (matrix(8, 3).t(),),
    "dtype": lambda: (matrix(3, 8), -1, torch.float64),
    "16 bits": lambda: (matrix(3, 8, torch.bfloat16),),
    "offset": lambda: (matrix(3, 8, offset=1),),
    "double": lambda: (matrix(3, 8, torch.float64),),
    "gradient": lambda: (matrix(3, 8).requires_grad_(),),
    "other shape": lambda: (matrix(8, 3),),
    "three dimensions": lambda: (matrix(3, 8).view(3, 2, 4), 1),
}


def call_of(form: str) -> tuple[tuple, dict]:
    """New arguments of a form for `is_repeated`."""
    made = FORMS[form]()
    x, dim, dtype = (*made, *(-1, None)[len(made) - 1 :])
    return (x, dim), {"dtype": dtype}


@pytest.mark.parametrize("form", FORMS)
def test_the_third_call_of_a_form_is_like_the_second(calls, form):
    answers = []
    for _ in range(4):
        args, how = call_of(form)
        answers.append(is_repeated(calls, *args, **how))
    assert answers == [False, False, True, True]


def test_forms_of_one_shape_do_not_disturb_each_other(calls, monkeypatch):
    monkeypatch.setattr(operator, "MOST_FORMS", len(FORMS))
    for _ in range(3):
        answers = []
        for form in FORMS:
            args, how = call_of(form)
            answers.append(is_repeated(calls, *args, **how))
    assert all(answers)


def test_so_many_forms_of_a_shape_are_kept_and_no_more(calls, monkeypatch):
    monkeypatch.setattr(operator, "MOST_FORMS", 2)
    for form in [form for form in FORMS for _ in range(3)]:
        args, how = call_of(form)
        is_repeated(calls, *args, **how)
    assert {len(known) for known in fastest.known.values()} <= {1, 2}


def test_a_repeated_call_is_recorded_where_a_gradient_is_wanted(calls):
    for _ in range(4):
        x = matrix(3, 8).requires_grad_()
        y = fastest.softmax(x, 1)
        y[:, 0].sum().backward()
        theirs = x.detach().requires_grad_()
        torch.softmax(theirs, 1)[:, 0].sum().backward()
        torch.testing.assert_close(x.grad, theirs.grad)
        with torch.no_grad():
            assert not fastest.softmax(x, 1).requires_grad
    assert len(calls.others) == 2


@pytest.mark.parametrize("offset", [0, 1])
def test_calls_with_out_are_repeated(calls, offset):
    answers = []
    for _ in range(4):
        x, out = matrix(3, 8), matrix(3, 8, offset=offset)
        version = out._version
        answers.append(is_repeated(calls, x, 1, out=out))
        assert out._version > version
        assert_right(out, x)
    assert answers == [False, False, True, True]


def test_calls_in_place_are_repeated(calls):
    answers = []
    for _ in range(4):
        x = matrix(3, 8)
        version = x._version
        answers.append(is_repeated(calls, x, 1, out=x))
        assert x._version > version
    assert answers == [False, False, True, True]
    assert not is_repeated(calls, x, 1, out=x.view(3, 8))
    assert not is_repeated(calls, x, 1)


def test_an_out_that_is_not_apart_is_not_like_one_that_is(calls):
    buffer = matrix(1, 64).view(-1)
    x = buffer[16:40].view(3, 8)
    for start in (40, 40, 40, 20, 24, 4, 16, 36, 40):  # multiples of 16 bytes
        out = buffer[start : start + 24].view(3, 8)
        before = x.clone()
        fastest.softmax(x, 1, out=out)
        assert_right(out, before)
        x.copy_(before)
    for _ in range(3):
        before = x.clone()
        assert_right(fastest.softmax(x, 1, out=x), before)
    x = matrix(3, 8).requires_grad_()
    for _ in range(3):
        with torch.no_grad():
            fastest.softmax(x, 1, out=out)
        with pytest.raises(RuntimeError, match="x requires a gradient"):
            fastest.softmax(x, 1, out=out)


def known_calls(calls: Calls) -> torch.Tensor:
    """A tensor whose calls are known, with out and without."""
    x, out = matrix(3, 8), matrix(3, 8)
    for _ in range(3):
        fastest.softmax(x, 1)
        fastest.softmax(x, 1, out=out)
    calls.others.clear()
    calls.direct = 0
    return x


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def softmax_1(x: torch.Tensor) -> torch.Tensor:
    return fastest.softmax(x, 1)


def inside(mode: contextlib.AbstractContextManager, x: torch.Tensor) -> torch.Tensor:
    with mode:
        return softmax_1(x)


def fake(x: torch.Tensor) -> torch.Tensor:
    """A softmax of fake tensors, which has no values, and the right one."""
    with FakeTensorMode() as mode:
        assert isinstance(softmax_1(mode.from_tensor(x)), FakeTensor)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(softmax_1(x), FakeTensor)
    return torch.softmax(x, 1)


def with_a_tangent(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(softmax_1(forward_ad.make_dual(x, x.sin())))
        assert tangent is not None
        return y


UNLIKE = {
    "a negative view": lambda x: softmax_1(torch._neg_view(-x)),
    "a subclass": lambda x: softmax_1(x.as_subclass(Subclass)).as_subclass(
        torch.Tensor
    ),
    "a parameter": lambda x: softmax_1(torch.nn.Parameter(x)).detach(),
    "a mode": lambda x: inside(Mode(), x),
    "a fake tensor": fake,
    "a tangent": with_a_tangent,
    "a level of forward differentiation": lambda x: inside(forward_ad.dual_level(), x),
    "vmap": lambda x: torch.vmap(softmax_1)(x.expand(2, 3, 8))[1],
    "in vmap": lambda x: torch.vmap(lambda s: s * softmax_1(x))(torch.ones(2))[1],
    "in grad": lambda x: torch.func.vjp(lambda s: s * softmax_1(x), torch.ones(1))[0],
    "functionalize": lambda x: torch.func.functionalize(softmax_1)(x),
    "make_fx": lambda x: make_fx(softmax_1)(x)(x),
    "torch.jit": lambda x: torch.jit.trace(softmax_1, (x,), check_trace=False)(x),
    "torch.compile": lambda x: torch.compile(softmax_1, backend="aot_eager")(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_not_plain_is_not_like_what_is(calls, kind):
    """It goes its own way and is right, though shape, strides and dtype are known."""
    x = known_calls(calls)
    y = UNLIKE[kind](x)
    torch.testing.assert_close(y, torch.softmax(x, 1))
    assert calls.direct <= len(calls.others)  # a repeated call is not among the others
    assert is_repeated(calls, x, 1)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu")])
def test_calls_are_repeated_within_inference_and_autocast(calls, mode):
    x = known_calls(calls)
    with mode():
        assert [is_repeated(calls, x, 1) for _ in range(3)] == [False, True, True]
        assert softmax_1(x).is_inference() == torch.is_inference_mode_enabled()
    assert is_repeated(calls, x, 1)


@pytest.mark.parametrize(
    ("change", "dim", "error"),
    [
        (lambda x: x.tolist(), 1, TypeError),
        (lambda x: x.numpy(force=True), 1, TypeError),
        (lambda x: x.int(), 1, TypeError),
        (lambda x: x.to("meta"), 1, ValueError),
        (lambda x: x.to_sparse(), 1, ValueError),
        (lambda x: x, True, TypeError),
        (lambda x: x, 1.0, TypeError),
        (lambda x: x, 2, IndexError),
    ],
)
def test_bad_input_is_named_where_calls_of_its_shape_are_known(
    calls, change, dim, error
):
    x = change(known_calls(calls))
    with pytest.raises(error, match="must be"):
        fastest.softmax(x, dim)
    with pytest.raises(error, match="must be"):
        fastest.softmax(x, dim, out=matrix(3, 8))


def test_a_nested_tensor_is_named():
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"must be strided, got a nested.*to_padded_"):
        fastest.softmax(nested, 1)


def test_memory_that_is_gone_is_named(calls):
    x = known_calls(calls)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x must have memory"):
        fastest.softmax(x, 1)


def test_another_device_than_the_current_one_is_not_repeated(calls, monkeypatch):
    current = [-1]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0])
    x = known_calls(calls)
    current[0] = 0
    assert not is_repeated(calls, x, 1, out=matrix(3, 8))


def test_no_tensor_of_a_call_is_kept(calls):
    kept = []
    for _ in range(3):
        x, out = matrix(3, 8), matrix(3, 8)
        kept += map(weakref.ref, (x, out, fastest.softmax(x)))
        fastest.softmax(x, out=out)
    del x, out
    calls.others.clear()
    gc.collect()
    assert not any(reference() is not None for reference in kept)


@pytest.mark.parametrize("lost", ["TensorGuards", "_empty_strided_cpu"])
def test_without_a_part_of_pytorch_calls_are_as_before(calls, lost, monkeypatch):
    parts = types.SimpleNamespace(**vars(torch._C._dynamo.guards))
    delattr(parts, lost)
    monkeypatch.setattr(torch._C._dynamo, "guards", parts)
    assert [is_repeated(calls, matrix(3, 8)) for _ in range(4)] == [False] * 4
    assert not any(fastest.known.values())


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
