"""Every kernel of the pages' experiments compiles for every kind of GPU, too.

As in `tests.test_every_gpu`, nothing here needs a GPU. The launches are those that the
pages make, in the dtypes that they make them in.
"""

import importlib
import itertools
import pkgutil

import pytest
import torch

import benchmarks
from benchmarks import (
    backwards,
    edges,
    faults,
    layouts,
    ledger,
    options,
    parts,
    passes,
    peers,
    profilers,
    residency,
    schedules,
    sharing,
    steps,
    tiles,
    variants,
)
from kernels import meta, online, program, strided, unaligned
from kernels.lab import compile, gpu
from tests.helpers import DTYPES, GPUS, loaded, meta_matrix
from tests.test_every_gpu import compile_and_fit, kernel_of, kernels_in

F32, BF16 = map(compile.pointer, (torch.float32, torch.bfloat16))
I32, I64 = map(compile.pointer, (torch.int32, torch.int64))

# ---- each module's launches, at least one for each kernel ----------------------------


def of_backwards():
    for n in (1024, 1001):
        yield backwards.row_kernel, (F32, F32, F32, n), {"BLOCK": 1024}
    tile = {"ROWS": 4, "BLOCK_COLS": 1024, "VECTOR": 4}
    yield backwards.tile_kernel, (F32, F32, F32, 4096, 1024), tile
    yield backwards.edges_kernel, (F32, F32, F32, 4096, 1001), tile
    for across in (False, True):
        yield backwards.ends_kernel, (BF16, BF16, 265, across), {"num_warps": 2}


def of_edges():
    x, long = (meta_matrix(4096, n, torch.bfloat16) for n in (1001, 8193))
    yield edges.launch_for(edges.head_kernel, x)
    yield edges.launch_for(edges.beside_kernel, x)
    yield edges.launch_for(edges.beside_kernel, long)  # in two blocks
    yield edges.launch_for(edges.turns_kernel, x)
    rows = meta_matrix(64, 137, torch.bfloat16, stride=144)
    config = dict(edges.launch_for(edges.head_kernel, rows).constants)
    yield edges.tail_kernel, (BF16, BF16, 144, 144, 64, 137), config


def of_faults():
    yield faults.printing_kernel, (F32,), {"BLOCK": 2}


def of_layouts():
    for x in (F32, BF16):
        yield layouts.eights_kernel, (x, x, 125), {"BLOCK_COLS": 1024}


def of_ledger():
    size = ledger.SHAPE[0] * ledger.SHAPE[1]
    for n in ledger.STEPS:
        yield ledger.busy_kernel, (F32, F32, size), {"STEPS": n, "BLOCK": ledger.BLOCK}


def of_options():
    x = meta_matrix(2, 8192)
    for given in options.OPTIONS:
        how = {"num_warps": options.NUM_WARPS, **given}
        yield strided.softmax_kernel, meta.arguments(x, x), how
    for launched, loops in ((4, None), (3, 4)):
        stages = {"STAGES": loops, "num_stages": launched}
        yield options.sum_rows_kernel, (F32, F32, 512, 1024), stages
    for fuse in (True, False):
        how = {"enable_fp_fusion": fuse}
        yield options.multiply_add_kernel, (F32, 1.5, 2.5, 3.5), how


def of_parts():
    split = {"BLOCK": 64, "VECTOR": parts.VECTOR, "SPLIT": unaligned.split_row}
    yield parts.split_softmax_kernel, (F32, F32, I32, 33), split


def of_passes():
    x = meta_matrix(1056, 65536)
    sizes = 65536, 1, 65536, 1, 65536
    config = online.choose_config(1, 65536, x.element_size())
    how = {"num_warps": config.num_warps}
    blocks = {"BLOCK_COLS": config.block_cols, "MERGE": online.merge}
    for kernel in (
        passes.two_pass_kernel,
        passes.backwards_kernel,
        passes.silent_kernel,
    ):
        yield kernel, (F32, F32, *sizes), blocks | how
    pairs = {"N": passes.PAIRS, "MERGE": online.merge}
    yield passes.pairs_kernel, (F32, F32, F32, F32), pairs


