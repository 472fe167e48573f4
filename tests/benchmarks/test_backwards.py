"""The gradient's kernel in steps: each is right. A mistake is named in a sentence."""

from typing import Any

import pytest
import torch
import triton

from benchmarks import backwards, training
from kernels import gradient
from kernels.lab import record, show
from tests.helpers import TRITON, assert_is_gradient, matrix


def inputs(n_rows: int, n_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.softmax(matrix(n_rows, n_cols), 1)
    return matrix(n_rows, n_cols, seed=1), y


def by_tiles(kernel: Any, g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient by a kernel with the parameters of `tile_kernel`."""
    x, (n_rows, n_cols) = torch.empty_like(y), y.shape
    sizes = {"ROWS": 4, "BLOCK_COLS": triton.next_power_of_2(n_cols + 3), "VECTOR": 4}
    kernel[(triton.cdiv(n_rows, 4),)](x, g, y, n_rows, n_cols, **sizes)
    return x


@pytest.mark.parametrize("n_cols", [4, 32, 100])
@pytest.mark.parametrize("kernel", [backwards.tile_kernel, backwards.edges_kernel])
def test_tiles_of_aligned_rows(kernel, n_cols):
    g, y = inputs(7, n_cols)
    assert_is_gradient(by_tiles(kernel, g, y), g, y)


@pytest.mark.parametrize("n_cols", [1, 3, 33, 101])
def test_rows_that_start_anywhere_have_edges(n_cols):
    g, y = inputs(7, n_cols)
    assert_is_gradient(by_tiles(backwards.edges_kernel, g, y), g, y)
    assert_is_gradient(backwards.by_rows(backwards.row_kernel)(g, y), g, y)


def test_edges_add_about_ten_lines():
    steps = backwards.tile_kernel, backwards.edges_kernel
    lines = repr(show.diff(*steps)).splitlines()[2:]
    added = [line for line in lines if line[0] == "+" and "+def " not in line]
    assert len(added) <= 11, added


def test_the_steps_helpers_and_lines_are_the_chapters():
    """What the page says of the chapter's kernel holds as long as these lines do."""
    chapters = show.source(gradient.gradient_kernel).text
    for line in (
        "is_row = rows < n_rows",
        "start = rows.to(tl.int64) * n_cols",
        "head, body = split_row(start, n_cols, VECTOR)",
        "edge = tl.arange(0, 2 * VECTOR)[:, None]",
        "start += head",
        "// VECTOR * VECTOR)[:, None] + cols",
        "row_dot = dot(g, y, 1)",
        "dot(edge_g, edge_y, 0)",
        "combine(edge_g, edge_y, row_dot[None, :])",
    ):
        assert line in chapters, line
    shared = show.excerpt(gradient.gradient_kernel, *SHARED)
    assert "atomic_xchg" in shared.text and 8 < len(shared.text.splitlines()) < 20


SHARED = "elif BLOCK_PARTS > 1:", "if (next_task < 0)"


def test_a_block_of_edges_that_lies_on_its_side_is_loaded_once():
    (_, down, longer), (_, across, shorter) = backwards.ends()
    if TRITON >= (3, 9):  # loads it once in both ways
        assert max(down, across) <= 2
    else:
        assert down >= 4 * across and shorter < 0.8 * longer


@pytest.mark.thorough
def test_resident_programs_hold_enough_without_spills():
    for row in backwards.resident():
        found = dict(zip(backwards.RESIDENT, row, strict=True))
        # Triton 3.9 spills up to 64 where programs share a row of 16 bits.
        spilling = TRITON >= (3, 9) and found["parts of a row"] > 1
        assert found["spilled bytes"] <= (64 if spilling else 0), found
        assert found["16-byte accesses"], found
        assert found["KiB on an SM"] >= 64, found


# ---- the learner's kernel ------------------------------------------------------------

SUM, RESULT = "tl.sum(g * y, axis=0)", "y * (g - row_dot)"
SAID = [
    (SUM, SUM, "Right: every value of 4 matrices is autograd's."),
    (SUM, "...", 'line 6 of my_kernel still has "..." in it'),
    (RESULT, "...", 'line 7 of my_kernel still has "..." in it'),
    (RESULT, "g * y", "this is g * y. The row's sum is still"),
    (RESULT, "g - row_dot", "y, the factor, is missing"),
    (RESULT, "g * y - row_dot", "the row's sum is not multiplied by y"),
    (RESULT, "y * (g + row_dot)", "the row's sum is added"),
    (SUM, "tl.sum(g, axis=0)", "row_dot sums g alone"),
    (RESULT, "y * (g - 2 * row_dot + row_dot) * 2", "It should sum to 0"),
    (RESULT, "y - g_dot", "it raised "),
]


@pytest.mark.parametrize("number", range(len(SAID)))
def test_a_kernel_is_judged_in_a_sentence(number, tmp_path, monkeypatch, capsys):
    old, new, said = SAID[number]
    text = show.source(backwards.row_kernel, docstring=False).text
    assert old in text
    text = text.replace(old, new).replace("def row_kernel", "def my_kernel")
    header = "import triton\nimport triton.language as tl\n\n"
    (tmp_path / f"written_{number}.py").write_text(header + text)
    monkeypatch.syspath_prepend(tmp_path)
    backwards.judge(__import__(f"written_{number}").my_kernel)
    assert said in capsys.readouterr().out.replace("\n", " ")


# ---- what PyTorch runs ---------------------------------------------------------------


@pytest.mark.gpu
def test_pytorch_multiplies_first():
    rows = backwards.kernels((64, 4096), n_bytes=2**22)
    for n_cols in (64, 4096):
        names = {
            call: [
                row["kernel"]
                for row in rows
                if (row["n_cols"], row["call"]) == (n_cols, call)
            ]
            for call in ("stream", "torch", "gradient")
        }
        assert [len(found) for found in names.values()] == [1, 2, 1], names
        assert "(mul)" in names["torch"][0]
        assert names["gradient"] == ["gradient_kernel"]


def test_the_profiler_names_what_runs(monkeypatch):
    class Broken:
        def __enter__(self):
            raise RuntimeError("no CUPTI")

        def __exit__(self, *error):
            return False

    monkeypatch.setattr(torch.profiler, "profile", lambda **options: Broken())
    with pytest.raises(record.Unavailable, match="CUPTI"):
        backwards.ran(training.stream, torch.ones(2, 1, 1))
