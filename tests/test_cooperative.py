"""Programs that share a row: right with partners and without, and never stuck."""

import importlib.util
import itertools
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels import cooperative, tiled
from kernels.lab import backend, check, compile, gpu, meter, occupancy

INF, NAN = float("inf"), float("nan")
TAG = 7
LONGEST = 4 * 2**20  # columns of the longest rows that the course measures
MINUTE = 60.0


def matrix(n_rows, n_cols, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(n_rows + n_cols + seed)
    x = 3 * torch.randn(n_rows, n_cols, generator=generator)
    return x.to(backend.DEVICE, dtype)


def assert_right(y, x):
    near = {"rtol": 0.02, "atol": 1e-6} if x.element_size() == 2 else {}
    wanted = torch.softmax(x.double(), 1).to(x.dtype)
    torch.testing.assert_close(y, wanted, equal_nan=True, **near)


def laid_out(output, x, block_cols, num_warps=1):
    """A layout of such narrow parts for these tensors."""
    output_row, input_row = ((t.stride(0), tiled.shift(t)) for t in (output, x))
    wide = tiled.accesses(x.shape[1], x.element_size(), output_row, input_row)
    vector, edges, _ = wide
    body = max(x.shape[1] // vector * vector, 1) if edges else x.shape[1]
    n_parts = triton.cdiv(body, block_cols)
    return cooperative.Plan(block_cols, n_parts, *wide, num_warps, None)


def like(x):
    return torch.full(x.shape, 7.0, dtype=x.dtype, device=x.device)


class Call:
    """A call with words of its own, which may be launched again, or in part."""

    def __init__(self, x, block_cols=16, *, output=None, kernel=None):
        self.x, self.output = x, like(x) if output is None else output
        self.layout = laid_out(self.output, x, block_cols)
        self.kernel = kernel or cooperative.softmax_kernel
        found = cooperative.arguments(self.output, x, self.layout)
        self.n_programs, n_words, self.numbers, self.constants = found
        self.words = torch.zeros(n_words, dtype=torch.int64, device=x.device)

    def launch(self, tag=TAG, n_programs=None):
        args = self.output, self.x, self.words, tag, *self.numbers
        self.kernel[(n_programs or self.n_programs,)](*args, **self.constants)
        return self.output

    def launch_again(self):
        """With all words published already, so that no program has to wait."""
        self.launch()
        self.output = like(self.x)
        return self.launch()


def rows_of(x):
    return x if x.stride(1) == 1 else x.contiguous()


def by_parts(x, block_cols=16, kernel=None):
    """In the interpreter, each program but the last of a row finds no partners."""
    return (
        Call(rows_of(x), block_cols, kernel=kernel).launch() if x.numel() else like(x)
    )


def by_partners(x, block_cols=16, kernel=None):
    call = Call(rows_of(x), block_cols, kernel=kernel) if x.numel() else None
    return call.launch_again() if call else like(x)


WAYS = {"by parts": by_parts, "by partners": by_partners}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(check, "ROWS", (1, 2, 9))


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax(few_rows):
    summary = check.softmax(cooperative.softmax)
    assert summary, summary


@pytest.mark.gpu
def test_is_a_softmax_of_many_rows():
    summary = check.softmax(cooperative.softmax)
    assert summary, summary


def test_is_a_softmax_in_narrow_parts(way, few_rows):
    dtypes = [torch.float32, torch.bfloat16]
    summary = check.softmax(way, dtypes=dtypes, max_cols=40)
    assert summary, summary


def test_is_a_softmax_in_parts_of_a_warp(few_rows):
    def softmax(x):
        return by_parts(x, block_cols=512)

    how = {"dtypes": [torch.float32], "layouts": ["offset"]}
    summary = check.softmax(softmax, max_cols=1025, **how)
    assert summary, summary


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [50_257, 65_537, 2**17, 2**20 + 3, 2**22])
def test_long_rows(n_cols):
    for dtype in backend.DTYPES:
        for n_rows in (1, 7, 70):
            x = torch.randn(n_rows, n_cols, device=backend.DEVICE).to(dtype)
            assert_right(cooperative.softmax(x), x)


@pytest.mark.parametrize("n_cols", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70])
def test_lengths_that_parts_do_not_divide(way, n_cols):
    for dtype in (torch.float32, torch.float16):
        x = matrix(2, n_cols, dtype)
        assert_right(way(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stride", [39, 40])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 8])
def test_rows_that_start_anywhere(start, stride, dtype):
    n_rows, n_cols = 2, 37
    x = matrix(1, 8 + n_rows * stride, dtype)[0]
    x = x.as_strided((n_rows, n_cols), (stride, 1), start)
    y = matrix(1, 8 + n_rows * stride, dtype, seed=1)[0]
    for output_start in {start, 3}:  # as far from an aligned address, or not
        before = y.clone()
        output = y.as_strided((n_rows, n_cols), (stride, 1), output_start)
        Call(x, output=output).launch()
        assert_right(output, x)
        output.copy_(before.as_strided((n_rows, n_cols), (stride, 1), output_start))
        assert torch.equal(y, before)  # nothing beside the rows was written


PLACES = {"first": slice(16), "inner": slice(20, 50), "last": slice(64, None)}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [-INF, INF, NAN, 1e30, -1e30])
def test_parts_of_one_value(way, value, place):
    x = matrix(3, 70)
    x[1, PLACES[place]] = value
    y = way(x)
    assert_right(y, x)
    assert y[1].isnan().all() == (value in (INF,) or value != value)


@pytest.mark.parametrize("value", [-INF, INF, NAN])
@pytest.mark.parametrize("col", [0, 15, 16, 40, 69])
def test_single_values(way, value, col):
    x = matrix(2, 70)
    x[0, col] = value
    assert_right(way(x), x)


def test_only_one_part_is_not_masked(way):
    for part in range(5):
        x = torch.full((1, 70), -INF, device=backend.DEVICE)
        x[:, 16 * part + 3] = -5.0
        assert_right(way(x), x)


def test_a_row_of_minus_infinity_is_nan(way):
    x = matrix(3, 70)
    x[1] = -INF
    y = way(x)
    assert y[1].isnan().all()
    assert_right(y, x)


def test_differences_of_large_values_survive_the_exchange(way):
    x = 2.0**23 + matrix(2, 70).round()
    x[:, 40:] -= 2.0**10
    assert_right(way(x), x)


def test_outputs_are_contiguous_and_columns_may_be_apart():
    x = matrix(50, 3).t()
    y = cooperative.softmax(x)
    assert y.is_contiguous()
    assert_right(y, x)


def test_errors_name_what_was_got():
    with pytest.raises(TypeError, match=r"float32, float16 or bfloat16, got torch.int"):
        cooperative.softmax(torch.ones(2, 2, dtype=torch.int32, device=backend.DEVICE))
    with pytest.raises(ValueError, match=r"2 dimensions .*got shape \(2, 3, 4\)"):
        cooperative.softmax(torch.ones(2, 3, 4, device=backend.DEVICE))
    x = matrix(1, 1).expand(1, cooperative.MAX_COLS + 1)
    with pytest.raises(ValueError, match=rf"at most {cooperative.MAX_COLS} columns"):
        cooperative.softmax(x)


# ---- words ---------------------------------------------------------------------------


def words_of(call):
    """Row by row: the parts' maxima, their sums, and the tags of both."""
    halves = call.words.cpu().view(torch.int32).view(len(call.x), 2, -1, 2)
    tags, values = halves.unbind(-1)
    return *values.contiguous().view(torch.float32).unbind(1), tags


def test_words_are_the_pairs_of_the_parts():
    call = Call(matrix(2, 64))
    call.launch()
    tops, totals, tags = words_of(call)
    parts = call.x.cpu().double().view(2, 4, 16)
    assert torch.equal(tops.double(), parts.amax(2))
    wanted = (parts - parts.amax(2, keepdim=True)).exp().sum(2)
    torch.testing.assert_close(totals.double(), wanted, rtol=1e-6, atol=0)
    assert (tags == TAG).all()


def garbage(n_words, tag):
    """Words of a large maximum and a large sum."""
    values = torch.full((n_words,), 1e9).view(torch.int32).to(torch.int64)
    return ((values << 32) | tag).to(backend.DEVICE)


@pytest.mark.parametrize("tag", [0, TAG - 1, TAG + 1, 2**31 - 1])
def test_words_of_another_call_are_not_taken(tag):
    call = Call(matrix(3, 70))
    call.words.copy_(garbage(len(call.words), tag))
    assert_right(call.launch(), call.x)


def test_words_of_this_call_are_taken():
    call = Call(matrix(1, 64))
    call.words.copy_(garbage(len(call.words), TAG))
    y = call.launch(n_programs=1)  # alone, among words that it must believe
    assert (y[0, :16] == 0).all()  # far below that maximum


def test_words_serve_call_after_call():
    call = Call(matrix(3, 70))
    for tag in (1, 2, 3, 2**31 - 1, 1):
        call.x.copy_(matrix(3, 70, seed=tag % 1000))
        call.output.fill_(7)
        assert_right(call.launch(tag), call.x)


def test_a_scratch_has_new_tags_and_grows():
    scratch, device = cooperative.Scratch(), torch.device("cpu")
    words, tag = scratch.take(5, device)
    assert len(words) >= 5 and not words.any() and tag > 0
    again, next_tag = scratch.take(3, device)
    assert again is words and next_tag != tag
    grown, last_tag = scratch.take(1000, device)
    assert len(grown) >= 1000 and not grown.any()
    assert len({tag, next_tag, last_tag}) == 3
    scratch.tags = itertools.count(2**31 - 3)
    tags = [scratch.take(1, device)[1] for _ in range(4)]
    assert all(0 < tag < 2**31 for tag in tags) and len(set(tags)) == 4


def test_each_stream_has_its_own_scratch():
    one, other = cooperative.scratch_of(0, 101), cooperative.scratch_of(0, 102)
    assert one is not other and one is cooperative.scratch_of(0, 101)
    assert cooperative.scratch_of(1, 101) is not one


# ---- what is moved -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 64), (2, 69), (2, 781)])
def test_moves_what_it_says_if_partners_are_there(shape):
    n_rows = shape[0]
    n_parts = Call(matrix(*shape)).layout.n_parts

    def twice(x):
        Call(x).launch_again()

    traffic = meter.count(twice, matrix(*shape))
    *_, launch = (op for op in traffic.rows if op.grid)
    moved = launch.read_values, launch.written_values
    assert moved == cooperative.traffic(*shape) == meter.fused(*shape)[:2]
    words = 2 * n_parts * n_rows
    assert launch.written_indices == words
    assert launch.read_indices == words + words * n_parts  # swapped out; polled once


def test_reads_the_row_again_if_partners_are_not_there():
    n_rows, n_cols, block_cols = 2, 64, 16
    traffic = meter.count(by_parts, matrix(n_rows, n_cols))
    (launch,) = (op for op in traffic.rows if op.grid)
    lonely = n_cols // block_cols - 1  # parts of a row, in the interpreter
    again = lonely * (n_cols + block_cols)
    assert launch.read_values == n_rows * (n_cols + again)
    assert launch.written_values == n_rows * n_cols


def test_one_part_needs_nobody():
    shape = (3, 2000)
    moved = meter.count(cooperative.softmax, matrix(*shape))
    assert moved.values[:2] == cooperative.traffic(*shape)


# ---- without partners ----------------------------------------------------------------


@pytest.mark.parametrize("block_cols", [16, 32])
@pytest.mark.parametrize("n_cols", [96, 102, 101])
@pytest.mark.parametrize("absent", [1, 2])
def test_programs_without_partners_end_and_are_right(absent, n_cols, block_cols):
    call = Call(matrix(3, n_cols), block_cols)
    y = call.launch(n_programs=call.n_programs - absent)
    assert_right(y[:2], call.x[:2])
    done = (call.layout.n_parts - absent) * block_cols
    assert 0 < done < n_cols
    wanted = torch.softmax(call.x.double(), 1).float()
    torch.testing.assert_close(y[2, :done], wanted[2, :done])
    assert (y[2, -1] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [2**17, 100_003])
def test_programs_of_a_real_layout_without_partners_are_right(n_cols):
    for dtype in backend.DTYPES:
        x = matrix(2, n_cols, dtype)
        y = like(x)
        found = cooperative.arguments(y, x)
        n_programs, n_words, numbers, constants = found
        words = torch.zeros(n_words, dtype=torch.int64, device=x.device)
        args = y, x, words, TAG, *numbers
        cooperative.softmax_kernel[(n_programs - 1,)](*args, **constants)
        assert_right(y[:1], x[:1])
        done = (constants["N_PARTS"] - 1) * constants["BLOCK_COLS"]
        wanted = torch.softmax(x.double(), 1)
        near = {"rtol": 0.02, "atol": 1e-6}
        torch.testing.assert_close(y[1, :done].double(), wanted[1, :done], **near)
        assert y[1, -1] == 7


# ---- wrong kernels -------------------------------------------------------------------

WRONG = {
    "sums are not rescaled": (
        "value_of(totals) * power(part_tops, top)",
        "value_of(totals)",
        by_partners,
    ),
    "tags are not looked at": (
        "return (word & 0xFFFFFFFF) == tag",
        "return (word & 0) == 0",
        by_parts,
    ),
    "alone, sums are not rescaled": (
        "total = total * power(top, finite) + ",
        "total = total + ",
        lambda x, kernel: by_parts(torch.cat([x, x + 40, x], 1), 1024, kernel),
    ),
    "the last part is taken for a whole one": (
        "inside = cols < n_cols // VECTOR * VECTOR - part * BLOCK_COLS",
        "inside = cols < n_cols // VECTOR * VECTOR",
        by_partners,
    ),
}


def altered(old, new, folder):
    """The kernel, with a piece of its module's text replaced."""
    text = Path(cooperative.__file__).read_text()
    assert text.count(old) == 1, old
    path = folder / "altered.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("altered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.softmax_kernel


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kernels_are_caught(fault, tmp_path, few_rows, capsys):
    old, new, function = WRONG[fault]
    kernel = altered(old, new, tmp_path)
    if fault.startswith("alone"):
        x = matrix(1, 1024)
        y = function(x, kernel)
        assert not torch.allclose(y.sum(1), torch.ones(1, device=y.device))
        return

    def softmax(x):
        return function(x, kernel=kernel)

    how = {"dtypes": [torch.float32], "layouts": ["sliced"]}
    assert not check.softmax(softmax, max_cols=70, **how)
    assert "softmax: " in capsys.readouterr().out


# ---- the plan ------------------------------------------------------------------------

SIZES = [
    (n_rows, n_cols, size)
    for n_rows in (1, 3, 64, 1000, 10**6)
    for n_cols in (1, 5, 4096, 50_257, 2**17, 10**6, 2**20, 2**22, 2**27)
    for size in (2, 4)
]


@pytest.mark.parametrize("edges", [True, False])
def test_plans_hold_their_rows(edges):
    for n_rows, n_cols, size in SIZES:
        vector = 16 // size
        layout = cooperative.plan(n_rows, n_cols, size, vector, edges, True)
        body = max(n_cols // vector * vector, 1) if edges else n_cols
        held = layout.n_parts * layout.block_cols
        assert held - layout.block_cols < body <= held
        for number in (layout.block_cols, layout.num_warps):
            assert number & (number - 1) == 0
        assert layout.block_cols % (32 * layout.num_warps * vector) == 0
        parts = layout.constants["BLOCK_PARTS"]
        assert parts & (parts - 1) == 0
        assert parts >= layout.n_parts and parts % (32 * layout.num_warps) == 0


def test_few_rows_have_more_and_smaller_parts():
    for n_cols in (2**16, 2**18, 2**20):
        few, many = (
            cooperative.plan(n_rows, n_cols, 4, 4, False, True)
            for n_rows in (1, 10_000)
        )
        assert few.block_cols <= many.block_cols
        assert few.n_parts >= many.n_parts
    assert cooperative.plan(1, 2**16, 4, 4, False, True).block_cols == 2048


def test_a_row_of_a_part_or_less_is_one_program():
    assert cooperative.plan(1000, 100, 4, 4, False, True).n_parts == 1


# ---- what the compiler makes of it ---------------------------------------------------


def compiled(dtype, n_rows, n_cols, on="H200"):
    """The kernel as it is launched on contiguous rows, and its layout."""
    x = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
    _, _, numbers, constants = cooperative.arguments(x, x)
    pointers = [compile.pointer(dtype)] * 2 + [compile.pointer(torch.int64)]
    args = *pointers, TAG, *numbers
    kernel = compile.aot(cooperative.softmax_kernel, *args, gpu=on, **constants)
    return kernel, constants["N_PARTS"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_travel_whole_and_without_fences(dtype):
    kernel, _ = compiled(dtype, 1000, 2**17)
    exchanges = kernel.lines(r"atom\S*\.exch")
    assert len(exchanges) == 2
    assert all(".relaxed" in line and ".b64" in line for line in exchanges)
    polls = kernel.lines(r"ld\.volatile")
    assert len(polls) >= 4 and all("64 " in line for line in polls)
    assert not kernel.count(r"\b(fence|membar)\b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_cols", [2**16, LONGEST])
def test_accesses_are_16_bytes_wide_and_nothing_spills_much(n_cols, dtype):
    kernel, _ = compiled(dtype, 2**28 // n_cols, n_cols)
    for access in (r"ld\.global\.\S*evict_last\S*", r"st\.global\S*"):
        assert kernel.count(rf"{access}\.v4\.b32") > 0
    assert kernel.spills <= 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 64, 1000])
@pytest.mark.parametrize("n_cols", [2**17, 2**20, LONGEST])
def test_all_parts_of_a_row_can_be_resident(n_cols, n_rows, dtype):
    kernel, n_parts = compiled(dtype, n_rows, n_cols)
    found = occupancy.of(kernel)
    assert n_parts <= found.blocks_per_sm * kernel.gpu.sms, (n_parts, str(found))


@pytest.mark.parametrize("name", ["T4", "A100", "L4", "RTX 4090", "H100", "B200"])
def test_compiles_for_every_documented_gpu(name):
    kernel, _ = compiled(torch.float32, 1000, 2**17, on=name)
    assert occupancy.of(kernel).blocks_per_sm >= 1


# ---- at the same time ----------------------------------------------------------------


@pytest.mark.gpu
def test_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(8)]
    shapes = [(3, 70_001), (40, 2**17), (1, 2**20), (200, 50_257)]
    inputs = [matrix(*shape, seed=i) for i, shape in enumerate(2 * shapes)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(20):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(cooperative.softmax(x))
    torch.cuda.synchronize()
    for y, x in zip(outputs, itertools.cycle(inputs), strict=False):
        assert_right(y, x)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_values():
    for shape in ((3, 2**18), (300, 50_257)):
        x = matrix(*shape)
        cooperative.softmax(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, z = cooperative.softmax(x), cooperative.softmax(x.neg())
        for seed in range(5):
            x.copy_(matrix(*shape, seed=seed))
            y.fill_(7)
            graph.replay()
            cooperative.softmax(x)  # on the same stream, with words of its own
            assert_right(y, x)
            assert_right(z, x.neg())


@triton.jit
def hold_kernel(end_ptr, duration):
    """One program stays on its SM for so many nanoseconds."""
    begin = cuda.globaltimer()
    now = begin
    while now - begin < duration:
        now = cuda.globaltimer()
    tl.store(end_ptr + tl.program_id(0), now)


def beside_a_kernel_that_holds_the_gpu(n_calls):
    """Calls on streams of their own, begun while half an SM is free: all end."""
    shape, hold_s = (4, 2**17), 3.0
    n_held = 2 * gpu.current().sms - 1  # two of 32 warps fill an SM
    ends = torch.zeros(n_held, dtype=torch.int64, device=backend.DEVICE)
    inputs = [matrix(*shape, seed=seed) for seed in range(n_calls)]
    holder, *streams = (torch.cuda.Stream() for _ in range(1 + n_calls))

    def call_all():
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(cooperative.softmax(x))
        for stream in streams:
            stream.synchronize()
        return results

    def hold(seconds):
        with torch.cuda.stream(holder):
            how = {"num_warps": 32, "maxnreg": 32}
            hold_kernel[(n_held,)](ends, int(1e9 * seconds), **how)

    hold(1e-3)
    call_all()  # compiles, and leaves memory to be used again
    torch.cuda.synchronize()
    hold(hold_s)
    time.sleep(0.1)
    assert not holder.query()  # still holding
    outputs = call_all()
    torch.cuda.synchronize()
    for y, x in zip(outputs, inputs, strict=True):
        assert_right(y, x)
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("n_calls", [2, 4])
def test_calls_end_beside_a_kernel_that_holds_the_gpu(n_calls):
    x = matrix(4, 2**17)
    n_parts = cooperative.arguments(like(x), x)[3]["N_PARTS"]
    assert n_parts > 16  # more than run on half an SM
    process = backend.Helper("compiler", hide_gpu=False)
    try:
        call = beside_a_kernel_that_holds_the_gpu, (n_calls,)
        assert process.call(*call, limit_s=MINUTE)
    finally:
        process.stop()


@pytest.mark.gpu
def test_more_than_2_to_31_values():
    n_rows, n_cols = 2**11 + 3, 2**20
    x = torch.zeros(n_rows, n_cols, dtype=torch.bfloat16, device=backend.DEVICE)
    x[-1].normal_()
    y = cooperative.softmax(x)
    assert (y[:-1] == 2.0**-20).all()
    assert_right(y[-1:], x[-1:])


@pytest.mark.gpu
def test_a_row_with_more_parts_than_can_be_resident_ends():
    x = torch.randn(1, LONGEST, device=backend.DEVICE)
    layout = laid_out(x, x, 1024, num_warps=4)
    here = gpu.current()
    assert layout.n_parts > here.sms * here.threads_per_sm // (4 * here.warp_size)
    assert_right(cooperative.softmax(x, layout=layout), x)
