"""The models keep their rules; models of Triton do what Triton does."""

import math
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl

from kernels.lab import compile, models

ROWS, PARTS = 5, 3
IN_ORDER = [(row, part) for row in range(ROWS) for part in range(PARTS)]
BY_PART = [(row, part) for part in range(PARTS) for row in range(ROWS)]


# ---- schedules -----------------------------------------------------------------------


def test_a_queue_keeps_every_slot_busy():
    durations = [1 + (7 * i % 5) / 4 for i in range(40)]
    runs = models.scheduled_by_queue(durations, 6)
    assert [run.end - run.begin for run in runs] == pytest.approx(durations)
    ends = [0.0] * 6
    for slot, begin, end in runs:
        assert begin == ends[slot] == min(ends)
        ends[slot] = end
    assert max(end for *_, end in models.scheduled_by_queue([1.0] * 9, 4)) == 3


def test_a_queue_starts_each_task_and_a_stride_each_slot():
    queue = models.scheduled_by_queue([1.0] * 4, 2, start=0.5)
    assert queue[-1] == (1, 2.0, 3.0)
    stride = models.scheduled_by_stride([1.0] * 4, 2, start=0.5)
    assert stride[-1] == (1, 1.5, 2.5)


def test_by_stride_a_slot_takes_every_slots_th_task():
    runs = models.scheduled_by_stride([1.0, 5.0, 1.0, 1.0, 1.0], 2, start=0.5)
    assert [run.slot for run in runs] == [0, 1, 0, 1, 0]
    assert runs[-1] == (0, 2.5, 3.5)
    assert runs[3] == (1, 5.5, 6.5)


def test_a_slow_slot_gets_fewer_tasks_from_a_queue_only():
    speeds = [1.0, 0.5, 1.0]
    queue = models.scheduled_by_queue([1.0] * 10, 3, speeds=speeds)
    stride = models.scheduled_by_stride([1.0] * 10, 3, speeds=speeds)
    assert [sum(run.slot == 1 for run in runs) for runs in (queue, stride)] == [2, 3]
    assert [max(run.end for run in runs) for runs in (queue, stride)] == [4, 6]
    slow = [run for run in queue + stride if run.slot == 1]
    assert {run.end - run.begin for run in slow} == {2.0}


# ---- programs that wait for each other -----------------------------------------------


def test_waiting_programs_end_if_there_are_enough_slots():
    for order in (IN_ORDER, BY_PART):
        runs = models.scheduled_with_waiting(order, ROWS * PARTS)
        assert {run[1:] for run in runs} == {(0, 1, 1, 1.5)}
    runs = models.scheduled_with_waiting(IN_ORDER, PARTS)  # a row at a time
    assert runs[-1] == (2, 6, 7, 7, 7.5)
    runs = models.scheduled_with_waiting(IN_ORDER, 5)
    waiting = [run for run in runs if run.published < run.resumed]
    assert len(waiting) == 8 and max(run.end for run in waiting) == 7.5


def test_waiting_programs_never_end_if_no_row_is_complete():
    for order, slots in ((BY_PART, ROWS), (IN_ORDER, PARTS - 1)):
        runs = models.scheduled_with_waiting(order, slots)
        assert all(run.resumed == run.end == math.inf for run in runs)
        assert [run.slot for run in runs] == [*range(slots), *[-1] * (15 - slots)]
    runs = models.scheduled_with_waiting(BY_PART, 2 * ROWS + 1)
    assert runs[-1].end < math.inf


def test_with_help_every_order_ends():
    for order in (IN_ORDER, BY_PART):
        for slots in range(1, 8):
            runs = models.scheduled_with_waiting(order, slots, patience=1.0)
            assert all(run.end < math.inf for run in runs)
    runs = models.scheduled_with_waiting(BY_PART, ROWS, patience=1.0)
    assert runs[0] == (0, 0, 1, 2, 5.5)  # waits, loads two parts and its own, stores
    assert runs[-1] == (4, 7, 8, 8, 8.5)  # the pairs of all other parts are there


def test_programs_that_help_share_the_missing_parts():
    order = [(0, part) for part in range(6)]
    runs = models.scheduled_with_waiting(order, 2, patience=1.0)
    # Two programs help with four parts, two each, and load their own again.
    assert [run.end for run in runs[:2]] == [5.5, 5.5]
    assert [run.published for run in runs[2:4]] == [6.5, 6.5]
    runs = models.scheduled_with_waiting(order, 6, patience=0.5)
    assert all(run.published == run.resumed for run in runs)  # nobody is missed


