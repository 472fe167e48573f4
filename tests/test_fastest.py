"""One softmax for every shape: PyTorch's answers, by the kernel that the rule names."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kernels import fastest
from kernels.lab import backend, check, gpu, meter
from tests.helpers import (
    DIMS,
    EMPTY,
    LAYOUTS,
    STEMS,
    WRITABLE,
    assert_right,
    contiguous_for,
    fewer,
    input_of,
    tensor,
)

INF = float("inf")


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax():
    summary = check.softmax(fastest.softmax)
    assert summary, summary


@pytest.mark.parametrize("dtype", fastest.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_rank_any_dim(layout, dtype):
    for shape, dim in DIMS:
        x = LAYOUTS[layout](*shape, dtype=dtype)
        y = fastest.softmax(x, dim)
        assert y.is_contiguous() and y.dtype == dtype and y.shape == shape
        assert_right(y, x, dim)


def test_dimensions_count_from_the_end_as_well():
    for shape, dim in DIMS:
        x = tensor(*shape)
        y = fastest.softmax(x, dim - max(len(shape), 1))
        assert torch.equal(y, fastest.softmax(x, dim))
    assert torch.equal(fastest.softmax(x), fastest.softmax(x, -1))


@pytest.mark.parametrize("dtype", fastest.DTYPES)
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_gives_empty(shape, dtype):
    x = torch.empty(shape, dtype=dtype, device=backend.DEVICE)
    for dim in range(len(shape)):
        y = fastest.softmax(x, dim)
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device)
        assert fastest.softmax(x, dim, out=y) is y


def test_float64_keeps_its_precision():
    x = tensor(3, 9000, dtype=torch.float64)
    assert_right(fastest.softmax(x), x)
    with pytest.raises(AssertionError):
        assert_right(torch.softmax(x.float(), 1).double(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", STEMS)
def test_large_magnitudes(stem, dtype):
    largest = torch.finfo(dtype).max
    x = input_of(stem, dtype=dtype)
    x[0], x[0, 1] = -largest, largest  # their difference is no number of the dtype
    x[1], x[1, -1] = largest, largest / 2
    x[2] = 1024 + 8 * x[2].round()
    assert_right(fastest.softmax(x), x)


@pytest.mark.parametrize("stem", STEMS)
def test_infinities_and_nan(stem):
    x = input_of(stem, n_rows=5)
    half = x.shape[1] // 2
    x[0, :half], x[1, half:], x[2] = -INF, -INF, -INF
    x[3, -1], x[4, 0] = INF, float("nan")
    y = fastest.softmax(x)
    assert_right(y, x)
    assert y.isnan().all(1).tolist() == [False, False, True, True, True]
    assert y.isnan().any(1).tolist() == [False, False, True, True, True]


def test_moves_what_it_says():
    for shape in ((37, 33), (3, 781), (200, 4)):
        x = tensor(*shape)
        assert meter.count(fastest.softmax, x).values == meter.fused(*shape)
    others = (
        (tensor(3, 50, 7), 1, 1),
        (tensor(3, 300, 7), 1, 2),
        (tensor(33, 37).t(), 1, 2),
    )
    for x, dim, passes in others:
        counted = meter.count(fastest.softmax, x, dim).values
        assert counted == meter.passes(x.numel(), 1, passes=passes)


# ---- where the result goes -----------------------------------------------------------


@pytest.mark.parametrize("layout", WRITABLE)
def test_out_of_any_strides(layout):
    for shape, dim in DIMS:
        x, out = tensor(*shape), LAYOUTS[layout](*shape, seed=1)
        assert fastest.softmax(x, dim, out=out) is out
        assert_right(out, x, dim)


@pytest.mark.parametrize("dtype", fastest.DTYPES)
def test_out_at_any_address(dtype):
    for n_cols, offset in itertools.product((1, 8, 33, 781), (0, 1, 4, 7)):
        x = tensor(2, n_cols + 8, dtype=dtype)[:, offset : offset + n_cols]
        buffer = torch.full((2 * n_cols + 16,), 7, dtype=dtype, device=x.device)
        out = buffer[offset : offset + 2 * n_cols].view(2, n_cols)
        assert_right(fastest.softmax(x, out=out), x)
        out.fill_(7)
        assert (buffer == 7).all()


@pytest.mark.parametrize("layout", WRITABLE)
def test_out_may_be_x_itself(layout):
    for shape, dim in DIMS:
        x = LAYOUTS[layout](*shape)
        before = x.clone()
        assert fastest.softmax(x, dim, out=x) is x
        assert_right(x, before, dim)


@pytest.mark.parametrize("stem", [*STEMS, "columns"])
@pytest.mark.parametrize("shift", [-3, 3])
def test_out_may_overlap_x(stem, shift):
    shape, dim, dtype = contiguous_for(stem)
    buffer = tensor(math.prod(shape) + 3, dtype=dtype)
    x, out = buffer[:-3].view(shape), buffer[3:].view(shape)
    if shift < 0:
        x, out = out, x
    before = x.clone()
    fastest.softmax(x, dim, out=out)
    assert_right(out, before, dim)


def test_only_out_is_written():
    x, wide = tensor(4, 50), torch.full((4, 60), 7.0, device=backend.DEVICE)
    assert_right(fastest.softmax(x, out=wide[:, 5:55]), x)
    assert (wide[:, :5] == 7).all() and (wide[:, 55:] == 7).all()


def test_an_out_with_one_place_for_many_values_is_refused():
    x, out = tensor(4, 5), tensor(1, 5).expand(4, 5)
    with pytest.raises(ValueError, match=r"of its own .*\(0, 1\).*empty_like\(x\)"):
        fastest.softmax(x, out=out)


@pytest.mark.parametrize("shape, strides", [((3, 0), (0, 1)), ((0, 5), (1, 0))])
def test_an_empty_out_has_no_place_to_share(shape, strides):
    x = tensor(*shape)
    out = torch.empty_strided(shape, strides, device=x.device)
    assert fastest.softmax(x, out=out) is out
    assert fastest.softmax(out, out=out) is out


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        ([1.0], TypeError, r"out must be a torch\.Tensor, got list"),
        (tensor(2, 3).double(), TypeError, r"must be torch\.float32 as.*got.*float64"),
        (tensor(3, 2), ValueError, r"\(2, 3\).*got \(3, 2\).*empty_like"),
        (tensor(2, 3, 1), ValueError, r"\(2, 3\).*got \(2, 3, 1\).*empty_like"),
        (torch.ones(2, 3, device="meta"), ValueError, r"got \(2, 3\) on 'meta'"),
    ],
)
def test_an_unfit_out_is_named(out, error, words):
    with pytest.raises(error, match=words):
        fastest.softmax(tensor(2, 3), out=out)


# ---- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "dim", "error", "words"),
    [
        ([[1.0]], 0, TypeError, r"x must be a torch\.Tensor, got list"),
        (tensor(2, 3).int(), 0, TypeError, r"float64, got torch\.int32.*x\.float\(\)"),
        (tensor(2, 3) > 0, 0, TypeError, r"or float64, got torch\.bool"),
        (torch.ones(2, 3, device="meta"), 0, ValueError, r"'meta'; .*randn_like\(x"),
        (tensor(2, 3) * 1j, 0, TypeError, r"got torch\.complex64; x\.real or x\.abs"),
        (tensor(2, 3), 2, IndexError, r"from -2 to 1 for shape \(2, 3\), got 2"),
        (tensor(2, 3), -3, IndexError, r"from -2 to 1 for shape \(2, 3\), got -3"),
        (tensor(), 1, IndexError, r"from -1 to 0 for shape \(\), got 1"),
        (tensor(2, 3), "1", TypeError, r"dim must be an int, got '1'"),
        (tensor(2, 3), None, TypeError, r"dim must be an int, got None"),
        (tensor(2, 3), (0, 1), TypeError, r"dim must be an int, got \(0, 1\)"),
        (tensor(2, 3), [0], TypeError, r"dim must be an int, got \[0\]"),
        (tensor(2, 3), 1.0, TypeError, r"dim must be an int, got 1\.0"),
        (tensor(2, 3), True, TypeError, r"dim must be an int, got True"),
        (tensor(2, 3).to_sparse(), 1, ValueError, r"strided, got torch\.sparse_coo"),
    ],
)
def test_bad_input_is_named(x, dim, error, words):
    fastest.softmax(tensor(2, 3), 1)  # a good call before does not make it good
    with pytest.raises(error, match=words):
        fastest.softmax(x, dim)
    if isinstance(x, torch.Tensor):
        with pytest.raises(error, match=words):
            fastest.softmax(x, dim, out=torch.empty(x.shape, dtype=x.dtype))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (tensor(2, 3).to_sparse(), r"got torch\.sparse_coo"),
        (tensor(2, 3).to_sparse_csr(), r"got torch\.sparse_csr"),
        (torch.nested.nested_tensor([tensor(3), tensor(2)]), "got a nested tensor"),
    ],
)
def test_an_out_that_is_not_strided_is_named(out, words):
    with pytest.raises(
        ValueError, match=rf"out must be strided, {words}; .*empty_like"
    ):
        fastest.softmax(tensor(2, 3), 1, out=out)


def test_quantized_values_are_named_with_a_dtype_too():
    x = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    for dtype in (None, torch.float32):
        with pytest.raises(TypeError, match=r"got torch\.qint8; x\.dequantize\(\)"):
            fastest.softmax(x, 1, dtype=dtype)


@pytest.mark.parametrize("dim", [np.int64(0), torch.tensor(0)], ids=["numpy", "torch"])
def test_integers_of_other_kinds_are_dims(dim):
    x = tensor(3, 5)
    assert_right(fastest.softmax(x, dim), x, 0)


# ---- another dtype -------------------------------------------------------------------

WIDER = [
    *[(torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
    *[(torch.bfloat16, torch.float64), (torch.float32, torch.float64)],
]
CONVERTED = [
    *[(torch.float32, torch.bfloat16), (torch.float64, torch.float32)],
    *[(torch.bfloat16, torch.float16), (torch.int64, torch.float32)],
    (torch.bool, torch.float64),
]


@pytest.mark.parametrize(("of_x", "dtype"), WIDER + CONVERTED)
@pytest.mark.parametrize("stem", STEMS)
def test_a_dtype_is_that_of_the_converted_input(stem, of_x, dtype):
    x = input_of(stem, dtype=torch.float32).to(of_x)
    few_columns = x[:, : fewer(65, None)]  # as many rows, if they are transposed
    for view in (x, x[:, 1:], few_columns.t()):
        for _ in range(2):
            y = fastest.softmax(view, 1, dtype=dtype)
            assert y.is_contiguous()
            assert_right(y, view.to(dtype), 1)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    assert fastest.softmax(x, 1, dtype=dtype, out=out) is out
    assert_right(out, x.to(dtype), 1)


@pytest.mark.parametrize("n_cols", [1, 4, 7, 8, 12, 60, 100, 252, 1004, 4100, 8188])
@pytest.mark.parametrize(("of_x", "dtype"), WIDER)
def test_few_rows_of_a_wider_dtype(of_x, dtype, n_cols):
    """4 of the output's elements may be 16 bytes where 4 of the input's are 8."""
    for n_rows, more, first in ((1, 0, 0), (3, 0, 0), (3, 4, 0), (3, 8, 4), (3, 3, 1)):
        x = tensor(n_rows, n_cols + more + first, dtype=of_x)[:, first:][:, :n_cols]
        assert_right(fastest.softmax(x, dtype=dtype), x.to(dtype))


def test_a_wider_dtype_takes_no_pass_of_its_own():
    for of_x, dtype in WIDER[:2]:
        for n_cols in (33, 64):
            x = tensor(20, n_cols, dtype=of_x)
            moved = meter.count(fastest.softmax, x, dtype=dtype)
            assert moved.values == meter.fused(20, n_cols)
            assert moved.bytes == x.numel() * (of_x.itemsize + dtype.itemsize)


def test_values_that_a_narrower_dtype_lacks_are_as_in_torch():
    x = torch.tensor([[1e5, 1e5, 0.0], [1.0, 2.0, 1e-9]], device=backend.DEVICE)
    ours = fastest.softmax(x, 1, dtype=torch.float16)
    theirs = torch.softmax(x, 1, dtype=torch.float16)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[0].isnan().any()


@pytest.mark.parametrize(("of_x", "dtype"), [*WIDER, *CONVERTED[:3]])
def test_the_gradient_has_the_dtype_of_x(of_x, dtype):
    x, weights = tensor(3, 33, dtype=of_x), tensor(3, 33, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (fastest.softmax(ours, 1, dtype=dtype) * weights).sum().backward()
    (torch.softmax(theirs, 1, dtype=dtype) * weights).sum().backward()
    assert ours.grad.dtype == of_x
    near = 8 * max(torch.finfo(t).eps for t in (of_x, dtype))
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=near)


def test_an_unfit_dtype_is_named():
    x = tensor(2, 3)
    for dtype in (torch.int32, torch.complex64, "float32", [torch.float32]):
        with pytest.raises(TypeError, match=r"dtype must be float32.*or None, got"):
            fastest.softmax(x, 1, dtype=dtype)
    with pytest.raises(TypeError, match=r"x must be float32.*got torch\.complex64"):
        fastest.softmax(x.to(torch.complex64), 1, dtype=torch.float32)
    with pytest.raises(
        TypeError, match=r"out must be torch\.float64 as dtype.*float32"
    ):
        fastest.softmax(x, 1, dtype=torch.float64, out=torch.empty_like(x))
    with pytest.raises(ValueError, match=r"empty_like\(x, dtype=torch\.float64\)"):
        fastest.softmax(x, 1, dtype=torch.float64, out=torch.empty(3, 2).double())
    assert_right(fastest.softmax(x, 1, dtype=torch.float32), x)


# ---- very short rows -----------------------------------------------------------------

# From one program to more than an H200 runs at once. The interpreter plays its 132 SMs.
FEW_AND_MANY = fewer(
    (1, 133),
    (1, 2, 3, 64, *(n * 132 + d for n in (1, 2, 4, 8, 16, 24) for d in (-1, 0, 1))),
)


@pytest.mark.parametrize("n_cols", [1, 2, 3])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_very_short_rows_in_any_number(dtype, n_cols):
    """How many of them a tile takes depends on their number."""
    for n_rows in FEW_AND_MANY:
        x, weights = (tensor(n_rows, n_cols, dtype=dtype, seed=n) for n in (0, 1))
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y = fastest.softmax(ours)
        assert_right(y.detach(), x)
        (y * weights).sum().backward()
        (torch.softmax(theirs, 1) * weights).sum().backward()
        near = 8 * torch.finfo(dtype).eps * max(1, weights.abs().max().item())
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=near)


# ---- what only a GPU can show --------------------------------------------------------

# Columns of slices of 16 bits that go to `windows`.
SLICES = {"a slice": 4_001, "a slice in parts": 20_001}
INPUTS = (*STEMS, *SLICES)


def one_of(name: str, seed: int = 0) -> torch.Tensor:
    """A matrix for a chapter of STEMS, or one of SLICES."""
    if name in STEMS:
        return input_of(name, seed=seed)
    n_cols = SLICES[name]
    shape = 2**24 // n_cols, n_cols + 2
    generator = torch.Generator(backend.DEVICE).manual_seed(seed)
    like = {"dtype": torch.bfloat16, "device": backend.DEVICE}
    x = torch.randn(shape, generator=generator, **like)[:, 1:-1]
    assert fastest.choose(*x.shape, x.dtype, 1, same_shift=False) == "windows"
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("with_out", [False, True])
def test_a_graph_is_captured_and_replayed(name, with_out):
    x = one_of(name)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    how = {"out": out} if with_out else {}
    first = fastest.softmax(x, **how).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fastest.softmax(x, **how)
    graph.replay()
    assert torch.equal(y, first)
    for seed in range(1, 5):
        x.copy_(one_of(name, seed))
        y.fill_(7)
        graph.replay()
        between = one_of(name, 9)
        z = fastest.softmax(between)  # the graph has words of its own
        assert_right(z, between)
        assert_right(y, x)


@pytest.mark.gpu
def test_one_graph_of_many_calls():
    inputs = [one_of(name, seed) for name in INPUTS for seed in range(3)]
    for x in inputs:
        fastest.softmax(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [fastest.softmax(x) for x in inputs]
    for _ in range(3):
        for x in inputs:
            x.normal_()
        graph.replay()
        for y, x in zip(outputs, inputs, strict=True):
            assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INPUTS)
def test_streams_at_once(name):
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [[one_of(name, 10 * i + j) for j in range(20)] for i in range(4)]
    torch.cuda.synchronize()
    outputs = [[] for _ in streams]
    for turn in range(20):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[place].append(fastest.softmax(inputs[place][turn]))
    torch.cuda.synchronize()
    pairs = zip(itertools.chain(*inputs), itertools.chain(*outputs), strict=True)
    for x, y in pairs:
        assert_right(y, x)


@pytest.mark.gpu
def test_threads_at_once():
    def work(seed):
        inputs = [one_of(name, seed) for name in INPUTS]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            pairs = [(x, fastest.softmax(x)) for _ in range(20) for x in inputs]
        stream.synchronize()
        return pairs

    with ThreadPoolExecutor(4) as pool:
        for pairs in pool.map(work, range(4)):
            for x, y in pairs:
                assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stem", "n_cols", "dtype", "dim"),
    [
        ("tiled", 1000, torch.bfloat16, 1),
        ("unaligned", 1001, torch.bfloat16, 1),
        ("staged", 33, torch.bfloat16, 1),
        ("cooperative", 2**17, torch.bfloat16, 1),
        ("cooperative", 2**17 + 1, torch.bfloat16, 1),
        ("online", 4096, torch.float64, 1),
        ("columns", 4096, torch.bfloat16, 0),
    ],
)
def test_more_than_2_to_31_values(stem, n_cols, dtype, dim):
    n_rows = 2**31 // n_cols + 5
    needed = 3 * n_rows * n_cols * dtype.itemsize
    if gpu.free_bytes() < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory")
    assert dim == 0 or fastest.choose(n_rows, n_cols, dtype) == stem
    x = torch.empty(n_rows, n_cols, dtype=dtype, device=backend.DEVICE).normal_()
    y = fastest.softmax(x, dim)
    for rows in (slice(0, 2), slice(n_rows // 2, n_rows // 2 + 2), slice(-3, None)):
        if dim == 1:
            assert_right(y[rows], x[rows])
        else:  # these rows' columns
            assert_right(y[:, rows], x[:, rows], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [2, 1000])
def test_both_sides_of_the_seam(n_rows, dtype):
    lengths = range(1, 2**18)
    seam = next(n for n in lengths if fastest.choose(n_rows, n, dtype) == "cooperative")
    for n_cols in (seam - 8, seam - 1, seam, seam + 1, seam + 7):
        x = torch.randn(n_rows, n_cols, device=backend.DEVICE).to(dtype)
        assert_right(fastest.softmax(x), x)


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for name in INPUTS:
        here = one_of(name)
        with torch.cuda.device(1):
            there = one_of(name)
        assert there.device.index == 1 and there.stride() == here.stride()
        for _ in range(2):
            for x in (here, there):
                y, out = fastest.softmax(x), torch.empty_like(x)
                assert y.device == x.device
                assert_right(y, x)
                assert_right(fastest.softmax(x, out=out), x)
                z = x.clone().requires_grad_()
                assert_right(fastest.softmax(z).detach(), x)
        assert torch.cuda.current_device() == 0
    x = tensor(3, 64).to("cuda:1")
    fastest.softmax(x)
    count = "allocation.all.allocated"
    before = [torch.cuda.memory_stats(index)[count] for index in range(2)]
    fastest.softmax(x)
    after = [torch.cuda.memory_stats(index)[count] for index in range(2)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 1]
