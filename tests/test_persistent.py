"""Programs that stay: right for any grid, and free of the usual driver's faults."""

import dataclasses

import pytest
import torch
import triton

from kernels import persistent
from kernels.lab import backend, check, compile, gpu, meter, occupancy

H200 = gpu.named("H200")
DOCUMENTED = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200")
MANY = 10**6


def matrix(n_rows, n_cols, dtype=torch.float32):
    generator = torch.Generator().manual_seed(n_rows + n_cols)
    x = torch.randn(n_rows, n_cols, generator=generator)
    return x.to(backend.DEVICE, dtype)


def assert_right(y, x):
    torch.testing.assert_close(y, torch.softmax(x.double(), 1).to(x.dtype))


def laid_out(n_cols, **changes):
    return dataclasses.replace(persistent.plan(n_cols, 4), **changes)


def compiled(dtype, n_cols, num_warps=4, num_stages=1, *, rows=1, on="H200"):
    """The kernel for contiguous rows."""
    x, block = compile.pointer(dtype), triton.next_power_of_2(n_cols)
    sizes = n_cols, 1, n_cols, 1, 4096, n_cols, rows, block, num_stages
    kernel = persistent.softmax_kernel
    return compile.aot(kernel, x, x, *sizes, num_warps=num_warps, gpu=on)


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
def test_is_right_for_any_layout(n_rows, n_cols, rows_per_tile, programs_per_slot):
    layout = laid_out(
        n_cols, rows_per_tile=rows_per_tile, programs_per_slot=programs_per_slot
    )
    x = matrix(n_rows, n_cols)
    assert_right(persistent.softmax(x, layout=layout), x)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_is_right_for_any_number_of_stages(num_stages):
    layout = laid_out(128, rows_per_tile=2, num_stages=num_stages, programs_per_slot=1)
    for n_cols in (128, 127):
        x = matrix(2000, n_cols)[::200]
        assert_right(persistent.softmax(x, layout=layout), x)


@pytest.mark.parametrize("answer", [0, 1, 3, MANY])
def test_never_depends_on_the_number_of_slots(monkeypatch, answer):
    monkeypatch.setattr(persistent, "slots", lambda dtype, layout: answer)
    x = matrix(37, 33)
    for programs_per_slot in (1, 16):
        layout = laid_out(33, rows_per_tile=2, programs_per_slot=programs_per_slot)
        assert_right(persistent.softmax(x, layout=layout), x)


def test_moves_what_it_says():
    for n_rows, n_cols in ((37, 33), (3, 781), (200, 4)):
        counted = meter.count(persistent.softmax, matrix(n_rows, n_cols))
        moved = counted.read_values, counted.written_values
        assert moved == persistent.traffic(n_rows, n_cols)
        assert moved == meter.fused(n_rows, n_cols)[:2]


def grid(n_rows, **changes):
    layout = laid_out(64, rows_per_tile=4, **changes)
    traffic = meter.count(persistent.softmax, matrix(n_rows, 64), layout=layout)
    (launch,) = (op for op in traffic.rows if op.grid)
    return launch.grid[0]


def test_the_grid_is_what_fits_or_the_tiles_if_they_are_fewer():
    slots = persistent.INTERPRETED_SLOTS  # the meter counts in the interpreter
    assert grid(100, programs_per_slot=1) == slots
    assert grid(100, programs_per_slot=2) == 2 * slots
    assert grid(100, programs_per_slot=MANY) == 25
    assert grid(9, programs_per_slot=1) == 3
    assert grid(1) == 1


def test_a_layout_that_is_too_narrow_is_named():
    with pytest.raises(ValueError, match=r"at least 65.*got 64; plan\(65, 4\) would"):
        persistent.softmax(matrix(2, 65), layout=persistent.plan(64, 4))


def test_more_rows_than_the_loop_can_number_are_named():
    x = matrix(1, 1).expand(persistent.MAX_ROWS + 1, 1)
    with pytest.raises(ValueError, match=r"at most 1073741824 rows .*got 1073741825"):
        persistent.softmax(x)


# ---- the plan ------------------------------------------------------------------------


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
def test_plan(n_cols, element_size, rows_per_tile, num_warps):
    block_cols = triton.next_power_of_2(n_cols)
    wanted = persistent.Plan(rows_per_tile, block_cols, num_warps, 1, 16)
    assert persistent.plan(n_cols, element_size) == wanted


@pytest.fixture
def on(monkeypatch):
    persistent.plan.cache_clear()
    yield lambda name: monkeypatch.setattr(gpu, "here", lambda: gpu.named(name))
    persistent.plan.cache_clear()


