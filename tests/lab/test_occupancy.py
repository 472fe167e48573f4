"""Occupancy: known answers, NVIDIA's calculator, the driver as recorded and at hand."""

import csv
import dataclasses
import itertools
import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import persistent, program, strided
from kernels.lab import backend, compile, gpu, occupancy
from kernels.lab.launch import Launch
from tests.fakes import fake_gpu

H200 = gpu.named("H200")
DOCUMENTED = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200")
RECORDS = backend.ROOT / "notebooks" / "recorded" / "nvidia-h200"
RECORDED = RECORDS / "residency_occupancy.csv"


def resident(num_warps, registers=0, shared=0, on=H200):
    return occupancy.resident(
        on, num_warps=num_warps, registers=registers, shared=shared
    )


# ---- known answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared", "blocks", "limit"),
    [
        (1, 30, 0, 32, "blocks"),  # registers alone: 65536 // (30 * 32) = 68
        (1, 0, 0, 32, "blocks"),  # shared memory alone would divide by zero
        (8, 16, 0, 8, "threads"),  # 2048 threads / 256
        (4, 64, 0, 8, "registers"),  # 65536 / (64 * 128)
        (4, 65, 0, 7, "registers"),  # a warp gets 72 a thread: 65536 // (72 * 128)
        (1, 88, 0, 20, "registers"),  # 5 warps a quarter; 23 if quarters could share
        (32, 64, 0, 1, "registers"),  # one block of 1024 threads takes them all
        (32, 65, 0, 0, "registers"),  # and cannot have more
        (25, 80, 0, 0, "registers"),  # 64000 fit, but are checked as 28 warps'
        (4, 256, 0, 0, "registers"),  # no thread can address so many
        (4, 16, 65536, 3, "shared memory"),  # 228 KiB / (64 + 1)
        (4, 16, 232448, 1, "shared memory"),  # all a block can have
        (4, 16, 232449, 0, "shared memory"),
        (33, 16, 0, 0, "threads"),  # 1056 threads in a block
    ],
)
def test_known_answers_on_h200(num_warps, registers, shared, blocks, limit):
    result = resident(num_warps, registers, shared)
    assert (result.blocks_per_sm, result.limit) == (blocks, limit)


def test_limits_and_shares():
    result = resident(4, 40, 8208)
    assert result.limits == {
        "threads": 16,
        "blocks": 32,
        "registers": 12,  # 65536 / (40 * 128) = 12.8
        "shared memory": 24,  # 233472 / (8208 + 1024 rounded up to 9344) = 24.99
    }
    assert (result.blocks_per_sm, result.warps_per_sm, result.share) == (12, 48, 0.75)
    assert str(result) == (
        "resident blocks per SM: 12, limited by registers "
        "(threads 16, blocks 32, registers 12, shared memory 24)"
    )


def test_what_is_not_used_does_not_limit():
    result = resident(1, on=gpu.named("T4"))
    assert result.limits["registers"] == result.limits["shared memory"] == math.inf
    assert (result.blocks_per_sm, result.limit) == (16, "blocks")
    assert "registers any" in str(result)


@pytest.mark.parametrize(
    ("name", "blocks"), [("T4", 16), ("A100", 32), ("RTX 4090", 24), ("B200", 32)]
)
def test_the_limit_on_blocks_depends_on_the_gpu(name, blocks):
    assert resident(1, 16, on=gpu.named(name)).blocks_per_sm == blocks


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_warps must be at least 1, got 0"):
        resident(0)
    with pytest.raises(ValueError, match="shared must be at least 0, got -1"):
        resident(1, shared=-1)
    with pytest.raises(TypeError, match=r"registers must be an integer, got 1\.5"):
        resident(1, registers=1.5)
    with pytest.raises(TypeError, match=r"compile\.aot returns, or a Launch, got 32"):
        occupancy.of(32)


# ---- NVIDIA's calculator, compiled ---------------------------------------------------

