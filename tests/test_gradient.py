"""The gradient of a softmax: right in tiles, in unaligned rows and in shared rows."""

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels import cooperative, gradient, unaligned
from kernels.gradient import Config, softmax_backward
from kernels.lab import backend, compile, gpu, meter
from kernels.lab import launch as launch_module
from tests.helpers import (
    assert_is_gradient,
    fewer,
    matrix,
    meta_matrix,
    patched,
)

INF, NAN = float("inf"), float("nan")
SINGLE, HALF = torch.float32, torch.bfloat16
TAG = 7


def inputs(
    n_rows: int, n_cols: int, dtype: torch.dtype = SINGLE, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A gradient, and the result of a softmax, on the device that kernels run on."""
    y = torch.softmax(matrix(n_rows, n_cols, seed=seed), 1).to(dtype)
    return matrix(n_rows, n_cols, dtype, seed=seed + 1), y


def in_config(
    g: torch.Tensor, y: torch.Tensor, config: Config, **options: bool
) -> torch.Tensor:
    """The gradient by a launch of this configuration, and of these options."""
    output = torch.full_like(y, 7.0)
    launch = gradient.launch_for(output, g, y, config)
    launch = dataclasses.replace(launch, constants=launch.constants | options)
    launch(output, g, y)
    return output


def parts_of(n_cols: int, block_cols: int, element_size: int) -> Config:
    """A configuration of parts so narrow, whose rows may start anywhere."""
    vector = 16 // element_size
    n_parts = triton.cdiv(n_cols // vector * vector, block_cols)
    block_parts = max(32, triton.next_power_of_2(n_parts)) if n_parts > 1 else 1
    return Config(1, block_cols, block_parts, vector, n_cols % vector > 0, 50, 1)


def by_parts(g: torch.Tensor, y: torch.Tensor, block_cols: int = 16) -> torch.Tensor:
    """In the interpreter, no program but the last of a row finds its partners."""
    return in_config(g, y, parts_of(y.shape[1], block_cols, y.element_size()))


class Call:
    """A call on shared rows with words of its own, which may be launched again."""

    def __init__(self, n_rows: int, n_cols: int, block_cols: int = 16) -> None:
        self.g, self.y = inputs(n_rows, n_cols)
        self.output = torch.full_like(self.y, 7.0)
        tensors = self.output, self.g, self.y
        config = parts_of(n_cols, block_cols, self.y.element_size())
        self.prepared = gradient.launch_for(*tensors, config)
        self.n_words, self.n_parts = self.prepared.n_words, self.prepared.scalars[-1]
        self.words = torch.zeros(self.n_words, dtype=torch.int64, device=self.y.device)

    def launch(self, tag: int = TAG, n_programs: int | None = None) -> torch.Tensor:
        """Launches all programs, or the first n_programs; returns the output."""
        launch = self.prepared
        args = self.output, self.g, self.y, self.words, tag, *launch.scalars
        launch.kernel[(n_programs or launch.grid[0],)](*args, **launch.constants)
        return self.output


# ---- the values ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize(
    "n_cols",
    [
        *(*range(1, 10), 13, 14, 22, 25, 27, 30, 33, 38, 63, 64, 66, 68, 99, 129),
        *(257, 781, 2049),
    ],
)
def test_is_right(n_cols, dtype):
    for n_rows in (1, 4, 37):
        g, y = inputs(n_rows, n_cols, dtype)
        assert_is_gradient(softmax_backward(g, y), g, y)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_cols", [1, 3, 7, 9, 14])
def test_pairs_are_right_beside_a_row_without_a_partner(n_cols, dtype):
    """The last program takes its rows one by one, those before it take pairs."""
    config = gradient.choose_config(10**5, n_cols, dtype.itemsize)
    g, y = inputs(2 * config.rows + 3, n_cols, dtype)
    assert_is_gradient(softmax_backward(g, y), g, y)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_cols", [8192, 8193, 10_001, 16_384, 20_001, 50_257])
def test_is_right_for_long_rows(n_cols, dtype):
    g, y = inputs(2, n_cols, dtype)
    assert_is_gradient(softmax_backward(g, y), g, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n_cols", [8191, 16_385, 50_257, 65_536, 131_071, 262_144, 2**20 + 1, 5_000_000]
)
def test_is_right_for_rows_that_many_programs_share(n_cols):
    for dtype, n_rows in itertools.product(backend.DTYPES, (1, 7, 70)):
        if n_rows * n_cols > 2**26:
            continue
        g, y = inputs(n_rows, n_cols, dtype)
        x = softmax_backward(g, y)
        assert_is_gradient(x, g, y)
        assert torch.equal(x, softmax_backward(g, y))  # in every run


@pytest.mark.gpu
def test_is_right_for_more_parts_than_the_gpu_runs_at_once():
    g, y = inputs(1, 20_000_001)
    assert_is_gradient(softmax_backward(g, y), g, y)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [5_000_000, 20_000_001])
def test_a_graph_may_hold_rows_of_any_length(n_cols):
    g, y = inputs(2, n_cols, HALF)
    right = softmax_backward(g, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = softmax_backward(g, y)
    for _ in range(2):
        x.fill_(7)
        graph.replay()
        assert torch.equal(x, right)


@pytest.mark.gpu
def test_beyond_32_bit_offsets():
    n_rows, n_cols = 2**31 // 1001 + 2, 1001
    if gpu.free_bytes() < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    y = torch.full((n_rows, n_cols), 1 / n_cols, dtype=HALF, device=backend.DEVICE)
    g = torch.zeros_like(y)
    g[-1, -1] = 5
    x = softmax_backward(g, y)
    assert_is_gradient(x[-2:], g[-2:], y[-2:])


def test_columns_beyond_32_bits():
    """A part's first column is counted in 64 bits where n_cols needs as many."""
    for n_cols, in_32_bits in ((2**31 + 4096, 0), (2**20, 1)):
        x = meta_matrix(1, n_cols, HALF)
        for launch in gradient.steps_for(x, x, x) or (gradient.launch_for(x, x, x),):
            block = launch.constants["BLOCK_COLS"]
            made = compile.aot(launch)
            assert made.count(rf"muli .*%c{block}_i32 : i32", "ttir") == in_32_bits
            if not in_32_bits:
                assert made.count(rf"muli .*%c{block}\w* : i64", "ttir") == 1


def test_agrees_with_pytorch():
    for n_rows, n_cols in ((3, 64), (5, 33), (2, 9001)):
        g, y = inputs(n_rows, n_cols)
        x = torch.ops.aten._softmax_backward_data(g, y, 1, SINGLE)
        torch.testing.assert_close(softmax_backward(g, y), x, rtol=1e-4, atol=1e-6)


def test_is_the_derivative_of_softmax():
    x = matrix(3, 33).double().requires_grad_()
    y = torch.softmax(x, 1)
    g = matrix(3, 33, seed=1)
    (expected,) = torch.autograd.grad(y, x, g.double())
    got = softmax_backward(g, y.detach().float())
    torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n_cols", [7, 40, 33, 2050])
def test_nan_stays_in_its_row(n_cols):
    """A row of -inf has the softmax NaN, as in PyTorch."""
    g, _ = inputs(6, n_cols)
    x = matrix(6, n_cols)
    x[1] = -INF
    x[3, 2] = NAN
    y = kernels.softmax(x)
    assert_is_gradient(softmax_backward(g, y), g, y)
    g[4, n_cols - 1] = INF
    got = softmax_backward(g, y)
    right = torch.ops.aten._softmax_backward_data(g, y, 1, SINGLE)
    assert torch.equal(got.isnan(), right.isnan())


def test_tiny_and_huge_gradients():
    _, y = inputs(3, 70)
    for scale in (1e-30, 1e30):
        g = matrix(3, 70, seed=1) * scale
        assert_is_gradient(softmax_backward(g, y), g, y)


def test_a_constant_gradient_is_lost():
    """Adding a constant to a row of x changes nothing, so no gradient can ask for it.

    What remains is rounding.
    """
    _, y = inputs(5, 300)
    x = softmax_backward(torch.full_like(y, 3.0), y)
    assert (x.abs() <= 2.0**-20 * y).all()


# ---- shapes, strides, dtypes ---------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack([t, t], dim=2)[:, :, 0],
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        lambda t: t[:1].expand(len(t), -1),
    ],
    ids=["transposed", "strided", "sliced", "offset", "expanded"],
)
def test_any_strides(view):
    g, y = inputs(6, 33)
    for of_g, of_y in ((view, torch.clone), (torch.clone, view), (view, view)):
        views = of_g(g), of_y(y)
        assert_is_gradient(softmax_backward(*views), *views)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_any_dimension(dim):
    g = matrix(30, 7).view(5, 6, 7)
    y = torch.softmax(matrix(30, 7, seed=1).view(5, 6, 7), dim)
    assert_is_gradient(softmax_backward(g, y, dim), g, y, dim)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4, 5), (3, 1), (4, 5, 1)])
