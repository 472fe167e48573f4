"""Which configuration `online` chooses, and what the compiler makes of it."""

import dataclasses
import re

import pytest
import torch

from kernels import online
from kernels.lab import backend, compile, occupancy
from kernels.lab.compile import Compiled
from kernels.online import Config
from tests.test_online import launches_of

# ---- the configuration ---------------------------------------------------------------


NEITHER = (False, False)
INPUT, OUTPUT = (True, False), (False, True)  # where only rows are adjacent


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "element_size", "adjacent", "expected"),
    [
        (1000, 65536, 4, NEITHER, Config(1, 16384, 4096, 32)),
        (1000, 2**33, 2, NEITHER, Config(1, 32768, 8192, 32)),
        (1000, 50257, 8, NEITHER, Config(1, 8192, 2048, 32)),
        (1000, 4096, 4, NEITHER, Config(1, 4096, 1024, 8)),
        (1000, 781, 2, NEITHER, Config(2, 1024, 256, 2)),
        (1, 781, 2, NEITHER, Config(1, 1024, 256, 1)),
        (10**9, 1, 4, NEITHER, Config(1024, 1, 1, 2)),
        (1000, 65536, 4, OUTPUT, Config(32, 256, 64, 16)),
        (1000, 65536, 2, OUTPUT, Config(64, 256, 64, 16)),
        (3, 65536, 4, OUTPUT, Config(4, 2048, 512, 16)),
        (1000, 65536, 4, INPUT, Config(16, 256, 256, 16)),
        (1000, 65536, 2, INPUT, Config(16, 256, 256, 16)),
        (1000, 65536, 8, INPUT, Config(16, 128, 128, 16)),
        (3, 65536, 4, INPUT, Config(4, 1024, 1024, 16)),
        (1000, 65, 2, INPUT, Config(16, 128, 128, 8)),
        (16_383, 65536, 2, INPUT, Config(16, 256, 256, 16)),
        (16_384, 65536, 2, INPUT, Config(32, 64, 64, 8)),  # many rows
        (1000, 64, 2, INPUT, Config(64, 64, 16, 4)),  # short ones: as for the output
    ],
)
def test_known_configs(n_rows, n_cols, element_size, adjacent, expected):
    assert online.choose_config(n_rows, n_cols, element_size, 0, adjacent) == expected


@pytest.mark.parametrize("n_rows", [3, 1000, 10**6])
@pytest.mark.parametrize(("size", "values"), [(2, 2048), (4, 2048), (8, 1024)])
def test_programs_that_share_adjacent_rows_have_small_tiles(n_rows, size, values):
    rows = min(n_rows + 1, 32)
    for step in (1, 2):
        config = online.choose_config(n_rows, 65536, size, step, INPUT)
        assert (config.rows, config.rows * config.block_cols) == (rows, values)
        assert config.num_warps == 8 and config.accumulators == config.block_cols


def test_configs_are_powers_of_two_and_fit():
    for n_cols in (*range(1, 70), 781, 4095, 4097, 50257, 10**6, 2**31 + 1):
        for n_rows in (1, 3, 5000):
            for element_size in (2, 4, 8):
                for adjacent in (NEITHER, INPUT, OUTPUT, (True, True)):
                    form = n_rows, n_cols, element_size
                    config = online.choose_config(*form, 0, adjacent)
                    sizes = config.rows, config.block_cols, config.accumulators
                    assert all(size & (size - 1) == 0 for size in sizes)
                    assert 1 <= config.accumulators <= config.block_cols < 2 * n_cols
                    tile = config.rows * config.block_cols * element_size
                    assert tile <= online.BLOCK_BYTES
                    shared = online.choose_config(*form, 1, adjacent)
                    assert shared.rows * shared.block_cols * element_size <= 32768
                    assert config.rows < 2 * n_rows
                    assert 1 <= config.num_warps <= 32


@pytest.mark.parametrize("dtype", [*backend.DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(1, 100, 1), (2, 30, 50), (1, 50, 300)])
def test_a_launch_needs_no_memory(shape, dtype):
    """Tensors without memory make the launch that real ones make."""
    x = torch.empty(shape, dtype=dtype, device=backend.DEVICE)
    for view in (x, x.transpose(1, 2), x[:, 1:]):
        y = torch.empty(view.shape, dtype=dtype, device=x.device)
        ghost = torch.empty(x.numel(), dtype=dtype, device="meta")
        ghost = ghost.as_strided(view.shape, view.stride(), view.storage_offset())
        assert online.launch_for(y.to("meta"), ghost) == online.launch_for(y, view)


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(
    dtype: torch.dtype = torch.float32,
    n_cols: int = 65536,
    adjacent: tuple[bool, bool] = NEITHER,
    **changes: object,
) -> Compiled:
    """The kernel for 4096 rows on an H200, contiguous or transposed to contiguous."""
    n_rows = 4096
    x = torch.empty(n_cols, n_rows, dtype=dtype, device="meta").t()
    y = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    config = online.choose_config(n_rows, n_cols, dtype.itemsize, 0, adjacent)
    config = dataclasses.replace(config, **changes)
    return compile.aot(online.launch_for(y, x if adjacent[0] else y, config))


def first_loop(kernel: Compiled) -> str:
    """The PTX from the first label to the jump back to it."""
    label = re.search(r"^(\$L__BB\d+_\d+):", kernel.ptx, re.MULTILINE)
    end = re.search(rf"bra\S*\s+{re.escape(label[1])};", kernel.ptx)
    return kernel.ptx[label.end() : end.start()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_exchange_nothing_within_the_loop(dtype):
    loop = first_loop(compiled(dtype))
    assert "ld.global" in loop and "ex2" in loop
    assert "bar.sync" not in loop and "shfl" not in loop
    loop = first_loop(compiled(dtype, accumulators=1))
    assert "bar.sync" in loop and "shfl" in loop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjacent", [NEITHER, INPUT])
def test_accesses_are_16_bytes_wide(dtype, adjacent):
    kernel = compiled(dtype, adjacent=adjacent)
    for access in ("ld", "st"):
        every = kernel.count(rf"{access}\.global")
        assert every == kernel.count(rf"{access}\.global\S*\.v4\.b32") > 0


def test_hints_reach_the_cache():
    kernel = compiled()
    assert kernel.count(r"ld\.global.*L1::evict_last") > 0
    assert kernel.count(r"ld\.global.*L1::evict_first") > 0
    assert kernel.count(r"st\.global.*L1::evict_first") > 0
    assert compiled(hints=False).count("evict") == 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_programs_that_share_rows_share_sms(dtype):
    for shape in ((1, 20_000_000), (1, 2**20, 16)):
        for half in launches_of(*shape, dtype=dtype):
            kernel = compile.aot(half)
            # Triton 3.6 gives float64 164 registers, so one program fills an SM.
            at_least = 1 if dtype == torch.float64 else 2
            assert occupancy.of(kernel).blocks_per_sm >= at_least
            assert kernel.spills == 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_rows_leave_one_program_on_an_sm(dtype):
    kernel = compiled(dtype)
    assert occupancy.of(kernel).blocks_per_sm == 1
    assert kernel.spills <= 16