# ---- what the compiler does ----------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "ends"), [(1, [4.5, 9, 13.5]), (2, [4.5, 9, 13.5]), (3, [4.5, 6, 9])]
)
def test_pipelined_loops_wait_for_their_loads(stages, ends):
    runs = models.pipelined(3, stages, 3.0, 1.0, 0.5)
    assert [run.end for run in runs] == ends
    for run in runs:
        assert run.begin >= run.issued + 3
    for early, late in zip(runs, runs[max(stages - 1, 1) :], strict=False):
        assert late.issued == early.end  # its buffer is free when that iteration ends


@triton.jit
def rows_kernel(
    output_ptr,
    input_ptr,
    n_rows,
    n_cols,
    BLOCK_COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_COLS)
    for row in tl.range(tl.program_id(0), n_rows, 64, num_stages=STAGES):
        places = row * n_cols + cols
        x = tl.load(input_ptr + places, mask=cols < n_cols, other=-float("inf"))
        z = tl.exp(x - tl.max(x, 0))
        tl.store(output_ptr + places, z / tl.sum(z, 0), mask=cols < n_cols)


def compiled(stages):
    x = compile.pointer(torch.float32)
    options = {"BLOCK_COLS": 1024, "STAGES": stages}
    return compile.aot(rows_kernel, x, x, 1824, 1024, **options)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_pipeline_is_the_compilers(stages):
    """Loads before the loop, and the order within it, are those of the model."""
    signs = {"async_copy_global": "issue", "async_wait": "wait"}
    signs |= {"tt.load": "load", "tt.store": "store"}

    def steps(part: str) -> list[str]:
        lines = part.splitlines()
        return [step for line in lines for sign, step in signs.items() if sign in line]

    before, loop = compiled(stages).ttgir.split("scf.for")
    assert steps(before) == ["issue"] * (stages - 1)
    wanted = ["wait", "store", "issue"] if stages > 1 else ["load", "store"]
    assert steps(loop.split("scf.yield")[0]) == wanted


def test_the_default_layout_is_the_compilers():
    layout = "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4]"
    assert f"#ttg.blocked<{{{layout}" in compiled(1).ttgir


