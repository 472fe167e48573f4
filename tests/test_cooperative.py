"""Programs that share a row: right with partners and without, and never stuck."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from kernels import cooperative, unaligned
from kernels.cooperative import Config
from kernels.lab import backend, check, meter
from tests.helpers import (
    assert_right,
    like,
    matrix,
    patched,
    tail_that_starts_late,
    without_rescaling_an_axis,
)

INF, NAN = float("inf"), float("nan")
TAG = 7
LONGEST = 4 * 2**20  # columns of the longest rows that the course measures


def config_for(
    output: torch.Tensor,
    x: torch.Tensor,
    block_cols: int,
    num_warps: int = 1,
    patience: int = 50,
) -> Config:
    """A configuration of parts so narrow for these tensors."""
    n_cols = x.shape[1]
    vector, same_shift = unaligned.alignment(output, x)
    edges = vector == 1 and (same_shift or x.element_size() == 2)
    if edges:
        vector = 16 // x.element_size() if same_shift else 4
    n_parts = cooperative.count_parts(n_cols, block_cols, vector)
    block_parts = max(32 * num_warps, triton.next_power_of_2(n_parts))
    same = same_shift or not edges
    return Config(block_cols, block_parts, vector, edges, same, patience, num_warps)


def parts_of(n_cols: int, config: Config) -> int:
    return cooperative.count_parts(n_cols, config.block_cols, config.vector)


class Call:
    """A call with words of its own, which may be launched again, or in part."""

    def __init__(
        self,
        x: torch.Tensor,
        block_cols: int = 16,
        *,
        output: torch.Tensor | None = None,
        **how: int,
    ) -> None:
        self.x, self.output = x, like(x) if output is None else output
        self.config = config_for(self.output, x, block_cols, **how)
        self.prepared = cooperative.launch_for(self.output, x, self.config)
        self.n_parts = self.prepared.scalars[-1]
        n_words = self.prepared.n_words
        self.words = torch.zeros(n_words, dtype=torch.int64, device=x.device)

    def launch(self, tag: int = TAG, absent: int = 0) -> torch.Tensor:
        """Launches all programs, but `absent` at the end of each row; the output."""
        launch = self.prepared
        args = self.output, self.x, self.words, tag, *launch.scalars
        grid = launch.grid[0] - absent, *launch.grid[1:]
        launch.kernel[grid](*args, **launch.constants)
        return self.output

    def launch_again(self) -> torch.Tensor:
        """With all words published already, so that no program has to wait."""
        self.launch()
        self.output = like(self.x)
        return self.launch()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def by_parts(x: torch.Tensor, block_cols: int = 16) -> torch.Tensor:
    """In the interpreter, a row's first program finds no partner, and helps all."""
    return Call(rows_of(x), block_cols).launch() if x.numel() else like(x)


def by_partners(x: torch.Tensor, block_cols: int = 16) -> torch.Tensor:
    """Every program finds the words of all its partners, on a GPU too."""
    return Call(rows_of(x), block_cols).launch_again() if x.numel() else like(x)


WAYS = {"by parts": by_parts, "by partners": by_partners}


@pytest.fixture(params=WAYS)
def way(request) -> Callable[[torch.Tensor], torch.Tensor]:
    return WAYS[request.param]


# ---- the softmax ---------------------------------------------------------------------


def test_is_a_softmax(few_rows):
    fewer = {"layouts": ["contiguous", "offset"]}
    summary = check.softmax(cooperative.softmax, **fewer)
    assert summary, summary


@pytest.mark.gpu
def test_is_a_softmax_of_everything():
    summary = check.softmax(cooperative.softmax)
    assert summary, summary


def test_is_a_softmax_in_narrow_parts(way, few_rows):
    dtypes = [torch.float32, torch.bfloat16]
    layouts = ["sliced", "broadcast", "offset"]
    summary = check.softmax(way, dtypes=dtypes, layouts=layouts, max_cols=33)
    assert summary, summary


