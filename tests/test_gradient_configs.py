"""The configurations of `gradient`, and what the compiler makes of its kernels."""

import dataclasses
import itertools

import pytest
import torch
import triton

from kernels import gradient
from kernels.gradient import Config
from kernels.lab import backend, compile
from kernels.lab import launch as launch_module
from kernels.lab.compile import Compiled
from tests.helpers import TRITON, meta_matrix
from tests.test_gradient import HALF, SINGLE, inputs

# ---- the configuration ---------------------------------------------------------------

LENGTHS = [*range(1, 1100), 4104, 8191, 8192, 8193, 16_385, 24_000, 50_257, 262_144]


@pytest.mark.parametrize("element_size", [2, 4])
def test_configs_hold_their_rows(element_size):
    for n_cols, n_rows in itertools.product(LENGTHS, (1, 10_000)):
        config = gradient.choose_config(n_rows, n_cols, element_size)
        if isinstance(config, gradient.ShortConfig):
            continue
        y = meta_matrix(n_rows, n_cols)
        n_parts = gradient.launch_for(y, y, y, config).scalars[-1]
        body = n_cols // config.vector * config.vector
        assert n_parts * config.block_cols >= body
        assert (n_parts - 1) * config.block_cols < max(body, 1)
        assert config.edges or n_cols == body
        assert config.block_parts >= n_parts
        assert (config.block_parts == 1) == (n_parts == 1)
        assert config.rows == 1 or n_parts == 1
        numbers = config.rows, config.block_cols, config.num_warps, config.block_parts
        for number in numbers:
            assert number == triton.next_power_of_2(number) > 0
        assert config.num_warps <= 32


@pytest.mark.parametrize("element_size", [2, 4])
def test_short_rows_are_those_with_edges(element_size):
    """Each thread has values of one row or pair, whose body the two blocks hold."""
    longest, widest = gradient.LONGEST_SHORT[element_size], 16 // element_size
    for n_cols in range(1, longest + 9):
        config = gradient.choose_config(10**5, n_cols, element_size)
        is_narrow = n_cols % 4 > 0 or (n_cols > 64 and n_cols % widest > 0)
        is_short = n_cols <= longest and is_narrow and n_cols != 2
        assert isinstance(config, gradient.ShortConfig) == is_short
        if not is_short:
            continue
        if config.pairs:
            n_cols *= 2
            assert not config.edges
        body = n_cols // config.vector * config.vector
        span = config.threads * config.vector
        assert config.edges == (body < n_cols)
        assert config.block_cols + config.rest_cols >= body
        turns = 4 if n_cols == 2 else 1
        assert config.rows * config.threads == 32 * config.num_warps * turns
        for cols in (config.block_cols, config.rest_cols):
            assert cols % span == 0 and cols in (0, triton.next_power_of_2(cols))


def test_the_configurations_of_short_rows_that_were_the_fastest():
    """Of an H200, at 16 bits; threads of a row or a pair, and elements of an access."""
    pairs = (1, 1, 2), (3, 1, 2), (7, 2, 2), (9, 4, 2), (13, 4, 2), (14, 2, 4)
    pairs += (17, 8, 2), (25, 8, 2), (27, 8, 2), (30, 4, 4), (31, 8, 2)
    rows = (6, 1, 2), (10, 2, 2), (22, 4, 2), (33, 8, 4), (38, 8, 2), (68, 8, 4)
    rows += ((99, 8, 4),)
    for n_cols, *expected in pairs + rows:
        config = gradient.choose_config(10**5, n_cols, 2)
        assert [config.threads, config.vector] == expected
        assert config.pairs == ((n_cols, *expected) in pairs)


@pytest.mark.parametrize(
    ("n_cols", "element_size", "rows", "num_warps"),
    [
        *((38, 4, 8, 2), (69, 4, 4, 2), (159, 4, 2, 2), (295, 4, 1, 1)),
        *((129, 2, 8, 2), (206, 2, 8, 2)),
        *((412, 2, 4, 2), (657, 2, 2, 2), (1001, 2, 1, 1)),
        *((8893, 2, 1, 8), (12_272, 2, 1, 8)),
    ],
)
def test_tiles_are_large_enough_to_load_at_full_speed(
    n_cols, element_size, rows, num_warps
):
    config = gradient.choose_config(10**5, n_cols, element_size)
    assert (config.rows, config.num_warps) == (rows, num_warps)


def test_accesses_are_of_8_bytes_where_short_rows_have_no_edges_then():
    lengths = 2, 4, 36, 64, 68, 159, 188, 206
    vectors = [gradient.choose_config(10**5, n, 2).vector for n in lengths]
    assert vectors == [2, 4, 4, 8, 4, 8, 4, 8]


def test_parts_are_small_but_for_long_rows_of_float32():
    for n_cols, element_size, part_bytes, num_warps, maxnreg in (
        (20_001, 2, 16384, 4, 96),
        (262_144, 2, 16384, 4, 96),
        (49_151, 4, 16384, 4, 96),
        (49_152, 4, 32768, 4, 168),
    ):
        config = gradient.choose_config(10**4, n_cols, element_size)
        assert config.block_cols == part_bytes // element_size
        assert (config.num_warps, config.maxnreg) == (num_warps, maxnreg)


