"""Experiments of chapter `matmul`: times beside cuBLAS, and the orders' counters.

from benchmarks import products
observed = record.observe("matmul", products.times)
observed = record.observe("matmul_orders", products.orders)

A long product heats the GPU, and a hot GPU lowers its clock. So the providers of a
shape take turns, call by call: whatever the clock does, it does to all of them.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels import matmul, persistent
from kernels.lab import backend, clock, counters, gpu, products
from kernels.lab.launch import Launch

SQUARE = (512, 1024, 2048, 4096, 8192)
RAGGED = ((1000, 1000, 1000), (2048, 50257, 768), (1823, 781, 1001))
"""(M, N, K): rows of 16-byte multiples; a vocabulary; no power of two divides them."""
NARROW = ((2**18, 128, 64), (2**17, 256, 256))
"""(M, N, K) of the softmax behind a product: one tile is as wide as the product."""
CALLS, FEW_CALLS, LONG_US = 25, 3, 40_000  # few where a GPU is too slow for a shape
HOLD = 800_000  # clock cycles, about 0.4 ms, in which the host gets ahead
ROWS = 512  # whose errors are looked at
PARTS = ("cublas alone", "persistent alone", "copy")

Call = Callable[[], torch.Tensor]

FUNCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda product: product,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "softmax": partial(torch.softmax, dim=1),
}
"""PyTorch's function for each activation."""


def cases() -> Iterator[tuple[str | None, torch.dtype, tuple[int, int, int]]]:
    """(activation, dtype, (M, N, K)) of every case."""
    for dtype in products.DTYPES:
        for size in SQUARE:
            yield None, dtype, (size, size, size)
        for shape in RAGGED:
            yield None, dtype, shape
        yield "leaky_relu", dtype, (4096, 4096, 4096)
        for shape in NARROW:
            yield "softmax", dtype, shape


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A and B, normally distributed, so that A · B is, with a variance of 1."""
    generator = torch.Generator(backend.DEVICE).manual_seed(0)
    make = partial(torch.randn, device=backend.DEVICE, dtype=dtype, generator=generator)
    return make(m, k) * k**-0.25, make(k, n) * k**-0.25


def providers(
    a: torch.Tensor, b: torch.Tensor, activation: str | None
) -> dict[str, Call]:
    """The calls that are compared on one pair of operands, by their names."""
    output = torch.empty(len(a), b.shape[1], dtype=a.dtype, device=a.device)

    def run(launch: Launch) -> torch.Tensor:
        launch(output, a, b)
        return output

    calls: dict[str, Call] = {}
    for name, with_descriptors in (("pointers", False), ("descriptors", True)):
        launch = matmul.launch_for(output, a, b, activation, with_descriptors)
        if (launch.kernel is matmul.descriptor_kernel) == with_descriptors:
            calls[f"matmul.{name}"] = partial(run, launch)
    function = FUNCTIONS[activation]
    calls["cublas"] = lambda: function(torch.matmul(a, b))
    if activation == "softmax":
        product = torch.matmul(a, b)
        calls["cublas, persistent"] = lambda: persistent.softmax(torch.matmul(a, b))
        calls["cublas alone"] = lambda: torch.matmul(a, b)
        calls["persistent alone"] = lambda: persistent.softmax(product)
        calls["copy"] = output.clone
    return calls


def times() -> Iterator[dict[str, Any]]:
    """The times of every provider in every case.

    Yields:
        Rows of provider, activation, dtype, m, n, k, low_us, us and high_us (the 20th,
        50th and 80th percentile), tflops (2MNK operations over the median) and error
        (the largest error as a share of `products.allowed`). The provider "cublas" is
        torch.matmul, with PyTorch's activation behind it. Beside a fused softmax there
        are its parts, each alone, and a copy of C; they have no error.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    for activation, dtype, shape in cases():
        m, n, k = shape
        if 2 * (m * k + k * n + 2 * m * n) * dtype.itemsize > gpu.free_bytes():
            print(f"{m} × {n} × {k} is left out: it does not fit the GPU's memory")
            continue
        a, b = operands(*shape, dtype)
        calls = providers(a, b, activation)
        for name, (low, us, high) in in_turns(calls).items():
            whole = name not in PARTS
            yield {
                "provider": name,
                "activation": activation or "none",
                "dtype": str(dtype).removeprefix("torch."),
                **{"m": m, "n": n, "k": k, "low_us": low, "us": us, "high_us": high},
                "tflops": round(2 * m * n * k / us / 1e6, 2),
                "error": error(calls[name](), a, b, activation) if whole else None,
            }


