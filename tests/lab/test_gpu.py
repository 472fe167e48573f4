"""Facts of GPUs: the table against itself and known values, the driver against both."""

import ctypes
import dataclasses

import pytest
import torch

from kernels.lab import backend, gpu

DOCUMENTED = ("T4", "A100", "L4", "RTX 4090", "H100", "H200", "B200")
NOT_READ = {"source": "the driver of this machine"}


def test_h200():
    h200 = gpu.named("H200")
    assert h200.name == "NVIDIA H200"
    assert h200.compute_capability == 90
    assert h200.sms == 132
    assert h200.registers_per_sm == h200.registers_per_block == 65536
    assert h200.shared_per_sm == 233472
    assert h200.shared_per_block == 232448
    assert h200.shared_reserved_per_block == 1024
    assert h200.threads_per_sm == 2048
    assert h200.blocks_per_sm == 32
    assert h200.l2_bytes == 62914560
    assert h200.peak_bandwidth_gbps == 4800


@pytest.mark.parametrize(
    ("name", "threads", "blocks", "shared_per_block", "reserved", "granularity"),
    [
        ("T4", 1024, 16, 65536, 0, 256),
        ("A100", 2048, 32, 166912, 1024, 128),
        ("L4", 1536, 24, 101376, 1024, 128),
        ("B200", 2048, 32, 232448, 1024, 128),
    ],
)
def test_generations_differ(
    name, threads, blocks, shared_per_block, reserved, granularity
):
    facts = gpu.named(name)
    assert (facts.threads_per_sm, facts.blocks_per_sm) == (threads, blocks)
    assert facts.shared_per_block == shared_per_block
    assert facts.shared_reserved_per_block == reserved
    assert facts.shared_granularity == granularity


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_fact_is_cited_and_consistent(name):
    facts = gpu.named(name)
    assert "https://" in facts.source
    assert (
        facts.shared_per_block + facts.shared_reserved_per_block == facts.shared_per_sm
    )
    assert facts.threads_per_sm % (4 * facts.warp_size) == 0
    assert min(v for v in dataclasses.astuple(facts) if isinstance(v, int)) >= 0


def test_unknown_names():
    with pytest.raises(ValueError, match=r"one of T4, A100.*got 'V100'"):
        gpu.named("V100")
    with pytest.raises(TypeError, match="got 90"):
        gpu.named(90)


@pytest.mark.skipif(backend.has_gpu(), reason="there is a GPU to read")
def test_without_a_gpu():
    assert gpu.here() == gpu.named("H200")
    with pytest.raises(RuntimeError, match="no CUDA GPU here"):
        gpu.current()
    with pytest.raises(RuntimeError, match="cuInit"):
        gpu.driver("cuInit", 0)


ATTRIBUTES = (  # numbers of cuda.h and what an H200's driver answers
    *((1, 1024), (10, 32), (12, 65536), (16, 132), (36, 3201000), (37, 6144)),
    *((38, 62914560), (39, 2048), (75, 9), (76, 0), (81, 233472), (82, 65536)),
    *((97, 232448), (106, 32), (111, 1024)),
)


class FakeDriver:
    """A driver library with one H200; asked for another device, it fails."""

    name = b"NVIDIA H200"

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = 7
        return 0 if ordinal == 0 else 101

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = self.name
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert device.value == 7
        value._obj.value = dict(ATTRIBUTES)[attribute]
        return 0

    def cuGetErrorName(self, code, text):
        text._obj.value = b"CUDA_ERROR_INVALID_DEVICE"
        return 0


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver())
    monkeypatch.setattr(backend, "has_gpu", lambda: True)
    gpu.current.cache_clear()
    yield
    gpu.current.cache_clear()


def test_current_reads_the_driver(fake):
    assert gpu.current() == dataclasses.replace(gpu.named("H200"), **NOT_READ)


def test_peak_bandwidth_of_an_undocumented_gpu(fake, monkeypatch):
    monkeypatch.setattr(FakeDriver, "name", b"NVIDIA H20")
    # 2 transfers x 3201 MHz x 6144 bits
    assert gpu.current().peak_bandwidth_gbps == 4917


def test_failing_call_is_named(fake):
    with pytest.raises(RuntimeError, match=r"cuDeviceGet .*INVALID_DEVICE \(101\)"):
        gpu.driver("cuDeviceGet", ctypes.byref(ctypes.c_int()), 8)
    with pytest.raises(RuntimeError, match="cuNoSuchCall"):
        gpu.driver("cuNoSuchCall")


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