@pytest.mark.parametrize("block", [128, 512, 1024, 4096])
@pytest.mark.parametrize("warps", [1, 4, 8])
def test_a_block_layout_holds_every_element_equally_often(block, warps):
    held = Counter()
    for warp in range(warps):
        for lane in range(32):
            held.update(models.elements_of_lane(block, warp, lane, warps_per_cta=warps))
    assert sorted(held) == list(range(block))
    assert set(held.values()) == {max(128 * warps // block, 1)}


def test_a_lane_holds_neighbours_of_every_round():
    wanted = [136, 137, 138, 139, 648, 649, 650, 651]
    assert models.elements_of_lane(1024, 1, 2) == wanted


@triton.jit
def owners(output_ptr, BLOCK: tl.constexpr):
    """Writes, for each element of a block, the number of a thread that holds it."""
    offsets = tl.arange(0, BLOCK)
    assembly: tl.constexpr = "{ mov.u32 $0, %tid.x; add.u32 $0, $0, $1; }"
    thread = tl.inline_asm_elementwise(
        assembly, "=r,r", [offsets * 0], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(output_ptr + offsets, thread)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "warps"), [(1024, 4), (512, 1), (4096, 8)])
def test_the_block_layout_is_the_compilers(block, warps):
    output = torch.empty(block, dtype=torch.int32, device="cuda")
    owners[(1,)](output, BLOCK=block, num_warps=warps)
    for warp in range(warps):
        for lane in range(32):
            mine = models.elements_of_lane(block, warp, lane, warps_per_cta=warps)
            assert set(output[mine].tolist()) == {32 * warp + lane}


# ---- a cache and a butterfly ---------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 3, 7, 8, 9])
def test_a_cache_serves_what_was_used_last(capacity):
    once = list(range(8))
    held = min(capacity, 8)
    forwards = models.served_by_lru([*once, *once], capacity)
    assert forwards == [False] * 8 + [held == 8] * 8
    backwards = models.served_by_lru([*once, *once[::-1]], capacity)
    assert backwards == [False] * 8 + [True] * held + [False] * (8 - held)
    used_again = models.served_by_lru([0, 1, 0, 2, 0, 1], 2)
    assert used_again == [False, False, True, False, True, False]


def test_a_butterfly_combines_all_values_in_every_lane():
    steps = models.butterfly([1, 3, 2, 0])
    assert steps == [[1, 3, 2, 0], [2, 3, 2, 3], [3, 3, 3, 3]]
    sums = models.butterfly(range(32), lambda a, b: a + b)
    assert len(sums) == 6 and sums[-1] == [sum(range(32))] * 32
    assert models.butterfly(["alone"]) == [["alone"]]


@pytest.mark.parametrize("count", [0, 3, 12])
def test_a_butterfly_needs_a_power_of_two(count):
    with pytest.raises(
        ValueError, match=f"number of values must be a power of two, got {count}"
    ):
        models.butterfly(range(count))


@pytest.mark.parametrize("stride", range(1, 34))
def test_a_stride_meets_its_banks_as_often_as_it_shares_factors_with_32(stride):
    addresses = [4 * stride * lane for lane in range(32)]
    assert models.bank_passes(addresses) == math.gcd(stride, 32)


def test_bank_passes():
    assert models.bank_passes([0] * 32) == 1  # all lanes want the same bytes
    assert models.bank_passes([0, 1, 2, 3] * 8) == 1  # bytes of one word
    assert models.bank_passes([-1] * 32) == 0
    assert models.bank_passes([-1] * 30 + [0, 128]) == 2
    assert models.bank_passes([8 * lane for lane in range(32)], 8) == 2
    assert models.bank_passes([16 * lane for lane in range(32)], 16) == 4
    assert models.bank_passes([128 * lane for lane in range(32)], 16) == 32


def test_lanes_exchange_at_any_distances():
    steps = models.exchanged([1, 3, 2, 0], [1, 2])
    assert steps == [[1, 3, 2, 0], [3, 3, 2, 2], [3, 3, 3, 3]]
    assert models.exchanged([1, 3, 2, 0], []) == [[1, 3, 2, 0]]


def test_a_butterfly_of_24_lanes_splits_them():
    heard = models.exchanged(
        [frozenset([lane]) for lane in range(32)], [12, 6, 3, 1], frozenset.union
    )[-1]
    assert {len(each) for each in heard} == {16}
    values = [100, *range(31)]  # the maximum is in lane 0
    found = models.exchanged(values, [12, 6, 3, 1])[-1]
    assert [lane for lane in range(24) if found[lane] == 100] == [*range(16)]


def test_a_shuffle_needs_a_partner():
    with pytest.raises(ValueError, match=r"one of the 24 lanes, got 12.*lane 31"):
        models.exchanged(range(24), [12])


def test_a_block_reduces_by_warps_and_by_shared_memory():
    done = models.block_reduction([1, 5, 2, 0, 3, 3, 9, 4], warp_size=4)
    assert done.first[0] == [1, 5, 2, 0, 3, 3, 9, 4]
    assert done.first[1:] == [[2, 5, 2, 5, 9, 4, 9, 4], [5] * 4 + [9] * 4]
    assert done.shared == [5, 9] and done.result == 9
    assert done.second[0] == [5, 9, -math.inf, -math.inf]
    assert done.second[1:] == [[5, 9, 5, 9], [9] * 4]
    total = models.block_reduction(range(1024), lambda a, b: a + b, identity=0)
    assert total.result == sum(range(1024)) and len(total.shared) == 32


def test_a_block_of_112_threads_lacks_lanes():
    with pytest.raises(ValueError, match=r"got 112: .*lacks 16 lanes"):
        models.block_reduction([-1.0] * 112)
    wrong = models.block_reduction([-1.0] * 112, missing=0.0)
    assert (wrong.shared, wrong.result) == ([-1.0, -1.0, -1.0, 0.0], 0.0)
    assert models.block_reduction([-1.0] * 112, missing=-math.inf).result == -1.0


@pytest.mark.parametrize("threads", [0, 17 * 16])
def test_a_block_has_no_more_warps_than_a_warp_has_lanes(threads):
    with pytest.raises(ValueError, match="number of values must be 1 to 256"):
        models.block_reduction([1] * threads, warp_size=16)


# ---- tiles of a matrix product -------------------------------------------------------


def test_grouped_tiles_go_down_before_they_go_right():
    order = [models.grouped_tile(program, 5, 3, 2) for program in range(15)]
    assert order[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert order[-3:] == [(4, 0), (4, 1), (4, 2)]  # the last group has one row


def test_loads_of_tiles_go_in_lockstep_wave_by_wave():
    loads = models.loads_of_tiles([(0, 0), (0, 1), (1, 0)], 2, 2, (1, 2))
    first = [("A", 0, 0), ("B", 0, 0), ("B", 1, 0), ("A", 0, 0), ("B", 2, 0)]
    assert loads[:5] == first
    assert {step for _, _, step in loads[:6]} == {0}
    assert loads[12:] == [
        *(("A", 1, 0), ("B", 0, 0), ("B", 1, 0)),
        *(("A", 1, 1), ("B", 0, 1), ("B", 1, 1)),
    ]
    assert sum(models.served_by_lru(loads, 100)) == len(loads) - 4 - 8
