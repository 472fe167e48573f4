"""The predictions are what the meter counts, line by line and in all."""

import pytest
import torch

from kernels import eager, traffic
from kernels.lab import backend, meter
from tests.helpers import matrix

SHAPES = [(1, 1), (3, 1), (7, 64), (64, 781)]
NAMES = ["max", "subtract", "exp", "sum", "divide"]


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_predicted_is_counted_line_by_line(shape, dtype):
    counted = meter.count(eager.five_lines, matrix(*shape, dtype))
    predicted = traffic.predicted(*shape)
    assert [line.name for line in predicted] == NAMES
    for line, op in zip(predicted, counted.rows, strict=True):
        moved = (op.read_values, op.written_values, op.written_indices)
        assert (line.read, line.written, line.indices) == moved
        assert line.read_bytes(dtype.itemsize) == op.read_bytes
        assert line.written_bytes(dtype.itemsize) == op.written_bytes
        assert line.bytes(dtype.itemsize) == op.bytes


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), *SHAPES, (8192, 8192)])
def test_the_five_lines_sum_to_the_formula(shape):
    lines = traffic.predicted(*shape)
    sums = [sum(column) for column in list(zip(*lines, strict=True))[1:]]
    assert tuple(sums) == meter.naive(*shape)


def test_each_line_alone_moves_what_it_moves_among_the_five():
    x = matrix(7, 64)
    whole = meter.count(eager.five_lines, x).rows
    assert list(traffic.LINES) == NAMES
    for line, among in zip(traffic.LINES.values(), whole, strict=True):
        alone = meter.count(line, x).rows[-1]  # the first call also makes its column
        assert alone == among


def test_no_shape():
    with pytest.raises(ValueError, match="n_cols must be 0 or more, got -1"):
        traffic.predicted(2, -1)
    with pytest.raises(TypeError, match="n_rows must be an int, got float"):
        traffic.predicted(2.0, 1)


def test_predicted_time():
    assert traffic.predicted_us(4.8e9, 4800) == 1e3
    for gbps in (0, -1.0, float("nan")):
        with pytest.raises(
            ValueError, match="gbps must be a bandwidth in GB/s above 0, got"
        ):
            traffic.predicted_us(1, gbps)


def test_operations():
    assert traffic.operations(1, 1) == 3  # a subtraction, an exponential, a division
    assert traffic.operations(10, 4) == 10 * (3 + 4 + 4 + 3 + 4)
    assert traffic.operations(10, 0) == 0


@pytest.mark.parametrize("dtype", backend.DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 64), (3, 1001)])
def test_copy_moves_each_value_once(shape, dtype):
    x = matrix(*shape, dtype)
    assert torch.equal(traffic.copy(x), x)
    assert meter.count(traffic.copy, x).values == meter.fused(*shape)


def test_empty_moves_nothing():
    assert meter.count(traffic.empty, matrix(2, 3)).bytes == 0
