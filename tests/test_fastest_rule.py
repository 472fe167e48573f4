"""Which kernel `fastest` chooses for which rows, and in which tiles."""

import itertools

import pytest
import torch

from kernels import cooperative, fastest, staged, tiled, unaligned
from kernels.lab import backend, compile, launch
from tests.helpers import STEMS, TRITON, assert_right, meta_matrix, tensor
from tests.lab.test_direct import launches_for

INF = float("inf")
SINGLE, HALF = torch.float32, torch.bfloat16
HALVES = torch.float16, torch.bfloat16
OLDER_TRITON = TRITON < (3, 8)

MANY = 10**6
SHARED = "cooperative"


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "dtype", "stem"),
    [
        (MANY, 1, torch.float32, "tiled"),
        (MANY, 32, torch.float32, "tiled"),
        (MANY, 781, torch.bfloat16, "unaligned"),
        (MANY, 780, torch.bfloat16, "tiled"),
        (MANY, 33, torch.float32, "unaligned"),
        (MANY, 8192, torch.float16, "tiled"),
        (10 * MANY, 7, torch.bfloat16, "staged"),
        (10 * MANY, 36, torch.float16, "staged"),
        (10 * MANY, 63, torch.float16, "staged"),
        (10 * MANY, 65, torch.float16, "unaligned"),
        (10 * MANY, 63, torch.float32, "unaligned"),
        (10 * MANY, 64, torch.float16, "tiled"),
        (10 * MANY, 1, torch.float16, "tiled"),
        (MANY // 20, 33, torch.float16, "unaligned"),  # they do not fill the GPU
        (1, 1024, torch.float32, "tiled"),
        (1, 2**20, torch.float32, "cooperative"),
        (1, 2**20, torch.bfloat16, "cooperative"),
        (4096, 50257, torch.float32, "cooperative"),
        (4096, 131072, torch.bfloat16, "cooperative"),
        (1, 2_000_000, torch.float32, "cooperative"),
        (1, 3_000_000, torch.float32, "cooperative"),
        (64, 2**21, torch.float32, "cooperative"),
        (1, 4_000_000, torch.float32, "cooperative"),
        (16, 2**22, torch.float32, "cooperative"),
        (16, 4_500_000, torch.float32, "online"),
        (16, 2**22, torch.bfloat16, "cooperative"),
        (64, 2**23, torch.bfloat16, "cooperative"),
        (1, 6_000_000, torch.float32, "online"),
        (4, 8_000_000, torch.float32, "online"),
        (1, 4_000_000, torch.bfloat16, "cooperative"),
        (1, 6_000_000, torch.bfloat16, "cooperative"),
        (1, 10_000_000, torch.bfloat16, "online"),
        (1, 2**27, torch.bfloat16, "online"),
        (tiled.MAX_ROWS, 2, torch.float16, "tiled"),
        (tiled.MAX_ROWS + 1, 2, torch.float16, "online"),
        (MANY, 32, torch.float64, "online"),
        (1, 2**20, torch.float64, "online"),
    ],
)
def test_known_answers(n_rows, n_cols, dtype, stem):
    assert fastest.choose(n_rows, n_cols, dtype) == stem


def test_short_rows_that_start_elsewhere_in_the_output_are_not_staged():
    how = torch.float16, 1
    assert fastest.choose(10 * MANY, 33, *how, same_shift=True) == "staged"
    assert fastest.choose(10 * MANY, 33, *how, same_shift=False) == "unaligned"


@pytest.mark.parametrize(("sms", "stem"), [(132, "cooperative"), (20, "tiled")])
def test_what_fills_the_gpu_depends_on_the_gpu(sms, stem, monkeypatch):
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (sms, 2048))
    assert fastest.choose(40, 2**14, torch.float32) == stem  # 2.5 MiB, rows of 64 KiB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, MANY])
