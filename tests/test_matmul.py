"""Products by tiles: right in any shape, order and layout; compiled as promised."""

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl

from kernels import matmul
from kernels.lab import backend, compile, descriptors, gpu, models, occupancy, products
from tests.helpers import GPUS, matrix, meta_matrix, patched

HALF = torch.bfloat16
REFERENCES = {
    None: None,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "softmax": lambda product: product.softmax(1),
}


def checked(activation=None, **options):
    """The verdict on `matmul.matmul` with an activation."""
    most = matmul.MAX_SOFTMAX_COLS if activation == "softmax" else None
    return products.check(
        lambda a, b: matmul.matmul(a, b, activation),
        activation=REFERENCES[activation],
        max_cols=most,
        **options,
    )


def assert_is_product(c, a, b, activation=None):
    """Asserts that c is the activation of a @ b, as near as `products.check` asks."""
    reference = REFERENCES[activation] or (lambda product: product)
    expected = reference(products.exact(a, b))
    errors = (c.double() - expected).abs() / products.allowed(a, b, expected)
    assert errors.max() <= 1


def ghosts(m, n, k, dtype=HALF):
    """C, A and B without memory."""
    return [meta_matrix(*size, dtype) for size in ((m, n), (m, k), (k, n))]


# ---- the product ---------------------------------------------------------------------


@pytest.mark.parametrize("activation", matmul.ACTIVATIONS)
def test_is_right(activation):
    verdict = checked(activation)
    assert verdict, verdict


@pytest.mark.parametrize("activation", matmul.ACTIVATIONS)
@pytest.mark.parametrize("with_descriptors", [False, True])
@pytest.mark.parametrize("blocks", [(16, 32, 16, 1), (32, 16, 32, 2), (16, 16, 16, 8)])
def test_is_right_in_any_tile_and_order(blocks, with_descriptors, activation):
    """Ragged in every direction: two groups, the last lower; a last step along K."""
    a, b = matrix(72, 40, torch.float16), matrix(40, 56, torch.float16)
    c = torch.full((72, 56), float("nan"), dtype=a.dtype, device=a.device)
    launch = matmul.launch_for(c, a, b, activation, with_descriptors)
    names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"
    constants = {**launch.constants, **dict(zip(names, blocks, strict=True))}
    if activation == "softmax":
        constants["BLOCK_N"] = 64
    m, n, k, _ = (constants[name] for name in names)
    grid = (triton.cdiv(72, m) * triton.cdiv(56, n),)
    launch = dataclasses.replace(launch, grid=grid, constants=constants)
    if with_descriptors:
        forms = descriptors.described((c, a, b), ((m, n), (m, k), (k, n)))
        launch = dataclasses.replace(launch, pointers=forms)
    launch(c, a, b)
    assert_is_product(c, a, b, activation)


def test_both_kernels_are_launched():
    """Rows of 16-byte multiples are described; others have pointers."""
    launched = {
        cols: matmul.launch_for(*ghosts(64, cols, 64)).kernel for cols in (64, 65)
    }
    assert launched == {64: matmul.descriptor_kernel, 65: matmul.matmul_kernel}
    without = matmul.launch_for(*ghosts(64, 64, 64), with_descriptors=False)
    assert without.kernel is matmul.matmul_kernel
    older = matmul.launch_for(*ghosts(64, 64, 64), on=gpu.named("A100"))
    assert older.kernel is matmul.matmul_kernel


