"""The experiments of chapter `persistent`: the queue is right, the clock adds up."""

import dataclasses

import pandas as pd
import pytest
import torch

from benchmarks import schedules
from kernels import persistent
from kernels.lab import backend, clock, compile, gpu, meter, occupancy
from kernels.lab.launch import Pointer, pointer_to
from tests.helpers import TRITON, assert_right, matrix

F32, I32 = compile.pointer(torch.float32), compile.pointer(torch.int32)
POINTERS = I32, F32, F32


# ---- how many programs fit -----------------------------------------------------------


def test_a_kernels_own_registers_decide_how_many_programs_fit(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "here", lambda: gpu.named("H200"))
    ask = schedules.resident_programs.__wrapped__
    found = ask(schedules.queue_kernel, POINTERS, (65536, 1024), 1024, 2)
    made = compile.aot(
        schedules.queue_kernel, *POINTERS, 65536, 1024, 1024, num_warps=2
    )
    assert found == 132 * occupancy.of(made).blocks_per_sm


# ---- other launches of the chapter's kernel ------------------------------------------


def test_a_launch_changes_only_what_it_is_told(monkeypatch):
    used = []
    monkeypatch.setattr(
        persistent, "softmax", lambda x, *, config: used.append(config) or x
    )
    schedules.launched(num_stages=2, programs_per_slot=1)(matrix(3, 40))
    chosen = persistent.choose_config(40, 4)
    assert used == [dataclasses.replace(chosen, num_stages=2, programs_per_slot=1)]


# ---- a clock in the kernel -----------------------------------------------------------


def test_the_timed_kernel_reads_both_registers_around_the_chapters_kernel():
    p = compile.pointer(torch.int64)
    made = compile.aot(schedules.timed_kernel, p, F32, F32, 64, 1024, 1024, num_warps=4)
    order = made.lines(r"%globaltimer|%smid|ex2\.approx")
    kinds = ["clock" if "globaltimer" in line else "other" for line in order]
    assert kinds.count("clock") == 2 and kinds[0] == "clock"
    assert "smid" in order[-1] and kinds[-2] == "clock"


def test_the_rows_of_an_sm_are_those_of_its_programs():
    stamps = torch.tensor([[100, 900, 7], [164, 500, 3], [200, 700, 7]])
    assert schedules.by_sm(stamps, n_rows=8) == [
        {"sm": 3, "first_start_us": 0.064, "last_end_us": 0.4, "rows": 3},
        {"sm": 7, "first_start_us": 0.0, "last_end_us": 0.8, "rows": 3 + 2},
    ]


OBSERVED = pd.DataFrame(
    [
        (1, 0, 0.0, 130.048, 62),
        (1, 1, 0.032, 98.4, 62),
        (1, 2, 0.064, 99.2, 62),
        (1, 5, 0.0, 128.0, 62),
        (16, 0, 0.0, 125.0, 51),
        (16, 1, 0.0, 124.0, 79),
        (16, 2, 0.0, 125.12, 80),
        (16, 5, 0.0, 123.2, 66),
    ],
    columns=["programs_per_slot", "sm", "first_start_us", "last_end_us", "rows"],
)


def test_two_populations_are_divided_at_the_largest_gap():
    found = schedules.populations(OBSERVED)
    assert list(found.loc["early"]) == [2, "1–2", "98 to 99", "79 to 80"]
    assert list(found.loc["late"]) == [2, "the others", "128 to 130", "51 to 66"]


def test_the_clocks_step_divides_every_time():
    assert schedules.clock_step(OBSERVED[OBSERVED["sm"] < 2]) == 8
    odd = OBSERVED.iloc[:3].assign(last_end_us=[0.064, 0.16, 0.224])
    assert schedules.clock_step(odd) == 32


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([3], "3"), ([5, 4, 3, 9], "3–5, 9"), ([1, 3, 5, 7], "1, 3, 5, 7"), ([], "")],
)
def test_neighbours_are_named_as_a_span(numbers, said):
    assert schedules.spans(numbers) == said


