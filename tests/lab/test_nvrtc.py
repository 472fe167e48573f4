"""CUDA C++ is compiled in both worlds, launched on a GPU, and refused in a sentence."""

import functools
import re
import sys
import threading
from unittest.mock import MagicMock

import pandas as pd
import pytest
import torch

from kernels.lab import backend, gpu, nvrtc, occupancy, record

DOUBLE = """
template <int FACTOR>
__global__ void scale(float* output, const float* input, long long n) {
    const long long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) output[i] = FACTOR * input[i];
}
"""
SHARED = """
__global__ void reverse(float* output, const float* input) {
    extern __shared__ float held[];
    held[threadIdx.x] = input[threadIdx.x];
    __syncthreads();
    output[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.mark.parametrize("name", ["T4", "A100", "H200", "RTX 5090"])
def test_an_instance_is_compiled_for_any_gpu(compiler, name):
    made = nvrtc.compile(DOUBLE, "scale<2>", name)
    assert f".target sm_{gpu.named(name).compute_capability}" in made.ptx
    assert made.cubin[:4] == b"\x7fELF" and made.gpu is gpu.named(name)
    assert 0 < made.registers < 32 and made.spills == made.shared == 0
    assert f"Used {made.registers} registers" in made.log
    assert nvrtc.compile(DOUBLE, "scale<2>", name) is made
    assert nvrtc.compile(DOUBLE, "scale<3>", name) is not made
    assert "scale<2>" in str(made) and "ELF" not in str(made)


def test_a_file_is_included_from_a_folder(compiler, tmp_path):
    (tmp_path / "half.cuh").write_text(
        "__device__ float half(float x) { return x / 2; }"
    )
    code = '#include "half.cuh"\n__global__ void k(float* x) { *x = half(*x); }'
    assert nvrtc.compile(code, "k", "H200", [tmp_path]).registers > 0
    with pytest.raises(RuntimeError, match=r"cannot open source file .half\.cuh"):
        nvrtc.compile(code, "k", "H200")


def test_what_does_not_compile_says_where(compiler):
    with pytest.raises(RuntimeError, match=r"(?s)k does not compile.*undefined"):
        nvrtc.compile("__global__ void k(float* x) { *x = y; }", "k")


def test_spills_are_counted(compiler):
    many = "float v[400];\n#pragma unroll\nfor (int i = 0; i < 400; ++i) v[i] = x[i];"
    last = "#pragma unroll\nfor (int i = 399; i >= 0; --i) x[i] = __fsqrt_rn(v[i]);"
    code = (
        f"__global__ void k(volatile float* x) {{ {many}\n__syncthreads();\n{last} }}"
    )
    assert nvrtc.compile(code, "k", "H200").spills > 0


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(nvrtc, "toolkit", nvrtc.toolkit.__wrapped__)
    with pytest.raises(RuntimeError, match=r"pip install 'cuda-core\[cu1[23]\]'"):
        nvrtc.compile(DOUBLE, "scale<7>")


def test_what_was_compiled_is_described_or_what_to_install(monkeypatch):
    assert re.search(r"NVRTC 1\d\.\d+ \(cuda-core|pip install", nvrtc.describe())
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(nvrtc, "toolkit", nvrtc.toolkit.__wrapped__)
    assert "pip install" in nvrtc.describe()


@pytest.mark.skipif(not backend.INTERPRETED, reason="a GPU observes")
def test_the_compiler_is_asked_here_or_the_record(compiler, monkeypatch, capsys):
    asked = []
    rows = nvrtc.observe("nothing", lambda: asked.append(1) or [{"registers": 7}])
    assert rows["registers"].tolist() == [7] and asked
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(nvrtc, "toolkit", nvrtc.toolkit.__wrapped__)
    recorded = pd.DataFrame({"registers": [9]} | dict.fromkeys(record.PROVENANCE, "x"))
    monkeypatch.setattr(record, "observe", lambda name, function: recorded)
    nvrtc._say_once.cache_clear()
    for said in (1, 0):  # times
        rows = nvrtc.observe("this", lambda: asked.append(2))
        assert list(rows) == ["registers"] and rows["registers"].tolist() == [9]
        assert capsys.readouterr().out.count("pip install") == said
    assert asked == [1]


def test_an_unknown_gpu_is_named():
    with pytest.raises(ValueError, match="got 'H201'"):
        nvrtc.compile(DOUBLE, "scale<2>", "H201")


@pytest.mark.skipif(not backend.INTERPRETED, reason="a GPU is here")
def test_nothing_runs_without_a_gpu(compiler):
    made = nvrtc.compile(DOUBLE, "scale<2>")
    with pytest.raises(RuntimeError, match="CUDA C\\+\\+ has no interpreter"):
        nvrtc.run(made, 1, 32, torch.ones(4), torch.ones(4), 4)
    expected = occupancy.resident(
        made.gpu, num_warps=8, registers=made.registers, shared=20_000
    )
    assert nvrtc.blocks_per_sm(made, 256, 20_000) == expected.blocks_per_sm


def test_a_launch_is_prepared_once(monkeypatch):
    """Only the launch itself, with the tensors' addresses, is done in every call."""
    core, driver, compiled = MagicMock(), MagicMock(), MagicMock(shared=0)
    driver.active.get_current_device.return_value = 9  # no other test has it
    driver.active.get_current_stream.side_effect = [11, 11, 12, 11]
    monkeypatch.setattr(nvrtc, "toolkit", lambda: (core, None, None))
    monkeypatch.setattr(nvrtc, "require_gpu", lambda: None)
    monkeypatch.setattr(nvrtc.triton.runtime, "driver", driver)
    monkeypatch.setattr(nvrtc, "_stream", functools.cache(nvrtc._stream.__wrapped__))
    x = torch.ones(4)
    for _ in range(3):
        nvrtc.run(compiled, 2, (32, 4), x, 7, shared=64)
    core.LaunchConfig.assert_called_once_with(grid=2, block=(32, 4), shmem_size=64)
    compiled.code.get_kernel.assert_called_once()
    core.Device.assert_called_once_with(9)
    assert [call.args for call in core.Stream.from_handle.mock_calls] == [(11,), (12,)]
    assert [call.args[3:] for call in core.launch.mock_calls] == 3 * [(x.data_ptr(), 7)]
    nvrtc.run(compiled, 3, (32, 4), x, 7, shared=64)
    assert core.LaunchConfig.call_count == 2 and core.Device.call_count == 1


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream(compiler):
    made = nvrtc.compile(DOUBLE, "scale<3>")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x = torch.arange(1000.0, device="cuda")
            torch.cuda._sleep(10**7)  # a kernel on another stream would be too early
            x += 1
            output = torch.zeros_like(x)
            nvrtc.run(made, 4, 256, output, x, 1000)
            result = output.clone()
        stream.synchronize()
        assert torch.equal(result, 3 * torch.arange(1.0, 1001.0, device="cuda"))


