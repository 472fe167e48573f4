"""Three reductions in CUDA C++: right, compiled for every GPU, and chosen as stated."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch

from benchmarks import cuda_faults
from kernels import cuda
from kernels.lab import backend, check, gpu, nvrtc, record
from tests.helpers import assert_right, matrix, meta_matrix

H200, T4 = gpu.named("H200"), gpu.named("T4")
GPUS = ("T4", "A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090")
DTYPES = list(cuda.C_TYPES)


pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """A function that replaces a text in a file of kernels/cu while a test runs.

    C++ has no attribute that a test could patch, as Triton kernels' helpers are.
    """

    def change(file, old, new):
        for path in cuda.SOURCES.iterdir():
            (tmp_path / path.name).write_text(path.read_text())
        text = cuda.source(file)
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))
        monkeypatch.setattr(cuda, "SOURCES", tmp_path)
        unwrapped = cuda.choose_config.__wrapped__
        monkeypatch.setattr(cuda, "choose_config", unwrapped)

    return change


# ---- compiling -----------------------------------------------------------------------


def instances(dtype, pack):
    """One instance of each template."""
    c_type = cuda.C_TYPES[dtype]
    return {
        "warp.cu": f"softmax_warp<{c_type}, {pack}, 32, 2>",
        "block.cu": f"softmax_block<{c_type}, {pack}, {cuda.UNROLL}>",
        "uncached.cu": f"softmax_uncached<{c_type}, {pack}, {cuda.UNROLL}>",
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_template_compiles_in_every_dtype_and_pack(name):
    """All of them for an H200; for each other GPU, other thirds of their pairs."""
    turn = GPUS.index(name)
    jobs = [
        (dtype, pack, *instance)
        for i, dtype in enumerate(DTYPES)
        for j, pack in enumerate(cuda.PACKS)
        for instance in instances(dtype, pack).items()
        if name == "H200" or (i + j + turn) % 3 == 0
    ]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda job: cuda.compile(job[2], job[3], name), jobs))
    for (dtype, pack, _, expression), compiled in zip(jobs, made, strict=True):
        assert compiled.spills == 0, expression
        loads = re.findall(r"ld\.global(?:\.nc)?(?:\.v(\d))?\.\w?(\d+)", compiled.ptx)
        widths = {int(count or 1) * int(bits) // 8 for count, bits in loads}
        widest = 16 if gpu.named(name).compute_capability < 100 else 32
        assert widths == {min(pack * dtype.itemsize, widest)}, expression


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_a_butterfly_has_a_shuffle_for_each_halving(lanes):
    made = cuda.compile("warp.cu", f"softmax_warp<float, 1, {lanes}, 1>", H200)
    assert made.ptx.count("shfl.sync.bfly") == 2 * (lanes.bit_length() - 1)


def test_a_butterfly_of_24_lanes_is_refused_by_the_template():
    with pytest.raises(RuntimeError, match="a butterfly needs a power of two"):
        cuda.compile("warp.cu", "softmax_warp<float, 1, 24, 1>", H200)


def test_a_row_beyond_the_registers_spills():
    spilling = cuda.choose_config(8, 8192, torch.float32, 4, "warp", on=H200).compiled
    assert spilling.spills > 0
    whole = cuda.choose_config(8, 4096, torch.float32, 4, "warp", on=H200).compiled
    assert whole.spills == 0 and whole.registers > 128  # the row's values


@pytest.mark.parametrize("file", ["width.cu", "barrier.cu", "banks.cu"])
def test_the_faulty_kernels_compile(file):
    names = {
        "width.cu": ["widths<24>", "widths<32>"],
        "barrier.cu": ["reduce<Max, true>", "reduce<Sum, false>"],
        "banks.cu": [f"banks<{stride}>" for stride in cuda_faults.STRIDES],
    }
    for name in names[file]:
        assert cuda.compile(file, name, H200).spills == 0
    if file == "barrier.cu":
        barriers = [
            cuda.compile(file, name, H200).ptx.count("bar.sync") for name in names[file]
        ]
        assert barriers == [1, 0]


# ---- choosing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "pack"),
    [
        (meta_matrix(4, 64), 4),  # 16 bytes
        (meta_matrix(4, 64, torch.float16), 8),
        (meta_matrix(4, 60, torch.bfloat16), 4),
        (meta_matrix(4, 62, torch.float16), 2),
        (meta_matrix(4, 63), 1),
        (meta_matrix(4, 64, stride=66), 2),
        (meta_matrix(1, 64, stride=67), 4),  # one row has no stride
        (meta_matrix(4, 64, torch.float16, stride=80, offset=8), 8),
    ],
)
def test_the_pack_divides_rows_and_strides(x, pack):
    assert cuda.largest_pack(meta_matrix(4, x.shape[1], x.dtype), x) == pack


def test_the_largest_pack_is_the_largest_that_fits():
    flat = torch.empty(4096, dtype=torch.float16)
    for n_cols in range(1, 26):
        for stride in range(n_cols, n_cols + 9):
            for offset in range(9):
                x = flat.as_strided((3, n_cols), (stride, 1), offset)
                fitting = [pack for pack in cuda.PACKS if cuda.pack_fits(pack, x)]
                assert cuda.largest_pack(x) == fitting[0]


def test_the_pack_divides_the_address():
    flat = torch.empty(80)
    for offset, pack in ((0, 4), (1, 1), (2, 2), (4, 4)):
        assert cuda.largest_pack(flat[offset : offset + 64].view(4, 16)) == pack


@pytest.mark.parametrize(
    ("n_cols", "pack", "expected"),
    [
        (1, 1, (1, 1)),
        (2, 1, (2, 1)),
        (24, 1, (32, 1)),
        (24, 8, (4, 1)),
        (32, 1, (32, 1)),
        (33, 1, (32, 2)),
        (256, 8, (32, 1)),
        (1000, 8, (32, 4)),
        (4096, 4, (32, 32)),
    ],
)
def test_lanes_and_packs_hold_a_row(n_cols, pack, expected):
    assert cuda.lanes_and_packs(n_cols, pack) == expected


@pytest.mark.parametrize("pack", cuda.PACKS)
def test_only_the_last_pack_of_a_lane_may_lie_outside(pack):
    for n_cols in range(pack, 1500, pack):
        lanes, packs = cuda.lanes_and_packs(n_cols, pack)
        assert lanes * pack * (packs - 1) < n_cols <= lanes * pack * packs
        assert lanes == 32 or packs == 1


def test_the_block_has_the_most_threads_resident():
    assert cuda.choose_block(lambda threads: 2048 // threads) == 128
    assert cuda.choose_block(lambda threads: min(3, 2048 // threads)) == 1024
    assert cuda.choose_block(lambda threads: min(6, 2048 // threads)) == 512
    assert cuda.choose_block(lambda threads: min(13, 2048 // threads)) == 256
    assert cuda.choose_block(lambda threads: 1) == 1024


@pytest.mark.parametrize(
    ("n_cols", "dtype", "block", "unroll"),
    [
        (2048, torch.float32, 128, 4),
        (4096, torch.float32, 256, 4),
        (8192, torch.float32, 512, 4),
        (16384, torch.float32, 1024, 4),
        (32768, torch.float32, 1024, 8),
        (8192, torch.float16, 256, 4),
        (32768, torch.float16, 1024, 4),
    ],
)
def test_long_rows_get_long_blocks(n_cols, dtype, block, unroll):
    config = cuda.choose_config(
        4096, n_cols, dtype, 16 // dtype.itemsize, "block", on=H200
    )
    assert (config.grid, config.block) == (4096, block)
    assert config.shared == n_cols * dtype.itemsize
    assert config.compiled.expression.endswith(f", {unroll}>")


def test_each_kernel_has_its_range():
    for size, packs in cuda.LONGEST_WARP_ROW.items():
        for pack, longest in packs.items():
            assert cuda.choose_kernel(1, pack, size, H200) == "warp"
            assert cuda.choose_kernel(longest, pack, size, H200) == "warp"
            assert cuda.choose_kernel(longest + 1, pack, size, H200) == "block"
    choose = functools.partial(cuda.choose_kernel, pack=8, on=H200)
    assert choose(58_048, element_size=4) == choose(116_096, element_size=2) == "block"
    assert choose(58_049, element_size=4) == "uncached"
    assert choose(116_097, element_size=2) == "uncached"
    assert cuda.choose_kernel(20_000, 4, 4, T4) == "uncached"


def test_a_config_has_blocks_for_all_rows():
    config = cuda.choose_config(1001, 40, torch.float32, 1, "warp", on=H200)
    assert config.block == (32, 4) and config.grid == 251
    narrow = cuda.choose_config(1001, 8, torch.float32, 4, "warp", on=H200)
    assert narrow.block == (2, 64) and narrow.grid == 16
    assert cuda.choose_config(7, 99, torch.float16, 1, "uncached", 96, H200).block == 96


def test_registers_leave_room_for_12_warps_of_4096_columns():
    config = cuda.choose_config(4096, 4096, torch.float16, 8, "warp", on=H200)
    assert 4 * nvrtc.blocks_per_sm(config.compiled, 128, 0) == 12


def test_by_the_gpus_time_float16_rows_are_as_fast_as_a_copy():
    try:
        df = record.select(record.recorded("cuda_packs"), dtype=torch.float16)
    except ValueError:
        pytest.skip("the crossing is not recorded yet")
    times = record.pivot(df, "p50_us")
    for n_cols in (1024, 2048, 4096):
        chosen = times[f"cuda.{cuda.choose_kernel(n_cols, 8, 2, H200)}.8"]
        assert times["copy"][n_cols] > 0.95 * chosen[n_cols]


def test_thresholds_follow_the_record():
    try:
        df = record.recorded("cuda_packs")
    except ValueError:
        pytest.skip("the crossing is not recorded yet")
    for dtype in (torch.float16, torch.float32):
        times = record.pivot(record.select(df, dtype=dtype), "p50_us").sort_index()
        for pack, longest in cuda.LONGEST_WARP_ROW[dtype.itemsize].items():
            warp, block = (
                times[f"cuda.{kernel}.{pack}"] for kernel in ("warp", "block")
            )
            last = max(n for n in times.index if n <= longest)
            assert warp[last] <= 1.05 * block[last], (dtype, pack)
            for n in times.index[times.index > longest][:1]:
                assert block[n] <= 1.05 * warp[n], (dtype, pack)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel": "wrap"}, "kernel must be one of .*got 'wrap'"),
        ({"block": 112}, "block must be a multiple of 32.*got 112"),
        ({"block": 2048}, "block must be a multiple of 32.*got 2048"),
        ({"pack": 3}, "pack must be one of .*got 3"),
        ({"pack": 2}, r"divides rows.*got 2 for shape \(2, 9001\)"),
        ({"kernel": "warp"}, "'warp' takes at most 8192 columns, got 9001"),
    ],
)
def test_options_that_do_not_fit_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        cuda.softmax(torch.ones(2, 9001, device=backend.DEVICE), **options)


@pytest.mark.skipif(not backend.INTERPRETED, reason="a GPU is here")
def test_without_a_gpu_a_sentence_says_so():
    with pytest.raises(RuntimeError, match="has no interpreter: it runs on a GPU"):
        cuda.softmax(torch.ones(2, 3))
    assert cuda.softmax(torch.ones(0, 3)).shape == (0, 3)


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*cuda.KERNELS, None])
def test_the_checker_finds_no_fault(kernel):
    def softmax(x):
        return cuda.softmax(x, kernel=kernel)

    assert check.softmax(softmax)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pack", cuda.PACKS)
@pytest.mark.parametrize("kernel", cuda.KERNELS)
def test_every_kernel_dtype_and_pack_is_right(kernel, dtype, pack):
    for shape in ((1, 8), (5, 40), (33, 1000), (3, 2056), (129, 96)):
        x = matrix(*shape, dtype)
        assert_right(cuda.softmax(x, kernel=kernel, pack=pack), x)
    sliced = matrix(9, 264, dtype, stride=280, offset=8)
    assert_right(cuda.softmax(sliced, kernel=kernel, pack=pack), sliced)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", cuda.KERNELS)
def test_rows_of_odd_lengths_and_odd_places_are_right(kernel, dtype):
    for n_cols in (1, 3, 31, 33, 127, 1001, 3001):
        x = matrix(7, n_cols, dtype, stride=n_cols + 3, offset=1)
        assert_right(cuda.softmax(x, kernel=kernel), x)
    columns = matrix(50, 60, dtype).t()
    assert_right(cuda.softmax(columns, kernel=kernel), columns)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", cuda.KERNELS)
def test_infinities_and_nan_are_right(kernel):
    x = matrix(5, 200)
    x[0], x[1, ::2], x[2, 7], x[3, 9] = -torch.inf, -torch.inf, torch.inf, torch.nan
    assert_right(cuda.softmax(x, kernel=kernel), x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_longest_row_of_shared_memory_and_longer_ones(dtype):
    longest = cuda.longest("block", dtype.itemsize, gpu.current())
    for n_cols in (longest, longest + 1, 300_001):
        x = matrix(2, n_cols, dtype)
        assert_right(cuda.softmax(x), x)
    with pytest.raises(ValueError, match=f"at most {longest} columns"):
        cuda.softmax(matrix(2, longest + 1, dtype), kernel="block")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [32, 96, 1024])
def test_any_whole_warps_make_a_block(block):
    x = matrix(9, 3000)
    for kernel in ("block", "uncached"):
        assert_right(cuda.softmax(x, kernel=kernel, block=block), x)


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets_are_right():
    if gpu.free_bytes() < 20 * 2**30:
        pytest.skip("needs 20 GiB of the GPU's memory")
    x = torch.zeros(2**17 + 1, 2**15, dtype=torch.float16, device="cuda")
    x[-1] = matrix(1, 2**15, torch.float16)[0]
    assert_right(cuda.softmax(x)[-1:], x[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("file", "old", "new", "kernel"),
    [
        ("butterfly.cuh", "LANES / 2; distance > 0", "LANES / 2; distance > 1", "warp"),
        ("block_reduce.cuh", "lane < warps ?", "lane < warps - 1 ?", "block"),
        ("butterfly.cuh", "return fmaxf(a, b)", "return a", "uncached"),
        ("warp.cu", "i < PACKS - 1 || col < n_cols", "true", "warp"),
        ("block.cu", "1.0f / row_sum", "1.0f", "block"),
        ("uncached.cu", "i < packs", "i < packs - 1", "uncached"),
    ],
)
def test_the_checker_catches_a_wrong_kernel(changed, capsys, file, old, new, kernel):
    changed(file, old, new)
    assert not check.softmax(lambda x: cuda.softmax(x, kernel=kernel))
    assert capsys.readouterr().out


@pytest.mark.gpu
def test_every_call_but_the_first_finds_its_config():
    x = matrix(64, 1024)
    cuda.softmax(x)
    with patch.object(nvrtc, "_compile", side_effect=AssertionError("compiled again")):
        cuda.softmax(x.clone())
