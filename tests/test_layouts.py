"""Layouts: the model of who holds what is what compiled kernels do."""

import itertools

import numpy as np
import pytest
import torch

from kernels import layouts
from kernels.lab import allocation, check, compile, gpu, models, occupancy, ptx
from kernels.layouts import ARRANGEMENTS, TILE, Blocked
from tests.helpers import GPUS, assert_right, dtypes_for, matrix

SINGLE, HALF = torch.float32, torch.float16
OUT, IN = 2**30, 0  # addresses


def pointers(n: int, dtype: torch.dtype = SINGLE) -> list:
    return [compile.pointer(dtype)] * n


def softmax_of(rows, cols, axis, n_cols=4096, **options):
    arguments = (*pointers(2), 4096, n_cols, rows, cols, axis)
    return compile.aot(layouts.softmax_kernel, *arguments, **options)


def transposition(arrangement: str, on: str = "H200", side: int = TILE):
    arguments = (*pointers(2), 128, 256, side)
    if arrangement:
        how = ARRANGEMENTS[arrangement]
        return compile.aot(layouts.through_shared_kernel, *arguments, how, gpu=on)
    return compile.aot(layouts.transpose_kernel, *arguments, gpu=on)


def passes(compiled) -> dict[str, tuple[int, int]]:
    """Passes through shared memory, and the fewest possible, of loads and stores."""
    found = {}
    for access in ptx.accesses(compiled, OUT, IN, 128, 256, space="shared"):
        warps = access.addresses.reshape(-1, 32).tolist()
        taken = sum(models.bank_passes(each, access.n_bytes) for each in warps)
        before = found.get(access.kind, (0, 0))
        needed = len(warps) * max(access.n_bytes // 4, 1)
        found[access.kind] = before[0] + taken, before[1] + needed
    return found


# ---- the softmax ---------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_is_a_softmax(axis):
    def along_rows(x):
        return layouts.softmax(x) if axis else layouts.softmax(x.T, 0).T.contiguous()

    summary = check.softmax(along_rows, dtypes=[SINGLE, torch.bfloat16], max_cols=300)
    assert summary, summary


@pytest.mark.parametrize("shape", [(3, 2500), (2500, 3), (70, 70), (1, 1), (129, 33)])
def test_both_axes(shape):
    x = matrix(*shape)
    assert_right(layouts.softmax(x), x)
    assert_right(layouts.softmax(x, 0), x, 0)


def test_check_catches_a_wrong_fill():
    def with_zeros(x):
        padded = torch.nn.functional.pad(x, (0, 1))
        return layouts.softmax(padded)[:, :-1].contiguous()

    assert not check.softmax(with_zeros, dtypes=[SINGLE], max_cols=40)


def test_softmax_of_something_else():
    with pytest.raises(ValueError, match="axis must be 0 or 1, got 2"):
        layouts.softmax(matrix(2, 2), 2)
    with pytest.raises(ValueError, match="at most 4096 columns"):
        layouts.softmax(matrix(1, 4097))
    with pytest.raises(ValueError, match="at most 4096 rows"):
        layouts.softmax(matrix(4097, 1), 0)
    assert layouts.softmax(matrix(0, 3)).shape == (0, 3)


# ---- the transposition ---------------------------------------------------------------

SHAPES = [(32, 32), (1, 1), (33, 70), (100, 31), (0, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_transposes(shape, dtype):
    x = matrix(*shape, dtype)
    assert torch.equal(layouts.transpose(x), x.T)


@pytest.mark.gpu
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_transposes_in_every_arrangement(arrangement, dtype):
    for shape in (*SHAPES, (1000, 513)):
        x = matrix(*shape, dtype)
        assert torch.equal(layouts.transpose(x, arrangement), x.T)


def test_transposition_of_something_else():
    with pytest.raises(ValueError, match=r"contiguous matrix, got \(3, 2\) with str"):
        layouts.transpose(matrix(2, 3).T)
    with pytest.raises(ValueError, match=r"arrangement must be one of \['plain'"):
        layouts.transpose(matrix(2, 3), "folded")


@pytest.mark.skipif(not layouts.backend.INTERPRETED, reason="there is a GPU")
def test_gluon_needs_a_gpu():
    with pytest.raises(RuntimeError, match="Gluon kernels need a GPU"):
        layouts.transpose(matrix(2, 3), "plain")


@pytest.mark.parametrize("arrangement", ["", *ARRANGEMENTS])
@pytest.mark.parametrize("on", ["T4", "H200", "RTX 5090"])
def test_the_compiled_code_transposes(arrangement, on):
    """In place of a GPU: the PTX is carried out, and each value says where it was."""
    found = ptx.accesses(
        transposition(arrangement, on), OUT, IN, 128, 256, program=(1, 2, 0)
    )
    written = ptx.stored(found)
    assert len(written) == TILE**2
    for target, source in written.items():
        assert divmod((target - OUT) // 4, 128) == divmod(source // 4, 256)[::-1]


def test_conflicts_are_where_the_model_says():
    assert passes(transposition("plain"))["ld"] == (1024, 32)
    for arrangement in ("padded", "swizzled", ""):
        assert all(a == b for a, b in passes(transposition(arrangement)).values())
    taken = passes(transposition("", side=64))
    assert taken["ld"] == taken["st"] == (128, 128)


def test_padding_costs_memory_and_swizzling_none():
    shared = {name: transposition(name).shared for name in ("", *ARRANGEMENTS)}
    assert shared == {"": 4096, "plain": 4096, "padded": 4220, "swizzled": 4096}


def test_one_warp_loads_from_a_padded_tile_where_it_must_not():
    """A fault of Triton 3.6 to 3.9, which the page tells: hence 4 warps."""
    arguments = (*pointers(2), 128, 256, TILE, ARRANGEMENTS["padded"])
    for num_warps, aligned in ((1, False), (4, True)):
        launch = layouts.through_shared_kernel, arguments, {"num_warps": num_warps}
        (made,) = compile.aot_all([launch])
        found = ptx.accesses(made, OUT, IN, 128, 256, space="shared")
        assert all(not (a.addresses % a.n_bytes).any() for a in found) == aligned


# ---- the product ---------------------------------------------------------------------


def run_product(n_rows=128, n_inner=96):
    left, right = matrix(n_rows, n_inner, HALF, scale=0.3), matrix(n_inner, 64, HALF)
    output = torch.empty(64, n_rows, dtype=HALF, device=left.device)
    arguments = (output, left, right, n_rows, n_inner, 64, 64, 32)
    layouts.product_kernel[(n_rows // 64,)](*arguments, num_stages=3)
    wanted = torch.softmax(left.double() @ right.double(), 1).T
    return output, wanted.to(HALF)


def test_product_is_right():
    output, wanted = run_product()
    torch.testing.assert_close(output, wanted, rtol=2**-7, atol=2e-4)


def test_buffers_share_bytes():
    arguments = (*pointers(3, HALF), 4096, 1024, 64, 64, 32)
    made = compile.aot(layouts.product_kernel, *arguments, gpu="A100", num_stages=3)
    found = allocation.buffers(made)
    names = [each.operation for each in found]
    assert names == ["local_alloc"] * 2 + ["reduce"] * 2 + ["convert_layout"]
    assert allocation.peak_bytes(found) == made.shared == 16384
    assert sum(each.size for each in found) == 25600


# ---- layouts -------------------------------------------------------------------------

LAUNCHES = [
    (1, 1024, 1, 4),
    (16, 64, 1, 4),
    (16, 64, 0, 4),
    (64, 16, 1, 8),
    (8, 8, 1, 4),
]


def test_layouts_are_read_from_the_ttgir():
    found = layouts.layouts_of(softmax_of(16, 64, 1).ttgir)
    assert found == {"#blocked": Blocked((1, 4), (2, 16), (4, 1), (1, 0))}
    assert layouts.layouts_of("#shared = #ttg.swizzled_shared<{vec = 1}>") == {}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("n_cols", [4096, 4095])
def test_holders_are_the_threads_that_load_the_elements(launch, n_cols):
    rows, cols, axis, num_warps = launch
    made = softmax_of(rows, cols, axis, n_cols, num_warps=num_warps)
    layout = layouts.layouts_of(made.ttgir)["#blocked"]
    warp, lane = layouts.holders(layout, (rows, cols))
    loads = ptx.accesses(made, OUT, IN, 4096, n_cols, space="global")
    seen = set()
    for access in loads:
        for thread, address in enumerate(access.addresses.tolist()):
            for number in range(access.n_bytes // 4) if address != ptx.OFF else ():
                row, col = divmod((address % OUT) // 4 + number, n_cols)
                copies = 32 * num_warps * access.n_bytes // 4 > rows * cols
                if not copies:
                    assert (warp[row, col], lane[row, col]) == divmod(thread, 32)
                seen.add((row, col))
    assert len(seen) == rows * cols


def test_holders_of_a_row_are_those_of_the_model():
    options = {"size_per_thread": 4, "threads_per_warp": 32, "warps_per_cta": 4}
    warp, lane = layouts.holders(Blocked((4,), (32,), (4,), (0,)), (1024,))
    for w, n in itertools.product(range(4), range(32)):
        mine = np.flatnonzero((warp == w) & (lane == n)).tolist()
        assert mine == models.elements_of_lane(1024, w, n, **options)


def test_judge_answers_in_a_sentence():
    layout = Blocked((1, 4), (2, 16), (4, 1), (1, 0))

    def holder(row, col):
        return row // 2 % 4, row % 2 * 16 + col // 4

    def judged(function):
        return layouts.judge(function, layout, (16, 64))

    assert judged(holder) == "Right for all 1024 elements."
    assert judged(lambda row, col: ...) == (
        "Not yet: holder(0, 0) gives ... and not two numbers."
    )
    assert judged(lambda row, col: (0, col // 4)) == (
        "Not yet: lane 16 of warp 0 holds (1, 0), and your function says lane 0 of "
        "warp 0."
    )


@pytest.mark.parametrize(
    ("launch", "shuffles", "shared"),
    [((4, 512, 0), False, 0), ((16, 64, 1), True, 0), ((16, 64, 0), True, 1024)],
)
def test_a_reduction_goes_as_far_as_its_layout_makes_it(launch, shuffles, shared):
    made = softmax_of(*launch)
    layout = layouts.layouts_of(made.ttgir)["#blocked"]
    axis = launch[2]
    assert (layout.threads_per_warp[axis] > 1) == shuffles
    assert (layout.warps_per_cta[axis] > 1 and launch[axis] > 4) == (shared > 0)
    assert (made.count(r"shfl\.sync") > 0) == shuffles
    assert made.shared == shared


def test_divisibility_decides_the_width_of_a_load():
    for n_cols, size, width in ((4096, 4, "v4.b32"), (4095, 1, "b32")):
        made = softmax_of(1, 1024, 1, n_cols)
        layout = layouts.layouts_of(made.ttgir)["#blocked"]
        assert layout.size_per_thread == (1, size)
        assert made.count(rf"ld\.global\.{width}") == 8 // size


# ---- every GPU -----------------------------------------------------------------------


def launches(dtypes):
    for dtype in dtypes:
        two, three = pointers(2, dtype), pointers(3, dtype)
        for n_cols, axis in ((1000, 1), (1024, 1), (1024, 0)):
            sizes = (4096, n_cols, *((2, 1024) if axis else (64, 32)), axis)
            yield layouts.softmax_kernel, (*two, *sizes), {}
        yield layouts.transpose_kernel, (*two, 1000, 1024, TILE), {}
        for how in ARRANGEMENTS.values():
            yield layouts.through_shared_kernel, (*two, 1000, 1024, TILE, how), {}
        yield (
            layouts.product_kernel,
            (*three, 4096, 1024, 64, 64, 32),
            {"num_stages": 3},
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name):
    on = gpu.named(name)
    for compiled in compile.aot_all(launches(dtypes_for(name)), gpu=on):
        assert compiled.count(rf"\.target sm_{on.compute_capability}a?\b") == 1
        assert occupancy.of(compiled).blocks_per_sm >= 1, str(compiled)