ORACLE = r"""
#include <stdio.h>
#include <limits.h>
#include <string.h>
#include <cuda_occupancy.h>

int main(void) {
    cudaOccDeviceProp gpu;
    memset(&gpu, 0, sizeof gpu);
    gpu.maxThreadsPerBlock = 1024;
    gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
    gpu.warpSize = 32;
    gpu.sharedMemPerBlock = 49152;
    gpu.numSms = 1;
    int capability, threads, warps, registers, shared, sm, optin, reserved;
    while (scanf("%d %d %d %d %d %d %d %d", &capability, &threads, &sm, &optin,
                 &reserved, &warps, &registers, &shared) == 8) {
        gpu.computeMajor = capability / 10;
        gpu.computeMinor = capability % 10;
        gpu.maxThreadsPerMultiprocessor = threads;
        gpu.sharedMemPerMultiprocessor = sm;
        gpu.sharedMemPerBlockOptin = optin;
        gpu.reservedSharedMemPerBlock = reserved;
        cudaOccFuncAttributes kernel;
        memset(&kernel, 0, sizeof kernel);
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.numRegs = registers;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = shared;
        kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        memset(&state, 0, sizeof state);
        state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
        cudaOccResult result;
        memset(&result, 0, sizeof result);
        if (cudaOccMaxActiveBlocksPerMultiprocessor(
                &result, &gpu, &kernel, &state, warps * 32, shared)
            != CUDA_OCC_SUCCESS)
            return 1;
        printf("%d %d %d %d %d\n", result.activeBlocksPerMultiprocessor,
               result.blockLimitWarps, result.blockLimitBlocks,
               result.blockLimitRegs, result.blockLimitSharedMem);
    }
    return 0;
}
"""