def test_any_rank(shape):
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(shape, generator=generator).to(backend.DEVICE) for _ in "gx")
    for dim in range(-len(shape), len(shape)):
        y = torch.softmax(x, dim)
        assert_is_gradient(softmax_backward(g, y, dim), g, y, dim)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 0, 4)])
def test_empty_gives_empty(shape):
    for dtype in (*backend.DTYPES, torch.float64):
        y = torch.empty(shape, dtype=dtype, device=backend.DEVICE)
        x = softmax_backward(y, y, 0, torch.float32)
        assert (x.shape, x.dtype) == (y.shape, torch.float32)


def test_float64_is_computed_in_float64():
    y = torch.softmax(matrix(3, 40, torch.float64), 1)
    g = matrix(3, 40, torch.float64, seed=1)
    expected = y * (g - (g * y).sum(1, keepdim=True))
    torch.testing.assert_close(softmax_backward(g, y), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("n_cols", [33, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float16, HALF, SINGLE, torch.float64])
@pytest.mark.parametrize("of_y", [torch.float16, HALF, SINGLE])
def test_the_result_may_have_another_dtype(of_y, dtype, n_cols):
    """As where softmax(x, dtype=float32) is the forward pass for a bfloat16 x."""
    g, y = inputs(3, n_cols, of_y)
    x = softmax_backward(g, y, 1, dtype)
    assert x.dtype == dtype
    expected = softmax_backward(g, y, 1).to(dtype)
    tolerance = max(torch.finfo(t).eps for t in (of_y, dtype))
    if backend.INTERPRETED:
        tolerance *= 2  # there, bfloat16 is truncated
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=1e-6)