def test_is_a_softmax_in_parts_of_a_warp(few_rows):
    def softmax(x):
        return by_parts(x, block_cols=512)

    fewer = {"dtypes": [torch.float32], "layouts": ["offset"]}
    summary = check.softmax(softmax, max_cols=1025, **fewer)
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
    x = matrix(2, 37, dtype, stride=stride, offset=start)
    for output_start in {start, 3}:  # as far from an aligned address, or not
        buffer = torch.full((16 + 2 * stride,), 7.0, dtype=dtype, device=x.device)
        output = buffer.as_strided(x.shape, (stride, 1), output_start)
        Call(x, output=output).launch()
        assert_right(output, x)
        output.fill_(7.0)
        assert (buffer == 7).all()  # nothing beside the rows was written


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


def rows_of_words(call: Call) -> torch.Tensor:
    """For each row its words, which fill whole lines of 128 bytes."""
    row_words = math.ceil(2 * call.n_parts / 16) * 16
    return call.words[: len(call.x) * row_words].view(len(call.x), row_words)


def words_of(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row by row: the parts' maxima, their sums, and the tags of both."""
    pairs = rows_of_words(call)[:, : 2 * call.n_parts].cpu().contiguous()
    halves = pairs.view(torch.int32).view(len(call.x), 2, -1, 2)
    tags, values = halves.unbind(-1)
    return *values.contiguous().view(torch.float32).unbind(1), tags


def test_words_are_the_pairs_of_the_parts():
    call = Call(matrix(2, 64))
    call.launch()
    maxima, sums, tags = words_of(call)
    parts = call.x.cpu().double().view(2, 4, 16)
    assert torch.equal(maxima.double(), parts.amax(2))
    wanted = (parts - parts.amax(2, keepdim=True)).exp().sum(2)
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-6, atol=0)
    assert (tags == TAG).all()


def test_words_of_two_rows_share_no_line():
    """A line has 128 bytes, so 16 words."""
    call = Call(matrix(3, 70))
    call.launch()
    written = (call.words.cpu() != 0).nonzero().flatten() // 16
    of_pairs = written[: 3 * 2 * call.n_parts].view(3, -1)  # behind them are counts
    lines = [{*row.tolist()} for row in of_pairs]
    assert len(set.union(*lines)) == sum(map(len, lines))


# ---- parts ---------------------------------------------------------------------------


@triton.jit
def cut_kernel(output_ptr, start, body, N: tl.constexpr, B: tl.constexpr):
    """Program k writes where part k begins and ends."""
    part = tl.program_id(0)
    begin, end = cooperative.cut(part, start, body, N, B, 64)
    tl.store(output_ptr + 2 * part, begin)
    tl.store(output_ptr + 2 * part + 1, end)


@pytest.mark.parametrize("body", [8, 200, 256, 449, 456, 512, 700, 960, 1024])
def test_parts_end_where_lines_end_if_there_is_room(body):
    n_parts = math.ceil(body / 256)
    for start in range(0, 192, 24):
        ends = torch.zeros(n_parts, 2, dtype=torch.int32, device=backend.DEVICE)
        cut_kernel[(n_parts,)](ends, start, body, n_parts, 256)
        begins, ends = ends.T.tolist()
        assert [begins[0], ends[-1]] == [0, body]
        assert begins[1:] == ends[:-1]  # no value twice, and none left out
        longest = max(b - a for a, b in zip(begins, ends, strict=True))
        assert 0 < longest <= 256
        has_room = 256 * n_parts - body >= 64
        edge = 0 if has_room else start % 64
        assert all((start + end) % 64 == edge for end in ends[:-1])


# ---- words of other calls ------------------------------------------------------------


def garbage(n_words: int, tag: int) -> torch.Tensor:
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
    y = call.launch(absent=call.n_parts - 1)  # alone, among words that it must believe
    assert (y[0, :16] == 0).all()  # far below that maximum


@pytest.mark.parametrize("half", [0, 1])
def test_a_pair_is_there_only_if_both_words_are(half):
    call = Call(matrix(2, 70))
    call.launch()
    words = rows_of_words(call)
    words[:, half * call.n_parts :][:, : call.n_parts] = garbage(1, TAG - 1)
    assert_right(call.launch(), call.x)


