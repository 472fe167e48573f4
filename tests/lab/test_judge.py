"""The judge: one sentence for whatever a learner's function does; the notebook goes on.

The functions are a notebook's, which a process of its own runs.
"""

import fractions
import os
import signal
import sys
import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from kernels import strided
from kernels.lab import backend, cases, description, judge, progress

FAST = {"layouts": ["contiguous"], "dtypes": [torch.float32], "max_cols": 9}


@triton.jit
def sum_kernel(output_ptr, input_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(input_ptr + row * row_stride + cols, mask=cols < n_cols, other=0)
    tl.store(output_ptr + row, tl.sum(x.to(tl.float32), axis=0))


def summed(x, n_cols, block=None):
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    block = block or triton.next_power_of_2(x.shape[1])
    sum_kernel[(len(x),)](output, x, x.stride(0), n_cols, BLOCK=block)
    return output


def row_sum(x):
    return summed(x, x.shape[1])


def row_sum_without_mask(x):
    return summed(x, x.shape[1] + 1)


def row_sum_of_a_bad_block(x):
    return summed(x, x.shape[1], block=12)


def reference(x):
    return x.sum(dim=1)


def of_rows(function, **options):
    return judge.rows(function, reference, **FAST | options)


def said(verdict) -> str:
    """The sentence in one line."""
    assert all(len(line) <= 80 for line in repr(verdict).splitlines())
    return " ".join(repr(verdict).split())


# ---- what goes wrong -----------------------------------------------------------------


def unfinished(x):
    output = torch.empty(len(x))
    output[:] = ...
    return output


def raises(x):
    return x.sum(dim=2)


def returns_nothing(x):
    x.sum(dim=1)


def returns_the_wrong_dtype(x):
    return x.double().sum(dim=1)


def returns_the_wrong_shape(x):
    return x.sum(dim=1, keepdim=True)


def returns_a_wrong_value(x):
    return x.sum(dim=1) + 1


def is_right_for_one_length_only(x):
    return x[:, :5].sum(dim=1)


def changes_its_input(x):
    return x.mul_(2).sum(dim=1) / 2


WRONG = {
    unfinished: 'Not yet: line 3 of unfinished still has "..." in it.',
    raises: "raises fails with a 13 × 9 matrix (float32): IndexError: Dimension out of "
    "range (expected to be in range of [-2, 1], but got 2), in the line "
    "`return x.sum(dim=2)`.",
    returns_nothing: "returns_nothing returns NoneType for a 13 × 9 matrix (float32), "
    "not a tensor.",
    returns_the_wrong_dtype: "returns_the_wrong_dtype returns float64 for a 13 × 9 "
    "matrix (float32), not float32.",
    returns_the_wrong_shape: "returns_the_wrong_shape returns 13 × 1 values for a 13 × "
    "9 matrix (float32), not 13.",
    returns_a_wrong_value: "Row 0 (normal) of a 13 × 9 matrix (float32) is wrong: its "
    "value is",
    is_right_for_one_length_only: "Row 0 (normal) of a 13 × 9 matrix (float32) is "
    "wrong: its value is",
    changes_its_input: "changes_its_input changes its input, a 13 × 9 matrix",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_each_mistake_has_its_sentence(function):
    verdict = of_rows(function)
    assert verdict.right is False and not verdict
    assert said(verdict).startswith(WRONG[function])


def test_a_kernel_that_leaves_its_tensor_is_named_with_its_line():
    assert said(of_rows(row_sum_without_mask)) == (
        "An access is out of bounds. sum_kernel, program 2: load at offset 15 of "
        "input_ptr, whose last element is 14, in the line `x = tl.load(input_ptr + row "
        "* row_stride + cols, mask=cols < n_cols, other=0)`. Is it masked, and is its "
        "offset right?"
    )


def test_a_kernel_that_cannot_be_compiled_is_named_with_its_line():
    verdict = said(of_rows(row_sum_of_a_bad_block))
    assert "power of 2" in verdict and "tl.arange(0, BLOCK)" in verdict


def test_a_mask_that_is_missing_is_explained_where_accesses_are_not_checked():
    """As for a kernel that the interpreter cannot run; here it's the same process."""
    verdict = said(of_rows(lambda x: summed(x, x.shape[1] + 1), layouts=["sliced"]))
    assert "lies between the elements" in verdict  # the small inputs are sliced, too


@triton.jit
def loop_kernel(output_ptr, input_ptr, row_stride, n_rows, n_cols, FAR: tl.constexpr):
    cols = tl.arange(0, 64)
    limit = n_cols + FAR * (n_cols // 17) * 64  # more than n_cols from 17 on
    for row in range(0, n_rows if FAR else tl.maximum(n_rows, 1)):
        ptrs = input_ptr + row * row_stride + cols
        x = tl.load(ptrs, mask=cols < limit, other=0)
        x = tl.where(cols < n_cols, x.to(tl.float32), 0)
        tl.store(output_ptr + row, tl.sum(x, axis=0))


@pytest.mark.parametrize(
    ("far", "max_cols", "words"),
    [
        (True, 33, "load at offset 34 of input_ptr, whose last element is 33"),
        (False, 9, "load at offset 0 of input_ptr, which has no elements"),
    ],
)
def test_accesses_are_checked_in_every_matrix(far, max_cols, words):
    def one_program(x):
        output = torch.empty(len(x), dtype=x.dtype, device=x.device)
        loop_kernel[(1,)](output, x, x.stride(0), *x.shape, FAR=int(far))
        return output

    assert words in said(of_rows(one_program, max_cols=max_cols))


def test_a_row_stride_that_is_not_used_is_asked_for():
    def packed(x):
        output = torch.empty(len(x), dtype=x.dtype, device=x.device)
        sum_kernel[(len(x),)](output, x, x.shape[1], x.shape[1], BLOCK=16)
        return output

    words = said(of_rows(packed, layouts=["contiguous", "sliced"]))
    assert words.endswith("is its offset right? Does it use the strides of x?")


@triton.jit
def add_kernel(output_ptr, input_ptr, row_stride, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(input_ptr + row * row_stride + cols, mask=cols < n_cols, other=0)
    tl.atomic_add(output_ptr + row, tl.sum(x.to(tl.float32), axis=0))


@pytest.mark.parametrize("values", [judge.FINITE, ["±60000"]])
def test_memory_that_is_added_to_and_that_nobody_set_is_named(values):
    def added(x, new=torch.empty):
        output = new(len(x), dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(x.shape[1])
        add_kernel[(len(x),)](output, x, x.stride(0), x.shape[1], BLOCK=block)
        return output

    assert of_rows(lambda x: added(x, torch.zeros), values=values, name="added")
    words = (
        "add_kernel, program 0: atomic at offset 0 of output_ptr adds to memory that "
        "nobody set: `torch.empty` leaves in it what was there before. `torch.zeros` "
        "would do."
    )
    assert said(of_rows(added, values=values)) == words
    shapes, float16 = [(3, 4), (2, 3)], {"dtypes": [torch.float16]}
    assert said(judge.operator(added, reference, shapes, **float16)) == words


# ---- what breaks ---------------------------------------------------------------------


def never_ends(x):
    while True:
        pass


def dies(x):
    os.kill(os.getpid(), signal.SIGSEGV)


def is_killed(x):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(x):
    sys.exit(3)


def test_a_loop_that_never_ends_is_ended():
    of_rows(raises)  # the process runs
    start = time.monotonic()
    verdict = of_rows(never_ends, limit_s=1)
    assert time.monotonic() - start < 30
    assert said(verdict) == (
        "Not yet: never_ends did not end within 1 s. Does one of its loops never end?"
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (dies, "ends its process by an access to memory that isn't its own."),
        (is_killed, "is ended by the system, probably as it needs too much memory."),
        (leaves, "ends its process, as sys.exit does."),
    ],
)
def test_a_process_that_ends_is_a_sentence(function, words):
    verdict = of_rows(function)
    assert said(verdict).startswith(f"Not yet: {function.__name__} {words}")
    assert not of_rows(raises)  # in a new process


def test_the_process_is_kept_for_the_next_call():
    of_rows(raises)
    first = judge._helper("interpreter").process
    of_rows(raises)
    assert judge._helper("interpreter").process is first


def test_what_cannot_be_sent_is_a_sentence():
    lock = threading.Lock()

    def locks(x):
        with lock:
            return x.sum(dim=1)

    assert said(of_rows(locks)) == (
        "Not yet: locks cannot be sent to the process that judges it: cannot pickle "
        "'_thread.lock' object."
    )


def test_functions_of_a_notebook_are_judged(monkeypatch):
    """They belong to `__main__`, and only their source's cache knows their lines."""
    import linecache

    source = "def nearly(x):\n    return x.sum(dim=1) / undefined\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(source), None, lines, "<cell>"))
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), namespace)
    assert "in the line `return x.sum(dim=1) / undefined`." in said(
        of_rows(namespace["nearly"])
    )


# ---- what is right -------------------------------------------------------------------


def test_a_right_kernel_is_right(every_row):
    verdict = of_rows(row_sum)
    assert verdict and verdict.right is True
    assert said(verdict).startswith("Right: row_sum passes ")
    assert said(verdict).endswith(
        f"matrices of up to {cases.ROWS[-1]} rows and 9 columns, in float32."
    )


def test_a_softmax_needs_no_reference():
    assert judge.softmax(strided.softmax, dtypes=[torch.float32], max_cols=9)
    assert "sums to" not in said(judge.softmax(torch.sigmoid, **FAST))


def test_a_result_may_have_a_dtype_of_its_own():
    half = {"dtypes": [torch.float16], "result": torch.float32}
    values = judge.FINITE
    assert of_rows(lambda x: x.float().sum(dim=1), values=values, **half)
    low = of_rows(lambda x: x.sum(dim=1).float(), values=values, **half)
    assert "is wrong" in said(low)  # rounded to float16 on the way


def test_a_result_may_have_parts():
    def extremes(x):
        return x.amax(dim=1), x.amin(dim=1)

    assert judge.rows(extremes, extremes, **FAST)
    wrong = judge.rows(lambda x: (x.amax(dim=1), x.amax(dim=1)), extremes, **FAST)
    assert "Row 0" in said(wrong)
    assert "not a tensor" in said(judge.rows(reference, extremes, **FAST))


KNOWN = {"The sum is of squares.": lambda x: x.square().sum(1)}


def test_a_known_mistake_has_its_sentence():
    wrong = of_rows(lambda x: x.square().sum(1), mistakes=KNOWN)
    assert said(wrong).endswith("The sum is of squares.")
    near = of_rows(lambda x: x.square().sum(1) * 1.001, mistakes=KNOWN)
    assert "squares" not in said(near)
    parts = {"The other extreme.": lambda x: (x.amax(1), x.amax(1))}
    wrong = judge.rows(
        parts["The other extreme."],
        lambda x: (x.amax(dim=1), x.amin(dim=1)),
        mistakes=parts,
        **FAST,
    )
    assert said(wrong).endswith("The other extreme.")


@triton.jit
def by_all_kernel(output_ptr, input_ptr, n_rows, n_cols, FROM: tl.constexpr):
    for row in range(tl.program_id(0) * FROM, n_rows, tl.num_programs(0) * FROM or 1):
        cols = tl.arange(0, 16)
        x = tl.load(input_ptr + row * n_cols + cols, mask=cols < n_cols, other=0)
        tl.store(output_ptr + row, tl.sum(x, axis=0))


def by_three(x, shared):
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    by_all_kernel[(3,)](output, x, *x.shape, FROM=int(shared))
    return output


def test_programs_that_do_the_same_work_are_seen():
    assert of_rows(lambda x: by_three(x, True), once=True)
    assert of_rows(lambda x: by_three(x, False))  # the values are right
    wrong = said(of_rows(lambda x: by_three(x, False), once=True))
    assert "reads 45 values of a 3 × 5 matrix, which holds 15. Is a value" in wrong


@triton.jit
def triangle_kernel(output_ptr, input_ptr, n_cols, STRIDE, INSIDE: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, 16)
    seen = (cols <= row) & ((cols < n_cols) | (not INSIDE))
    x = tl.load(input_ptr + row * STRIDE + cols, mask=seen, other=0)
    tl.store(output_ptr + row, tl.sum(x.to(tl.float32), axis=0))


def triangle(x, inside=True):
    output = torch.empty(len(x), dtype=x.dtype, device=x.device)
    triangle_kernel[(len(x),)](output, x, x.shape[1], x.stride(0), INSIDE=inside)
    return output


def test_a_column_beyond_the_row_is_seen_with_more_rows_than_columns():
    def right(x):
        return x.tril().sum(dim=1)

    options = FAST | {"values": judge.FINITE, "layouts": ["sliced"]}
    assert judge.rows(triangle, right, **options)
    beyond = judge.rows(lambda x: triangle(x, inside=False), right, **options)
    assert "lies between the elements" in said(beyond)


# ---- formulas ------------------------------------------------------------------------


def test_a_formula_is_judged_call_by_call():
    def area(n, m):
        return n * m

    def round_about(n, m):
        return 2 * (n + m)

    cases = [(4, 4), (2, 3)]
    assert said(judge.formula(area, area, cases)) == "Right: area passes 2 calls."
    wrong = said(judge.formula(lambda n, m: n + m, area, cases))
    assert "(4, 4)" in wrong and "16" in wrong
    mistakes = {"That goes round it.": round_about}
    wrong = said(judge.formula(round_about, area, cases, mistakes=mistakes))
    assert "(2, 3)" in wrong and wrong.endswith("That goes round it.")
    assert "did not end" in said(
        judge.formula(lambda n, m: never_ends(n), area, cases, limit_s=1)
    )
    with pytest.raises(ValueError, match="two calls or more"):
        judge.formula(area, area, [(2, 3)])


# ---- the GPU's world -----------------------------------------------------------------


class Stage:
    """A helper process that answers what it is told to, in place of a GPU's."""

    def __init__(self, *answers):
        self.answers, self.stopped, self.process = list(answers), 0, True

    def call(self, function, args=(), **options):
        return self.answers.pop(0) if args else None

    def stop(self):
        self.stopped += 1


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU: the interpreter finds nothing, the GPU's process does."""
    stages = {"interpreter": Stage(*[judge.Outcome(None, "4 inputs")] * 9)}
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(judge, "_helper", stages.__getitem__)
    return stages


def test_the_gpu_has_the_last_word(gpu):
    gpu["compiler"] = Stage(judge.Outcome("Wrong there."))
    assert said(of_rows(row_sum)) == "Wrong there."
    assert len(gpu["interpreter"].answers) == 7  # the small inputs, and all of them


def test_a_gpu_that_broke_is_a_sentence_and_a_new_process(gpu):
    broken = judge.Outcome("CUDA error: an illegal memory access", broken=True)
    gpu["compiler"] = Stage(broken)
    assert said(of_rows(row_sum)) == (
        "Not yet: row_sum breaks its process's use of the GPU (CUDA error: an illegal "
        "memory access). Is an access not masked, or an offset wrong?"
    )
    assert gpu["compiler"].stopped == 1


def test_an_interpreter_that_does_not_work_is_left_out_on_a_gpu(gpu, monkeypatch):
    def refuse():
        raise RuntimeError("not with this NumPy")

    monkeypatch.setattr(description, "require_interpreter", refuse)
    gpu["compiler"] = Stage(judge.Outcome(None, "4 inputs"))
    assert of_rows(row_sum)
    monkeypatch.setattr(backend, "INTERPRETED", True)
    with pytest.raises(RuntimeError, match="not with this NumPy"):
        of_rows(row_sum)


def test_bandwidth_is_a_share_of_the_copys(gpu, monkeypatch):
    monkeypatch.delenv("COURSE_MEASURE", raising=False)
    gpu["compiler"] = Stage((3000.0, 4000.0), (3400.0, 4000.0))
    assert said(judge.bandwidth(row_sum, (4096, 4096))) == (
        "Not yet: row_sum reaches an effective bandwidth of 3,000 GB/s, 75 % of the "
        "copy's 4,000 GB/s; 80 % is enough."
    )
    assert said(judge.bandwidth(row_sum, (4096, 4096))).startswith("Right: ")


@pytest.mark.skipif(not backend.INTERPRETED, reason="there is a GPU")
def test_without_a_gpu_a_bandwidth_is_not_judged():
    verdict = judge.bandwidth(row_sum, (4096, 4096))
    assert verdict.right is None and said(verdict).startswith("Not judged: ")


@triton.jit
def lost_kernel(output_ptr, input_ptr):
    tl.store(output_ptr + (1 << 40), tl.load(input_ptr + (1 << 40)))


@pytest.mark.gpu
def test_on_a_gpu_too_an_access_far_outside_is_a_sentence():
    def lost(x):
        lost_kernel[(1,)](torch.empty_like(x), x)
        return x.sum(dim=1)

    assert said(of_rows(lost)).startswith("An access is out of bounds.")
    outcome = judge._run(
        "compiler",
        judge.functools.partial(judge.trials.of_rows, reference=reference, **FAST),
        lost,
        "lost",
        60,
    )
    assert "breaks its process's use of the GPU" in outcome.failure
    assert torch.ones(3, device="cuda").sum() == 3  # the notebook's own goes on


# ---- progress, and what is no function -----------------------------------------------


def test_a_right_answer_solves_the_exercise_of_its_name(monkeypatch):
    monkeypatch.setattr(progress, "_exercises", {})
    monkeypatch.setattr(progress, "_solved", {})
    judge.chapter("strided", repair="row_sum", write="n_bytes")
    of_rows(raises, name="row_sum")
    assert "0 of 2" in repr(judge.progress("strided"))
    of_rows(reference, name="row_sum")
    assert repr(judge.progress("strided")) == (
        "strided: 1 of 2 exercises solved (open: write n_bytes)"
    )
    judge.formula(abs, abs, [(3,), (-4,)], name="n_bytes")
    assert repr(judge.progress("strided")) == "strided: 2 of 2 exercises solved"


def test_what_is_no_function():
    assert said(judge.rows(..., reference)) == 'Not yet: the function is still "...".'
    with pytest.raises(TypeError, match="must be a function to judge, got int"):
        judge.rows(3, reference)


@pytest.mark.parametrize(
    ("guessed", "found", "right", "words"),
    [
        ("4", 4, None, "No guess yet: '4' is not a number."),
        (..., 4, None, "No guess yet: write down a number for each."),
        ({"a": "3", "b": ...}, {"a": 3, "b": 4}, None, "'3' is not a number"),
        (10**400, 4, None, "is not"),
        (fractions.Fraction(9, 2), 4, True, "Guessed 4.5, found 4, within"),
        (torch.tensor(4.0), 4, True, "Guessed 4, found 4, within"),
    ],
)
def test_guesses_of_every_kind(guessed, found, right, words):
    verdict = judge.guess(guessed, found)
    assert verdict.right is right and words in said(verdict)


def test_a_guess_of_the_number_itself_is_right_however_it_is_rounded():
    assert judge.guess(0.1 * 3, 0.3, within=1)


def test_a_single_guess_keeps_its_unit():
    said = str(judge.guess(1000.0, 4000.0, "GB/s"))
    assert said.startswith("Guessed") and "GB/s" in said
