"""Eager softmax: right in five operations, and wrong in the ways the chapter shows."""

import warnings

import pytest
import torch

from kernels import eager
from kernels.lab import backend, check, counters, meter
from kernels.lab.check import Fault
from tests.helpers import assert_right, matrix

SHAPES = [(1, 1), (3, 781), (64, 128)]
FIVE = ["max", "sub", "exp", "sum", "div"]


def names(traffic: meter.Traffic) -> list[str]:
    return [op.name for op in traffic.rows]


# ---- five lines ----------------------------------------------------------------------


def test_softmax_passes_the_check():
    assert check.softmax(eager.softmax)


@pytest.mark.parametrize("shape", SHAPES)
def test_moves_what_the_formula_says(shape):
    counted = meter.count(eager.softmax, matrix(*shape))
    assert names(counted) == FIVE
    assert counted.values == meter.naive(*shape)


def test_a_shift_changes_no_bit_where_it_rounds_nothing():
    eighths = (8 * matrix(16, 50)).round() / 8
    for shift in (-1e4, -100.0, 0.5, 89.0, 1e4):
        assert torch.equal((eighths + shift) - shift, eighths)
        shifted = eager.five_lines(eighths + shift)
        assert torch.equal(shifted, eager.five_lines(eighths))


@pytest.mark.parametrize(
    ("dtype", "last", "first"),
    [(torch.float32, 88, 89), (torch.float16, 11, 12), (torch.bfloat16, 88, 89)],
)
def test_the_unshifted_definition_fails_where_exp_overflows(dtype, last, first):
    row = torch.tensor([[0.0, -8.0, -16.0]], device=backend.DEVICE)
    right = torch.softmax(row, dim=1)
    fits, overflows = (row + last).to(dtype), (row + first).to(dtype)
    close = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 0.0}
    for x in (fits, overflows):
        torch.testing.assert_close(eager.five_lines(x).float(), right, **close)
    torch.testing.assert_close(eager.unshifted(fits).float(), right, **close)
    assert eager.unshifted(overflows).isnan().any()


def test_the_unshifted_sum_overflows_before_exp_does():
    row = torch.tensor([[11.0, 10.0, 9.0]], dtype=torch.float16, device=backend.DEVICE)
    assert torch.exp(row).isfinite().all()
    assert (eager.unshifted(row) == 0).all()


def test_float16_rows_whose_sum_overflows_are_right():
    zeros = torch.zeros(1, 70_000, dtype=torch.float16, device=backend.DEVICE)
    assert (eager.five_lines(zeros) == 0).all()  # 1 / inf
    assert torch.equal(eager.softmax(zeros), torch.softmax(zeros, dim=1))
    assert eager.softmax(zeros).min() > 0


# ---- the shift thrown away -----------------------------------------------------------


@pytest.mark.parametrize("function", [eager.unshifted, eager.shift_thrown_away])
def test_the_check_finds_what_is_not_shifted(function, capsys):
    assert check.softmax(function).failure.fault == Fault.NAN
    assert "shifted by +1e4" in capsys.readouterr().out


def test_torchscript_drops_the_operations_whose_result_is_thrown_away():
    x = matrix(4, 8)
    assert names(meter.count(eager.shift_thrown_away, x)) == FIVE
    graph = meter.count(lambda x: eager.scripted(eager.shift_thrown_away)(x), x)
    assert names(graph) == ["exp", "sum", "div"]


# ---- graphs --------------------------------------------------------------------------


def test_torchscript_computes_the_same():
    x = matrix(64, 100)
    for _ in range(3):  # TorchScript profiles, optimises, and runs what it made
        assert_right(eager.scripted(eager.five_lines)(x), x)


def test_scripting_warns_of_nothing():
    eager.scripted.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager.scripted(eager.five_lines)


class Keep:
    """A backend for torch.compile that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> object:
        self.graphs.append(graph)
        return graph.forward


def test_torch_compile_sees_all_five_lines_at_once():
    keep, x = Keep(), matrix(4, 8)
    result = eager.compiled(eager.five_lines, keep)(x)
    assert torch.equal(result, eager.five_lines(x))
    (graph,) = keep.graphs
    found = [node.name for node in graph.graph.nodes if node.op.startswith("call")]
    assert found[1:] == ["row_max", "shifted", "numerator", "denominator", "truediv"]


def test_torch_compile_compiles_anew_for_each_of_many_shapes():
    keep = Keep()
    function = eager.compiled(eager.five_lines, keep)
    for n_cols in range(1, 13):
        function(matrix(2, n_cols))
    assert len(keep.graphs) == 12


def test_torch_compile_gives_up_without_an_error_unless_its_limit_is_raised():
    assert torch._dynamo.config._config["recompile_limit"].default == 8
    keep = Keep()
    function = torch.compile(eager.unshifted, dynamic=False, backend=keep)
    with torch._dynamo.config.patch(recompile_limit=8):
        for n_cols in range(1, 13):
            function(matrix(2, n_cols))
    assert len(keep.graphs) == 8


# ---- what only a GPU can tell --------------------------------------------------------


@pytest.mark.gpu
def test_each_line_is_a_kernel_and_torch_softmax_is_one():
    x = matrix(4096, 1024)
    assert len(counters.launched(eager.five_lines, x)) == 5
    assert len(counters.launched(torch.softmax, x, 1)) == 1
    assert (
        len(counters.launched(eager.scripted(eager.five_lines), x)) == 4
    )  # sub with exp


@pytest.mark.gpu
def test_torch_compile_writes_one_triton_kernel_that_is_right():
    x = matrix(4096, 1024)
    function = eager.compiled(eager.five_lines)
    assert_right(function(x), x)
    (name,) = counters.launched(function, x)
    assert name.startswith("triton_")
