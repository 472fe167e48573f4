"""Every launch of the course compiles for every kind of GPU, and its blocks fit an SM.

Nothing here needs a GPU: the launches are made from tensors without memory, and
compiled ahead of time, by `make test-all`. The chapters in `THEMSELVES` do the same in
their own tests, as their launches differ most. The pages' experiments are in
`tests/benchmarks`.
"""

import importlib
import re

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kernels
from kernels import (
    columns,
    cooperative,
    fastest,
    gradient,
    meta,
    online,
    persistent,
    program,
    residency,
    staged,
    strided,
    tiled,
    traffic,
    unaligned,
    windows,
)
from kernels.lab import compile, gpu, occupancy
from kernels.lab.launch import Launch
from tests.helpers import DTYPES, GPUS, dtypes_for, meta_matrix

THEMSELVES = ("debugging", "profiling", "compiler", "layouts", "cuda", "matmul")

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)


# ---- each chapter's launches, one for each variant of its kernel ---------------------


def of_traffic(dtype):
    x = compile.pointer(dtype)
    yield traffic.empty_kernel, (x,), {}
    for n in (2**20, 1001):  # wide accesses, and not
        yield traffic.copy_kernel, (x, x, n), {"BLOCK": 1024}


def of_program(dtype):
    x = compile.pointer(dtype)
    for n in (1024, 1001):  # wide accesses, and not
        yield program.add_kernel, (x, x, x, n), {"BLOCK": 1024}
        yield program.softmax_kernel, (x, x, n), {"BLOCK_COLS": 1024}


def of_strided(dtype):
    x = meta_matrix(8, 1001, dtype, stride=1008)
    for view in (x[:, 1:], x.t()):
        yield strided.softmax_kernel, meta.arguments(view, view), {}


def of_residency(dtype):
    for n_cols in (2048, 2047):  # wide accesses, and not
        x = meta_matrix(8, n_cols, dtype)
        yield residency.launch_for(x, x)
        yield residency.launch_for(x, x, maxnreg=32)
    ring = compile.pointer(torch.int32)
    yield residency.chase_kernel, (ring, ring, 4096), {"num_warps": 1}


def of_meta(dtype):
    x = meta_matrix(8, 4096, dtype)
    for warps in (1, 32):
        yield strided.softmax_kernel, meta.arguments(x, x), {"num_warps": warps}


def of_persistent(dtype):
    x = compile.pointer(dtype)
    for n_cols in (60, 1024, 8192):  # rows share a tile; one buffer; several
        config = persistent.choose_config(n_cols, dtype.itemsize)
        sizes = n_cols, 1, n_cols, 1, 4096, n_cols
        tile = config.rows_per_tile, config.block_cols, config.num_stages
        options = {"num_warps": config.num_warps}
        yield persistent.softmax_kernel, (x, x, *sizes, *tile), options


def of_tiled(dtype):
    for n_cols in (64, 3000, 33):  # rows share a tile; two blocks; narrow accesses
        x = meta_matrix(64, n_cols, dtype)
        yield tiled.launch_for(x, x)


def of_unaligned(dtype):
    for n_cols in (33, 3001):
        x = meta_matrix(64, n_cols, dtype, offset=1)
        yield unaligned.launch_for(x, x)
    sliced = meta_matrix(64, 2001, dtype, stride=2100)  # the output is not
    yield unaligned.launch_for(meta_matrix(64, 2001, dtype), sliced)


def of_online(dtype):
    rows = meta_matrix(3, 70_000, dtype)
    columns = meta_matrix(64, 5000, dtype).t()
    doubles = meta_matrix(3, 5000, torch.float64)  # no other chapter takes them
    for x in (rows, columns, doubles):
        yield online.launch_for(x, x)
        shared = []  # by programs, in two launches
        online.prepare(x[:1], x[:1], shared.append)
        yield from shared


def of_cooperative(dtype):
    for shape in ((1, 70_000), (2, 70_001), (1024, 70_000)):  # small; edges; large
        x = meta_matrix(*shape, dtype)
        yield cooperative.launch_for(x, x)
    sliced = meta_matrix(2, 70_001, dtype, stride=70_100)  # the output is not
    yield cooperative.launch_for(meta_matrix(2, 70_001, dtype), sliced)


