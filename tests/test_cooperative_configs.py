"""The configurations of `cooperative`, and what the compiler makes of its kernel."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable

import pytest
import torch

from kernels import cooperative, unaligned
from kernels.lab import backend, compile, gpu, occupancy
from kernels.lab import launch as launch_module
from kernels.lab.compile import Compiled
from tests.helpers import TRITON, fewer, matrix
from tests.sass import loads_before_use
from tests.test_cooperative import LONGEST, parts_of

# ---- the configuration ---------------------------------------------------------------

SIZES = [
    (n_rows, n_cols, size)
    for n_rows in (1, 3, 64, 1000, 10**6)
    for n_cols in (1, 5, 4096, 50_257, 2**17, 10**6, 2**20, 2**22, 2**27)
    for size in (2, 4)
]


def sizes_of(name: str, sms: int) -> Callable[[], tuple[int, int]]:
    """What `launch.sms_and_threads` answers on a GPU of that name with fewer SMs."""
    return lambda: (sms, gpu.named(name).threads_per_sm)


@pytest.mark.parametrize("sms", [132, 20])
@pytest.mark.parametrize("edges", [True, False])
def test_configs_hold_their_rows(edges, sms, monkeypatch):
    monkeypatch.setattr(launch_module, "sms_and_threads", sizes_of("H200", sms))
    for n_rows, n_cols, size in SIZES:
        vector = 16 // size
        given = 1 if edges else vector
        config = cooperative.choose_config(n_rows, n_cols, size, given, True)
        assert (config.edges, config.vector) == (edges, vector)
        body = max(n_cols // vector * vector, 1) if edges else n_cols
        n_parts = parts_of(n_cols, config)
        held = n_parts * config.block_cols
        assert held - config.block_cols < body <= held
        for number in (config.block_cols, config.block_parts, config.num_warps):
            assert number & (number - 1) == 0
        threads = 32 * config.num_warps
        assert config.block_cols % (threads * vector) == 0
        assert config.block_parts >= n_parts
        assert config.block_parts % threads == 0


def test_few_rows_have_more_and_smaller_parts():
    for n_cols in (2**16, 2**18, 2**20):
        few, many = (
            cooperative.choose_config(n_rows, n_cols, 4, 4, True)
            for n_rows in (1, 10_000)
        )
        assert few.block_cols <= many.block_cols == 8192  # 32 KiB
        assert parts_of(n_cols, few) >= parts_of(n_cols, many)
    assert cooperative.choose_config(1, 2**16, 4, 4, True).block_cols == 1024


@pytest.mark.parametrize(
    ("n_cols", "size", "aligned", "part_bytes"),
    [
        (2**20, 4, True, 32768),
        (2**21, 4, True, 65536),
        (2**21, 2, True, 32768),
        (2**22, 2, True, 65536),
        (800_001, 2, False, 32768),
        (1_000_003, 2, False, 65536),
        (1_000_003, 4, False, 32768),
        (3_000_001, 4, False, 65536),
    ],
)
def test_long_rows_have_larger_parts(n_cols, size, aligned, part_bytes):
    """16-bit rows that start anywhere have them earlier; the lengths are an H200's."""
    vector = 16 // size if aligned else 1
    config = cooperative.choose_config(1000, n_cols, size, vector, True)
    assert config.block_cols * size == part_bytes


@pytest.mark.parametrize(
    ("n_cols", "part_bytes"),
    [(2**16, 4096), (2**18, 8192), (2**19, 16384), (2**21, 16384)],
)
def test_a_few_long_rows_have_parts_of_their_length(n_cols, part_bytes):
    config = cooperative.choose_config(1, n_cols, 2, 8, True)
    assert config.block_cols * 2 == part_bytes
    assert config.num_warps == part_bytes // 2048


def test_a_row_of_a_part_or_less_is_one_program():
    config = cooperative.choose_config(1000, 100, 4, 4, True)
    assert parts_of(100, config) == 1


PARTS = [("T4", 7), ("RTX 5090", 20), *fewer([], [("T4", 20), ("H200", 16)])]


@pytest.fixture(params=PARTS)
def small_gpu(request, monkeypatch) -> gpu.Gpu:
    """A GPU of few SMs, as a part of a GPU under MIG is. Launches are made for it."""
    name, sms = request.param
    monkeypatch.setattr(launch_module, "sms_and_threads", sizes_of(name, sms))
    return dataclasses.replace(gpu.named(name), name=f"{name} in part", sms=sms)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_resident_by_the_occupancy(small_gpu, dtype):
    """Programs wait for parts that run with them: no row is called so that is not."""
    answers = []
    lengths = fewer((50_000, 300_001, 2**22), (50_000, 2**17, 300_001, 10**6, 2**22))
    for n_rows, n_cols in itertools.product((1, 50), lengths):
        x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
        form = n_rows, n_cols, dtype.itemsize, *unaligned.alignment(x, x)
        answers.append(cooperative.are_resident(*form))
        if answers[-1]:
            launch = cooperative.launch_for(x, x)
            found = occupancy.of(compile.aot(launch, gpu=small_gpu))
            slots = found.blocks_per_sm * small_gpu.sms
            assert launch.scalars[-1] <= slots, (n_rows, n_cols, str(found))
    assert any(answers) and not all(answers)