def error(
    got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, activation: str | None
) -> float:
    """The largest error of some rows of a result, as a share of what is allowed."""
    some = slice(None, None, max(1, len(a) // ROWS))
    expected = FUNCTIONS[activation](products.exact(a[some], b))
    differences = (got[some].double() - expected).abs()
    return round((differences / products.allowed(a[some], b, expected)).max().item(), 3)


def in_turns(calls: Mapping[str, Call]) -> dict[str, clock.Times]:
    """The times of calls that take turns, L2 flushed before each; see `clock`.

    Raises:
        RuntimeError: nothing is timed here.
    """
    clock.require_gpu()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles, while others may still measure
    with clock.alone():
        slow = max(_once(call) for call in calls.values()) > LONG_US
        for _ in range(FEW_CALLS if slow else CALLS):
            for name, call in calls.items():
                times[name].append(_once(call))
    return {name: _percentiles(taken) for name, taken in times.items()}


def _once(call: Call) -> float:
    """The time between two events around a call, µs."""
    clock.flush_by_reading()
    clock.spin(HOLD)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def _percentiles(times: list[float]) -> clock.Times:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return round(cuts[1], 3), round(cuts[4], 3), round(cuts[7], 3)


# ---- the order of the programs -------------------------------------------------------

ORDERED, GROUPS = (4096, 8192, 16384), (1, 8)
METRICS = {
    "lts__t_sectors_op_read.sum": "l2_sectors",
    "lts__t_sectors_op_read_lookup_hit.sum": "l2_hits",
    "dram__bytes_read.sum": "dram_read_bytes",
    "gpu__time_duration.sum": "duration_us",
}


def orders() -> list[dict[str, Any]]:
    """The L2's counters of the kernel with pointers, in plain and in grouped order.

    Returns:
        Rows of size (of square bfloat16 matrices), group_m, the tile (block_m, block_n,
        block_k), and the values of METRICS.

    Raises:
        record.Unavailable: the counters cannot be read here.
    """
    rows = counters.profile(run_orders, METRICS, replay="application")
    return [
        {"size": size, "group_m": launch.constants["GROUP_M"]}
        | {
            key: launch.constants[key.upper()]
            for key in ("block_m", "block_n", "block_k")
        }
        | {key: row[key] for key in METRICS.values()}
        for (size, launch), row in zip(ordered("meta"), rows, strict=True)
    ]


def ordered(device: str) -> Iterator[tuple[int, Launch]]:
    """Each size, and a launch of its product in each order."""
    for size in ORDERED:
        x = torch.empty(size, size, dtype=torch.bfloat16, device=device)
        launch = matmul.launch_for(x, x, x, with_descriptors=False)
        for group_m in GROUPS:
            constants = {**launch.constants, "GROUP_M": group_m}
            yield size, replace(launch, constants=constants)


def run_orders() -> None:
    """What the profiler watches: each launch once, on an empty L2."""
    for size, launch in ordered("meta"):
        a, b = operands(size, size, size, torch.bfloat16)
        output = torch.empty_like(a)
        launch(output, a, b)  # compiles
        with counters.watched(emptied=True):
            launch(output, a, b)
