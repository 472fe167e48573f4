"""The exercises' judges name the mistake in each of many wrong answers."""

import linecache

import nbformat
import pytest

from kernels.lab import backend
from tests.test_course import tags
from tests.test_exercises import SOLUTIONS, exercises, generator, tagged


def judged(stem: str, heading: str, tag: str, *changes: tuple[str, str]) -> str:
    """What the judge says to an exercise's stub or solution if its code is changed."""
    notebook = nbformat.read(SOLUTIONS[0].parent / f"{stem}.ipynb", as_version=4)
    cells = exercises(notebook)[heading]
    start = next(cell for cell in notebook.cells if cell.cell_type == "code").source
    judge, code = (tagged(cells, each)[0].source for each in ("judge", tag))
    stub = tagged(cells, "stub")[0].source  # a solution may use its functions
    given = "\n\n".join(
        c.source for c in cells if c.cell_type == "code" and not tags(c)
    )
    if tag == "solution":
        code = generator.without_judge(code, judge)
    for old, new in changes:
        assert old in code, old
        code = code.replace(old, new)
    *defined, call = generator.statements(judge)
    namespace = {"__name__": "__main__"}
    start = start.split("import open_course\n")[-1]
    for part, source in enumerate((start, "\n".join(defined), given, stub, code)):
        name = f"<{stem}, {heading}, {part}>"
        rows = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, rows, name)
        exec(compile(source, name, "exec"), namespace)
    return " ".join(repr(eval(call, namespace)).split())


TEMPERATURE = "01_eager", "Write: a temperature", "solution"
TILE = "21_staged", "Repair: in and out of shared memory", "solution"
LAST_IN = (
    "    for place in last:\n        shared[place] = x[place]\n    yield BARRIER\n"
)
LATE = """    yield BARRIER
    if thread == 0:
        for place in range(len(x) // 8 * 8, len(x)):
            shared[place] = x[place]
"""
LOG_SOFTMAX = "01_eager", "Write: log-softmax", "solution"
ROW_SUM = "03_program", "Write: a row's sum", "solution"
TAIL = "03_program", "Repair: the tail", "solution"
RANGE = "04_strided", "Repair: the range of each row", "solution"
PAIR = "16_online", "Repair: a pair to begin with"
BEGIN = "row_max, row_sum = 0.0, 0.0"


RUNNING_SUM = "17_cooperative", "Write: a wait that always ends", "solution"
ROW_MEAN = "17_cooperative", "Repair: the last one merges"
COUNT = "came_before = tl.atomic_add(counts_ptr + row, 1)"
CLEAR = "if part == 0:\n        tl.store(counts_ptr + row, 0)"
WAIT, NO_WAIT = "while not has_tag(word, 1):", "while False:"
WINDOW = "22_windows", "Write: a window", "solution"
SLICE = "22_windows", "Write: a slice, copied by words", "solution"
KEPT = "22_windows", "Repair: kept numerators"
SHIFTED = "((two << 32) | one) >> (16 * shift) & 0xFFFFFFFF"
ALONE = "[*range(first), *range(first + 2 * count, n_cols)]"
OF_SLICE = "((two << 32) | one) >> (16 * odd).to(tl.uint64)"
FACTOR = "tl.exp(part_max - row_max) / row_sum"
SCALED = "sums * tl.exp(maxima - row_max)"
COLUMNS = "23_columns", "Write: a softmax of columns", "solution"
LONG = "23_columns", "Repair: columns of many rows"
COL = "tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]"
PLACES = "places = row * n_cols + col"
COL_MAX = "tl.max(x, axis=0, keep_dims=True)"
COL_SUM = "tl.sum(numerators, axis=0, keep_dims=True)"
MOVED = "col_sum *= exp_shifted_or_zero(col_max, both)"
ADDED = "col_sum += tl.sum(tl.exp(x - both), axis=0, keep_dims=True)"

# What a masked element holds, and which of several stores is the last, a GPU decides.
interpreted = pytest.mark.skipif(
    not backend.INTERPRETED, reason="is about the interpreter"
)