@pytest.mark.parametrize("experiment", [schedules.timeline, schedules.draws])
def test_nothing_is_timed_without_a_gpu(monkeypatch, experiment):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        experiment()


@pytest.mark.gpu
def test_every_row_is_computed_once_on_some_sm():
    rows = schedules.timeline(1000, 8192)
    for per_slot in (1, 16):
        chosen = [row for row in rows if row["programs_per_slot"] == per_slot]
        assert sum(row["rows"] for row in chosen) == 1000
        assert len({row["sm"] for row in chosen}) == len(chosen) <= gpu.here().sms
        assert min(row["first_start_us"] for row in chosen) == 0
        assert all(row["last_end_us"] > row["first_start_us"] for row in chosen)


# ---- a queue in memory ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (4, 5), (37, 781)])
def test_the_queue_is_right_and_ready_for_the_next_call(shape):
    for seed in (1, 2):
        x = matrix(*shape, seed=seed)
        assert_right(schedules.queued(x), x)
        assert schedules.counter().item() == 0


@pytest.mark.parametrize("fit", [1, 3, 100])
def test_any_number_of_programs_is_right(monkeypatch, fit):
    monkeypatch.setattr(schedules, "resident_programs", lambda *asked: fit)
    x = matrix(20, 17)
    assert_right(schedules.queued(x), x)


def test_every_value_moves_once_and_every_row_draws_once():
    counted = meter.count(schedules.queued, matrix(37, 65))
    assert counted.values[:2] == meter.fused(37, 65)[:2]
    assert counted.read_indices == 37


def test_the_queue_is_asked_about_with_its_own_sizes(monkeypatch):
    asked = []
    monkeypatch.setattr(
        schedules, "resident_programs", lambda *args: asked.append(args) or 4
    )
    x = matrix(9, 40)
    schedules.queued(x)
    config = persistent.choose_config(40, 4)
    ((kernel, pointers, scalars, block, num_warps),) = asked
    assert kernel is schedules.queue_kernel
    assert (pointers[0], pointers[2]) == (Pointer(torch.int32), pointer_to(x))
    assert (scalars, block, num_warps) == ((9, 40), 64, config.num_warps)


def test_another_kernel_fits_in_another_number():
    made = compile.aot(
        schedules.queue_kernel, *POINTERS, 65536, 1024, 1024, num_warps=2
    )
    found = schedules.fits(1024)
    assert found["queue_kernel"] == occupancy.of(made).blocks_per_sm
    if TRITON < (3, 9):  # which gives both the same number of registers
        assert found["queue_kernel"] < found["persistent.softmax_kernel"]
    assert found["persistent.softmax_kernel"] <= 32


def test_draws_alone_draw_as_often_and_leave_the_counter_ready():
    counter = torch.zeros(1, dtype=torch.int32, device=backend.DEVICE)
    for _ in range(2):
        counted = meter.count(schedules.draws_kernel[(4,)], counter, 37)
        assert (counted.read_indices, counted.values.read) == (37, 0)
        schedules.draws_kernel[(4,)](counter, 37)
        assert counter.item() == 0


def test_draws_are_timed_with_the_queues_own_programs(monkeypatch):
    timed = []

    def device_us(function):
        timed.append((function.args[1], function.keywords["num_warps"]))
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(clock, "device_us", device_us)
    monkeypatch.setattr(schedules, "resident_programs", lambda *asked: 7)
    rows = schedules.draws((1024, 4096))
    warps = [persistent.choose_config(n, 4).num_warps for n in (1024, 4096)]
    assert timed == [(2**16, warps[0]), (2**14, warps[1])]
    assert rows[0]["n_programs"] == 7 and rows[1]["p50_draws_us"] == 2.0


@pytest.mark.gpu
def test_more_draws_take_more_time():
    few, many = schedules.draws((4096, 1024))
    assert many["p50_draws_us"] > few["p50_draws_us"] > 0