@pytest.mark.gpu
def test_a_kernel_runs_in_a_new_thread(compiler):
    made = nvrtc.compile(DOUBLE, "scale<5>")
    x = torch.arange(64.0, device="cuda")
    output = torch.zeros_like(x)
    torch.cuda.synchronize()
    errors = []

    def work():
        try:
            assert nvrtc.blocks_per_sm(made, 64, 0) > 0
            nvrtc.run(made, 1, 64, output, x, 64)
            torch.cuda.synchronize()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [] and torch.equal(output, 5 * x)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [4096, 4 * 16_000, 4 * 20_000])
def test_a_block_gets_the_shared_memory_that_it_asks_for(compiler, shared):
    if shared > gpu.current().shared_per_block:
        pytest.skip("a block of this GPU cannot have so much")
    x = torch.arange(512.0, device="cuda")
    output = torch.zeros_like(x)
    nvrtc.run(nvrtc.compile(SHARED, "reverse"), 1, 512, output, x, shared=shared)
    assert torch.equal(output, x.flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 128, 512, 1024])
@pytest.mark.parametrize("shared", [0, 10_000, 49_152, 60_000])
def test_the_lab_counts_resident_blocks_as_the_driver_does(compiler, threads, shared):
    made = nvrtc.compile(SHARED, "reverse")
    here = gpu.current()
    expected = occupancy.resident(
        here, num_warps=threads // 32, registers=made.registers, shared=shared
    )
    assert nvrtc.blocks_per_sm(made, threads, shared) == expected.blocks_per_sm
