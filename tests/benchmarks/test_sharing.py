"""Programs that share a row, step by step: right, alike, and never launched to hang."""

import math
import sys

import pandas as pd
import pytest
import torch

from benchmarks import sharing
from kernels.lab import backend, check, compile, occupancy, record, show
from tests.helpers import assert_right, matrix

FEW = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 129}
TAG = 5


pytestmark = pytest.mark.usefixtures("few_rows")


def test_two_launches_are_a_softmax():
    summary = check.softmax(sharing.in_two_launches(), **FEW)
    assert summary, summary


def launched(kernel, x: torch.Tensor, words: torch.Tensor, *patience: int):
    output = torch.empty_like(x)
    n_parts = words.shape[1] // 2
    sizes = x.shape[1], n_parts, sharing.PART, 128
    kernel[(x.shape[0] * n_parts,)](output, x, words, TAG, *sizes, *patience)
    return output


@pytest.mark.parametrize("n_cols", [64, 65, 1001])
@pytest.mark.parametrize("patience", [1, 3])
def test_both_kernels_of_one_launch(n_cols, patience):
    """Waiting is tried where all words are there already: elsewhere it never ends."""
    x = matrix(2, n_cols)
    n_words = 2 * -(-n_cols // sharing.PART)
    words = torch.zeros(2, n_words, dtype=torch.int64, device=backend.DEVICE)
    first = launched(sharing.helping_kernel, x, words, patience)
    assert_right(first, x)
    assert ((words & 0xFFFFFFFF) == TAG).all()
    assert torch.equal(first, launched(sharing.waiting_kernel, x, words))


@pytest.mark.parametrize("kernel", [sharing.waiting_kernel, sharing.helping_kernel])
def test_both_kernels_of_one_launch_compile(kernel):
    x, words = compile.pointer(torch.float32), compile.pointer(torch.int64)
    patience = (50,) if kernel is sharing.helping_kernel else ()
    made = compile.aot(kernel, x, x, words, TAG, 2**17, 16, 8192, 128, *patience)
    assert made.count(r"ld\.volatile") >= 2
    assert made.count(r"atom\S*\.exch") == (4 if patience else 2)  # own, and others'


@pytest.mark.thorough
def test_help_takes_registers_unless_it_is_a_function_of_its_own():
    (_, waits, _), (name, helps, spilled), (*_, by_course) = sharing.registers()
    assert name == "helping_kernel" and helps > 1.5 * waits
    assert spilled > 200 and by_course <= 16  # 16 with Triton 3.9


def test_help_is_one_small_step():
    steps = sharing.waiting_kernel, sharing.helping_kernel
    lines = repr(show.diff(*steps, indentation=False)).splitlines()[2:]
    added = [line for line in lines if line[0] == "+" and "+def " not in line]
    assert len(added) <= 12


MISTAKES = {
    "tl.max(maxima, axis=0)": ("...", 'line 9 of merge_0 still has "..." in it'),
    " * tl.exp(maxima - row_max)": ("", "sum to"),
    'other=-float("inf")': ("other=0.0", "may have won the maximum"),
    "row_sum": ("row_sum", "Right in all"),
}


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_merge_is_judged_in_a_sentence(number, tmp_path, monkeypatch, capsys):
    old, (new, said) = [*MISTAKES.items()][number]
    name = f"merge_{number}"
    text = show.source(sharing.write_kernel, docstring=False).text
    assert old in text
    text = text.replace(old, new).replace("def write_kernel", f"def {name}")
    header = "import triton\nimport triton.language as tl\n\n"
    (tmp_path / f"{name}.py").write_text(header + text)
    monkeypatch.syspath_prepend(tmp_path)
    sharing.judge(getattr(__import__(name), name))
    del sys.modules[name]
    assert said in capsys.readouterr().out.replace("\n", " ")


# ---- who is there --------------------------------------------------------------------


def test_narrow_parts_are_a_softmax():
    layouts = ["contiguous", "offset"]
    summary = check.softmax(sharing.in_parts, **FEW | {"layouts": layouts})
    assert summary, summary


def test_the_matrix_is_read_once_if_partners_are_there_and_else_twice():
    found = sharing.readings(2, 4)
    assert found["read, MN"].to_list() == [2, 1, 2]
    assert found["written, MN"].to_list() == [1, 1, 1]


def test_bits_do_not_depend_on_who_computes_the_pairs():
    x = matrix(1, 1001)
    first, *others = sharing.pairs_by(x).values()
    assert_right(first, x)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("patience", [1, 50])
def test_a_missing_program_leaves_only_its_part_unwritten(patience):
    x = matrix(1, 4 * 4096)
    assert_right(sharing.patient(patience)(x), x)
    y = sharing.patient(patience, missing=1)(x)[:, :-8192]
    torch.testing.assert_close(y, torch.softmax(x, 1)[:, : y.shape[1]])


# ---- what a wait costs ---------------------------------------------------------------


def test_the_dial_turns_one_kernel_with_partners_and_without():
    launches = [sharing.launch_for(*s) for s in (sharing.ONE_PART, sharing.MANY)]
    few, many = launches
    assert few.constants == many.constants
    assert math.prod(few.grid) == math.prod(many.grid)
    assert [launch.scalars[-1] for launch in launches] == [1, 16]
    made = [compile.aot(launch, gpu="H200") for launch in launches]
    assert made[0].ptx == made[1].ptx
    assert occupancy.of(made[0]).blocks_per_sm == max(sharing.RESIDENT)
    assert few.constants["BLOCK_COLS"] * 4 == 32 * 1024


def test_a_limit_changes_no_value():
    x = matrix(2, 5000)
    assert_right(sharing.limited(1)(x), x)


def test_residents_are_parts_that_fit():
    (row,) = sharing.residents(["H200"], [131072])
    *_, n_parts, fit, rows_at_once = row
    assert fit % 132 == 0 and rows_at_once == round(fit / n_parts, 1)


def swept(stem, providers, wanted, clock="device", **_):
    """A sweep in which the time of a case follows from the provider's name."""
    rows = []
    for case in map(record.Case._make, wanted):
        for name in ("copy", *providers):
            n = int("".join(c for c in name if c.isdigit()) or 1)
            us = 100 + case.n_rows * n
            sizes = {"dtype": "float32", "n_rows": case.n_rows, "n_cols": case.n_cols}
            rows.append({"provider": name, **sizes, "p50_us": us})
    df = pd.DataFrame(rows)
    df["share_of_copy"] = 1 / df["p50_us"]
    return record.with_source(df, "made up")


def test_tables_are_made_of_sweeps(monkeypatch):
    monkeypatch.setattr(record, "sweep", swept)
    table = sharing.waits([1, 50])
    assert table.shape == (2, 3)
    assert table.loc[50].to_list() == [100 + 50 * sharing.MANY[0], 150, 150]
    lines, source = sharing.held()
    assert source == "made up"
    assert [[*line] for line in lines.values()] == [[32, 64, 96, 128, 160, 192]] * 2
    columns = [2**20, 2**21]
    whole = swept("", {"cooperative": None}, record.of_size(2**29, columns))
    table = sharing.halves(whole, columns)
    assert table["copy: second half"].to_list() == [64, 32]
    assert (table["copy: left"] == 100).all()