# ---- derivatives ---------------------------------------------------------------------


def doubles() -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.softmax(matrix(3, 5, torch.float64, scale=1.0), 1)
    g = matrix(3, 5, torch.float64, seed=1, scale=1.0)
    return g.requires_grad_(), y.requires_grad_()


def test_gradcheck():
    assert torch.autograd.gradcheck(softmax_backward, doubles())
    assert torch.autograd.gradgradcheck(softmax_backward, doubles())


def test_derivatives_by_the_kernel_are_those_of_the_formula():
    """`gradcheck` takes float64, which PyTorch's kernel computes. This is float32."""
    for n_rows, n_cols in ((3, 33), (2, 9001)):
        g, y = (t.requires_grad_() for t in inputs(n_rows, n_cols))
        outer = matrix(n_rows, n_cols, seed=5).requires_grad_()
        got = torch.autograd.grad(softmax_backward(g, y), (g, y), outer)
        by_formula = y * (g - (g * y).sum(1, keepdim=True))
        expected = torch.autograd.grad(by_formula, (g, y), outer)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_derivative_by_the_gradient_is_the_kernel_again():
    g, y = inputs(3, 33)
    x = softmax_backward(g.requires_grad_(), y)
    outer = matrix(3, 33, seed=5)
    (for_g,) = torch.autograd.grad(x, g, outer)
    assert torch.equal(for_g, softmax_backward(outer, y))


# ---- what is moved -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_cols", [1, 7, 33, 64, 100, 1001])
def test_moves_three_values_for_each(n_cols, dtype):
    moved = meter.count(softmax_backward, *inputs(4, n_cols, dtype))
    assert moved.values[:2] == (2 * 4 * n_cols, 4 * n_cols)
    assert moved.bytes == 3 * 4 * n_cols * dtype.itemsize


