"""The experiments compile, count rightly, and judge a learner's functions in words."""

import math

import pandas as pd
import pytest
import torch
import triton
import triton.language as tl

from benchmarks import residency
from kernels import meta
from kernels import residency as chapter
from kernels.lab import clock, compile, gpu, occupancy
from tests.helpers import assert_right, matrix

# ---- what the driver is asked --------------------------------------------------------


def test_every_kernel_is_launched_in_every_way():
    labels = [
        (*labels.values(), launch.constants["num_warps"])
        for labels, launch in residency.launches()
    ]
    ways = len(residency.COLUMNS) * len(meta.WARPS) * len(residency.STAGES)
    assert len(set(labels)) == len(labels) == 4 * ways
    assert {kernel for kernel, *_ in labels} == {
        "program.add_kernel",
        "program.softmax_kernel",
        "strided.softmax_kernel",
        "persistent.softmax_kernel",
    }


def test_the_launches_compile_with_their_options():
    chosen = [
        launch
        for labels, launch in residency.launches()
        if labels["block_cols"] == 512 and labels["num_stages"] == 3
        if launch.constants["num_warps"] == 2
    ]
    made = compile.aot_all(chosen, gpu="H200")
    assert [kernel.num_warps for kernel in made] == [2] * 4
    assert [kernel.num_stages for kernel in made] == [3] * 4
    ahead = [kernel.count(r"cp\.async\.c[ag]") > 0 for kernel in made]
    assert ahead == [False, False, False, True]  # only the last kernel has a loop
    for kernel in made:
        assert occupancy.of(kernel, gpu.named("H200")).blocks_per_sm >= 1


def test_the_usual_formula_fails_where_it_divides_by_zero_or_forgets_a_limit():
    columns = ["num_warps", "registers", "shared_bytes", "blocks_per_sm_driver"]
    rows = [(1, 30, 0, 32), (4, 21, 16, 16), (8, 64, 8192, 4)]
    asked = pd.DataFrame(rows, columns=columns).assign(gpu="NVIDIA H200")
    said = residency.usual_answers(asked)
    assert "by zero for 1 of 3 kernels, and promises too much for 1" in said


# ---- how long a load takes, and a program lives --------------------------------------


@pytest.mark.parametrize("observe", [residency.latencies, residency.lives])
def test_nothing_is_timed_without_a_gpu(monkeypatch, observe):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        observe()


def test_a_step_is_the_time_of_the_chase_over_its_steps(monkeypatch):
    took = 2048.0, 4096.0, 8192.0
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    for name in ("device_us", "unflushed_us"):
        monkeypatch.setattr(clock, name, lambda function, ring, steps: took)
    times = {"p20_ns": 500.0, "p50_ns": 1000.0, "p80_ns": 2000.0}
    assert residency.latencies() == [
        {"memory": memory, "links": 4096, **times} for memory in ("DRAM", "L2")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("work", residency.WORK)
def test_the_timed_kernel_reads_the_clock_around_its_work(work):
    x = torch.empty(64, 2048, device="meta")
    made = compile.aot(residency.timed_launch(x, work))
    order = made.lines(r"GLOBALTIMER|LDG\.E\.128|STG\.E\.128|MUFU\.EX2", "sass")
    clocks = [i for i, line in enumerate(order) if "GLOBALTIMER" in line]
    assert clocks == [0, len(order) - 1]
    assert (len(order) > 2) == (work != "empty")
    assert any("EX2" in line for line in order) == (work == "softmax")


def test_the_clock_leaves_room_for_as_many_programs():
    x = torch.empty(64, 2048, device="meta")
    timed = residency.timed_launch(x, "softmax")
    bare = chapter.launch_for(x, x)
    one, other = compile.aot_all([timed, bare])
    assert occupancy.of(one).blocks_per_sm == occupancy.of(other).blocks_per_sm


def test_programs_that_live_at_once_are_counted_by_sm():
    stamps = torch.tensor(
        [[0, 1000, 7], [500, 2000, 7], [1000, 3000, 7], [0, 4000, 3]]
    )  # the third begins when the first has ended
    found = residency.observed(stamps)
    assert found == {"seen": 2, "life_us": 1.5, "place_us": 4.0 * 2 * 2 / 4}


@pytest.mark.gpu
def test_no_more_programs_live_at_once_than_the_limit():
    for row in residency.lives(4096, 2048):
        assert row["limit"] == 0 or row["seen"] <= row["limit"], row
        assert row["life_us"] <= row["place_us"] * 1.1, row


# ---- what a limit costs --------------------------------------------------------------


def test_every_provider_is_a_softmax():
    x = matrix(5, 70)
    for provider in residency.providers().values():
        assert_right(provider(x), x)


def test_a_limit_above_what_fits_is_what_fits():
    kernel = {"kernel": "strided.softmax_kernel", "num_warps": 4}
    asked = pd.DataFrame([{**kernel, "block_cols": 512, "blocks_per_sm_driver": 5}])
    names = ["copy", "residency.limit2", "residency.limit8", "residency"]
    names += ["residency.maxnreg32"]
    measured = pd.DataFrame({"provider": names, "n_cols": 512, "share_of_copy": 1.0})
    found = residency.on_an_sm(measured, asked)
    assert found["programs"].tolist() == [2, 5, 5]
    assert found["kib"].tolist() == [4.0, 10.0, 10.0]


# ---- what is said of the learner's functions -----------------------------------------


def count(num_warps, registers, shared, *, portion=256, quarters=4, reserved=1024):
    by_threads = 2048 // (32 * num_warps)
    by_shared = 233472 // (128 * math.ceil((shared + reserved) / 128) or 1)
    per_warp = portion * math.ceil(32 * registers / portion)
    warps = quarters * (65536 // quarters // per_warp)
    return min(32, by_threads, by_shared, warps // num_warps)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "Right in all 152 cases"),
        ({"portion": 1}, "in portions of 256"),
        ({"quarters": 1}, "fit; yours says 25. An SM is four quarters"),
        ({"reserved": 0}, "They run out of shared memory first"),
    ],
)
def test_a_count_is_judged_in_a_sentence(wrong, said):
    def mine(num_warps, registers, shared):
        return count(num_warps, registers, shared, **wrong)

    assert said in residency.judge_count(mine)


def test_what_is_not_written_yet_is_named():
    def mine(num_warps, registers, shared):
        return ...

    said = 'Not yet: line 2 of mine still has "..." in it.'
    assert residency.judge_count(mine) == said


def test_an_exception_is_a_sentence():
    def mine(num_warps, registers, shared):
        return 1 // shared

    assert "Not yet: ZeroDivisionError" in residency.judge_count(mine)


@triton.jit
def lazy_kernel(output_ptr, next_ptr, n_steps):
    tl.store(output_ptr, tl.load(next_ptr))


def test_a_chase_is_judged_in_a_sentence():
    assert residency.judge_chase(chapter.chase_kernel).startswith("Right")
    said = residency.judge_chase(lazy_kernel)
    assert said.startswith("Not yet: after 0 steps from place 0 the links lead to")