def test_rows_are_shared_from_some_length_on(n_rows, dtype):
    """Where rows are few, from no later one; and up to what the GPU holds of a row."""
    lengths = {max(2**power + odd, 1) for power in range(28) for odd in (-1, 0, 1)}
    lengths = sorted(n for n in lengths if n <= cooperative.MAX_COLS)
    shared = [fastest.choose(n_rows, n, dtype) == "cooperative" for n in lengths]
    seams = [is_shared for is_shared, _ in itertools.groupby(shared)]
    assert seams == [False, True, False]
    few = [fastest.choose(1, n, dtype) == "cooperative" for n in lengths]
    assert few.index(True) <= shared.index(True)


@pytest.mark.parametrize(("sms", "stem"), [(132, "cooperative"), (20, "online")])
def test_programs_wait_only_where_the_gpu_holds_a_row(sms, stem, monkeypatch):
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (sms, 2048))
    for n_rows in (1, 16, MANY):
        assert fastest.choose(n_rows, 2**20, torch.float32) == stem  # rows of 4 MiB
        assert fastest.choose(n_rows, 2**17, torch.float32) == "cooperative"


@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_alignment_decides_between_the_kernels_of_whole_rows(dtype):
    for n_cols in (1, 2, 33, 64, 1000, 1001):
        vector = tiled.choose_vector(n_cols, dtype.itemsize, n_cols)
        aligned = vector > 1 or n_cols == 1
        stem = fastest.choose(10 * MANY, n_cols, dtype)
        narrow = "staged" if dtype.itemsize == 2 and n_cols <= 64 else "unaligned"
        assert stem == ("tiled" if aligned else narrow)
        widest = 16 // dtype.itemsize
        assert fastest.choose(10 * MANY, n_cols, dtype, widest) == "tiled"
        by_element = "tiled" if n_cols == 1 else narrow
        assert fastest.choose(10 * MANY, n_cols, dtype, 1) == by_element


@pytest.mark.parametrize(
    ("n_cols", "dtype", "stem"),
    [
        (2, torch.bfloat16, "tiled"),  # one access for a row
        (4, torch.bfloat16, "tiled"),
        (10, torch.bfloat16, "staged"),
        (34, torch.bfloat16, "staged"),  # 4 bytes
        (66, torch.bfloat16, "unaligned"),
        (100, torch.bfloat16, "unaligned"),  # 8 bytes, and an edge is a small part
        (100, torch.float16, "unaligned"),
        (104, torch.bfloat16, "tiled"),  # 16 bytes
        (188, torch.bfloat16, "unaligned"),
        (196, torch.bfloat16, "tiled"),
        (2, torch.float32, "tiled"),
        (66, torch.float32, "unaligned"),
        (98, torch.float32, "tiled"),
    ],
)
def test_short_rows_of_narrow_accesses(n_cols, dtype, stem):
    assert fastest.choose(MANY, n_cols, dtype) == stem


def test_few_rows_share_a_kernel_between_lengths():
    alone = fastest._config_of_few(257, 2, aligned=False, same=True)
    assert alone == fastest._config_of_few(200, 2, aligned=False, same=True)
    made = [prepared(132, n, torch.bfloat16) for n in (199, 257)]
    assert made[0].kernel == made[1].kernel == unaligned.softmax_kernel
    assert made[0].constants == made[1].constants
    assert (made[0].constants["ROWS"], made[0].constants["num_warps"]) == (1, 1)


