"""Rows that pass through shared memory: right, and with no access outside of it."""

import itertools
import re

import pytest
import torch
import triton.language as tl

from benchmarks import edges
from kernels import staged, unaligned
from kernels.lab import backend, compile, meter, models, shared
from tests.helpers import assert_right, matrix, meta_matrix
from tests.shared_memory import stand_in

LENGTHS = (2, 3, 4, 5, 7, 9, 12, 15, 17, 31, 33, 34, 47, 49, 62, 63)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture
def memory(monkeypatch):
    return stand_in(monkeypatch, staged)


def assert_all_right(dtypes=HALVES, lengths=LENGTHS) -> None:
    """Also of a last tile of any height."""
    for dtype in dtypes:
        for n_cols in lengths:
            tile = staged.choose_config(n_cols).rows
            for n_rows in (1, 3, tile + 1):
                x = matrix(n_rows, n_cols, dtype).contiguous()
                assert_right(staged.softmax(x), x)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_length(dtype):
    assert_all_right([dtype])


def test_every_length_by_shared_memory(memory):
    assert_all_right([torch.bfloat16])


def test_float16_by_shared_memory(memory):
    assert_all_right([torch.float16], [7, 33])


def test_no_rows():
    x = torch.empty(0, 7, dtype=torch.float16, device=backend.DEVICE)
    assert staged.softmax(x).shape == (0, 7)


@pytest.mark.parametrize("n_cols", [7, 36, 63])
def test_values_are_read_and_written_once(n_cols):
    x = matrix(130, n_cols, torch.bfloat16).contiguous()
    assert meter.count(staged.softmax, x).values == meter.fused(130, n_cols)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", LENGTHS)
def test_nothing_is_written_beyond_the_output(n_cols):
    for n_rows in (1, 3, 1001):
        x = matrix(n_rows, n_cols, torch.bfloat16).contiguous()
        room = torch.full((x.numel() + 512,), 7, dtype=x.dtype, device=x.device)
        output = room[: x.numel()].view(x.shape)
        staged.launch_for(output, x)(output, x)
        assert_right(output, x)
        assert (room[x.numel() :] == 7).all()


def test_a_store_beyond_a_row_is_caught(memory, monkeypatch):
    """Words that a row lacks are written, too: they are the next row's."""

    def everywhere(address, bits, inside):
        memory.store(address, bits, inside | (inside == 0))

    monkeypatch.setattr(shared, "store", everywhere)
    with pytest.raises(AssertionError):
        assert_all_right([torch.bfloat16], [15])


def test_an_address_beyond_what_is_reserved_is_caught(memory, monkeypatch):
    def late(address, inside, BITS):
        return memory.load(address + 8192, inside, BITS)

    monkeypatch.setattr(shared, "load", late)
    with pytest.raises(Exception, match="array"):  # the addresses
        assert_all_right([torch.bfloat16], [7])


def test_a_last_value_that_is_not_copied_is_caught(memory, monkeypatch):
    def none(tile, THREADS):
        place = tl.arange(0, THREADS)
        return place, place < 0

    monkeypatch.setattr(staged, "find_last", none)
    with pytest.raises(AssertionError):
        assert_all_right([torch.bfloat16], [7])


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [15, 33, 63])
def test_instructions_fit_the_time_of_the_copy(n_cols):
    x = meta_matrix(4096, n_cols, torch.bfloat16)
    launches = staged.launch_for(x, x), unaligned.launch_for(x, x)
    found, before = (edges.counts(each, n_cols)["instructions"] for each in launches)
    assert found < 0.8 * edges.budget(x.element_size())
    assert found < before
    assert all(compile.aot(each).spills == 0 for each in launches)


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [7, 31, 33, 63])
def test_the_threads_of_a_row_exchange_nothing(n_cols):
    """One barrier for the tile's last values, one before rows, and one after them."""
    x = meta_matrix(4096, n_cols, torch.bfloat16)
    made = compile.aot(staged.launch_for(x, x))
    assert made.count(r"shfl\.") == 0
    assert made.count(r"bar\.sync") == 3
    # Shared memory is written, waited for and read in this order, and by nobody else.
    kinds = re.findall(r"\b(LDG|STG|LDS|STS|BAR)\b", made.sass)
    order = " ".join(kind for kind, _ in itertools.groupby(kinds))
    copied_in, rows = "LDG STS BAR LDG STS BAR", "LDS STS BAR"
    assert re.fullmatch(f"{copied_in} {rows}( LDS STG)+", order), order


@pytest.mark.thorough
def test_chunks_are_moved_in_accesses_of_16_bytes():
    for n_cols in LENGTHS:
        x = meta_matrix(4096, n_cols, torch.bfloat16)
        assert edges.widths(staged.launch_for(x, x)) == (16, 16), n_cols


def test_its_shared_memory_is_counted():
    x = meta_matrix(4096, 33, torch.bfloat16)
    assert compile.aot(staged.launch_for(x, x)).shared == 4 * 64 * (16 + 4)


@pytest.mark.parametrize(("n_cols", "of_a_thread"), [(63, 1), (15, 2), (7, 4)])
def test_a_thread_takes_as_many_rows_as_the_page_says(n_cols, of_a_thread):
    config = staged.choose_config(n_cols)
    assert config.rows == config.threads * of_a_thread


def test_a_read_takes_two_passes_at_most():
    """Of a warp, whose lanes take a row each, at every length that the kernel takes."""
    for n_cols in range(2, staged.LONGEST + 1):
        begins = [row * n_cols for row in range(32)]
        passes = models.bank_passes(2 * (begin + begin % 2) for begin in begins)
        assert (passes <= 2) == (n_cols % 8 > 0), n_cols


def short(n_cols: int = 7, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return meta_matrix(64, n_cols, dtype)


@pytest.mark.parametrize(
    ("output", "x"),
    [
        (short(), short(16)[:, :7]),
        (short(16)[:, :7], short()),
        (short(), short(dtype=torch.float32)),
        (short(dtype=torch.float32), short()),
        (short(65), short(65)),
        (short(1), short(1)),
        (short(64), short(64)),
    ],
)
def test_other_matrices_have_the_launch_of_unaligned(output, x):
    assert not staged.fits(output, x)
    assert staged.launch_for(output, x) == unaligned.launch_for(output, x)


def test_a_matrix_that_starts_between_is_right():
    x = torch.randn(7 * 40 + 1, device=backend.DEVICE).bfloat16()[1:].view(40, 7)
    assert not staged.fits(torch.empty_like(x), x)
    assert_right(staged.softmax(x), x)