def launched_twice(n_cols: int) -> None:
    call = Call(2, n_cols)
    call.launch()
    call.launch()


@pytest.mark.parametrize("n_cols", [64, 69])
def test_shared_rows_move_no_more_if_partners_are_there(n_cols):
    n_parts = Call(2, n_cols).n_parts
    traffic = meter.count(launched_twice, n_cols)
    *_, launch = (op for op in traffic.rows if op.grid)
    moved = launch.read_values, launch.written_values
    assert moved == (2 * 2 * n_cols, 2 * n_cols)
    words = 2 * n_parts
    assert launch.written_indices == words
    assert launch.read_indices == words + words * n_parts  # swapped out; looked at once


# ---- shared rows ---------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [17, 31, 32, 33, 63, 64, 65, 70, 301])
@pytest.mark.parametrize("dtype", [SINGLE, torch.float16])
def test_parts_that_are_no_whole_rows(n_cols, dtype):
    g, y = inputs(3, n_cols, dtype)
    assert_is_gradient(by_parts(g, y), g, y)


def test_words_of_two_rows_share_no_line():
    call = Call(3, 70)
    call.launch()
    written = (call.words.cpu() != 0).nonzero().flatten() // 16
    lines = [{*row.tolist()} for row in written[: 3 * call.n_parts].view(3, -1)]
    assert len(set.union(*lines)) == sum(map(len, lines))


@pytest.mark.parametrize("n_cols", [96, 101])
@pytest.mark.parametrize("absent", [1, 2, 5])
def test_programs_without_partners_end_and_are_right(absent, n_cols):
    """They compute the sums of the parts whose programs do not come."""
    call = Call(3, n_cols)
    n_parts = call.n_parts
    x = call.launch(n_programs=3 * n_parts - absent)
    assert_is_gradient(x[:2], call.g[:2], call.y[:2])
    whole = softmax_backward(call.g, call.y)
    done = (n_parts - absent) * 16
    torch.testing.assert_close(x[2, :done], whole[2, :done], rtol=1e-5, atol=1e-7)


def test_the_same_bits_whoever_computes_the_parts():
    call = Call(3, 101)
    helped = call.launch().clone()  # in the interpreter; on a GPU, perhaps
    partnered = call.launch()
    assert torch.equal(helped, partnered)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize("n_cols", [50_257, 131_072])
def test_the_same_bits_with_patience_and_without(n_cols, dtype):
    g, y = inputs(70, n_cols, dtype)
    config = gradient.choose_config(70, n_cols, y.element_size())
    configs = [dataclasses.replace(config, patience=n) for n in (1, 3, 1000)]
    # Which product and sum are fused is the compiler's choice, in each kernel anew.
    first, *others = (in_config(g, y, c, enable_fp_fusion=False) for c in configs)
    assert all(torch.equal(first, other) for other in others)


def words_of(value: float, n_words: int, tag: int) -> torch.Tensor:
    bits = torch.full((n_words,), value).view(torch.int32).to(torch.int64)
    return ((bits << 32) | tag).to(backend.DEVICE)


@pytest.mark.parametrize("tag", [0, TAG - 1, TAG + 1, 2**31 - 1])
def test_words_of_another_call_are_not_taken(tag):
    call = Call(3, 70)
    call.words.copy_(words_of(1e9, call.n_words, tag))
    assert_is_gradient(call.launch(), call.g, call.y)


def test_words_of_this_call_are_taken():
    call = Call(1, 64)
    call.words.copy_(words_of(1e9, call.n_words, TAG))
    x = call.launch(n_programs=1)  # alone, among words that it must believe
    assert (x[0, :16] < -1e5 * call.y[0, :16]).all()


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("n_cols", [70_001, 80_000])
def test_two_launches_are_right(n_cols, dtype, monkeypatch):
    """A GPU that runs one program at once."""
    monkeypatch.setattr(launch_module, "programs_at_once", lambda *_: 1)
    monkeypatch.setattr(gradient._backward, "launches", {})
    for n_rows in fewer((1 if n_cols == 80_000 else 2,), (1, 3)):
        g, y = inputs(n_rows, n_cols, dtype)
        x = softmax_backward(g, y)
        assert_is_gradient(x, g, y)
        assert torch.equal(x, softmax_backward(g, y))


