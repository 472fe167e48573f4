"""Facts of GPUs: the table against itself and known values, the driver against both."""

import ctypes
import dataclasses

import pytest
import torch

from kernels.lab import backend, gpu
from tests.fakes import fake_gpu

DOCUMENTED = (
    *("T4", "A100", "RTX 3090", "L4", "RTX 4090", "H100", "H200", "B200", "RTX 5090"),
)
NOT_READ = {"source": "the driver of this machine"}


@pytest.mark.parametrize(
    ("name", "shared_per_block", "reserved"),
    [("T4", 65536, 0), ("A100", 166912, 1024), ("RTX 5090", 101376, 1024)],
)
def test_shared_memory_that_no_block_can_have_is_the_drivers(
    name, shared_per_block, reserved
):
    facts = gpu.named(name)
    assert facts.shared_per_block == shared_per_block
    assert facts.shared_reserved_per_block == reserved


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_fact_is_cited_and_consistent(name):
    facts = gpu.named(name)
    assert "https://" in facts.source
    assert (
        facts.shared_per_block + facts.shared_reserved_per_block == facts.shared_per_sm
    )
    assert facts.threads_per_sm % (4 * facts.warp_size) == 0
    assert min(v for v in dataclasses.astuple(facts) if isinstance(v, int)) >= 0
    assert facts.shared_granularity == (256 if facts.compute_capability < 80 else 128)


def test_every_generation_of_the_course_is_documented():
    generations = {gpu.named(name).compute_capability for name in DOCUMENTED}
    assert generations == {75, 80, 86, 89, 90, 100, 120}


def test_the_documented_gpus_can_be_listed():
    assert gpu.documented() == {name: gpu.named(name) for name in DOCUMENTED}


def test_unknown_names():
    with pytest.raises(ValueError, match=r"one of T4, A100.*got 'V100'"):
        gpu.named("V100")
    with pytest.raises(TypeError, match="got 90"):
        gpu.named(90)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_documented_gpu_is_found_by_its_drivers_name(name):
    facts = gpu.of(gpu.named(name).name)
    assert dataclasses.replace(facts, source="") == dataclasses.replace(
        gpu.named(name), source=""
    )


def test_gpu_of_another_name_is_found_only_where_it_is():
    with pytest.raises(ValueError, match=r"'Tesla T4'.*got 'NVIDIA H20'"):
        gpu.of("NVIDIA H20")
    with fake_gpu(name="NVIDIA H20"):
        assert gpu.of("NVIDIA H20") == gpu.current()
        assert gpu.of("Tesla T4") == gpu.named("T4")


@pytest.mark.skipif(backend.has_gpu(), reason="there is a GPU to read")
def test_without_a_gpu():
    assert gpu.here() == gpu.named("H200")
    with pytest.raises(RuntimeError, match="no CUDA GPU here"):
        gpu.current()
    with pytest.raises(RuntimeError, match="cuInit"):
        gpu.driver("cuInit", 0)


@pytest.fixture
def fake():
    with fake_gpu() as driver:
        yield driver


def test_current_reads_the_driver(fake):
    assert gpu.current() == dataclasses.replace(gpu.named("H200"), **NOT_READ)


def test_driver_is_asked_once(fake):
    gpu.current()
    calls = len(fake.calls)
    assert gpu.current() is gpu.current() and len(fake.calls) == calls


def test_peak_bandwidth_of_an_undocumented_gpu():
    with fake_gpu(name="NVIDIA H20"):
        # 2 transfers x 3201 MHz x 6144 bits
        assert gpu.current().peak_bandwidth_gbps == 4917


def test_failing_call_is_named(fake):
    with pytest.raises(RuntimeError, match=r"cuDeviceGet .*INVALID_DEVICE \(101\)"):
        gpu.driver("cuDeviceGet", ctypes.byref(ctypes.c_int()), 8)
    with pytest.raises(RuntimeError, match="cuNoSuchCall"):
        gpu.driver("cuNoSuchCall")


# ---- free memory ---------------------------------------------------------------------


@pytest.mark.skipif(not backend.INTERPRETED, reason="kernels run on a GPU here")
def test_free_memory_without_a_gpu_is_a_small_gpus():
    assert gpu.free_bytes() == gpu.SMALLEST_BYTES == 14e9


@pytest.mark.parametrize(
    ("share", "free"),
    [
        (1.0, 62),  # the driver's 60, and the 2 that PyTorch keeps for reuse
        (0.175, 11),  # 14 for the process, which has 3
        (0.01, 0),  # it has more than it may have
    ],
)
def test_free_memory_is_what_new_tensors_can_have(monkeypatch, share, free):
    gb = 10**9
    facts = {
        "is_available": True,
        "mem_get_info": (60 * gb, 80 * gb),
        "memory_allocated": 3 * gb,
        "memory_reserved": 5 * gb,
        "get_per_process_memory_fraction": share,
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert gpu.free_bytes() == free * gb


@pytest.mark.gpu
def test_free_memory_shrinks_by_what_is_taken_and_comes_back():
    torch.cuda.synchronize()
    before = gpu.free_bytes()
    taken = torch.empty(2**28, dtype=torch.int8, device="cuda")
    # Other processes may use the same GPU, so that the margin is wide.
    assert before - gpu.free_bytes() == pytest.approx(2**28, abs=2**27)
    del taken
    assert gpu.free_bytes() == pytest.approx(before, abs=2**27)


# ---- the GPU at hand -----------------------------------------------------------------


@pytest.mark.gpu
def test_current_agrees_with_pytorch_and_the_table():
    facts, theirs = gpu.current(), torch.cuda.get_device_properties(0)
    assert facts.name == theirs.name
    assert facts.compute_capability == 10 * theirs.major + theirs.minor
    assert facts.sms == theirs.multi_processor_count
    assert facts.l2_bytes == theirs.L2_cache_size
    assert facts.threads_per_sm == theirs.max_threads_per_multi_processor
    assert gpu.here() == facts
    for documented in map(gpu.named, DOCUMENTED):
        if documented.name == facts.name:
            assert dataclasses.replace(documented, **NOT_READ) == facts


@pytest.mark.gpu
def test_failing_call_of_the_real_driver_is_named():
    with pytest.raises(RuntimeError, match=r"cuDeviceGet .*INVALID_DEVICE \(101\)"):
        gpu.driver("cuDeviceGet", ctypes.byref(ctypes.c_int()), 99)