def test_rows_that_are_not_resident_take_two_launches(monkeypatch):
    for sms, threads in ((132, 2048), (40, 1024), (20, 2048)):
        sizes = sms, threads
        monkeypatch.setattr(launch_module, "sms_and_threads", lambda sizes=sizes: sizes)
        for n_cols in (1000, 10**4, 10**5, 10**6, 3 * 10**6, 10**7):
            y = meta_matrix(100, n_cols)
            config = gradient.choose_config(100, n_cols, 4)
            n_parts = gradient.launch_for(y, y, y).scalars[-1]
            registers = config.maxnreg or 1
            held = min(threads, 65536 // registers) // (32 * config.num_warps)
            steps = gradient.steps_for(y, y, y)
            leaves_too_few = n_parts > 1 and 1.5 * n_parts > sms * held
            assert (steps is not None) == leaves_too_few
            if steps is not None:
                assert all(launch.n_words == 0 for launch in steps)


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("n_cols", [64, 33, 20_001])
def test_a_launch_needs_no_memory(dtype, n_cols):
    g, y = inputs(2, n_cols, dtype)
    ghost = meta_matrix(2, n_cols, dtype)
    launch = gradient.launch_for(ghost, ghost, ghost)
    assert launch == gradient.launch_for(torch.empty_like(y), g, y)


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(n_cols: int, dtype: torch.dtype, gpu: str = "H200") -> Compiled:
    y = meta_matrix(4096, n_cols, dtype)
    return compile.aot(gradient.launch_for(y, y, y), gpu=gpu)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_cols", [1024, 1001, 8191, 65_536, 50_257])
def test_rows_are_moved_in_16_bytes_and_nothing_is_spilled(n_cols, dtype):
    made = compiled(n_cols, dtype)
    for move in ("ld", "st"):
        assert made.count(rf"{move}\.global\S*\.v4\.b32") > 0
    # Triton 3.9 spills up to 64 where programs share a row of 16 bits.
    shared = TRITON >= (3, 9) and n_cols * dtype.itemsize > gradient.LONGEST_TILE
    assert made.spills <= (64 if shared and dtype.itemsize == 2 else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_rows", [2, 4096])  # few programs, and many
@pytest.mark.parametrize("n_cols", [65_536, 50_257])
def test_every_program_computes_a_part_by_the_same_instructions(n_cols, n_rows, dtype):
    """Else a part's bits could depend on which program computes it, in whose turn.

    So a thread loads each 16 bytes of its part at one place in the machine code.
    """
    y = meta_matrix(n_rows, n_cols, dtype)
    launch = gradient.launch_for(y, y, y)
    made = compile.aot(launch)
    part_bytes = launch.constants["BLOCK_COLS"] * dtype.itemsize
    once = part_bytes // 16 // (32 * made.num_warps)
    assert made.count(r"LDG\.\S*128", "sass") == 2 * once  # of y and the gradient
    assert made.count(r"STG\.\S*128", "sass") == once


def test_the_limit_for_the_longest_16_bit_rows_costs_little():
    """Triton takes as many registers without it; from 3.9 on, 155, so a few spill."""
    y = meta_matrix(4096, 16_384, HALF)
    limited = gradient.launch_for(y, y, y)
    assert limited.constants["maxnreg"] == 128
    free = dataclasses.replace(limited, constants=limited.constants | {"maxnreg": None})
    limited, free = compile.aot_all([limited, free])
    needed, spills = (155, 72) if TRITON >= (3, 9) else (128, 0)
    assert (free.registers, limited.registers) == (needed, 128)
    assert limited.spills <= spills


def test_edges_of_short_rows_are_computed_once():
    """Two warps have 16 rows of 64 values and 8 places for edges: 2 places a thread."""
    y = meta_matrix(4096, 63, HALF)
    config = Config(16, 64, 1, 4, True, 1, 2)
    made = compile.aot(gradient.launch_for(y, y, y, config))
    assert made.count(r"ld\.global\S*\.b16") == 2 * 2 * 16 * 8 // 64 // 2
    assert made.count(r"st\.global\S*\.b16") == 16 * 8 // 64


def test_pairs_of_odd_rows_are_moved_by_two_elements():
    """A pair of 18 values takes 4 threads three accesses to each tensor."""
    made = compiled(9, HALF)
    assert made.count(r"ld\.global\S*\.b32") == 2 * 3
    assert made.count(r"st\.global\S*\.b32") == 3


def test_lengths_of_one_class_share_a_kernel():
    """Lengths that any row may have, from 1 to a million."""
    generator = torch.Generator().manual_seed(0)
    lengths = 10 ** (6 * torch.rand(970, generator=generator))
    launches = set()
    for n_cols in lengths.int().tolist():
        n_rows = max(1, 2**28 // (4 * n_cols))
        config = gradient.choose_config(n_rows, n_cols, 4)
        n_parts = triton.cdiv(n_cols, config.block_cols)
        launches.add((config, n_parts == 1))
    assert len(launches) <= 46