def of_peers():
    sizes = 1000, 1000, 4096, 1000
    for num_stages in (2, 4):  # with little shared memory, and with much
        how = {"num_warps": 8}
        yield peers.tutorial_kernel, (F32, F32, *sizes, 1024, num_stages), how


@pytest.fixture(scope="module")
def double_kernel(tmp_path_factory):
    """The kernel in the text of `profilers.PROGRAM`, which compiles it when it runs."""
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(profilers.PROGRAM.partition("triton.knobs")[0])
    return loaded(path).double_kernel


def of_residency():
    x = meta_matrix(8, 2048)
    for work in ("empty", "copy", "softmax"):
        yield residency.timed_launch(x, work)


def of_schedules():
    yield schedules.timed_kernel, (I64, F32, F32, 64, 1024), {"BLOCK": 1024}
    yield schedules.queue_kernel, (I32, F32, F32, 64, 1024), {"BLOCK": 1024}
    yield schedules.draws_kernel, (I32, 64), {}


def of_sharing():
    sizes = {"BLOCK": 8192, "PARTS": 16}
    yield sharing.pair_kernel, (F32, F32, 2**17, 16), {"BLOCK_COLS": 8192}
    yield sharing.write_kernel, (F32, F32, F32, 2**17, 16), sizes
    arguments = F32, F32, I64, 7, 2**17, 16, 8192, 128
    yield sharing.waiting_kernel, arguments, {}
    yield sharing.helping_kernel, arguments, {"PATIENCE": sharing.PATIENCES[0]}


def of_steps():
    tile = {"ROWS_PER_TILE": 4, "BLOCK_COLS": 1024}
    for kernel in (steps.tile_kernel, steps.loop_kernel):
        yield kernel, (F32, F32, 1000, 1, 1000, 1, 4096, 1000), tile


def of_tiles():
    for kernel, n_cols in itertools.product(
        (tiles.tile_kernel, tiles.wide_kernel, tiles.blocks_kernel), (1000, 8200)
    ):
        x = meta_matrix(4096, n_cols, torch.bfloat16)
        yield tiles.launch_for(kernel, x, x)
    x = meta_matrix(4096, 128, torch.bfloat16)
    for rows in tiles.TILES:
        yield tiles.changed_launch(x, x, rows=rows, num_warps=1)


def of_variants():
    for dtype in DTYPES:
        x = meta_matrix(3, 70_000, dtype)
        how = {"BLOCK_COLS": 8192, "num_warps": 16}
        yield variants.three_pass_kernel, meta.arguments(x, x)[:-1], how


MODULES = {
    "backwards": of_backwards,
    "edges": of_edges,
    "faults": of_faults,
    "layouts": of_layouts,
    "ledger": of_ledger,
    "options": of_options,
    "parts": of_parts,
    "passes": of_passes,
    "peers": of_peers,
    "residency": of_residency,
    "schedules": of_schedules,
    "sharing": of_sharing,
    "steps": of_steps,
    "tiles": of_tiles,
    "variants": of_variants,
}


# ---- the tests -----------------------------------------------------------------------


def test_every_kernel_of_an_experiment_is_launched():
    launched = {kernel_of(each) for launches in MODULES.values() for each in launches()}
    names = [name for _, name, _ in pkgutil.iter_modules(benchmarks.__path__)]
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    assert kernels_in(modules) <= launched


@pytest.mark.thorough
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name, module):
    compile_and_fit(MODULES[module](), name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_the_program_of_the_cache_compiles(name, double_kernel):
    compile_and_fit([(double_kernel, (F32, 100), {"BLOCK": 128})], name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_blocks_in_pairs_compile_where_there_are_clusters(name):
    if gpu.named(name).compute_capability < 90:
        pytest.skip("chapter `meta` tries num_ctas=2 for a GPU with clusters")
    how = {"BLOCK": 1024, "num_ctas": 2}
    compile_and_fit([(program.add_kernel, (F32, F32, F32, 4096), how)], name)