@pytest.mark.parametrize(
    ("element_size", "vector", "same_shift", "share"),
    [
        (2, 1, True, 0.5),
        (4, 4, True, 0.5),
        (2, 4, False, 0.5),
        (2, 1, False, 1 / 8),
        (4, 1, False, 5 / 16),
    ],
)
@pytest.mark.parametrize(
    ("name", "sms"), [("H200", 132), ("H200", 20), ("RTX 5090", 20), ("T4", 40)]
)
def test_rows_are_resident_up_to_a_length(
    name, sms, element_size, vector, same_shift, share, monkeypatch
):
    """A share of what the registers hold, one row and many alike."""
    monkeypatch.setattr(launch_module, "sms_and_threads", sizes_of(name, sms))
    lengths = range(2**12, 2**25, 2**12 + 1)
    for n_rows in (1, 2, 10**6):
        forms = ((n_rows, n, element_size, vector, same_shift) for n in lengths)
        found = [cooperative.are_resident(*form) for form in forms]
        n_resident = found.count(True)
        assert all(found[:n_resident]) and n_resident < len(found)
        longest = lengths[n_resident - 1] * element_size
        assert 0.96 * share < longest / (sms * 65536 * 4) <= share


@pytest.mark.parametrize(("name", "threads"), [("H200", 2048), ("T4", 1024)])
@pytest.mark.parametrize(("same_shift", "share"), [(True, 32), (False, 16)])
def test_one_row_has_the_parts_of_few_rows_while_they_fit(
    name, threads, same_shift, share, monkeypatch
):
    monkeypatch.setattr(launch_module, "sms_and_threads", sizes_of(name, 40))
    longest = share * threads * 40 // 4
    few, other = (
        cooperative.choose_config(1, n_cols, 4, 4, same_shift)
        for n_cols in (longest - 4, longest)
    )
    assert few.maxnreg == (40 if same_shift else 64) and other.maxnreg == 80


@pytest.mark.parametrize(("sms", "block_cols"), [(132, 1024), (20, 8192)])
def test_what_is_few_depends_on_the_gpu(sms, block_cols, monkeypatch):
    monkeypatch.setattr(launch_module, "sms_and_threads", sizes_of("H200", sms))
    config = cooperative.choose_config(40, 2**16, 4, 4, True)  # 10 MiB
    assert config.block_cols == block_cols


@pytest.mark.parametrize(
    ("stride", "offset"), [(9000, 0), (9001, 0), (9001, 1), (9004, 4)]
)
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_a_launch_needs_no_memory(dtype, stride, offset):
    """Tensors without memory make the launch that real ones make."""
    x = matrix(3, 9000, dtype, stride=stride, offset=offset)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    ghost = torch.empty(3 * stride + offset, dtype=dtype, device="meta")
    ghost = ghost.as_strided(x.shape, x.stride(), offset)
    launch = cooperative.launch_for(y, x)
    assert cooperative.launch_for(y.to("meta"), ghost) == launch
    n_parts, n_rows = launch.grid
    assert launch.n_words == n_rows * (16 * math.ceil(2 * n_parts / 16) + n_parts)


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(dtype: torch.dtype, n_rows: int, n_cols: int) -> tuple[Compiled, int]:
    """The kernel for contiguous rows on an H200, and the parts of a row."""
    x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    launch = cooperative.launch_for(x, x)
    return compile.aot(launch), launch.scalars[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_travel_whole_and_without_fences(dtype):
    kernel, _ = compiled(dtype, 1000, 2**17)
    exchanges = kernel.lines(r"atom\S*\.cas")
    assert len(exchanges) == 2
    assert all(".relaxed" in line and ".b64" in line for line in exchanges)
    looks = kernel.lines(r"ld\.volatile")
    assert len(looks) >= 6 and all("64 " in line for line in looks)
    assert not kernel.count(r"\b(fence|membar)\b")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [100_001, 1_500_001])
def test_little_spills_where_rows_start_anywhere(n_cols, dtype):
    kernel, _ = compiled(dtype, 2**28 // n_cols, n_cols)
    assert kernel.spills <= (144 if TRITON >= (3, 9) else 8)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape, dtype",
    [((135, 1_000_003), torch.bfloat16), ((23, 3_000_001), torch.float32)],
)
def test_nearly_all_loads_start_before_a_value_is_used(shape, dtype):
    """Rows that start anywhere: without `loads_first` their loads take two turns."""
    kernel, _ = compiled(dtype, *shape)
    n_before, n_loads = loads_before_use(kernel.sass)
    assert n_before >= n_loads * 7 / 8 > 0