@pytest.mark.parametrize(
    ("exercise", "changes", "words"),
    [
        (TEMPERATURE, [("scores.max(", "x.max(")], "maximum of x or of scores?"),
        (LOG_SOFTMAX, [(").log()", ")")], "Was the logarithm of the sum taken?"),
        (
            LOG_SOFTMAX,
            [("- log_sum", "- log_sum - scores.amax(1, keepdim=True)")],
            "The maximum is subtracted twice.",
        ),
        pytest.param(
            *(ROW_SUM, [(", other=0", "")], "take part, in a load without `other`?"),
            marks=interpreted,
        ),
        pytest.param(
            *(ROW_SUM, [("output_ptr + row", "output_ptr")], "at its own place?"),
            marks=interpreted,
        ),
        pytest.param(
            RANGE,
            [(', other=-float("inf")', "")],
            "take part, in a load without `other`?",
            marks=interpreted,
        ),
        (RANGE, [('-float("inf")', "0")], "A masked 0 took part in the maximum."),
        (
            RANGE,
            [('x, float("inf"))', "x, 0)")],
            "A masked 0 took part in the minimum.",
        ),
        (TAIL, [("(triton.cdiv(n, 64),)", "triton.cdiv(n, 64)")], "grid is a tuple: "),
        (
            (*ROW_MEAN, "stub"),
            [(COUNT, f"{CLEAR}\n    {COUNT}")],
            "atomic at offset 0 of counts_ptr, which program 0 stored",
        ),
        (
            (*ROW_MEAN, "stub"),
            [("came_before == ", "came_before >= ")],
            "store at offset 1 of sums_ptr, which program 0 loaded",
        ),
        (
            (*ROW_MEAN, "solution"),
            [(COUNT, COUNT.replace("1)", "1, sem='relaxed')"))],
            "load at offset 0 of sums_ptr, which program 0 wrote",
        ),
        (
            RUNNING_SUM,
            [(WAIT, NO_WAIT)],
            "before program 0 had written there. On a GPU",
        ),
        (
            RUNNING_SUM,
            [(", volatile=True", "")],
            "offset 1 of words_ptr, which program 0 wrote, in the line `word = tl.load",
        ),
        ((*PAIR, "stub"), [], "With which maximum does the loop begin?"),
        (
            (*PAIR, "stub"),
            [(BEGIN, "row_max, row_sum = -float('inf'), 0.0")],
            "What is the exponential of -inf - (-inf)?",
        ),
        (
            (*PAIR, "solution"),
            [("exp_shifted_or_zero(x, both)", "tl.exp(x - both)")],
            "What is the exponential of -inf - (-inf)?",
        ),
        (TILE, [(LAST_IN, LATE)], "which warp 0 writes with no barrier between"),
        (WINDOW, [(" & 0xFFFFFFFF", "")], "bits are left in front of it?"),
        (
            WINDOW,
            [(SHIFTED, "((two << 32 | one) & 0xFFFFFFFF) >> 16 * shift")],
            "First shift, then keep 32 bits.",
        ),
        (
            WINDOW,
            [("(two << 32) | one", "(one << 32) | two")],
            "which word is the lower half?",
        ),
        (
            WINDOW,
            [(SHIFTED, "(one & 0xFFFF0000 | two & 0xFFFF) if shift else one")],
            "Each value is in the other one's half.",
        ),
        (WINDOW, [("(16 * shift)", "shift")], "By how many bits is a window shifted"),
        (WINDOW, [(SHIFTED, "one")], "Does your window depend on `shift`?"),
        (WINDOW, [("return first,", "return -first,")], "begins before the row is not"),
        (WINDOW, [("first = start % 2", "first = n_cols % 2")], "or on its start?"),
        (
            WINDOW,
            [("(n_cols - first) // 2", "n_cols // 2")],
            "words are made of the others.",
        ),
        (
            WINDOW,
            [("(n_cols - first) // 2", "(n_cols - first + 1) // 2")],
            "A word that ends behind the row is not whole.",
        ),
        (WINDOW, [(ALONE, f"{ALONE}[:1]")], "may have a value alone at each end."),
        (
            WINDOW,
            [("range(first + 2 * count, n_cols)", "range(n_cols // 2 * 2, n_cols)")],
            "depends on the row's start, too.",
        ),
        (SLICE, [(OF_SLICE, "one")], "Are its windows shifted?"),
        (
            SLICE,
            [("whole & (odd == 1)", "whole"), ("16 * odd", "odd * 0 + 16")],
            "Why shift its windows?",
        ),
        (SLICE, [(OF_SLICE, OF_SLICE.replace(">>", "<<"))], "In which direction does"),
        (SLICE, [("= start + odd", "= start")], "that row's first whole word?"),
        (
            SLICE,
            [("tl.where(odd == 1, 0, n_cols - 1)", "n_cols - 1")],
            "alone in a row that starts at an odd place?",
        ),
        (
            SLICE,
            [("tl.where(odd == 1, 0, n_cols - 1)", "0")],
            "alone in a row that starts at an even place?",
        ),
        (SLICE, [("whole & (odd == 1)", "whole")], "An access is out of bounds."),
        (
            SLICE,
            [("(n_cols - odd) // 2", "(n_cols + 1) // 2")],
            "An access is out of bounds.",
        ),
        ((*KEPT, "stub"), [], "and the row's sum?"),
        ((*KEPT, "solution"), [(" / row_sum", "")], "Who divides by the row's sum?"),
        (
            (*KEPT, "solution"),
            [("part_max - row_max", "row_max - part_max")],
            "must the factor's exponent be less?",
        ),
        ((*KEPT, "solution"), [(SCALED, "sums")], "relative to one maximum."),
        (
            (*KEPT, "solution"),
            [(FACTOR, "1 / tl.load(sum_ptr + row * n_parts + part)")],
            "Each part is divided by its own sum.",
        ),
        (
            (*KEPT, "solution"),
            [("tl.exp(x - finite)", "tl.exp(x - part_max)")],
            "What is the exponential of -inf - (-inf)?",
        ),
        (
            (*KEPT, "solution"),
            [("n_parts + part, part_max)", "n_parts + part, finite)")],
            "Did 0 become the row's maximum?",
        ),
        (COLUMNS, [("axis=0", "axis=1")], "That is a softmax of rows."),
        (
            COLUMNS,
            [(COL_SUM, COL_SUM.replace("0", "1"))],
            "The maximum is of a column. Is the sum, too?",
        ),
        (
            COLUMNS,
            [(COL_MAX, COL_MAX.replace("0", "1"))],
            "The sum is of a column. Is the maximum, too?",
        ),
        (
            COLUMNS,
            [(COL_MAX, "tl.max(x)"), (COL_SUM, "tl.sum(numerators)")],
            "Each column needs its own.",
        ),
        (COLUMNS, [(COL_SUM, "tl.sum(numerators)")], "Each column needs its own."),
        (COLUMNS, [(COL_MAX, "tl.max(x)")], "What is exp(-200) in float32?"),
        (COLUMNS, [(PLACES, "places = row + col * n_rows")], "How far apart are two"),
        pytest.param(
            COLUMNS,
            [(PLACES, "places = row * n_rows + col")],
            "does the next row start?",
            marks=interpreted,
        ),
        (COLUMNS, [(COL, "tl.arange(0, COLS)[None, :]")], "program takes column 16?"),
        (
            COLUMNS,
            [("tl.program_id(0) * COLS", "tl.program_id(0)")],
            "of program 1 begin?",
        ),
        (
            COLUMNS,
            [(" + tl.arange(0, COLS)[None, :]", "")],
            "and how many does it write?",
        ),
        pytest.param(
            COLUMNS,
            [("(row < n_rows) & (col < n_cols)", "places < n_rows * n_cols")],
            "What lies in memory after a row?",
            marks=interpreted,
        ),
        (COLUMNS, [(" & (col < n_cols)", "")], "An access is out of bounds."),
        (COLUMNS, [("(row < n_rows) & ", "")], "An access is out of bounds."),
        ((*LONG, "stub"), [], "To which maximum is each of them relative?"),
        (
            (*LONG, "stub"),
            [(ADDED, f"col_sum *= tl.exp(col_max - both)\n            {ADDED}")],
            "begins with a block of -inf. What is -inf - (-inf)?",
        ),
        ((*LONG, "solution"), [(MOVED, "")], "maximum is each of them relative?"),
        (
            (*LONG, "solution"),
            [(MOVED, "col_sum *= tl.exp(both - col_max)")],
            "Is your factor at most 1?",
        ),
        (
            (*LONG, "solution"),
            [("(col_max, both)", "(both, col_max)")],
            "Is your factor at most 1?",
        ),
        (
            (*LONG, "solution"),
            [
                (f"{MOVED}\n        ", ""),
                ("        col_max = both", f"        {MOVED}\n        col_max = both"),
            ],
            "relative to the old maximum, or to the new one?",
        ),
        (
            (*LONG, "solution"),
            [("exp_shifted_or_zero(x, both)", "tl.exp(x - both)")],
            "begins with a block of -inf. What is -inf - (-inf)?",
        ),
        (
            (*LONG, "solution"),
            [
                (
                    "col_max = both",
                    "col_max = tl.where(both == -float('inf'), 0.0, both)",
                )
            ],
            "Did 0 become its maximum?",
        ),
        (
            (*LONG, "solution"),
            [("tl.max(x, axis=0, keep_dims=True)", "tl.max(x)")],
            "values are near -200. Is its maximum, too?",
        ),
        (
            (*LONG, "solution"),
            [('-float("inf"), tl.float32)', "0.0, tl.float32)")],
            "values are near -200. Is its maximum, too?",
        ),
    ],
)
def test_a_wrong_answer_is_told_its_mistake(exercise, changes, words):
    sentence = judged(*exercise, *changes)
    assert words in sentence and not sentence.startswith("Right")


def test_what_a_solution_says_of_a_huge_negative_maximum_holds():
    begin = BEGIN, "row_max, row_sum = -1e30, 0.0"
    assert judged(*PAIR, "stub", begin).startswith("Right")