@pytest.mark.parametrize(("n_slots", "n_launches"), [(5, 2), (6, 1)])
def test_a_third_of_the_slots_stays_free(n_slots, n_launches, monkeypatch):
    """The rows of calls on other streams may need as many, and none waits for long."""
    monkeypatch.setattr(launch_module, "programs_at_once", lambda *_: n_slots)
    y = torch.empty(999, 4 * 4096, device="meta")  # four parts of 16 KiB
    assert gradient.launch_for(y, y, y).n_words == 999 * (16 + 4)
    steps = gradient.steps_for(y, y, y)
    assert (1 if steps is None else len(steps)) == n_launches


# ---- wrong kernels -------------------------------------------------------------------


def without_the_sum(g, y, row_dot):
    return y.to(tl.float32) * g.to(tl.float32)


def with_the_sum_added(g, y, row_dot):
    return y.to(tl.float32) * (g.to(tl.float32) + row_dot)


def of_the_gradient_alone(g, y, AXIS: tl.constexpr):
    return tl.sum(g.to(tl.float32), axis=AXIS)


def filled_with_ones(gradient_ptr, y_ptr, offsets, inside):
    g = tl.load(gradient_ptr + offsets, inside, other=1.0)
    return g, tl.load(y_ptr + offsets, inside, other=1.0)


def body_that_ends_early(row_start, n_cols, VECTOR: tl.constexpr):
    head = tl.minimum((-row_start).to(tl.int32) & (VECTOR - 1), n_cols)
    return head, (n_cols - head - VECTOR) & -VECTOR


def the_largest(x):
    return tl.max(tl.max(x, 3, keep_dims=True), 0, keep_dims=True)


def as_if_all_were_the_first_row(n_cols, FIRST, COLS, THREADS, VECTOR):
    TURNS: tl.constexpr = COLS // (THREADS * VECTOR)
    return tl.full((TURNS, 1, THREADS, VECTOR), False, tl.int1)


def edges_without_the_last_column(source, first_row, matrix, ROWS, THREADS, VECTOR):
    n_rows, n_cols, row_stride, shift = matrix
    shorter = n_rows, n_cols - 1, row_stride, shift
    return unaligned.load_edges(source, first_row, shorter, ROWS, THREADS, VECTOR)


@pytest.mark.parametrize(
    ("n_cols", "helper", "wrong"),
    [
        (33, "combine", without_the_sum),
        (33, "combine", with_the_sum_added),
        (33, "dot", of_the_gradient_alone),
        (33, "load_both", filled_with_ones),
        (33, "split_row", body_that_ends_early),
        (13, "combine", without_the_sum),  # pairs of short rows
        (13, "own_sum", the_largest),
        (13, "is_second", as_if_all_were_the_first_row),
        (17, "combine", without_the_sum),  # short rows
        (17, "own_sum", the_largest),
        (17, "load_edges", edges_without_the_last_column),
    ],
)
def test_a_wrong_kernel_is_caught(n_cols, helper, wrong):
    g, y = inputs(6, n_cols)
    with patched(gradient, helper, wrong), pytest.raises(AssertionError):
        assert_is_gradient(softmax_backward(g, y), g, y)
    assert_is_gradient(softmax_backward(g, y), g, y)


def believing_any_word(words_ptr, tag, n_parts, BLOCK_PARTS):
    parts = tl.arange(0, BLOCK_PARTS)
    words = tl.load(words_ptr + parts, mask=parts < n_parts, other=0, volatile=True)
    return cooperative.unpack(words), parts < 0, 0


def test_a_kernel_that_believes_any_word_is_caught():
    g, y = inputs(3, 70)
    with patched(gradient, "look", believing_any_word), pytest.raises(AssertionError):
        assert_is_gradient(by_parts(g, y), g, y)
