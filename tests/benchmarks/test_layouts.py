"""The experiments of chapter `strided`: right kernels, and rows that say their case."""

import contextlib

import pandas as pd
import pytest
import torch

from benchmarks import layouts
from kernels import strided
from kernels.lab import clock, counters
from tests.helpers import assert_right, matrix


@pytest.fixture
def timed(monkeypatch):
    """The (function, arguments) that were timed; each is called, and takes 2 µs."""
    log = []

    def device_us(function, *args):
        log.append((function, args))
        function(*args)
        return 1.0, 2.0, 3.0

    monkeypatch.setattr(clock, "device_us", device_us)
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
    assert len(rows) == len(timed) == 2 * (len(layouts.CASES) + 2)
    assert [row["dtype"] for row in rows] == ["float32"] * 8 + ["bfloat16"] * 8
    assert rows[3]["case"] == "1001: 1008 → 1001"
    assert rows[6]["case"] == "1000: 1000 → 1000, program"
    assert rows[7]["case"] == "1000: 1000 → 1000, eights"
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
        "contiguous, result not",
        "transposed, copied first",
        "copy",
    ]
    assert all(row["us"] == 2.0 for row in rows)


def test_a_result_can_lie_in_rows_or_in_columns():
    for x in (matrix(6, 10), matrix(10, 6).t()):
        rows, columns = layouts.into_rows(x), layouts.into_columns(x)
        assert (rows.stride(), columns.stride()) == ((10, 1), (1, 6))
        assert_right(rows, x)
        assert_right(columns, x)


def test_guesses_stand_beside_what_was_measured_in_copies():
    observed = pd.DataFrame(
        {"call": ["contiguous", "sliced", "copy"], "us": [30, 20, 10]}
    )
    assert layouts.in_copies(observed, {"contiguous": 1}) == {
        "contiguous": {"guessed": 1, "measured": 3},
        "sliced": {"measured": 2},
    }


def test_rms_norm_is_that_of_torch():
    x = matrix(4, 6)
    torch.testing.assert_close(
        layouts.rms_norm(x), torch.nn.functional.rms_norm(x, (6,), eps=1e-6)
    )


# ---- what a warp touches -------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "aligned", "load", "store"),
    [
        ((1008, 1, 1008, 1, 1008), True, "16 B, 100 %", "16 B, 100 %"),
        ((1008, 1, 1008, 1, 1008), False, "2 B, 66.7 %", "2 B, 66.7 %"),
        ((1001, 1, 1008, 1, 1001), True, "2 B, 12.5 %", "2 B, 66.7 %"),
        ((1008, 1, 1008, 1, 1001), True, "2 B, 12.5 %", "2 B, 12.5 %"),
        ((1, 4096, 1, 4096, 1008), True, "2 B, 6.25 %", "2 B, 6.25 %"),
    ],
)
def test_what_a_warp_touches_follows_from_strides_and_length(
    numbers, aligned, load, store
):
    dtype = torch.bfloat16
    said = layouts.access(strided.softmax_kernel, dtype, *numbers, aligned=aligned)
    assert said == {"load": load, "store": store}


def test_the_kernel_of_eights_loads_16_bytes():
    said = layouts.access(layouts.eights_kernel, torch.float32, 125)
    assert said["load"] == said["store"] == "16 B, 100 %"


def profiled(monkeypatch, number):
    fake = [{"kernel": "any", "loaded": i} for i in range(number)]

    def profile(function, metrics, *, replay):
        assert function is layouts.run_sectors and metrics is layouts.METRICS
        assert replay == "application"  # a second pass must find L2 emptied, too
        return fake

    monkeypatch.setattr(counters, "profile", profile)
    return layouts.sectors()


def test_each_call_that_is_counted_is_named(monkeypatch):
    rows = profiled(monkeypatch, 7)
    calls = [row["call"] for row in rows]
    assert calls == [*layouts.one_kernel_each(2, 2)]
    assert "transposed, copied first" not in calls  # that is two kernels
    assert (rows[3]["loaded"], rows[3]["n_rows"]) == (3, 16384)
    with pytest.raises(RuntimeError, match=r"7 kernels should have run, got \['any'\]"):
        profiled(monkeypatch, 1)


def test_each_call_is_watched_once_after_a_call_that_compiles(monkeypatch):
    watching, calls = [], []

    @contextlib.contextmanager
    def watched(*, emptied):
        assert emptied
        watching.append(True)
        yield
        watching.pop()

    monkeypatch.setattr(layouts, "COUNTED", (4, 4))
    monkeypatch.setattr(counters, "watched", watched)
    fake = {name: lambda: calls.append(bool(watching)) for name in ("one", "other")}
    monkeypatch.setattr(layouts, "one_kernel_each", lambda *shape: fake)
    layouts.run_sectors()
    assert calls == [False, True, False, True]


def test_sectors_and_bytes_are_counted_in_matrices():
    row = {"call": "any", "n_rows": 4, "n_cols": 16, "kernel": "any", "duration_us": 1}
    row |= {"loaded": 64, "stored": 8, "l2_read": 4, "l2_written": 8}
    row |= {"dram_read_bytes": 256, "dram_written_bytes": 128}
    (moved,) = layouts.in_matrices(pd.DataFrame([row])).to_dict("records")
    assert moved["loaded"] == 8 and moved["l2_read"] == 0.5
    assert moved["dram_read_bytes"] == 1 and moved["dram_written_bytes"] == 0.5


@pytest.mark.gpu
def test_misaligned_rows_are_slower():
    gbps = {(row["case"], row["dtype"]): row["gbps"] for row in layouts.causes()}
    assert gbps["1001: 1008 → 1008", "bfloat16"] < gbps["1008: 1008 → 1008", "bfloat16"]
    times = {row["call"]: row["us"] for row in layouts.times()}
    assert times["transposed"] > times["contiguous"] > 0
