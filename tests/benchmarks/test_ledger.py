"""What chapter `traffic` says of a count, of the record, and of instructions."""

import math

import pandas as pd
import pytest
import torch

from benchmarks import dram, ledger
from kernels import traffic
from kernels.lab import gpu, record
from tests.helpers import matrix


@pytest.fixture
def at_hand(monkeypatch):
    """Nothing is measured: the rows are those that the H200 recorded."""
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    monkeypatch.setenv("COURSE_RECORDED_GPU", "nvidia-h200")


# ---- the learner's count -------------------------------------------------------------


def right(M, N):
    """The count as the chapter's solution has it."""
    return {
        "max": (M * N, M),
        "subtract": (M * N + M, M * N),
        "exp": (M * N, M * N),
        "sum": (M * N, M),
        "divide": (M * N + M, M * N),
    }


def unfinished(M, N):
    """A count that a learner has begun."""
    return right(M, N) | {"exp": (..., ...)}


def test_a_right_count_is_right():
    assert ledger.judge(right) == "Right: the meter counts the same for 3 matrices."


def test_an_unfinished_count_is_told_its_line():
    said = ledger.judge(unfinished)
    assert said == 'Not yet: line 3 of unfinished still has "..." in it.'


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("subtract", (448, 448), "subtract reads 455 values, not 448"),
        ("sum", (448, 448), "sum writes 7 values, not 448"),
    ],
)
def test_a_wrong_count_is_told_its_first_mistake(line, wrong, said):
    judged = ledger.judge(lambda M, N: right(M, N) | {line: wrong})
    assert judged == f"Not yet: with 7 × 64 values, {said}."


# ---- tables and figures of the record ------------------------------------------------


def test_counters_stand_beside_what_was_asked(at_hand):
    counts = record.recorded("traffic_dram")
    table = ledger.dram_table(counts)
    assert list(table.index) == [*traffic.LINES, "all five"]
    subtract = table.loc["subtract"]
    assert subtract["reads, counted"] == subtract["writes, counted"] == "268"
    assert abs(int(subtract["reads, DRAM"]) - 268) <= 1  # MB
    assert int(subtract["writes, DRAM"]) < 268 - 20
    both = table.loc["all five", ["reads, counted", "writes, counted"]]
    assert list(both) == ["1342", "805"]
    asked = f"{4 * sum(line.read for line in traffic.predicted(*dram.SMALL)) / 1e6:.1f}"
    assert f"to read {asked} MB" in ledger.small_sentence(counts)


def test_rates_of_the_profilers_run(at_hand):
    table = ledger.rates_table(record.recorded("traffic_dram"))
    assert list(table.index) == ["five lines", "torch.softmax"]
    five = table.loc["five lines"]
    assert int(five["achieved, GB/s"]) > 3 * int(five["effective, GB/s"])


def test_predicted_and_measured_lines(at_hand):
    times = record.select(record.recorded("traffic"), clock="device")
    times = record.select(times, n_rows=8192, n_cols=8192, dtype="float32")
    (ax,) = ledger.lines_figure(times).axes
    shown = [tick.get_text() for tick in ax.get_yticklabels()]
    assert shown[:3] == ["exp", "control: scalar", "subtract"]
    assert shown[-1] == "all five lines"
    assert len(ax.patches) == 2 * 8


def test_clocks_side_by_side(at_hand):
    times = record.select(record.recorded("traffic"), n_cols=2048)
    table = ledger.clocks_table([times[times["n_rows"] == 512]])
    assert list(table.columns) == ["512 rows"]
    assert list(table.index)[-1] == "host, not waiting"


def test_a_size_that_a_clock_lacks_is_left_out(at_hand):
    times = record.select(record.recorded("traffic"), n_cols=2048)
    lacks = (times["clock"] == "wall") & (times["n_rows"] == 512)
    assert "512 rows" in ledger.clocks_table([times])
    assert "512 rows" not in ledger.clocks_table([times[~lacks]])


# ---- instructions --------------------------------------------------------------------


def test_busy_kernels_compute():
    x = matrix(7, 50)
    for function in ledger.BUSY.values():
        torch.testing.assert_close(function(x), torch.ones_like(x))


@pytest.mark.thorough
def test_instructions_grow_with_the_steps():
    counted = ledger.instructions(gpu.named("H200"))
    copy = counted["traffic.copy", "float32"]
    for steps, provider in zip(ledger.STEPS, ledger.BUSY, strict=True):
        assert steps <= counted[provider, "float32"] - copy <= steps + 1
    assert 15 < counted["program", "float32"] < 30


def test_rates_and_their_roofline():
    providers = ["copy", "traffic.copy", "program", *ledger.BUSY]
    frame = pd.DataFrame({"provider": providers, "dtype": "float32"})
    frame["gpu"], frame["n_rows"], frame["n_cols"] = "NVIDIA H200", *ledger.SHAPE
    frame["p50_us"] = [128.0, 128.0, 130.0, 300.0, 1100.0]
    n_bytes = 8 * math.prod(ledger.SHAPE)
    frame["effective_gbps"] = n_bytes / frame["p50_us"] / 1e3
    frame["share_of_copy"] = 128.0 / frame["p50_us"]
    frame.attrs["source"] = "made up"
    df = ledger.rates(frame)
    named = ["copy kernel, float32", "softmax, float32", "busy128", "busy512"]
    assert list(df.index) == named
    assert df["slots"].max() == 1
    assert df["per_value"].to_numpy() == pytest.approx(8 * df["per_byte"].to_numpy())
    per_second = df["per_value"]["softmax, float32"] * math.prod(ledger.SHAPE) / 130e-6
    assert df["rate"]["softmax, float32"] == pytest.approx(per_second / 1e12)
    (ax,) = ledger.roofline(frame).axes
    assert "the copy: 4194 GB/s" in [text.get_text() for text in ax.texts]