def find_header():
    roots = [os.environ.get("CUDA_HOME"), *Path("/usr/local").glob("cuda*")]
    roots += Path(torch.__file__).parents[1].glob("nvidia/*")
    for root in filter(None, roots):
        for header in Path(root).glob("include/cuda_occupancy.h"):
            return header
    return None


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    header, compiler = find_header(), shutil.which("gcc") or shutil.which("cc")
    if header is None or compiler is None:
        pytest.skip("needs cuda_occupancy.h of a CUDA toolkit, and a C compiler")
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "main.c").write_text(ORACLE)
    command = [compiler, "-I", header.parent, "main.c", "-o", "main"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "main"


def test_equals_nvidias_calculator(calculator):
    draw = random.Random(0)
    cases = []
    for name in DOCUMENTED:
        facts = gpu.named(name)
        edges = {
            max(0, facts.shared_per_sm // n - facts.shared_reserved_per_block + step)
            for n in (1, 2, 3, 7, 32)
            for step in (-128, -1, 0, 1)
        }
        sizes = [0, 1, 16, 8208, 49152, 49153, *edges]
        cases += [(facts, w, r, 0) for w in range(1, 33) for r in range(256)]
        cases += [(facts, w, 32, s) for w in (1, 4, 32) for s in sizes]
        cases += [
            (facts, draw.randint(1, 32), draw.randint(0, 255), draw.randrange(240000))
            for _ in range(2000)
        ]
    lines = [
        f"{g.compute_capability} {g.threads_per_sm} {g.shared_per_sm} "
        f"{g.shared_per_block} {g.shared_reserved_per_block} {w} {r} {s}"
        for g, w, r, s in cases
    ]
    output = subprocess.run(
        [calculator], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    answers = [tuple(map(int, line.split())) for line in output.stdout.splitlines()]
    for (facts, warps, registers, shared), answer in zip(cases, answers, strict=True):
        ours = resident(warps, registers, shared, on=facts)
        unlimited = 2**31 - 1  # INT_MAX, where we say infinity
        limits = tuple(min(n, unlimited) for n in ours.limits.values())
        assert (ours.blocks_per_sm, *limits) == answer, (facts.name, warps, registers)


# ---- of compiled kernels -------------------------------------------------------------


ROW = Launch(
    kernel=program.softmax_kernel,
    grid=(4096,),
    scalars=(128,),
    constants={"BLOCK_COLS": 128, "num_warps": 1},
    pointers=(compile.pointer(torch.float32),) * 2,
)


def compile_row(num_warps, gpu="H200"):
    constants = {"BLOCK_COLS": 128, "num_warps": num_warps}
    return compile.aot(dataclasses.replace(ROW, constants=constants), gpu=gpu)


def test_of_a_compiled_kernel():
    compiled = compile_row(num_warps=1)
    assert compiled.shared == 0
    result = occupancy.of(compiled)
    assert result == resident(1, compiled.registers)
    assert (result.blocks_per_sm, result.limit) == (32, "blocks")
    assert 65536 // (compiled.registers * 32) > 32  # what registers alone would say
    assert occupancy.of(compiled, gpu.named("T4")).blocks_per_sm == 16


def test_of_a_launch(monkeypatch):
    for name in ("H200", "T4"):
        compiled = compile_row(num_warps=1, gpu=name)
        assert occupancy.of(ROW, gpu.named(name)) == occupancy.of(compiled)
        monkeypatch.setattr(gpu, "here", lambda on=compiled.gpu: on)
        assert occupancy.of(ROW) == occupancy.of(compiled)


@pytest.fixture
def driver():
    occupancy._context.cache_clear()
    with fake_gpu(blocks=5) as driver:
        yield driver
    occupancy._context.cache_clear()


def test_by_driver_opts_in_to_large_shared_memory_alone(driver):
    compiled = compile_row(num_warps=4)
    assert occupancy.by_driver(compiled) == 5
    assert "cuFuncSetAttribute" not in driver.names
    asked = driver.calls[driver.names.index("cuModuleLoadData") + 2]
    assert (asked[3], asked[4].value) == (128, compiled.shared)  # threads, bytes

    large = dataclasses.replace(compiled, shared=100_000)
    occupancy.by_driver(large)
    opted = driver.calls[driver.names.index("cuFuncSetAttribute")]
    assert opted[2:] == (8, 100_000)
    assert driver.names.count("cuDevicePrimaryCtxRetain") == 1


def test_by_driver_leaves_nothing_behind_when_a_call_fails(driver):
    driver.failing = "cuModuleGetFunction"
    with pytest.raises(RuntimeError, match="cuModuleGetFunction"):
        occupancy.by_driver(compile_row(num_warps=4))
    left = [name for name in driver.names if name != "cuGetErrorName"]
    assert left[-2:] == ["cuModuleUnload", "cuCtxPopCurrent_v2"]


def test_by_driver_refuses_another_gpus_code(driver):
    with pytest.raises(RuntimeError, match=r"compiled for Tesla T4.*H200 cannot"):
        occupancy.by_driver(compile_row(num_warps=4, gpu="T4"))


@pytest.mark.thorough
def test_table_has_a_row_per_launch(driver):
    names = ("program.softmax_kernel", "persistent.softmax_kernel")
    rows = occupancy.table(course(names, block_cols=[128, 256], num_warps=[1, 4]))
    tried = itertools.product(names, (128, 256), (1, 4), (1, 2, 3, 4))
    columns = ("kernel", "block_cols", "num_warps", "num_stages")
    assert [tuple(row[c] for c in columns) for row in rows] == list(tried)
    assert rows[0] == {
        **{"kernel": names[0], "dtype": "float32", "block_cols": 128, "num_warps": 1},
        **{"num_stages": 1, "registers": compile_row(num_warps=1).registers},
        **{"shared_bytes": 0, "blocks_per_sm_driver": 5},
    }
    pipelined = [r["shared_bytes"] for r in rows if r["kernel"] == names[1]][:4]
    assert pipelined == [0, 512, 1024, 1536]  # 128 floats for each stage but one


def test_table_takes_launches_and_labels_of_any_kind(driver):
    rows = occupancy.table([({"what": "a launch"}, ROW)])
    registers = compile_row(num_warps=1).registers
    answers = {"registers": registers, "shared_bytes": 0, "blocks_per_sm_driver": 5}
    assert rows == [{"what": "a launch", "num_warps": 1, **answers}]
    assert occupancy.table([]) == []


@pytest.mark.skipif(backend.has_gpu(), reason="there is a GPU to ask")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        occupancy.by_driver(compile_row(num_warps=1))
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        occupancy.table([])


# ---- the driver, on every kernel of the course ---------------------------------------

KERNELS = {
    "program.add_kernel": program.add_kernel,
    "program.softmax_kernel": program.softmax_kernel,
    "strided.softmax_kernel": strided.softmax_kernel,
    "persistent.softmax_kernel": persistent.softmax_kernel,
}
NAMES = tuple(KERNELS)


def arguments(name, n_cols, num_stages):
    """The arguments of a launch on 4096 contiguous rows of a power of two of floats."""
    x, strides = compile.pointer(torch.float32), (n_cols, 1, n_cols, 1)
    return {
        "program.add_kernel": (x, x, x, 4096 * n_cols, n_cols),
        "program.softmax_kernel": (x, x, n_cols, n_cols),
        "strided.softmax_kernel": (x, x, *strides, n_cols, n_cols),
        "persistent.softmax_kernel": (
            *(x, x, *strides, 4096, n_cols),
            *(1, n_cols, num_stages),  # rows of a tile, its columns, stages
        ),
    }[name]


def course(
    names=NAMES,
    block_cols=(512, 2048, 4096),
    num_warps=(1, 2, 4, 8, 16, 32),
    num_stages=(1, 2, 3, 4),
):
    """Labels and a launch for every combination, as `occupancy.table` takes them."""
    for name, n_cols, warps, stages in itertools.product(
        names, block_cols, num_warps, num_stages
    ):
        options = {"num_warps": warps, "num_stages": stages}
        labels = {"kernel": name, "dtype": "float32", "block_cols": n_cols, **options}
        yield labels, (KERNELS[name], arguments(name, n_cols, stages), options)


def test_every_kernel_compiles_with_its_arguments():
    launches = course(block_cols=[1024], num_warps=[4], num_stages=[3])
    made = compile.aot_all([launch for _, launch in launches])
    assert all(k.count(r"ld\.global\.v4|cp\.async\.cg") for k in made)
    assert made[-1].shared - made[2].shared == 2 * 4096  # two tiles on their way


def disagreements(rows, on):
    """The rows in which the driver's answer is not ours, with ours."""
    return [
        (row, ours)
        for row in rows
        if int(row["blocks_per_sm_driver"])
        != (
            ours := resident(
                *(int(row[c]) for c in ("num_warps", "registers", "shared_bytes")),
                on=on,
            ).blocks_per_sm
        )
    ]


def lacking(rows):
    """(kernel, num_warps, num_stages) of the course that no row is about."""
    wanted = set(itertools.product(NAMES, (1, 2, 4, 8, 16, 32), (1, 2, 3, 4)))
    found = {(r["kernel"], int(r["num_warps"]), int(r["num_stages"])) for r in rows}
    return wanted - found


def test_a_gap_in_the_table_is_found():
    tried = itertools.product(NAMES, (1, 2, 4, 8, 16, 32), ("1", "2", "3", "4"))
    columns = ("kernel", "num_warps", "num_stages")
    rows = [dict(zip(columns, case, strict=True)) for case in tried]
    assert lacking(rows) == set()
    assert lacking(rows[1:]) == {(NAMES[0], 1, 1)}


def test_disagreements_are_found():
    row = {"num_warps": "1", "registers": "30", "shared_bytes": "0"}
    wrong, right = ({**row, "blocks_per_sm_driver": n} for n in ("68", "32"))
    assert disagreements([wrong, right], H200) == [(wrong, 32)]


@pytest.mark.skipif(not RECORDED.exists(), reason="the driver is not recorded yet")
def test_equals_the_recorded_driver():
    with RECORDED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["gpu"] for row in rows} == {H200.name}
    assert lacking(rows) == set()
    assert disagreements(rows, H200) == []


@pytest.mark.gpu
def test_equals_the_driver():
    rows = occupancy.table(course())
    assert lacking(rows) == set()
    assert disagreements(rows, gpu.current()) == []
