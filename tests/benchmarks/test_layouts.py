"""The experiments of chapter `strided`: right kernels, and rows that say their case."""

import pytest
import torch

from benchmarks import layouts
from kernels import strided
from kernels.lab import clock
from tests.helpers import assert_right, matrix


@pytest.fixture
def timed(monkeypatch):
    """The (function, arguments) that were timed; each is called, and takes 2 µs."""
    log = []

    def events_us(function, *args):
        log.append((function, args))
        function(*args)
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(clock, "events_us", events_us)
    return log


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_eights_is_a_softmax(dtype):
    x = matrix(5, 72, dtype)
    y = torch.empty_like(x)
    layouts.eights_kernel[(5,)](y, x, 9, BLOCK_COLS=128)
    assert_right(y, x)


def test_every_case_is_computed_and_timed_in_both_dtypes(timed, monkeypatch):
    monkeypatch.setattr(layouts, "N_ROWS", 2)
    rows = list(layouts.causes())
    assert len(rows) == len(timed) == 2 * (len(layouts.CASES) + 1)
    assert [row["dtype"] for row in rows] == ["float32"] * 7 + ["bfloat16"] * 7
    assert rows[3]["case"] == "1001: 1008 → 1001"
    assert rows[6]["case"] == "1000: 1000 → 1000, eights"
    for _, (y, x, *_) in timed:
        assert_right(y, x)
    strides = [(x.shape[1], x.stride(0), y.stride(0)) for _, (y, x, *_) in timed[:6]]
    assert strides == list(layouts.CASES)


def test_bandwidth_is_that_of_reading_and_writing_each_value_once(timed, monkeypatch):
    monkeypatch.setattr(layouts, "N_ROWS", 2)
    first = next(layouts.causes())
    assert first["gbps"] == round(2 * 2 * 1008 * 4 / 2.0 / 1e3)


def test_views_are_what_their_names_say():
    views = layouts.views(6, 10)
    assert {name: view.stride() for name, view in views.items()} == {
        "contiguous": (10, 1),
        "sliced": (42, 1),
        "offset": (10, 1),
        "transposed": (1, 6),
        "broadcast": (0, 1),
    }
    assert {view.shape for view in views.values()} == {(6, 10)}
    assert views["contiguous"].data_ptr() % 16 == 0
    assert views["offset"].data_ptr() % 16 == 4
    assert views["sliced"].data_ptr() % 16 == 0


def test_every_layout_is_timed_beside_the_copy(timed):
    rows = layouts.times(6, 10)
    assert [row["call"] for row in rows] == [
        *layouts.views(6, 10),
        "transposed, result not",
        "transposed, copied first",
        "copy",
    ]
    assert all(row["us"] == 2.0 for row in rows)


def test_the_result_of_a_transposed_matrix_can_lie_in_rows():
    x = matrix(10, 6).t()
    y = layouts.into_rows(x)
    assert_right(y, x)
    assert y.is_contiguous() and not strided.softmax(x).is_contiguous()


@pytest.mark.gpu
def test_misaligned_rows_are_slower():
    gbps = {(row["case"], row["dtype"]): row["gbps"] for row in layouts.causes()}
    assert gbps["1001: 1008 → 1008", "bfloat16"] < gbps["1008: 1008 → 1008", "bfloat16"]
    times = {row["call"]: row["us"] for row in layouts.times()}
    assert times["transposed"] > times["contiguous"] > 0
