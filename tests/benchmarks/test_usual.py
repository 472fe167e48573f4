"""The usual driver has the faults that chapter `persistent` says, and each shows."""

from types import SimpleNamespace

import pytest
import torch
import triton

from benchmarks import usual
from kernels import persistent
from kernels.lab import backend, clock, process
from tests.fakes import FakeCompiled
from tests.helpers import assert_right, matrix

HAS = {"max_num_regs": 65536, "max_shared_mem": 232448, "multiprocessor_count": 2}


@pytest.fixture
def compiled(monkeypatch):
    """The driver's dictionary is empty, and kernels are compiled to what this says."""
    if not backend.INTERPRETED:
        pytest.skip("on a GPU the last test tries the driver itself")
    needs = SimpleNamespace(registers=32, shared=4096, made=[])

    def warmup(*args, num_warps, grid):
        kernel = FakeCompiled(persistent.softmax_kernel)
        kernel.n_regs = needs.registers
        kernel.metadata = SimpleNamespace(shared=needs.shared)
        kernel._init_handles = lambda: None
        needs.made.append((args, num_warps))
        return kernel

    utils = SimpleNamespace(get_device_properties=lambda device: HAS)
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(usual, "kept", {})
    monkeypatch.setattr(triton.runtime, "driver", driver)
    monkeypatch.setattr(
        usual.persistent.softmax_kernel, "warmup", warmup, raising=False
    )
    return needs


def test_it_is_right_where_its_formula_is(compiled):
    x = matrix(40, 64)
    assert_right(usual.softmax(x), x)
    assert usual.kept[64][1] == 2 * (65536 // (32 * 32 * 8))
    (_, calls) = compiled.made, usual.kept[64][0].calls
    assert [grid for grid, _ in calls] == [(16, 1, 1)]


def test_one_kernel_serves_every_width_of_a_block(compiled):
    for n_cols in (64, 33):
        usual.softmax(matrix(4, n_cols))
    assert len(compiled.made) == 1  # the stale kernel: both widths have a block of 64


def test_a_kernel_without_shared_memory_is_a_division_by_zero(compiled):
    compiled.shared = 0
    outcome = usual._outcome(64)
    assert outcome == "ZeroDivisionError: integer division or modulo by zero"


def test_too_much_shared_memory_makes_an_empty_grid(compiled):
    compiled.shared = 393248
    usual.softmax(matrix(4, 64))
    kernel, n_programs = usual.kept[64]
    assert n_programs == 0
    assert [grid for grid, _ in kernel.calls] == [(0, 1, 1)]


def test_outcomes_are_rows_by_what_was_tried(monkeypatch):
    asked = []

    def outcome(*columns, **options):
        asked.append((columns, options))
        return "right"

    monkeypatch.setattr(usual, "_outcome", outcome)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(process, "call_apart", lambda function: function())
    rows = usual.faults()
    assert asked == [
        ((128,), {"num_warps": 1, "num_stages": 1}),
        ((32768,), {}),
        ((1024, 1001), {}),
    ]
    assert [row["outcome"] for row in rows] == ["right"] * 3
    assert rows[2]["tried"] == "1024 columns, then 1001"


def test_nothing_is_tried_without_a_gpu(monkeypatch):
    monkeypatch.setattr(clock, "can_measure", lambda: False)
    with pytest.raises(RuntimeError, match="nothing can be timed here"):
        usual.faults()


@pytest.mark.gpu
def test_every_fault_shows_and_this_process_survives():
    outcomes = {row["tried"]: row["outcome"] for row in usual.faults()}
    assert "ZeroDivisionError" in outcomes["128 columns, 1 warp"]
    assert outcomes["32768 columns"] != "right"
    assert outcomes["1024 columns, then 1001"] != "right"
    x = matrix(3, 1001)
    assert_right(persistent.softmax(x), x)
    assert torch.ones(1, device=backend.DEVICE).item() == 1
