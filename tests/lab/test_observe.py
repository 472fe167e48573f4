"""Observations are recorded whole, and read back as they were."""

import pandas as pd
import pytest

from kernels.lab import record
from tests.lab.conftest import GPU


def test_an_observation_is_recorded_and_read_back_with_its_types(world, folder):
    rows = [
        {"kernel": "program", "blocks": 32, "share": 0.5, "fits": True, "note": None},
        {"kernel": "nan", "blocks": 16, "share": 2e-9, "fits": False, "note": "1\n2"},
    ]
    world(has_gpu=True, recording=True)
    seen = record.observe("occupancy", lambda: iter(rows))
    header = (folder / "occupancy.csv").read_text().splitlines()[0]
    assert header.split(",") == [*rows[0], *record.PROVENANCE]
    world(has_gpu=False)
    read = record.observe("occupancy", pytest.fail)
    pd.testing.assert_frame_equal(read, seen)
    assert read["kernel"].tolist() == ["program", "nan"]
    assert read["blocks"].tolist() == [32, 16] and read["blocks"].dtype == int
    assert read["share"].tolist() == pytest.approx([0.5, 2e-9])
    assert read["fits"].tolist() == [True, False] and read["fits"].dtype == bool
    assert pd.isna(read["note"][0]) and read["note"][1] == "1\n2"
    assert (read["driver"][0], read["commit"][0]) == ("1.2", "abc1234")
    assert "recorded 20" in read.attrs["source"]
    assert "measured here" in seen.attrs["source"]


def test_what_a_gpu_cannot_tell_here_is_read(world, folder, monkeypatch, capsys):
    def no_profiler():
        raise record.Unavailable("ncu is not installed")

    world(has_gpu=True, recording=True)
    with pytest.raises(ValueError, match=r"no nvidia-test-100/counters\.csv"):
        record.observe("counters", no_profiler)
    record.observe("counters", lambda: [{"dram_bytes": 7}])
    monkeypatch.setattr(record, "_gpu", lambda: GPU | {"gpu": "NVIDIA Test 200"})
    capsys.readouterr()
    read = record.observe("counters", no_profiler)
    assert read["dram_bytes"].tolist() == [7]
    assert read.attrs["source"].startswith("NVIDIA Test 100 ·")
    assert "recorded" in read.attrs["source"]
    assert capsys.readouterr().out == (
        "counters is not observed here: ncu is not installed.\n"
        "It was recorded on NVIDIA Test 100.\n"
    )


def test_a_gpu_that_shows_recorded_times_observes_nothing(world, folder, monkeypatch):
    world(has_gpu=True, recording=True)
    record.observe("counters", lambda: [{"dram_bytes": 7}])
    monkeypatch.setenv("COURSE_MEASURE", "recorded")
    assert record.observe("counters", pytest.fail)["dram_bytes"].tolist() == [7]


def test_an_observation_must_be_a_table(world, folder):
    world(has_gpu=True, recording=True)
    with pytest.raises(ValueError, match="all rows must have the keys"):
        record.observe("mixed", lambda: [{"a": 1}, {"b": 2}])
    assert not folder.exists()
    assert record.observe("empty", lambda: []).attrs["source"] == "no measurements"
