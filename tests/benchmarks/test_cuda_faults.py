"""What a GPU makes of faulty kernels is what the models say, and the tools find it."""

import pytest

from benchmarks import cuda_faults
from kernels import cuda
from kernels.lab import backend, models
from kernels.lab.record import Unavailable

RACE = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void reduce<Sum, (bool)0>+0x220
=========     and Read access at void reduce<Sum, (bool)0>+0x230 [32 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def test_a_finding_is_read_with_its_summary():
    said = cuda_faults.read(RACE)
    assert said["finding"].startswith("Error: Race reported between Write access at")
    assert said["finding"].endswith("[32 hazards]")
    assert said["summary"] == (
        "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"
    )
    assert cuda_faults.read(CLEAN) == {
        "finding": None,
        "summary": "ERROR SUMMARY: 0 errors",
    }


def test_only_calls_that_there_are_can_be_watched():
    with pytest.raises(ValueError, match=r"names must be among .*got .'barrier'"):
        cuda_faults.sanitized("racecheck", "barrier")


def test_without_the_sanitizer_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(cuda_faults.shutil, "which", lambda tool: None)
    monkeypatch.setattr(cuda_faults.Path, "exists", lambda path: False)
    with pytest.raises(Unavailable, match="compute-sanitizer is not on the PATH"):
        cuda_faults.sanitized("racecheck", "no_barrier")()


def test_a_sanitizer_that_fails_is_unavailable(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho Device not supported\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr(cuda_faults.shutil, "which", lambda name: str(tool))
    with pytest.raises(Unavailable, match="ended with 1: Device not supported"):
        cuda_faults.sanitized("racecheck", "no_barrier")()


@pytest.mark.skipif(not backend.INTERPRETED, reason="a GPU is here")
@pytest.mark.parametrize(
    "experiment",
    [
        *(cuda_faults.butterflies, cuda_faults.partial_warps, cuda_faults.races),
        *(cuda_faults.bank_reads, cuda_faults.checked),
    ],
)
def test_nothing_is_observed_without_a_gpu(experiment):
    with pytest.raises(RuntimeError, match="has no interpreter"):
        experiment()


def test_the_crossing_is_where_the_block_wins_for_good():
    warp = {256: 5.0, 512: 7.0, 1024: 9.0, 2048: 12.0}
    assert cuda_faults.crossing(warp, {n: us + 1 for n, us in warp.items()}) is None
    assert cuda_faults.crossing(warp, {n: us - 1 for n, us in warp.items()}) == 256
    block = {2048: 11.0, 1024: 9.0, 512: 6.0, 256: 6.0}
    assert cuda_faults.crossing(warp, block) == 2048


def test_every_pack_has_both_kernels():
    providers = cuda_faults.by_pack()
    assert list(providers)[:2] == ["cuda.warp.1", "cuda.block.1"]
    assert len(providers) == 2 * len(cuda.PACKS)
    assert all(n % max(cuda.PACKS) == 0 for n in cuda_faults.CROSSING)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_warp_finds_what_the_model_finds():
    values = [float(value) for value in range(31, -1, -1)]
    for width, distances in ((24, (12, 6, 3, 1)), (32, (16, 8, 4, 2, 1))):
        rows = [row for row in cuda_faults.butterflies() if row["width"] == width]
        maxima = models.exchanged(values, distances)[-1]
        sums = models.exchanged(values, distances, lambda a, b: a + b)[-1]
        assert [row["maximum"] for row in rows] == maxima
        assert [row["sum"] for row in rows] == sums


@pytest.mark.gpu
def test_whole_warps_and_barriers_are_right():
    assert cuda_faults.partial_warps()[1]["wrong_blocks"] == 0
    for row in cuda_faults.races():
        assert row["wrong_blocks"] == 0 or not row["barrier"]


@pytest.mark.gpu
def test_more_passes_take_more_cycles():
    rows = cuda_faults.bank_reads()
    passes = [
        models.bank_passes(
            [4 * (lane * row["stride"] % (32 * 33)) for lane in range(32)]
        )
        for row in rows
    ]
    cycles = [row["cycles"] for row in rows]
    assert passes == [1, 2, 4, 8, 16, 32, 1]
    assert sorted(cycles[:-1]) == cycles[:-1] and cycles[-1] < cycles[1]


@pytest.mark.gpu
def test_the_checker_is_passed_by_all():
    rows = cuda_faults.checked()
    assert [row["kernel"] for row in rows] == [
        *(f"cuda.{kernel}" for kernel in cuda.KERNELS),
        "cuda",
    ]
    assert all(row["passes"] for row in rows)


def watched(tool, *names):
    try:
        return cuda_faults.sanitized(tool, *names)()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
def test_racecheck_finds_the_missing_barrier_and_nothing_else():
    missing, there, right = watched(
        "racecheck", "no_barrier", "with_barrier", "softmaxes"
    )
    assert "Race reported" in missing["finding"] and "reduce" in missing["finding"]
    assert there["finding"] is None is right["finding"]
    assert "0 hazards" in there["summary"] and "0 hazards" in right["summary"]


@pytest.mark.gpu
def test_memcheck_finds_nothing():
    (said,) = watched("memcheck", "softmaxes")
    assert said["summary"] == "ERROR SUMMARY: 0 errors" and said["finding"] is None
