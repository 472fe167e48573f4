"""The softmax with a limit is the softmax; the chase follows every link once."""

import pytest
import torch

from kernels import residency, strided
from kernels.lab import backend, check, compile, gpu, meter, occupancy
from tests.helpers import assert_right, fewer, in_company, matrix, meta_matrix

F32, I32 = compile.pointer(torch.float32), compile.pointer(torch.int32)


def test_is_a_softmax():
    summary = check.softmax(residency.softmax, max_cols=1025)
    assert summary, summary


@pytest.mark.parametrize("programs_per_sm", [None, 1, 3, 32])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_is_right_with_any_limit(dtype, programs_per_sm):
    for n_cols in (33, 64):
        x = matrix(fewer(30, 300), n_cols, dtype)
        for _ in range(2):  # a launch that is kept is right as well
            y = residency.softmax(x, programs_per_sm=programs_per_sm)
            assert_right(y, x)


@pytest.mark.parametrize("programs_per_sm", [0, 33, 2.5])
def test_a_limit_that_no_sm_has_is_named(monkeypatch, programs_per_sm):
    monkeypatch.setattr(gpu, "here", lambda: gpu.named("H200"))
    with pytest.raises(
        ValueError, match=r"programs_per_sm must be from 1 to 32, .*got"
    ):
        residency.softmax(matrix(3, 5), programs_per_sm=programs_per_sm)


def test_reads_and_writes_each_value_once():
    x = matrix(7, 33)
    assert meter.count(residency.softmax, x).values == meter.fused(*x.shape)


def test_launches_the_kernel_of_the_chapter_before():
    x = meta_matrix(3, 2048)
    launch = residency.launch_for(x, x)
    assert launch.kernel is strided.softmax_kernel and launch.grid == (3,)
    sizes = 2048, 1, 2048, 1, 2048, 2048
    bare = compile.aot(strided.softmax_kernel, F32, F32, *sizes, num_warps=4)
    assert compile.aot(launch).key == bare.key


def test_registers_come_in_portions():
    """What the chapter says: 33 registers leave room for 12 programs, 32 for 16."""
    x = meta_matrix(3, 2048)
    plain, squeezed = compile.aot_all(
        [residency.launch_for(x, x), residency.launch_for(x, x, maxnreg=32)]
    )
    assert plain.registers <= 40 and squeezed.registers <= 32
    assert plain.spills == squeezed.spills == 0
    fit = 12 if plain.registers > 32 else 16  # Triton 3.9 needs only 30
    assert occupancy.of(plain).blocks_per_sm == fit
    assert occupancy.of(squeezed).blocks_per_sm == 16


# ---- the chase -----------------------------------------------------------------------


@pytest.mark.parametrize("n_links", [1, 2, 100])
def test_the_links_are_one_ring(n_links):
    ring = residency.links(n_links, apart=8)
    assert ring.shape == (8 * n_links,) and ring.dtype == torch.int32
    place, visited = 0, []
    for _ in range(n_links):
        visited.append(place)
        place = ring[place].item()
    assert place == 0 and sorted(visited) == [8 * i for i in range(n_links)]


def test_the_chase_follows_the_links():
    ring = residency.links(16, apart=8)
    assert residency.chase(ring, 0).item() == 0
    assert residency.chase(ring, 1).item() == ring[0].item()
    assert residency.chase(ring, 15).item() != 0
    assert residency.chase(ring, 16).item() == 0


def test_the_compiler_keeps_one_load_for_each_step():
    made = compile.aot(residency.chase_kernel, I32, I32, 4096, num_warps=1)
    assert made.count(r"ld\.global") == 1 and not made.count("cp.async")
    assert made.num_warps == 1


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@in_company
def test_a_limit_costs_time():
    from kernels.lab import clock

    x = torch.randn(16384, 2048, device=backend.DEVICE)
    one = clock.device_us(lambda x: residency.softmax(x, programs_per_sm=1), x)
    assert one[1] > 1.5 * clock.device_us(residency.softmax, x)[1]