def test_a_use_between_loads_is_found():
    load = "    @P0 LDG.E.EL.128 R8, desc[UR4][R2.64]\n"
    later = load.replace("R8", "R12")
    use, other = "    FMUL R4, R11, R7 \n", "    FMUL R4, R12, R7 \n"
    again = "    MOV R9, R5 \n    MOV R8, R9 \n"
    assert loads_before_use(load + later + use + "ATOMG") == (2, 2)
    assert loads_before_use(load + use + later + "ATOMG") == (1, 2)
    assert loads_before_use(load + other + later + "ATOMG") == (2, 2)
    assert loads_before_use(again + load + later + use + load + "ATOMG") == (2, 3)


def test_a_helper_sees_the_words_before_it_loads():
    """Else it could publish a pair of results, where the output is the input."""
    kernel, _ = compiled(torch.float32, 1000, 2**17)
    functions = kernel.ptx.split("-- Begin function")
    (helps,) = (text for text in functions[1:] if "help_row" in text.split("\n")[0])
    seen, loads = (
        [found.start() for found in re.finditer(access, helps)]
        for access in (r"ld\.volatile", r"ld\.global\S*evict_last")
    )
    assert len(seen) >= 4 and max(seen) < min(loads)


def reductions(kernel: Compiled) -> list[list[tuple[str, str]]]:
    """Of floats, in each function of a kernel: the operation, and who holds what."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", kernel.ttgir, re.MULTILINE))
    pattern = r"arith\.(\w+) .* : f32\n.*\n.*tensor<(\w+), (#\w+)>\) -> f32"
    return [
        [(op, shape + layouts[name]) for op, shape, name in re.findall(pattern, text)]
        for text in kernel.ttgir.split("tt.func ")[1:]
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "n_cols", fewer([100_001, 2_500_000], [100_001, 2**17, 2_500_000])
)
@pytest.mark.parametrize("beyond", [0, 3])
@pytest.mark.parametrize("is_few", [False, True])
def test_both_copies_of_the_code_round_alike(is_few, beyond, n_cols, dtype):
    """They add in the same order, and never in fused multiply-adds.

    Which product and sum are fused is the compiler's choice, in each copy anew.
    """
    n_rows = 1 if is_few else 2**28 // n_cols
    x = torch.empty(n_rows, n_cols + beyond, dtype=dtype, device="meta")[:, :n_cols]
    y = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    launch = cooperative.launch_for(y, x)
    usual = compile.aot(launch)
    used, helping = reductions(usual)
    n_pairs = 3 if launch.constants["EDGES"] else 2  # part, edges, and all parts
    assert sorted(op for op, _ in used) == ["addf"] * n_pairs + ["maxnumf"] * n_pairs
    assert used == helping
    assert usual.count(r"\bFFMA", "sass") == 0
    if is_few:  # a control
        constants = launch.constants | {"enable_fp_fusion": True}
        constants["num_warps"] *= 2  # another order of additions
        other = compile.aot(dataclasses.replace(launch, constants=constants))
        assert used != reductions(other)[1]
        assert other.count(r"\bFFMA", "sass") > 0


def test_help_is_a_function_that_is_called():
    """So the compiler plans the registers of the usual way without it."""
    kernel, _ = compiled(torch.float32, 1000, 2**17)
    assert kernel.count(r"\bcall\b.*help_row") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [2**16, 1_500_000, LONGEST])
def test_accesses_are_16_bytes_wide_and_little_spills(n_cols, dtype):
    kernel, _ = compiled(dtype, 2**28 // n_cols, n_cols)
    for access in (r"ld\.global\.\S*evict_last\S*", r"st\.global\S*"):
        assert kernel.count(rf"{access}\.v4\.b32") > 0
    assert kernel.spills <= (40 if TRITON >= (3, 9) else 0)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("n_rows", [1, 1000])
def test_rows_that_the_output_places_elsewhere_are_loaded_by_elements(n_rows, dtype):
    x = torch.empty(n_rows, 50_258, dtype=dtype, device="meta")[:, 1:]
    y = torch.empty(x.shape, dtype=dtype, device="meta")
    launch, is_16_bit = cooperative.launch_for(y, x), dtype.itemsize == 2
    kernel = compile.aot(launch)
    # Triton 3.9 spills up to 4 in float32, and 116 in 16 bits.
    assert kernel.spills <= ((40, 120) if is_16_bit else (0, 8))[TRITON >= (3, 9)]
    assert launch.constants["EDGES"] == is_16_bit
    assert launch.constants["VECTOR"] == (4 if is_16_bit else 1)
    for access, accesses in (("ld", False), ("st", is_16_bit)):
        wide = rf"{access}\.global\.\S*v2\.b32"
        assert (kernel.count(wide) > 0) == accesses, access


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 64, 1000])
@pytest.mark.parametrize("n_cols", [2**17, 2**20, LONGEST])
def test_all_parts_of_a_row_can_be_resident(n_cols, n_rows, dtype):
    kernel, n_parts = compiled(dtype, n_rows, n_cols)
    found = occupancy.of(kernel)
    assert n_parts <= found.blocks_per_sm * kernel.gpu.sms, (n_parts, str(found))
