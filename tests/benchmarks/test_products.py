"""The experiments of chapter `matmul`: right products, fair turns, full rows."""

import re

import pandas as pd
import pytest
import torch

from benchmarks import products
from kernels import matmul
from kernels.lab import backend, clock, counters, models, record
from kernels.lab import products as lab
from tests.helpers import in_company

(PAGE,) = (backend.ROOT / "notebooks").glob("*_matmul.ipynb")


@pytest.fixture
def turns(monkeypatch):
    """The calls that were timed, in order; each takes 2 µs."""
    log = []

    def once(call):
        log.append(call)
        call()
        return 2.0

    monkeypatch.setattr(products, "_once", once)
    monkeypatch.setattr(clock, "require_gpu", lambda: None)
    monkeypatch.setattr(clock, "alone", lambda: torch.no_grad())
    monkeypatch.setattr(products, "CALLS", 3)
    return log


@pytest.mark.parametrize("activation", matmul.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(40, 24, 72), (33, 17, 9)])
def test_providers_compute_the_same(activation, shape):
    for dtype in lab.DTYPES:
        m, n, k = shape
        a, b = products.operands(m, n, k, dtype)
        if backend.INTERPRETED and dtype == torch.bfloat16:
            a, b = a.half(), b.half()  # see `matmul.matmul`
        calls = products.providers(a, b, activation)
        described = {"matmul.descriptors"} if k % 8 == 0 else set()
        beside = {"cublas, persistent", *products.PARTS}
        wanted = {"matmul.pointers", "cublas"} | described
        assert set(calls) == wanted | (beside if activation == "softmax" else set())
        for name in set(calls) - set(products.PARTS):
            assert products.error(calls[name](), a, b, activation) < 1, name


def test_an_error_above_1_is_none_that_is_allowed():
    a, b = products.operands(20, 20, 20, torch.float16)
    assert products.error(a @ b, a, b, None) < 1
    assert products.error(1.01 * (a @ b), a, b, None) > 1


def test_the_product_has_a_variance_of_1():
    a, b = products.operands(256, 256, 256, torch.float16)
    assert (a.float() @ b.float()).var().item() == pytest.approx(1, rel=0.05)


def test_providers_take_turns(turns):
    calls = {name: lambda name=name: name for name in "ab"}
    assert products.in_turns(calls) == {"a": (2.0, 2.0, 2.0), "b": (2.0, 2.0, 2.0)}
    assert [call() for call in turns] == ["a", "b"] * 4


def test_rows_say_their_case(turns, monkeypatch):
    monkeypatch.setattr(products, "SQUARE", (32,))
    monkeypatch.setattr(products, "RAGGED", ((5, 6, 7),))
    monkeypatch.setattr(products, "NARROW", ((32, 16, 8),))
    cases = [each for each in products.cases() if each[1] == torch.float16]
    cases = [
        (act, dtype, (8, 8, 8)) if act == "leaky_relu" else (act, dtype, shape)
        for act, dtype, shape in cases
    ]
    monkeypatch.setattr(products, "cases", lambda: iter(cases))
    rows = list(products.times())
    assert len({tuple(row) for row in rows}) == 1  # all have the same keys
    assert [row["provider"] for row in rows[:3]] == [
        *("matmul.pointers", "matmul.descriptors", "cublas")
    ]
    assert {row["activation"] for row in rows} == {"none", "leaky_relu", "softmax"}
    first = rows[0]
    assert (first["m"], first["n"], first["k"]) == (32, 32, 32)
    assert first["tflops"] == round(2 * 32**3 / 2.0 / 1e6, 2)
    assert all(
        row["error"] < 1 for row in rows if row["provider"] not in products.PARTS
    )


def test_a_case_that_does_not_fit_is_left_out(turns, monkeypatch, capsys):
    monkeypatch.setattr(products.gpu, "free_bytes", lambda: 0)
    assert list(products.times()) == []
    assert "8192 × 8192 × 8192 is left out" in capsys.readouterr().out


def test_orders_differ_in_their_groups_only(monkeypatch):
    metrics = dict.fromkeys(products.METRICS.values(), 7)
    launches = list(products.ordered("meta"))
    found = [{"kernel": "matmul_kernel", **metrics} for _ in launches]
    monkeypatch.setattr(counters, "profile", lambda *args, **options: found)
    rows = products.orders()
    assert [(row["size"], row["group_m"]) for row in rows] == [
        (size, group_m) for size in products.ORDERED for group_m in products.GROUPS
    ]
    for (_, plain), (_, grouped) in zip(launches[::2], launches[1::2], strict=True):
        assert plain.grid == grouped.grid
        assert {**plain.constants, "GROUP_M": 8} == grouped.constants
        assert plain.kernel is matmul.matmul_kernel


@pytest.mark.gpu
@in_company
def test_the_clock_of_turns_agrees_with_that_of_the_course():
    a, b = products.operands(2048, 2048, 2048, torch.bfloat16)
    call = products.providers(a, b, None)["cublas"]
    (_, us, _), (_, device_us, _) = (
        products.in_turns({"cublas": call})["cublas"],
        clock.device_us(call),
    )
    assert us == pytest.approx(device_us, rel=0.25)


# ---- what the chapter says of the H200's record, and no cell of it prints ------------


def of_h200(name):
    return pd.read_csv(record.RECORDED / "nvidia-h200" / f"{name}.csv")


def test_a_model_of_half_the_l2_reads_the_counted_bytes_at_4096():
    counted = of_h200("matmul_orders")
    for row in counted[counted["size"] == 4096].itertuples():
        tiles = [models.grouped_tile(p, 32, 16, row.group_m) for p in range(32 * 16)]
        loads = models.loads_of_tiles(tiles, 4096 // 256, 132, widths=(1, 2))
        block = 128 * 256 * 2
        served = models.served_by_lru(loads, 30 * 2**20 // block)
        predicted = block * served.count(False)
        assert predicted == pytest.approx(row.dram_read_bytes, rel=0.03)


def test_fewer_sectors_reach_l2_than_the_programs_load_at_4096():
    counted = of_h200("matmul_orders")
    assert (counted["l2_sectors"][counted["size"] == 4096] < 512 * 64 * 1536).all()


def test_fusing_gains_nothing_at_256():
    times = of_h200("matmul")
    us = times[(times["n"] == 256) & (times["dtype"] == "bfloat16")]
    us = us.set_index("provider")["us"]
    fused, two = us["matmul.descriptors"], us["cublas, persistent"]
    assert fused == pytest.approx(two, rel=0.015)
    said = re.search(r"one kernel and two take about (\d+) µs", PAGE.read_text())
    assert int(said[1]) == pytest.approx(fused, rel=0.01)
