"""What is committed is whole, and possible on the GPU that it names."""

import math

import pytest
import torch

from kernels.lab import gpu, record

NAMES = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200")
GPUS = {facts.name: facts for facts in map(gpu.named, NAMES)}
FILES = sorted(record.RECORDED.glob("*/*.csv"))
MISLEADING = {"launch", "host"}  # these clocks do not wait for the GPU
CACHED = {"unflushed"}  # and this one leaves its input in L2
# The share of a copy's bytes that providers move: a reduction reads only, and an empty
# kernel moves none.
READ_ONLY = ("eager.max", "eager.sum", "control.amax")
MOVED = {**dict.fromkeys(READ_ONLY, 0.5), "traffic.empty": 0}


def faults_of(df):
    """What cannot be true of measurements by an honest clock."""
    faults = []
    beside = [*record.CASE, "clock"]
    copies = record.select(df, provider="copy", input="contiguous")
    copied = set(copies[beside].itertuples(index=False, name=None))
    for row in df.itertuples(index=False):
        absent = [math.isnan(time) for time in (row.p20_us, row.p50_us, row.p80_us)]
        if not all(absent) and not 0 < row.p20_us <= row.p50_us <= row.p80_us:
            faults.append(f"percentiles out of order: {row}")
        if (row.dtype, row.n_rows, row.n_cols, row.clock) not in copied:
            faults.append(f"no copy beside {row}")
        n_bytes = 2 * row.n_rows * row.n_cols * getattr(torch, row.dtype).itemsize
        facts = GPUS.get(row.gpu)
        if facts and n_bytes > 2 * facts.l2_bytes and row.clock not in MISLEADING:
            moved = n_bytes * MOVED.get(row.provider, 1)
            kept = 2 if row.clock in CACHED else 1  # the last writes may stay in L2
            crossed = moved - kept * facts.l2_bytes
            if crossed / row.p50_us / 1e3 > facts.peak_bandwidth_gbps:
                faults.append(f"faster than the memory: {row}")
    return faults


@pytest.mark.skipif(not FILES, reason="nothing is recorded yet")
@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_committed_file_is_whole_and_possible(path):
    header = path.read_text().splitlines()[0].split(",")
    if "p50_us" in header:
        df = record._read(path)
        keys = list(df[record.KEY].itertuples(index=False, name=None))
        assert keys == sorted(set(keys))
        assert faults_of(df) == []
    else:
        assert header[-len(record.PROVENANCE) :] == record.PROVENANCE
        df = record._observed(path)
    assert {record._slug(name) for name in df["gpu"]} == {path.parent.name}


TRAFFIC = [path for path in FILES if path.stem == "traffic"]


@pytest.mark.parametrize("path", TRAFFIC, ids=lambda path: path.parent.name)
def test_the_launch_clock_tells_of_impossible_bandwidths(path):
    launches = record.select(record._read(path), clock="launch")
    assert faults_of(launches.assign(clock="device"))


def test_faults_are_found():
    provenance = ("NVIDIA H200", "580", "2.11", "3.6", "2026-01-01", "abc1234")
    case = ("copy", "float32", 32768, 8192, "contiguous", "device")
    good = record._frame([(*case, 490.0, 500.0, 510.0, *provenance)])
    assert faults_of(good) == []
    for change, fault in (
        ({"p80_us": 495.0}, "percentiles"),
        ({"p20_us": math.nan}, "percentiles"),
        ({"provider": "torch"}, "no copy"),
        ({"input": "sliced"}, "no copy"),
        ({"p20_us": 390.0, "p50_us": 400.0}, "faster"),
    ):
        (found,) = faults_of(good.assign(**change))
        assert found.startswith(fault)
    assert faults_of(good.assign(p20_us=5.0, p50_us=6.0, clock="launch")) == []