@pytest.mark.parametrize("n_cols", [40, 104, 176, 781, 4096])
def test_a_small_matrix_has_tiles_of_fewer_rows(n_cols):
    for dtype in (torch.float32, torch.bfloat16):
        chapter = STEMS[fastest.choose(MANY, n_cols, dtype)]
        usual = prepared(MANY, n_cols, dtype).constants
        x = torch.empty(MANY, n_cols, dtype=dtype, device="meta")
        assert usual == chapter.launch_for(torch.empty_like(x), x).constants
        for n_rows in (133, 600, 2000, 10_000):
            made = prepared(n_rows, n_cols, dtype)
            rows, warps = made.constants["ROWS"], made.constants["num_warps"]
            assert made.grid == (-(-n_rows // rows),)
            least = fastest.WARPS * 132
            assert rows == 1 or made.grid[0] * warps >= least
            if made.kernel is chapter.softmax_kernel and rows < usual["ROWS"]:
                fewer = max(warps, usual["num_warps"] * 2 * rows // usual["ROWS"])
                assert -(-n_rows // (2 * rows)) * fewer < least


@pytest.mark.parametrize("sms", [14, 132])
def test_a_tile_shrinks_while_an_sm_would_have_fewer_than_four_warps(sms, monkeypatch):
    """33 float32 columns: a tile has 16 rows and 4 warps, or the rows that 1 takes."""
    monkeypatch.setattr(launch, "sms_and_threads", lambda: (sms, 2048))
    rows = {133: (1, 1), 600: (1, 1), 2000: (2, 1), 2096: (2, 1), 2112: (16, 4)}
    rows = {133: (2, 1), 208: (2, 1), 209: (16, 4)} if sms == 14 else rows
    for n_rows, (of_tile, warps) in rows.items():
        made = prepared(n_rows, 33, torch.float32)
        assert made.kernel is unaligned.softmax_kernel
        constants = made.constants["ROWS"], made.constants["num_warps"]
        assert constants == (of_tile, warps), n_rows


def prepared(n_rows, n_cols, dtype):
    x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    return fastest.prepare(torch.empty_like(x), x, 1).launch


def test_no_kernel_is_asked_for_more_than_it_takes():
    columns = [2**power + odd for power in range(28) for odd in (0, 1)]
    rows = (1, 100, 10**4, MANY, tiled.MAX_ROWS, tiled.MAX_ROWS + 1)
    for n_rows, n_cols, dtype in itertools.product(rows, columns, fastest.DTYPES):
        stem = fastest.choose(n_rows, n_cols, dtype)
        module = {**STEMS, "staged": staged}[stem]
        assert n_cols <= getattr(module, "MAX_COLS", INF)
        assert stem == "cooperative" or n_rows <= getattr(module, "MAX_ROWS", INF)
        assert stem == "online" or dtype in backend.DTYPES


@pytest.mark.parametrize(
    ("n_cols", "dtype", "stem"),
    [
        (2200, torch.float32, "unaligned"),  # two blocks, and two warps or more
        (5000, torch.float32, "unaligned"),
        (10_104, torch.float32, "unaligned"),
        (5000, torch.bfloat16, "unaligned"),
        (18_832, torch.bfloat16, "unaligned"),
        (1240, torch.float32, "tiled"),  # one warp
        (2400, torch.bfloat16, "tiled"),
        (8192, torch.float32, "tiled"),  # one block
        (24_000, torch.bfloat16, "tiled"),
        (7002, torch.float32, "tiled"),  # accesses of 8 bytes
        (14_004, torch.bfloat16, "tiled"),
        (10_242, torch.float32, "unaligned"),  # so many that edges cost less
        (14_002, torch.float32, "unaligned"),
        (28_004, torch.bfloat16, "unaligned"),
    ],
)
def test_rows_of_several_warps(n_cols, dtype, stem):
    assert fastest.choose(MANY, n_cols, dtype) == stem
    size, vector = dtype.itemsize, tiled.choose_vector(n_cols, dtype.itemsize, n_cols)
    assert (
        fastest.choose(MANY, n_cols, dtype, vector, False) == "tiled"
    )  # else by element
    few = "tiled" if vector * size == 16 else "unaligned"
    assert fastest.choose(2, n_cols, dtype) == (
        few if n_cols * size <= 32768 else SHARED
    )


@pytest.mark.parametrize(
    ("n_cols", "dtype", "stem"),
    [
        (8192, torch.float32, "unaligned"),
        (8193, torch.float32, SHARED),
        (10_240, torch.float32, SHARED),
        (599, torch.bfloat16, "unaligned"),
        (600, torch.bfloat16, "windows"),
        (8192, torch.float16, "windows"),
        (65_536, torch.bfloat16, "windows"),
        (65_537, torch.bfloat16, SHARED),
        (2_000_000, torch.bfloat16, SHARED),
        (2_200_000, torch.bfloat16, "online"),
        (2_700_000, torch.float32, SHARED),
        (2_800_000, torch.float32, "online"),
    ],
)
def test_rows_that_are_loaded_by_element(n_cols, dtype, stem):
    assert fastest.choose(MANY, n_cols, dtype, 1, False) == stem


def test_rows_go_through_windows_only_where_they_start_elsewhere_in_the_output():
    for dtype, n_cols in itertools.product(HALVES, (701, 8191, 50_257)):
        assert fastest.choose(MANY, n_cols, dtype, 1, False) == "windows"
        assert fastest.choose(MANY, n_cols, dtype, 1, True) != "windows"
        assert fastest.choose(MANY, n_cols, dtype, 4, False) != "windows"
        assert fastest.choose(100, n_cols, dtype, 1, False) != "windows"  # few
    assert fastest.choose(MANY, 701, torch.float32, 1, False) != "windows"


def test_few_rows_that_are_loaded_by_element_are_shared_early():
    for n_rows, n_cols in itertools.product((2, 200), (8684, 17_000, 20_480)):
        assert fastest.choose(n_rows, n_cols, torch.bfloat16, 1, False) == SHARED


@pytest.mark.parametrize("n_cols", [33, 1001, 1024, 50_257, 131_072])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_the_stride_of_a_single_row_decides_nothing(n_cols, dtype):
    """One row of logits that are wider than the vocabulary, as in decoding."""
    wide = torch.empty(4, n_cols + 47, dtype=dtype, device="meta")
    y = torch.empty(1, n_cols, dtype=dtype, device="meta")
    found = fastest.prepare(y, wide[:1, :n_cols], 1).launch
    wanted = fastest.prepare(y, torch.empty_like(y), 1).launch
    assert (found.kernel, found.constants) == (wanted.kernel, wanted.constants)
    n_cols = min(n_cols, 20_001)
    x = tensor(1, 2 * n_cols, dtype=dtype)[:, :n_cols]
    assert_right(fastest.softmax(x), x)


@pytest.mark.parametrize("n_rows", [1, 132])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_few_rows_have_a_program_each(n_rows, dtype):
    lengths = [*range(1, 200), 1000, 1001, 4097, 8191]
    shapes = [(n_rows, n_cols) for n_cols in lengths]
    for made, n_cols in zip(launches_for(shapes, dtype), lengths, strict=True):
        assert made.grid == (n_rows,)
        assert made.constants["VECTOR"] * dtype.itemsize == 16
        rest = n_cols % made.constants["VECTOR"]
        assert made.constants["BLOCK_COLS"] >= n_cols - rest
        assert made.constants["REST_COLS"] == 0
        assert made.kernel is STEMS["unaligned" if rest else "tiled"].softmax_kernel


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    [
        *[(4096, 32), (4096, 33), (1000, 1000), (1000, 1001), (1000, 8192)],
        *[(1000, 12_345), (10_000, 50_257), (1000, 2**17), (64, 2**22), (1, 2**20)],
    ],
)
def test_registers_do_not_spill(n_rows, n_cols, dtype):
    """But Triton 3.9 spills up to 24 where their number is capped."""
    x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    stem = fastest.choose(n_rows, n_cols, dtype, *unaligned.alignment(x, x))
    kernel = compile.aot(STEMS[stem].launch_for(x, x), gpu="H200")
    capped = stem == "cooperative" and not OLDER_TRITON
    assert kernel.spills <= (96 if capped else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [1024, 16_384, 50_257, 131_072])
@pytest.mark.parametrize(("dtype", "offset"), [(SINGLE, 0), (HALF, 4)])
def test_a_wider_result_and_a_start_at_8_bytes_do_not_spill(dtype, offset, n_cols):
    """Each has kernels that hold no more values in a thread than it has registers."""
    shape = 2**25 // n_cols, n_cols
    output, x = meta_matrix(*shape, dtype), meta_matrix(*shape, HALF, offset=offset)
    made = fastest.prepare(output, x, 1).launch
    capped = made.n_words > 0
    limit = (16 if OLDER_TRITON else 96) if capped else 0
    assert compile.aot(made, gpu="H200").spills <= limit