def of_fastest(dtype):
    """What `softmax` adds: smaller tiles, a result of another dtype, and replays."""
    for n_cols in (64, 33, 2, 1):
        x = meta_matrix(264, n_cols, dtype)
        yield fastest.prepare(x, x, 1).launch
        yield fastest.prepare(meta_matrix(264, n_cols, torch.float32), x, 1).launch
    x = meta_matrix(2, 70_001, dtype)
    for made in (cooperative.launch_for(x, x), gradient.launch_for(x, x, x)):
        words = compile.pointer(torch.int64)
        args = *made.pointers, words, None, *made.scalars
        yield made.kernel, args, made.constants


def of_gradient(dtype):
    for n_cols in (64, 9, 33, 3001, 50_257):  # tiles, pairs, edges, a row, parts
        y = meta_matrix(64, n_cols, dtype)
        yield gradient.launch_for(y, y, y)


def of_staged(dtype):
    for n_cols in (3, 33, 63):
        x = meta_matrix(64, n_cols, dtype)
        yield staged.launch_for(x, x)  # of 32 bits: another chapter's


def of_windows(dtype):
    for n_cols in (781, 4097, 50_257):  # a warp, two warps, parts
        x = meta_matrix(64, n_cols, dtype, stride=n_cols + 3)
        yield windows.launch_for(meta_matrix(64, n_cols, dtype), x)


def of_columns(dtype):
    def stack(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    long = stack(4, 300, 64)  # in wide accesses; by programs, in two launches
    doubles = stack(4, 300, 64, dtype=torch.float64)
    for x in (long, doubles):
        yield columns.launch_for(x, x)
        shared = []
        columns.prepare(x, x, shared.append)
        yield from shared
    for x in (stack(4, 21, 65), stack(2, 40, 7)):  # held; columns of both matrices
        yield columns.launch_for(x, x)


CHAPTERS = {
    "traffic": of_traffic,
    "program": of_program,
    "strided": of_strided,
    "residency": of_residency,
    "meta": of_meta,
    "persistent": of_persistent,
    "tiled": of_tiled,
    "unaligned": of_unaligned,
    "online": of_online,
    "cooperative": of_cooperative,
    "fastest": of_fastest,
    "gradient": of_gradient,
    "staged": of_staged,
    "windows": of_windows,
    "columns": of_columns,
}


def launches_of(chapter, dtypes=DTYPES):
    return [launch for dtype in dtypes for launch in CHAPTERS[chapter](dtype)]


def kernel_of(launch):
    return launch.kernel if isinstance(launch, Launch) else launch[0]


def compile_and_fit(launches, name):
    """Compiles launches for a GPU, and asserts that a block of each fits its SM."""
    on = gpu.named(name)
    target = rf"\.target sm_{on.compute_capability}a?\b"
    for compiled in compile.aot_all(launches, gpu=on):
        assert compiled.count(target) == 1
        assert occupancy.of(compiled).blocks_per_sm >= 1, str(compiled)


def kernels_in(modules):
    """The kernels that modules define, without those that they import."""
    return {
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction | InterpretedFunction)
        and name.endswith("_kernel")
        and value.fn.__module__ == module.__name__
    }


# ---- the tests -----------------------------------------------------------------------


def test_these_are_the_kinds_of_gpu():
    assert tuple(gpu.named(name).compute_capability for name in GPUS) == CAPABILITIES


def test_every_kernel_of_the_course_is_launched():
    launched = {kernel_of(each) for stem in CHAPTERS for each in launches_of(stem)}
    stems = [stem for stem in kernels.CHAPTERS if stem not in THEMSELVES]
    modules = [importlib.import_module(f"kernels.{stem}") for stem in stems]
    assert kernels_in(modules) == launched


@pytest.mark.parametrize("stem", THEMSELVES)
def test_the_other_chapters_compile_their_own_for_every_gpu(stem):
    tests = vars(importlib.import_module(f"tests.test_{stem}"))
    (test,) = (
        tests[name] for name in tests if re.match(r"test_every_\w+_compiles", name)
    )
    (names,) = (mark.args[1] for mark in test.pytestmark if mark.args[:1] == ("name",))
    assert tuple(gpu.named(name).compute_capability for name in names) == CAPABILITIES


@pytest.mark.thorough
@pytest.mark.parametrize("chapter", CHAPTERS)
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name, chapter):
    compile_and_fit(launches_of(chapter, dtypes_for(name)), name)
