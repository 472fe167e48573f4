"""Kernels with one fault each: right where they look right, and caught where not."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kernels import debugging, program
from kernels.lab import backend, check, compile, gpu, meter, occupancy, process
from tests.helpers import GPUS, assert_right, dtypes_for, fewer, matrix

HALF = torch.bfloat16
PLAIN_CASE = {"dtypes": [torch.float32], "layouts": ["contiguous"], "max_cols": 65}
# Far more than a call takes, far less than a hang.
LIMIT_S = fewer(1, 20)


def in_larger(n_rows: int, n_cols: int, dtype=torch.float32) -> torch.Tensor:
    """A matrix with a row behind it, so that a read past its end is harmless."""
    return matrix(n_rows + 1, n_cols, dtype)[:-1]


# ---- each looks right ----------------------------------------------------------------


@pytest.mark.parametrize("softmax", debugging.SUSPECTS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_every_suspect_is_right_on_short_rows_of_a_power_of_two(softmax, dtype):
    x = in_larger(4, 64, dtype)
    assert_right(softmax(x), x)


@pytest.mark.parametrize("softmax", debugging.SUSPECTS)
def test_one_plausible_test_finds_no_suspect(softmax):
    x = in_larger(4, 1024) / 3  # normal
    torch.testing.assert_close(softmax(x), torch.softmax(x, dim=1))


@pytest.mark.parametrize(
    "call",
    [*debugging.SUSPECTS, debugging.asserting, debugging.in_turn],
    ids=lambda call: call.__name__,
)
def test_bad_input_and_empty_input_are_met_as_everywhere(call):
    with pytest.raises(TypeError, match=r"x must be .*got list"):
        call([[1.0]])
    with pytest.raises(ValueError, match="2 dimensions"):
        call(matrix(2, 3)[0])
    assert call(matrix(2, 3)[:, :0]).shape == (2, 0)
    assert call(matrix(2, 3)[:0]).shape == (0, 3)


def test_suspects_are_the_functions_that_return():
    names = [each.__name__ for each in debugging.SUSPECTS]
    kernels = {name for name in vars(debugging) if name.endswith("_kernel")}
    harmless = {"asserting_kernel", "in_turn_kernel"}
    assert {f"{name}_kernel" for name in names} == kernels - harmless


# ---- and is caught -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("softmax", "fault"),
    [
        (debugging.unshifted, check.Fault.NAN),
        (debugging.zero_filled, check.Fault.SUM),
        (debugging.unmasked, check.Fault.SUM),
    ],
)
def test_the_checker_catches_it_on_small_matrices(softmax, fault, capsys):
    summary = check.softmax(softmax, **PLAIN_CASE)
    assert not summary and summary.failure.fault is fault
    assert " of a 13 × 10 matrix" in capsys.readouterr().out


def test_the_checker_catches_a_narrow_sum_on_long_rows_of_16_bits_only():
    contiguous = {"layouts": ["contiguous"]}
    assert check.softmax(debugging.narrow_sum, dtypes=[torch.float32], **contiguous)
    assert check.softmax(debugging.narrow_sum, dtypes=[HALF], max_cols=32, **contiguous)
    summary = check.softmax(debugging.narrow_sum, dtypes=[HALF], **contiguous)
    assert not summary and summary.failure.shape[1] > 256


def test_the_meter_catches_reads_behind_the_last_row():
    x = matrix(4, 1000)
    with pytest.raises(meter.OutOfBounds, match=r"unmasked_kernel, program 3: load"):
        meter.count(debugging.unmasked, x)
    assert meter.count(debugging.unmasked, x[:, :512].contiguous())


def far_apart() -> torch.Tensor:
    """Three rows of four values, 2^30 elements apart; only they are touched."""
    x = torch.empty_strided((3, 4), (2**30, 1), dtype=HALF, device=backend.DEVICE)
    return x.fill_(1.0)


def far_apart_softmax() -> None:
    debugging.narrow_offset(far_apart())


def test_no_small_matrix_finds_a_narrow_offset_but_the_meter_does():
    assert check.softmax(debugging.narrow_offset, **PLAIN_CASE)
    with pytest.raises(
        meter.OutOfBounds, match=r"program 2: load at offset -2147483648"
    ):
        meter.count(far_apart_softmax)


def first_call() -> torch.Tensor:
    return debugging.in_turn(matrix(3, 33)).cpu()


def test_a_second_call_in_turn_never_returns():
    """The time limit of a process finds it, in the interpreter and on a GPU."""
    world = "interpreter" if backend.INTERPRETED else "compiler"
    helper = process.Helper(world, hide_gpu=False)
    try:
        assert_right(helper.call(first_call), matrix(3, 33).cpu())
        with pytest.raises(TimeoutError, match=f"no answer within {LIMIT_S} s"):
            helper.call(first_call, limit_s=LIMIT_S)
    finally:
        helper.stop()


# ---- assertions ----------------------------------------------------------------------

LARGE = [[100.0, 101.0]]


def test_a_static_assertion_is_always_heard():
    errors = {"AssertionError", "CompileTimeAssertionFailure", "InterpreterError"}
    with pytest.raises(Exception, match="a row must fit 4096 columns") as raised:
        debugging.asserting(matrix(1, 4097))
    assert raised.type.__name__ in errors


def test_a_device_assertion_is_silent_unless_it_is_asked_for():
    x = torch.tensor(LARGE, device=backend.DEVICE)
    assert debugging.asserting(x).isnan().all()
    small = matrix(3, 33)
    assert_right(debugging.asserting(small, debug=True), small)


def test_a_plain_assertion_is_heard_in_the_interpreter():
    x = torch.tensor(LARGE, device=backend.DEVICE)
    if backend.INTERPRETED:
        with pytest.raises(Exception, match="exp overflows"):
            debugging.asserting(x, plain=True)
        assert debugging.asserting(x, debug=True).isnan().all()  # and this is not
    else:
        assert debugging.asserting(x, plain=True).isnan().all()


@pytest.mark.parametrize("plain", [True, False])
def test_a_debug_build_holds_the_assertion_and_checks_of_overflow(plain):
    x = compile.pointer(torch.float32)
    arguments = debugging.asserting_kernel, x, x, 1000
    constants = {"BLOCK_COLS": 1024, "PLAIN": plain}
    asserts = {
        debug: compile.aot(*arguments, **constants, debug=debug).lines(
            r"tt\.assert", "ttir"
        )
        for debug in (False, True)
    }
    assert asserts[False] == []
    said = "\n".join(asserts[True])
    assert "exp overflows" in said and "int32 overflow detected" in said


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["asserting", "narrow_offset"])
def test_a_debug_build_stops_on_the_gpu(call):
    from benchmarks import faults

    said = "\n".join(row["line"] for row in faults.run(call, TRITON_DEBUG="1")())
    words = {"asserting": "exp overflows", "narrow_offset": "int32 overflow detected"}
    assert words[call] in said and "sums of the rows" not in said


# ---- the compiler --------------------------------------------------------------------


def launches(dtype: torch.dtype):
    """Every launch of the chapter, with what `compile.aot_all` takes."""
    x, word = compile.pointer(dtype), compile.pointer(torch.int32)
    block = {"BLOCK_COLS": 1024}
    for kernel in (
        debugging.unshifted_kernel,
        debugging.zero_filled_kernel,
        debugging.unmasked_kernel,
    ):
        yield kernel, (x, x, 1000), block
    for plain in (True, False):
        constants = block | {"PLAIN": plain, "debug": True}
        yield debugging.asserting_kernel, (x, x, 1000), constants
    piece = block | {"PIECE": debugging.PIECE}
    yield debugging.narrow_sum_kernel, (x, x, 1000), piece
    yield debugging.narrow_offset_kernel, (x, x, 2**30, 1000), block
    yield debugging.in_turn_kernel, (x, x, word, 1000), block


@pytest.mark.thorough
@pytest.mark.parametrize("name", GPUS)
def test_every_launch_compiles_and_fits(name):
    on = gpu.named(name)
    for dtype in dtypes_for(name):
        for compiled in compile.aot_all(list(launches(dtype)), gpu=on):
            assert occupancy.of(compiled).blocks_per_sm >= 1, str(compiled)


def test_every_kernel_is_among_them():
    kernels = {name for name in vars(debugging) if name.endswith("_kernel")}
    assert kernels == {kernel.fn.__name__ for kernel, *_ in launches(HALF)}


def test_the_right_kernel_is_right_where_these_are_not():
    for x in (in_larger(4, 1000), in_larger(4, 64) + 100, in_larger(2, 8192, HALF)):
        assert_right(program.softmax(x), x)


# ---- the page ------------------------------------------------------------------------


def test_the_command_of_the_page_names_the_line_that_the_debugger_stops_at():
    (notebook,) = (backend.ROOT / "notebooks").glob("*_debugging.ipynb")
    (line,) = set(
        re.findall(r"break kernels/debugging\.py:(\d+)", notebook.read_text())
    )
    lines = Path(debugging.__file__).read_text().splitlines()
    assert lines[int(line) - 1].strip() == "numerator = tl.exp(x)"
    assert int(line) < debugging.asserting_kernel.fn.__code__.co_firstlineno


PLAIN, CONSTANT = 2.0, tl.constexpr(2.0)


@triton.jit
def plain_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * PLAIN)


@triton.jit
def constant_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * CONSTANT)


def test_the_compiler_takes_a_global_only_if_it_is_a_constexpr():
    x = compile.pointer(torch.float32)
    with pytest.raises(triton.CompilationError, match="Cannot access global variable"):
        compile.aot(plain_kernel, x)
    assert compile.aot(constant_kernel, x).name == "constant_kernel"


def test_a_global_that_changes_is_noticed_on_a_gpu_only(monkeypatch):
    x = torch.ones(1, device=backend.DEVICE)
    constant_kernel[(1,)](x)
    monkeypatch.setitem(globals(), "CONSTANT", tl.constexpr(3.0))
    if backend.INTERPRETED:
        constant_kernel[(1,)](x)
        assert x.item() == 6
    else:
        with pytest.raises(RuntimeError, match="has changed since we compiled"):
            constant_kernel[(1,)](x)
