"""Each step towards chapter `unaligned`'s kernel is a softmax, and a small change."""

import itertools
from pathlib import Path

import nbformat
import pytest
import torch

from benchmarks import edges
from kernels import tiled, unaligned
from kernels.lab import check, show
from tests.helpers import assert_right, matrix, meta_matrix

STEPS = [
    edges.tail_kernel,
    edges.head_kernel,
    edges.beside_kernel,
    unaligned.softmax_kernel,
]
HALF = torch.bfloat16
ROOT = Path(__file__).parents[2]


def test_rows_may_end_anywhere_after_step_one():
    for n_cols in (9, 13, 137):
        x = matrix(5, n_cols, HALF, stride=144)
        y = torch.empty(5, 144, dtype=HALF, device=x.device)[:, :n_cols]
        launch = tiled.launch_for(y, x, tiled.choose_config(n_cols, 2, 8))
        strides, config = (144, 144, 5, n_cols), dict(launch.constants)
        edges.tail_kernel[launch.grid](y, x, *strides, **config)
        assert_right(y, x)


@pytest.mark.parametrize("kernel", STEPS[1:], ids=lambda kernel: kernel.fn.__name__)
def test_rows_may_start_anywhere_from_step_two_on(kernel):
    softmax = edges.softmax_by(kernel)
    summary = check.softmax(softmax, dtypes=[HALF, torch.float32], max_cols=136)
    assert summary, summary


def test_no_step_adds_many_statements():
    helpers = edges.load_narrow, edges.load_wide, unaligned.load_block
    steps = [tiled.softmax_kernel, *STEPS]
    for old, new in (*itertools.pairwise(steps), *itertools.pairwise(helpers)):
        code = repr(show.diff(old, new, indentation=False)).splitlines()[2:]
        added = [line[1:].strip() for line in code if line[0] == "+"]
        rest_of_call = "input_ptr, ", ")"  # a statement's second line and third
        added = [
            line
            for line in added
            if not line.startswith(("def ", "#", '"""', *rest_of_call))
            or line.startswith("input_ptr, output_ptr =")
        ]
        assert len(added) <= 15, added


def test_the_page_shows_about_ten_new_lines_at_once():
    page = nbformat.read(ROOT / "notebooks" / "15_unaligned.ipynb", as_version=4)
    texts = [
        output.get("data", {}).get("text/plain", "")
        for cell in page.cells
        for output in cell.get("outputs", ())
    ]
    diffs = [text.splitlines()[2:] for text in texts if text.startswith("--- ")]
    added = [sum(line[0] == "+" for line in diff) for diff in diffs]
    assert len(added) == 8 and max(added) <= 11, added


# ---- what the compiler makes of it ---------------------------------------------------


def test_step_three_makes_accesses_wide():
    x = meta_matrix(4096, 1001, HALF)
    widths = [edges.widths(edges.launch_for(kernel, x)) for kernel in STEPS[1:]]
    assert widths == [(2, 2), (16, 16), (16, 16)]


def of(kernel, n_cols: int) -> dict[str, float]:
    return dict(zip(edges.WORK, edges.work(kernel, n_cols), strict=True))


def test_edges_cost_less_if_each_thread_takes_one():
    beside, threads = (of(kernel, 257) for kernel in STEPS[2:])
    assert 2.5 < beside["edges, %"] < 3
    assert threads["exp: edges"] * 4 <= beside["exp: edges"]
    assert threads["instructions a value"] < 0.7 * beside["instructions a value"]


def test_edges_beside_the_body_take_its_layout():
    found = edges.layouts(edges.beside_kernel, 257)
    apart, copied = (2, 32), (32, 2)  # values in a thread, threads that differ
    assert found == [
        ("tt.load", *apart),
        ("ttg.convert_layout", *copied),
        ("math.exp2", *copied),
        ("ttg.convert_layout", *apart),
    ]


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ([1, 1, 2, 16, 1, 1], (2, 32)),  # four rows in two turns
        ([1, 8, 1, 32, 1, 1], (32, 2)),  # 30 of 32 threads hold copies
        ([1, 8, 1, 32, 4, 1], (8, 8)),  # four warps, a row each
        ([1, 32, 1, 32, 1, 1], (64, 1)),  # a thread could hold more than a row
    ],
)
def test_a_block_smaller_than_its_layout_is_held_in_copies(layout, held):
    assert edges._held((4, 16), layout) == held


def test_the_control_has_no_edges():
    found = of(tiled.softmax_kernel, 256)
    assert found["edges, %"] == found["exp: edges"] == 0


def test_an_h200_issues_28_instructions_for_a_value_of_16_bits():
    assert 27 < edges.budget(2) < 29
    assert edges.budget(4) == 2 * edges.budget(2)
