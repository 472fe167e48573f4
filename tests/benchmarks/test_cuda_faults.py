"""What a GPU makes of faulty kernels is what the models say, and the tools find it."""

import re
from collections import Counter

import pytest

from benchmarks import cuda_faults
from kernels import cuda
from kernels.lab import backend, models
from kernels.lab.record import Unavailable
from tests.helpers import TRITON

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


# ---- beside Triton -------------------------------------------------------------------

PTX = """
mov.u32 \t%r41, 31;
mov.u32 \t%r40, 16;
st.shared.v4.f32 [%r2], {%f1, %f2, %f3, %f4};
shfl.sync.bfly.b32 \t%r42|%p11, %r39, %r40, %r41, -1;
@%p7 bra \t$L__BB0_21;
@%p9 st.shared.f32 \t[%r59], %f59;
bar.sync \t0;
mov.u32 \t%r66, 2;
shfl.sync.bfly.b32 \t%r68|%p19, %r64, %r66, %r41, -1;
mov.b32 \t%f113, %r68;
max.ftz.f32 \t%f114, %f59, %f113;
ld.shared.v4.f32 \t{%f1, %f2, %f3, %f4}, [%r59];
sub.ftz.f32 \t%f5, %f1, %f114;
bar.sync \t0;
"""


def test_of_the_ptx_only_what_combines_the_maxima_is_left():
    assert cuda_faults.combining(PTX) == [
        "@%p1 st.shared.f32 [%a1], %f1;",
        "bar.sync 0;",
        "shfl.sync.bfly.b32 %r1, %r2, 2, 31, -1;",
        "max.ftz.f32 %f2, %f1, %f3;",
    ]


def test_an_address_of_64_bits_is_shown_as_one_of_32():
    wide = ["st.shared.f32 [%rd7], %f4;", "mov.b32 %r5, %f4;"]
    narrow = ["st.shared.f32 [%r2], %f9;", "mov.b32 %r3, %f9;"]
    shown = cuda_faults.renumbered(wide)
    assert shown == cuda_faults.renumbered(narrow)
    assert shown == ["st.shared.f32 [%a1], %f1;", "mov.b32 %r1, %f1;"]


@pytest.mark.usefixtures("compiler")
def test_our_warps_shuffle_in_five_steps_and_tritons_in_two():
    rows = cuda_faults.across_warps()
    ours, its = ("\n".join(filter(None, (r[k] for r in rows))) for k in rows[0])
    distances = re.findall(r"shfl\.sync\.bfly\.b32 %r\d+, %r\d+, (\d+), 31", ours)
    assert distances == ["16", "8", "4", "2", "1"]
    assert re.findall(r"%r\d+, %r\d+, (\d+), 31", its) == ["2", "1"]
    assert ours.count("max") == 5 and its.count("max") == 2
    assert (ours.count("bar"), ours.count("st.shared")) == (1, 1)


@pytest.mark.usefixtures("compiler")
def test_our_block_has_more_shuffles_and_fewer_barriers_than_tritons():
    warp, triton_1, block, triton_4 = cuda_faults.instructions()
    assert warp["shuffles"] == triton_1["shuffles"] == 10
    assert warp["barriers"] == triton_1["barriers"] == 0
    assert warp["divisions"] == block["divisions"] == 1 < triton_4["divisions"]
    assert block["shuffles"] == 20 > triton_4["shuffles"] == 14
    assert block["barriers"] == 2 < triton_4["barriers"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.skipif(TRITON >= (3, 9), reason="says what Triton 3.6 and 3.7 do")
def test_triton_keeps_maxima_and_sums_at_the_same_place():
    """So its warps wait once more, between both."""
    ptx = cuda_faults.ptx_of("block", 4)["Triton"]
    places = Counter(re.findall(r"st\.shared\.b32 \[ ?(%r\d+)", ptx))
    assert set(places.values()) == {2}