@pytest.mark.parametrize(
    ("name", "n_cols", "element_size", "stays"),
    [
        ("H200", 32768, 2, True),
        ("H200", 20000, 2, True),
        ("H200", 20001, 2, False),  # no row but the first is aligned
        ("H200", 16384, 2, False),  # two programs on an SM
        ("H200", 32768, 4, False),  # two more rows of 128 KiB do not fit
        ("H200", 65536, 2, False),
        ("A100", 32768, 2, True),
        ("RTX 4090", 32768, 2, False),  # 99 KiB for a block
        ("T4", 32768, 2, False),
    ],
)
def test_a_program_stays_where_it_is_alone_and_can_load_ahead(
    on, name, n_cols, element_size, stays
):
    on(name)
    layout = persistent.plan(n_cols, element_size)
    found = layout.num_stages, layout.programs_per_slot
    assert found == ((3, 1) if stays else (1, 16))


@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_plan_fits_its_gpu(on, name, dtype):
    on(name)
    for n_cols in (32, 1024, 32768):
        layout = persistent.plan(n_cols, dtype.itemsize)
        kernel = compiled(
            dtype,
            n_cols,
            layout.num_warps,
            layout.num_stages,
            rows=layout.rows_per_tile,
            on=name,
        )
        found = occupancy.of(kernel)
        assert found.blocks_per_sm >= 1, (layout, str(found))
        if n_cols == persistent.LONELY_COLS:
            assert found.blocks_per_sm == 1


# ---- the pipeline --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_stage_but_one_takes_a_tile_of_shared_memory(dtype):
    kernels = [compiled(dtype, 4096, num_stages=stages) for stages in (1, 2, 3, 4)]
    tile = 4096 * dtype.itemsize
    assert [k.shared - kernels[0].shared for k in kernels] == [
        0,
        tile,
        2 * tile,
        3 * tile,
    ]
    copies = [k.count(r"cp\.async\.c[ag]") for k in kernels]
    assert copies[0] == 0 and all(copies[1:])


def test_there_is_no_pipeline_for_2_byte_values_at_odd_addresses():
    assert compiled(torch.bfloat16, 1001, num_stages=3).count(r"cp\.async\.c[ag]") == 0
    assert compiled(torch.float32, 1001, num_stages=3).count(r"cp\.async\.c[ag]") > 0


# ---- what the usual driver gets wrong ------------------------------------------------


def test_a_kernel_kept_by_its_block_alone_would_be_misaligned():
    kept, needed = (compiled(torch.float32, n_cols) for n_cols in (1024, 1001))
    assert triton.next_power_of_2(1001) == 1024  # one key for both
    assert kept.count(r"ld\.global\.v4") and not needed.count(r"ld\.global\.v[24]")
    assert 1001 * 4 % 16 != 0  # row 1 of such a matrix


def test_right_after_another_width_of_the_same_block():
    for dtype in (torch.float32, torch.bfloat16):
        for n_cols in (1024, 1001):
            x = matrix(50, n_cols, dtype)
            wanted = torch.softmax(x.double(), 1)
            y = persistent.softmax(x).double()
            torch.testing.assert_close(y, wanted, rtol=0.02, atol=1e-6)


def test_registers_alone_promise_too_many_programs():
    kernel = compiled(torch.float32, 128, num_warps=1)
    assert kernel.shared == 0  # 232448 // 0 programs, by the usual formula
    assert 65536 // (kernel.registers * 32) > 32
    found = occupancy.of(kernel)
    assert (found.blocks_per_sm, found.limit) == (32, "blocks")
    x = matrix(200, 128)
    assert_right(persistent.softmax(x, layout=persistent.Plan(1, 128, num_warps=1)), x)


def test_a_grid_of_zero_would_leave_the_output_as_it_was():
    x = matrix(8, 64)
    y = torch.full_like(x, 7.0)
    layout = persistent.plan(64, 4)
    args = (y, x, *y.stride(), *x.stride(), *x.shape)
    persistent.softmax_kernel[(0,)](*args, **layout.constants)
    assert (y == 7).all()


@pytest.mark.gpu
def test_a_slot_is_what_the_driver_says():
    here = gpu.current()
    for dtype, n_cols in ((torch.float32, 128), (torch.bfloat16, 32768)):
        layout = persistent.plan(n_cols, dtype.itemsize)
        how = layout.num_warps, layout.num_stages
        kernel = compiled(dtype, n_cols, *how, rows=layout.rows_per_tile, on=here)
        slots = occupancy.by_driver(kernel) * here.sms
        assert persistent.slots(dtype, layout) == slots