def test_words_serve_call_after_call():
    call = Call(matrix(3, 70))
    for tag in (1, 2, 3, 2**31 - 1, 1):
        call.x.copy_(matrix(3, 70, seed=tag % 1000))
        call.output.fill_(7)
        assert_right(call.launch(tag), call.x)


# ---- what is moved -------------------------------------------------------------------


def of_a_second_launch(x: torch.Tensor) -> None:
    Call(x).launch_again()


@pytest.mark.parametrize("shape", [(3, 64), (2, 69), (2, 301)])
def test_moves_every_value_once_if_partners_are_there(shape):
    n_parts = Call(matrix(*shape)).n_parts
    traffic = meter.count(of_a_second_launch, matrix(*shape))
    *_, launch = (op for op in traffic.rows if op.grid)
    moved = launch.read_values, launch.written_values
    assert moved == meter.fused(*shape)[:2]
    words = 2 * n_parts * shape[0]
    assert launch.written_indices == words
    assert launch.read_indices == words + words * n_parts  # swapped; a look


@pytest.mark.parametrize("n_parts", [2, 4, 16, 64])
def test_reads_a_row_twice_if_partners_are_not_there(n_parts):
    """Not once for each part: a program that helps spares the others its work."""
    n_rows, block_cols = 2, 16
    n_cols = n_parts * block_cols
    traffic = meter.count(by_parts, matrix(n_rows, n_cols))
    (launch,) = (op for op in traffic.rows if op.grid)
    # The first program of a row computes all other parts, and its own a second time.
    assert launch.read_values == n_rows * 2 * n_cols
    assert launch.written_values == n_rows * n_cols


def test_a_row_of_one_part_needs_no_partner():
    x = matrix(3, 1000)
    moved = meter.count(cooperative.softmax, x)
    assert moved.values[:2] == meter.fused(3, 1000)[:2]


# ---- the same bits, however the programs meet ----------------------------------------


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])


@pytest.mark.parametrize(("n_cols", "block_cols"), [(70, 16), (96, 32), (1001, 128)])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_results_do_not_depend_on_who_waits(dtype, n_cols, block_cols):
    x = matrix(5, n_cols, dtype, scale=9.0)
    x[1, 10:40], x[2], x[3, 5] = -INF, -INF, INF
    parted, together = by_parts(x, block_cols), by_partners(x, block_cols)
    assert torch.equal(bits(parted), bits(together))


@pytest.mark.gpu
@pytest.mark.parametrize("beyond", [0, 3])
@pytest.mark.parametrize("n_cols", [2**16, 2**17, 50_257, 2**20, 1_500_001, 2_500_000])
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_results_of_real_configs_do_not_depend_on_patience(dtype, n_cols, beyond):
    stride = max(n_cols, 2**20) + beyond  # rows start at any address, or at 16 bytes
    for n_rows in (1, 2**25 // n_cols):  # fewer programs than run at once, and more
        x = matrix(n_rows, n_cols, dtype, stride=stride)
        y = torch.empty(n_rows, n_cols, dtype=dtype, device=x.device)
        kept = cooperative.launch_for(y, x)
        at_once = dataclasses.replace(kept, constants={**kept.constants, "PATIENCE": 1})
        kept(y, x)
        first = bits(y).clone()
        for launch in 5 * [kept, at_once]:
            y.fill_(7)
            launch(y, x)
            assert torch.equal(bits(y), first)
        assert_right(y, x)


# ---- wrong kernels -------------------------------------------------------------------


def whatever_the_mask(ptrs, inside):
    return tl.load(ptrs)


@pytest.mark.parametrize(
    ("helper", "wrong"),
    [
        ("merge_axis", without_rescaling_an_axis),
        ("load_or_neg_inf", whatever_the_mask),
        ("edge_columns", tail_that_starts_late),
    ],
)
def test_wrong_helpers_are_caught(helper, wrong, few_rows, capsys):
    layouts = ["contiguous", "sliced"]
    fewer = {"dtypes": [torch.float32], "layouts": layouts, "max_cols": 70}
    with patched(cooperative, helper, wrong):
        assert not check.softmax(by_partners, **fewer)
    assert "matrix" in capsys.readouterr().out