@pytest.mark.parametrize("views", [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("dtype", products.DTYPES)
def test_transposed_and_sliced_operands_are_taken_as_they_are(dtype, views):
    a, b = matrix(40, 24, dtype, stride=27, offset=1), matrix(24, 36, dtype, stride=40)
    a, b = (
        x.t().contiguous().t() if transposed else x
        for x, transposed in zip((a, b), views, strict=True)
    )
    assert_is_product(matmul.matmul(a, b), a, b)


def test_infinities_and_nan_stay_in_their_rows():
    a, b = matrix(40, 24, torch.float16), matrix(24, 40, torch.float16)
    a[3, 5], a[7, 0] = float("nan"), float("inf")
    c = matmul.matmul(a, b)
    assert c[3].isnan().all()
    assert not c[7].isfinite().any()
    others = [row for row in range(40) if row not in (3, 7)]
    assert_is_product(c[others], a[others], b)


def test_a_softmax_of_large_products_does_not_overflow():
    a, b = matrix(8, 16, torch.float16, scale=20), matrix(16, 24, torch.float16)
    b *= 20
    assert products.exact(a, b).max() > 1000
    c = matmul.matmul(a, b, "softmax")
    assert_is_product(c, a, b, "softmax")
    assert (c.double().sum(1) - 1).abs().max() < 0.01


@pytest.mark.parametrize("shape", [(0, 5, 4), (5, 0, 4), (5, 4, 0), (0, 0, 0)])
def test_empty_operands(shape):
    m, n, k = shape
    for activation in matmul.ACTIVATIONS:
        a, b = (
            torch.ones(size, dtype=HALF, device=backend.DEVICE)
            for size in ((m, k), (k, n))
        )
        c = matmul.matmul(a, b, activation)
        assert (c.shape, c.dtype) == ((m, n), HALF)
        filled = 1 / n if activation == "softmax" and n else 0
        assert (c == filled).all()


# ---- wrong kernels are caught --------------------------------------------------------


def columns_first(program, m, n, BLOCK_M, BLOCK_N, GROUP_M):
    tiles_n = tl.cdiv(n, BLOCK_N)
    return program % tiles_n, program // tiles_n


def without_the_last_height(program, m, n, BLOCK_M, BLOCK_N, GROUP_M):
    tiles_n = tl.cdiv(n, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    place = program % (GROUP_M * tiles_n)
    return group * GROUP_M + place % GROUP_M, place // GROUP_M


def with_padding_in_the_sum(acc, cols, n, ACTIVATION: tl.constexpr):
    numerator = tl.exp(acc - tl.max(acc, axis=1)[:, None])
    return numerator / tl.sum(numerator, axis=1)[:, None]


def without_a_slope(acc, cols, n, ACTIVATION: tl.constexpr):
    return tl.maximum(acc, 0.0)


@pytest.mark.parametrize(
    ("helper", "wrong", "activation"),
    [
        ("tile_of", columns_first, None),
        ("tile_of", without_the_last_height, None),
        ("activate", with_padding_in_the_sum, "softmax"),
        ("activate", without_a_slope, "leaky_relu"),
        ("activate", without_a_slope, None),
    ],
)
def test_a_wrong_helper_is_caught(helper, wrong, activation):
    with patched(matmul, helper, wrong):
        verdict = checked(activation, dtypes=[torch.float16])
    assert not verdict
    assert "With A of" in repr(verdict)


# ---- the order -----------------------------------------------------------------------


@triton.jit
def order_kernel(tiles_ptr, m, n, GROUP_M: tl.constexpr):
    """One program stores the tile that it would compute, of 16 × 32."""
    program = tl.program_id(0)
    tile_m, tile_n = matmul.tile_of(program, m, n, 16, 32, GROUP_M)
    tl.store(tiles_ptr + 2 * program, tile_m)
    tl.store(tiles_ptr + 2 * program + 1, tile_n)


@pytest.mark.parametrize("group_m", [1, 2, 3, 8])
def test_the_order_is_that_of_the_model_and_takes_each_tile_once(group_m):
    m, n, down, across = 75, 140, 5, 5
    tiles = torch.full((down * across, 2), -1, dtype=torch.int32, device=backend.DEVICE)
    order_kernel[(down * across,)](tiles, m, n, GROUP_M=group_m)
    found = [tuple(pair) for pair in tiles.tolist()]
    assert found == [
        models.grouped_tile(program, down, across, group_m)
        for program in range(down * across)
    ]
    assert set(found) == {*itertools.product(range(down), range(across))}


def test_plain_order_is_row_after_row():
    order = [models.grouped_tile(program, 3, 4) for program in range(12)]
    assert order == [*itertools.product(range(3), range(4))]


# ---- the configuration ---------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("softmax", [False, True])
def test_configs_fit_the_gpu(name, softmax):
    on = gpu.named(name)
    for m, n in itertools.product((1, 100, 1000, 4096, 10**6), (1, 40, 256, 5000)):
        if softmax and n > matmul.MAX_SOFTMAX_COLS:
            continue
        config = matmul.choose_config(m, n, on, softmax)
        for number in (config.block_m, config.block_n, config.block_k):
            assert number == triton.next_power_of_2(number) >= 16
        assert config.num_stages >= 1 and config.num_warps in (4, 8)
        assert not softmax or config.block_n >= n


def test_large_products_get_large_tiles_and_small_ones_enough_tiles():
    h200, t4 = gpu.named("H200"), gpu.named("T4")

    def tile(m, n, on=h200, softmax=False):
        config = matmul.choose_config(m, n, on, softmax)
        return config.block_m, config.block_n

    assert tile(8192, 8192) == tile(2048, 2048) == (128, 256)
    assert tile(1024, 1024) == (64, 128)
    assert tile(512, 512) == (64, 64)
    assert tile(20, 30) == (32, 32)
    assert tile(8192, 8192, t4) == (64, 64)
    assert tile(2**18, 100, softmax=True) == (128, 128)


# ---- what the compiler makes of it ---------------------------------------------------

INSTRUCTIONS = {  # the tensor cores' instruction for each kind of GPU
    75: None,
    80: r"mma\.sync",
    86: r"mma\.sync",
    89: r"mma\.sync",
    90: r"wgmma\.mma_async",
    100: r"tcgen05\.mma",
    120: r"mma\.sync",
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_fits_and_uses_tensor_cores(name):
    on = gpu.named(name)
    launches = [
        matmul.launch_for(*ghosts(4096, 4096, 4096), on=on),
        matmul.launch_for(*ghosts(4096, 4096, 4096), with_descriptors=False, on=on),
        matmul.launch_for(*ghosts(1823, 781, 1001), "leaky_relu", on=on),
        matmul.launch_for(*ghosts(2**18, 128, 64), "softmax", on=on),
        matmul.launch_for(*ghosts(512, 512, 512, torch.float16), on=on),
    ]
    wanted = INSTRUCTIONS[on.compute_capability]
    for made in compile.aot_all(launches, gpu=on):
        assert occupancy.of(made).blocks_per_sm >= 1, str(made)
        for instruction in set(INSTRUCTIONS.values()) - {None}:
            assert bool(made.count(instruction)) == (instruction == wanted), made


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_the_tile_for_aligned_rows_does_not_spill(name):
    on = gpu.named(name)
    made = compile.aot(matmul.launch_for(*ghosts(4096, 4096, 4096), on=on), gpu=on)
    assert made.spills <= 16, str(made)


def test_a_large_tile_spills_where_there_is_no_tensor_core():
    launch = matmul.launch_for(*ghosts(4096, 4096, 4096), on=gpu.named("L4"))
    small = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4}
    launch = dataclasses.replace(launch, constants={**launch.constants, **small})
    spills = {name: compile.aot(launch, gpu=name).spills for name in ("T4", "L4")}
    assert spills["T4"] > 0 == spills["L4"]


def test_descriptors_are_copied_by_the_gpu_itself():
    both = [
        matmul.launch_for(*ghosts(4096, 4096, 4096), with_descriptors=described)
        for described in (False, True)
    ]
    pointers, described = compile.aot_all(both)
    bulk = r"cp\.async\.bulk\.tensor"
    assert pointers.count(bulk) == 0 < described.count(bulk)
    assert pointers.count(r"cp\.async\.cg") > 0 == described.count(r"cp\.async\.cg")
    assert described.registers < pointers.registers


# ---- wrong input ---------------------------------------------------------------------


def ones(*shape, dtype=HALF):
    return torch.ones(shape, dtype=dtype, device=backend.DEVICE)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"activation must be one of .*got 'gelu'"):
        matmul.matmul(ones(2, 2), ones(2, 2), "gelu")


def test_a_softmax_that_is_wider_than_a_tile_is_named():
    limit = matmul.MAX_SOFTMAX_COLS
    assert matmul.matmul(ones(2, 2), ones(2, limit), "softmax").shape == (2, limit)
    with pytest.raises(ValueError, match=rf"at most {limit} columns.*got {limit + 1}"):
        matmul.matmul(ones(2, 2), ones(2, limit + 1), "softmax")


def test_operands_that_do_not_fit_together_are_named():
    with pytest.raises(ValueError, match="b must have as many rows as a has columns"):
        matmul.matmul(ones(2, 3), ones(2, 3))
    with pytest.raises(TypeError, match=r"a must be float16 or bfloat16, got torch\.f"):
        matmul.matmul(ones(2, 3, dtype=torch.float32), ones(3, 2))


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *((512, 512, 512), (1024, 1024, 1024), (4096, 4096, 4096), (1000, 1000, 1000)),
        *((1823, 781, 1001), (777, 50257, 768), (8192, 136, 2056)),
    ],
)
def test_is_right_at_the_sizes_that_are_timed(shape, dtype):
    m, n, k = shape
    a, b = matrix(m, k, dtype), matrix(k, n, dtype)
    assert_is_product(matmul.matmul(a, b), a, b)
    if n % 8 == 0:
        c = torch.full((m, n), float("nan"), dtype=dtype, device=a.device)
        matmul.launch_for(c, a, b, with_descriptors=False)(c, a, b)
        assert_is_product(c, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 40, 64, 100, 128, 200, 256])
def test_softmax_behind_a_product_is_right_on_a_gpu(n):
    for dtype, k in itertools.product(products.DTYPES, (64, 100)):
        a, b = matrix(5000, k, dtype, scale=1.0), matrix(k, n, dtype, scale=1.0)
        assert_is_product(matmul.matmul(a, b, "softmax"), a, b, "softmax")


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    if gpu.free_bytes() < 14e9:
        pytest.skip("needs 14 GB of free GPU memory")
    m = 2**31 // 1024 + 100
    a = torch.zeros(m, 1025, dtype=HALF, device=backend.DEVICE)[:, 1:]
    a[-1] = 1
    c = matmul.matmul(a, ones(1024, 16))
    assert (c[-1] == 1024).all()
    assert not c[:-1].any()
