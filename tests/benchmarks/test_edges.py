"""Each step towards chapter `unaligned`'s kernel is a softmax, and a small change."""

import dataclasses
import itertools
from pathlib import Path

import nbformat
import pytest
import torch

from benchmarks import edges
from kernels import layouts, tiled, unaligned
from kernels.lab import check, compile, show
from tests.helpers import assert_right, matrix, meta_matrix

STEPS = [
    edges.tail_kernel,
    edges.head_kernel,
    edges.beside_kernel,
    edges.turns_kernel,
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


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", STEPS[1:], ids=lambda kernel: kernel.fn.__name__)
def test_rows_may_start_anywhere_from_step_two_on(kernel):
    softmax = edges.softmax_by(kernel)
    summary = check.softmax(softmax, dtypes=[HALF, torch.float32], max_cols=136)
    assert summary, summary


def test_no_step_adds_many_statements():
    helpers = (
        edges.load_narrow,
        edges.load_wide,
        edges.load_turns,
        unaligned.load_block,
    )
    steps = [tiled.softmax_kernel, *STEPS]
    for old, new in (*itertools.pairwise(steps), *itertools.pairwise(helpers)):
        code = repr(show.diff(old, new, indentation=False)).splitlines()[2:]
        added = [line[1:].strip() for line in code if line[0] == "+"]
        rest_of_call = (
            "input_ptr, ",
            "source, ",
            ")",
        )  # a statement's second line and third
        added = [
            line
            for line in added
            if not line.startswith(("def ", "#", '"""', *rest_of_call))
            or line.startswith("input_ptr, output_ptr =")
        ]
        assert len(added) <= 15, added


def test_a_diff_of_the_page_has_at_most_11_new_lines():
    page = nbformat.read(ROOT / "notebooks" / "15_unaligned.ipynb", as_version=4)
    texts = [
        output.get("data", {}).get("text/plain", "")
        for cell in page.cells
        for output in cell.get("outputs", ())
    ]
    diffs = [text.splitlines()[2:] for text in texts if text.startswith("--- ")]
    added = [sum(line[0] == "+" for line in diff) for diff in diffs]
    assert len(added) == 4 and max(added) <= 11, added


# ---- what the compiler makes of it ---------------------------------------------------


@pytest.mark.thorough
def test_step_three_makes_accesses_wide():
    x = meta_matrix(4096, 1001, HALF)
    widths = [edges.widths(edges.launch_for(kernel, x)) for kernel in STEPS[1:]]
    assert widths == [(2, 2), (16, 16), (16, 16), (16, 16)]


@pytest.mark.thorough
def test_edges_cost_less_if_each_thread_takes_one():
    beside, turns, own = (edges.work(kernel, 257) for kernel in STEPS[2:])
    assert 2.5 < beside["edges"] < 3
    assert beside["edge exp"] == beside["body exp"] == turns["body exp"] == 32
    assert turns["edge exp"] == own["edge exp"] == 2
    assert turns["instructions"] < 0.65 * beside["instructions"]


@pytest.mark.thorough
@pytest.mark.parametrize("n_cols", [33, 63, 129, 257, 1001])
def test_a_row_exchanged_once_takes_half_the_shuffles(n_cols):
    apart, once = (edges.work(kernel, n_cols) for kernel in STEPS[3:])
    assert apart["shuffles"] == 2 * once["shuffles"] > 0
    assert once["instructions"] < apart["instructions"]


def spans(width: int, n: int) -> list[list[int]]:
    return [[*range(i, i + width)] for i in range(0, n, width)]


TWO_ROUNDS = [[i, i + 32] for i in range(32)]


def test_edges_beside_the_body_are_held_in_copies():
    """Two threads hold a row's 16 places, and 30 hold copies."""
    n_rows, held = edges.held(edges.beside_kernel, 257)
    assert n_rows == 4
    assert held == {"body": spans(8, 256), "edges": 16 * spans(8, 16)}


def test_the_copies_come_from_the_shape_and_not_from_the_size_of_the_tiles():
    x = meta_matrix(4096, 257, HALF)
    three, four = (edges.launch_for(kernel, x) for kernel in STEPS[2:4])
    size = {name: four.constants[name] for name in ("ROWS", "num_warps")}
    assert size.items() - three.constants.items()
    three = dataclasses.replace(three, constants={**three.constants, **size})
    powers = [compile.aot(launch).count(r"ex2\.") for launch in (three, four)]
    assert powers == [32 + 32, 32 + 2]


@pytest.mark.parametrize("kernel", STEPS[3:], ids=lambda kernel: kernel.fn.__name__)
def test_edges_in_four_dimensions_are_held_once(kernel):
    n_rows, held = edges.held(kernel, 257)
    assert n_rows == 2 and held["edges"] == spans(1, 16)
    turns = spans(8, 128), spans(8, 256)[16:]
    assert held["body"] == [one + two for one, two in zip(*turns, strict=True)]


@pytest.mark.parametrize(
    ("layout", "shape", "n_rows", "held"),
    [
        (([1, 1], [2, 16], [1, 1], [1, 0]), [4, 16], 2, spans(1, 16)),
        (([1, 8], [1, 32], [1, 1], [1, 0]), [4, 16], 4, 16 * spans(8, 16)),
        (([1, 8], [1, 32], [4, 1], [1, 0]), [4, 16], 1, 16 * spans(8, 16)),
        (([1, 32], [1, 32], [1, 1], [1, 0]), [4, 16], 4, 32 * spans(16, 16)),
        (([4, 1], [1, 32], [1, 1], [1, 0]), [4, 64], 4, TWO_ROUNDS),
        (([1, 1, 1, 4], [1, 2, 16, 1], [1, 2, 1, 1], [3, 2, 1, 0]), [1, 8, 16, 1], 2,
         spans(1, 16)),
    ],
)  # fmt: skip
def test_a_block_smaller_than_its_layout_is_held_in_copies(layout, shape, n_rows, held):
    layout = layouts.Blocked(*map(tuple, layout))
    assert edges._first_row(layout, shape) == (n_rows, held)


def test_threads_hold_what_the_layouts_chapter_says():
    layout = layouts.Blocked((1, 4), (2, 16), (2, 1), (1, 0))
    warps, lanes = (found[0] for found in layouts.holders(layout, (8, 64)))
    _, held = edges._first_row(layout, [8, 64])
    assert not warps.any()
    assert [lanes[numbers].tolist() for numbers in held] == [[i] * 4 for i in range(16)]


def test_the_control_has_no_edges():
    found = edges.work(tiled.softmax_kernel, 256)
    assert found["edges"] == found["edge exp"] == 0


def test_an_h200_issues_28_instructions_for_a_value_of_16_bits():
    assert 27 < edges.budget(2) < 29
    assert edges.budget(4) == 2 * edges.budget(2)
