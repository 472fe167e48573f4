"""Programs that stay: right for any grid, and free of the usual driver's faults."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kernels import persistent
from kernels.lab import backend, check, compile, gpu, meter, occupancy
from kernels.lab.compile import Compiled
from kernels.lab.gpu import Gpu
from tests.helpers import assert_right, matrix

H200 = gpu.named("H200")
DOCUMENTED = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200")
MANY = 10**6


def config_for(n_cols: int, **changes: int) -> persistent.Config:
    """The chosen config for rows of float32, with other values in some fields."""
    return dataclasses.replace(persistent.choose_config(n_cols, 4), **changes)


def launch_of(dtype: torch.dtype, n_cols: int, config: persistent.Config) -> tuple:
    """The launch on contiguous rows, as `compile.aot_all` takes it."""
    x, sizes = compile.pointer(dtype), (n_cols, 1, n_cols, 1, 4096, n_cols)
    return persistent.softmax_kernel, (x, x, *sizes), config.constants


def compiled(
    dtype: torch.dtype, n_cols: int, num_warps: int = 4, num_stages: int = 1
) -> Compiled:
    """The kernel that computes one contiguous row after another on an H200."""
    block_cols = triton.next_power_of_2(n_cols)
    config = persistent.Config(1, block_cols, num_warps, num_stages)
    kernel, args, constants = launch_of(dtype, n_cols, config)
    return compile.aot(kernel, *args, **constants)


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(persistent.softmax)
    assert summary, summary


@pytest.mark.gpu
def test_is_a_softmax_up_to_its_longest_row():
    summary = check.softmax(persistent.softmax, max_cols=persistent.MAX_COLS)
    assert summary, summary


@pytest.mark.parametrize("programs_per_slot", [1, 2, MANY])
@pytest.mark.parametrize("rows_per_tile", [1, 4])
@pytest.mark.parametrize(("n_rows", "n_cols"), [(1, 5), (3, 33), (37, 33), (64, 1)])
def test_is_right_for_any_config(n_rows, n_cols, rows_per_tile, programs_per_slot):
    config = config_for(
        n_cols, rows_per_tile=rows_per_tile, programs_per_slot=programs_per_slot
    )
    x = matrix(n_rows, n_cols)
    assert_right(persistent.softmax(x, config=config), x)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_is_right_for_any_number_of_stages(num_stages):
    config = config_for(
        128, rows_per_tile=2, num_stages=num_stages, programs_per_slot=1
    )
    for n_cols in (128, 127):
        x = matrix(2000, n_cols)[::200]
        assert_right(persistent.softmax(x, config=config), x)


@pytest.mark.parametrize("answer", [0, 1, 3, MANY])
def test_is_right_whatever_the_number_of_resident_programs(monkeypatch, answer):
    monkeypatch.setattr(persistent, "resident_programs", lambda dtype, config: answer)
    x = matrix(37, 33)
    for programs_per_slot in (1, 16):
        config = config_for(33, rows_per_tile=2, programs_per_slot=programs_per_slot)
        assert_right(persistent.softmax(x, config=config), x)


@pytest.mark.parametrize("shape", [(37, 33), (3, 781), (200, 4)])
def test_reads_and_writes_each_value_once(shape):
    assert meter.count(persistent.softmax, matrix(*shape)).values == meter.fused(*shape)


def grid(n_rows: int, **changes: int) -> int:
    """How many programs compute n_rows rows, in the interpreter."""
    config = config_for(64, rows_per_tile=4, **changes)
    counted = meter.count(persistent.softmax, matrix(n_rows, 64), config=config)
    (launch,) = (row for row in counted.rows if row.grid)
    return launch.grid[0]


def test_the_grid_is_what_fits_or_the_tiles_if_they_are_fewer():
    resident = grid(10**3, programs_per_slot=1)
    assert 1 < resident < 25
    assert grid(100, programs_per_slot=2) == 2 * resident
    assert grid(100, programs_per_slot=MANY) == 25
    assert grid(9, programs_per_slot=1) == 3
    assert grid(1) == 1


def test_a_config_that_is_too_narrow_is_named():
    narrow = persistent.choose_config(64, 4)
    wanted = r"at least 65.*got 64; choose_config\(65, 4\) would"
    with pytest.raises(ValueError, match=wanted):
        persistent.softmax(matrix(2, 65), config=narrow)


def test_more_rows_than_the_loop_can_number_are_named():
    x = matrix(1, 1).expand(persistent.MAX_ROWS + 1, 1)
    with pytest.raises(ValueError, match=r"at most 1073741824 rows .*got 1073741825"):
        persistent.softmax(x)


# ---- the config ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cols", "element_size", "rows_per_tile", "num_warps"),
    [
        (1, 4, 1024, 2),
        (32, 4, 32, 2),  # 4 KiB
        (33, 4, 16, 2),  # 64 columns are computed
        (781, 4, 1, 2),
        (1024, 4, 1, 2),
        (1024, 2, 2, 2),
        (4096, 2, 1, 4),
        (16384, 2, 1, 16),
        (32768, 4, 1, 32),
    ],
)
def test_short_rows_share_a_tile(n_cols, element_size, rows_per_tile, num_warps):
    block_cols = triton.next_power_of_2(n_cols)
    wanted = persistent.Config(rows_per_tile, block_cols, num_warps)
    assert persistent.choose_config(n_cols, element_size) == wanted


@pytest.fixture
def on(monkeypatch):
    """Makes `choose_config` choose for another GPU."""

    def choose_for(there: Gpu) -> None:
        persistent.choose_config.cache_clear()
        monkeypatch.setattr(gpu, "here", lambda: there)

    yield choose_for
    persistent.choose_config.cache_clear()


@pytest.mark.parametrize(
    ("name", "n_cols", "element_size", "stays"),
    [
        ("H200", 32768, 2, True),
        ("H200", 20000, 2, True),
        ("H200", 20001, 2, False),  # no row but the first is aligned
        ("H200", 16384, 2, False),  # an SM holds two programs
        ("H200", 32768, 4, False),  # two more rows of 128 KiB do not fit
        ("H200", 65536, 2, False),
        ("A100", 32768, 2, True),
        ("RTX 4090", 32768, 2, False),  # 99 KiB for a block
        ("T4", 32768, 2, False),
    ],
)
def test_a_program_stays_where_an_sm_holds_one_and_it_can_load_ahead(
    on, name, n_cols, element_size, stays
):
    on(gpu.named(name))
    config = persistent.choose_config(n_cols, element_size)
    found = config.num_stages, config.programs_per_slot
    assert found == ((3, 1) if stays else (1, 16))


ALIGNED = {"n_cols": 32768, "row_stride": 32768, "offset": 0, "col_stride": 1}


@pytest.mark.parametrize(
    ("changes", "aligned"),
    [
        ({}, True),
        ({"row_stride": 32784}, True),
        ({"row_stride": 0}, True),  # one row, again and again
        ({"row_stride": 32769}, False),
        ({"row_stride": 32776}, False),  # 16 bytes, but Triton tells 16 elements only
        ({"offset": 1}, False),
        ({"col_stride": 2, "row_stride": 65536}, False),
        ({"n_cols": 20008, "row_stride": 20016}, False),
    ],
)
def test_rows_stay_only_where_the_compiler_loads_them_ahead(on, changes, aligned):
    """A row that starts at an odd address would stay and not load ahead."""
    on(H200)
    lies = ALIGNED | changes
    n_cols, strides = lies["n_cols"], (lies["row_stride"], lies["col_stride"])
    flat = torch.empty(2 * 65536 + 1, dtype=torch.bfloat16)
    x = flat.as_strided((2, n_cols), strides, lies["offset"])
    assert flat.data_ptr() % 16 == 0
    config = persistent.choose_config(n_cols, 2, persistent.starts_aligned(x))
    assert (config.num_stages == 3) == (config.programs_per_slot == 1) == aligned
    ahead = dataclasses.replace(config, num_stages=3).constants
    sizes = (n_cols, 1, *strides, 4096, n_cols)
    kernel = compile.aot(persistent.softmax_kernel, flat, x, *sizes, **ahead)
    assert (kernel.count(r"cp\.async\.c[ag]") > 0) == aligned


def test_the_wrapper_tells_whether_rows_start_aligned(monkeypatch):
    told = []

    def choose(n_cols: int, element_size: int, aligned: bool) -> persistent.Config:
        told.append(aligned)
        return persistent.Config(1, n_cols, num_warps=2)

    monkeypatch.setattr(persistent, "choose_config", choose)
    for layout in ({"stride": 64}, {"stride": 65}, {"stride": 64, "offset": 1}):
        x = matrix(3, 64, **layout)
        assert_right(persistent.softmax(x), x)
    assert told == [True, False, False]


@pytest.mark.parametrize("compute_capability", [75, 80])
def test_nothing_loads_ahead_without_cp_async(on, compute_capability):
    """Shared memory decides for the GPUs above, so here there is enough of it."""
    on(dataclasses.replace(H200, compute_capability=compute_capability))
    config = persistent.choose_config(32768, 2)
    assert (config.num_stages > 1) == (compute_capability >= 80)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_chosen_config_fits_its_gpu(on, name):
    there = gpu.named(name)
    on(there)
    launches = {
        (n_cols, dtype): launch_of(
            dtype, n_cols, persistent.choose_config(n_cols, dtype.itemsize)
        )
        for n_cols in (32, 1024, persistent.ONE_PER_SM_COLS)
        for dtype in (torch.float32, torch.bfloat16)
    }
    made = compile.aot_all(launches.values(), gpu=there)
    for (n_cols, _), (*_, constants), kernel in zip(
        launches, launches.values(), made, strict=True
    ):
        found = occupancy.of(kernel)
        assert found.blocks_per_sm >= 1, (constants, str(found))
        if n_cols == persistent.ONE_PER_SM_COLS:
            assert found.blocks_per_sm == 1
        loads_ahead = kernel.count(r"cp\.async\.c[ag]") > 0
        assert loads_ahead == (constants["NUM_STAGES"] > 1)


# ---- the number of resident programs -------------------------------------------------


def test_resident_programs_are_those_of_the_compiled_kernel(monkeypatch):
    """They follow from the registers that a launch of aligned rows is compiled to."""
    asked, loaded = [], []

    def warmup(*args: Any, **options: Any) -> SimpleNamespace:
        asked.append((args, options))
        compiled = SimpleNamespace(metadata=SimpleNamespace(shared=64))

        def load() -> None:
            loaded.append(True)
            compiled.n_regs = 40  # known only now, as with Triton's own

        compiled._init_handles = load
        return compiled

    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(persistent.softmax_kernel, "warmup", warmup, raising=False)
    monkeypatch.setattr(gpu, "here", lambda: H200)
    config = persistent.Config(1, 8192, num_warps=16)
    ask = persistent.resident_programs.__wrapped__  # keeps nothing of this test
    assert ask(torch.float32, config) == 132 * 3  # 64 Ki // (16 * 32 * 40) = 3
    ((args, options),) = asked
    assert options == config.constants | {"grid": (1,)}
    names = persistent.softmax_kernel.arg_names[: len(args)]
    told = dict(zip(names, args, strict=True))
    assert told["input_ptr"] == told["output_ptr"] == torch.float32
    assert told["input_row_stride"] % 16 == 0 and told["input_col_stride"] == 1
    assert loaded == [True]


@pytest.mark.gpu
def test_resident_programs_are_as_many_as_the_driver_says():
    here = gpu.current()
    for dtype, n_cols in ((torch.float32, 128), (torch.bfloat16, 32768)):
        config = persistent.choose_config(n_cols, dtype.itemsize)
        kernel, args, constants = launch_of(dtype, n_cols, config)
        made = compile.aot(kernel, *args, gpu=here, **constants)
        programs = occupancy.by_driver(made) * here.sms
        assert persistent.resident_programs(dtype, config) == programs


# ---- the pipeline --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_stage_but_the_first_takes_a_tile_of_shared_memory(dtype):
    kernels = [compiled(dtype, 4096, num_stages=stages) for stages in (1, 2, 3, 4)]
    tile = 4096 * dtype.itemsize
    extra = [kernel.shared - kernels[0].shared for kernel in kernels]
    assert extra == [0, tile, 2 * tile, 3 * tile]
    copies = [kernel.count(r"cp\.async\.c[ag]") for kernel in kernels]
    assert copies[0] == 0 and all(copies[1:])


def test_there_is_no_pipeline_for_2_byte_values_at_odd_addresses():
    assert compiled(torch.bfloat16, 1001, num_stages=3).count(r"cp\.async\.c[ag]") == 0
    assert compiled(torch.float32, 1001, num_stages=3).count(r"cp\.async\.c[ag]") > 0


# ---- what the usual driver gets wrong ------------------------------------------------


def test_a_kernel_kept_by_its_block_alone_would_be_misaligned():
    kept, needed = (compiled(torch.float32, n_cols) for n_cols in (1024, 1001))
    assert triton.next_power_of_2(1001) == 1024  # the same key for both widths
    assert kept.count(r"ld\.global\.v4") and not needed.count(r"ld\.global\.v[24]")
    assert 1001 * 4 % 16 != 0  # row 1 of such a matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_after_another_width_of_the_same_block(dtype):
    for n_cols in (1024, 1001):
        x = matrix(50, n_cols, dtype)
        assert_right(persistent.softmax(x), x)


def test_registers_alone_promise_too_many_programs():
    kernel = compiled(torch.float32, 128, num_warps=1)
    assert kernel.shared == 0  # 232448 // 0 programs, by the usual formula
    assert 65536 // (kernel.registers * 32) > 32
    found = occupancy.of(kernel)
    assert (found.blocks_per_sm, found.limit) == (32, "blocks")
    x = matrix(200, 128)
    assert_right(persistent.softmax(x, config=persistent.Config(1, 128, 1)), x)


def test_a_grid_of_zero_would_leave_the_output_as_it_was():
    x = matrix(8, 64)
    y = torch.full_like(x, 7.0)
    args = (y, x, *y.stride(), *x.stride(), *x.shape)
    persistent.softmax_kernel[(0,)](*args, **config_for(64).constants)
    assert (y == 7).all()
