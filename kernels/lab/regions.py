"""The benchmark's regions: which matrices, and what is demanded of the course there.

A region is a part of the plane of shapes in which one thing decides: the bandwidth of
memory, the alignment of rows, the number of programs, the start of a kernel. Each has
its bars, and shapes that cover it, edges included.

The bars compare medians of one run: with the copy of the same matrix, and with the
fastest of those peers that took it.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kernels.lab import bench
from kernels.lab.bench import Measurement, Results

Case = tuple[torch.dtype, int, int]  # dtype, n_rows, n_cols

PEERS = ("torch", "torch.compile", "tutorial", "liger", "quack", "tileops")
MEBI, MEGA = 2**20, 10**6
LARGE = 512 * MEBI  # bytes read and written
EDGE = 256 * MEGA  # the least that counts as large

EVEN = (
    *(32, 64, 128, 256, 512, 1000, 1024, 2048, 4096, 5120, 8192, 12672, 16384),
    *(32000, 32768, 65536, 128256, 131072, 151936, 262144, 524288, 1048576),
)
ODD = (
    *(33, 63, 100, 129, 257, 781, 1001, 2049, 4097, 8191, 12345),
    *(50257, 65537, 100003, 262145, 1000003),
)
WIDTHS = {781: 800, 1000: 1001, 4096: 4104, 50257: 50304, 131072: 131080}
"""Columns that are used, and columns that there are, in the region of row strides."""


@dataclass(frozen=True)
class Region:
    """Some cases, and the bars that hold for them.

    Attributes:
        name: for the command line.
        title: for figures.
        cases: dtype, n_rows and n_cols of each matrix.
        share: of the copy's bandwidth, at least, in every case; None demands nothing.
        mean: the same in the geometric mean.
        best: of the fastest peer's, at least, in every case.
        stem: of the file that has its measurements.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    share: float | None = None
    mean: float | None = None
    best: float | None = None
    stem: str = "fastest"


@dataclass(frozen=True)
class Loss:
    """A case below a bar.

    Attributes:
        region: its name.
        bar: what was demanded, in words.
        dtype, n_rows, n_cols: the case; "", 0, 0 for the mean of a region.
        against: the copy, or the peer that was faster.
        got: the ratio that was reached.
        wanted: the ratio that was demanded.
    """

    region: str
    bar: str
    dtype: str
    n_rows: int
    n_cols: int
    against: str
    got: float
    wanted: float


@dataclass(frozen=True)
class Standing:
    """How a provider stands in a region.

    Attributes:
        share: of the copy's bandwidth in the worst case.
        mean: the same in the geometric mean.
        best: of the fastest peer's in the worst case; inf where no peer took any.
    """

    share: float
    mean: float
    best: float


def rows_of(total: int, n_cols: int, dtype: torch.dtype) -> int:
    """The fewest rows of n_cols values that make `total` bytes, read and written."""
    return math.ceil(total / (2 * n_cols * dtype.itemsize))


def _cases(
    total: int, columns: Iterable[int], dtypes: Iterable[torch.dtype]
) -> tuple[Case, ...]:
    columns = tuple(columns)
    return tuple((d, rows_of(total, n, d), n) for d in dtypes for n in columns)


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_TWO = _F32, _BF16

REGIONS = (
    Region(
        "large",
        "256 MB or more, N divisible by 8",
        _cases(LARGE, EVEN, _TWO)
        + _cases(LARGE, (64, 1024, 8192, 32768, 131072, 1048576), [_F16])
        + _cases(EDGE, (32, 1024, 8192, 32768, 131072), _TWO),
        share=0.97,
        mean=0.99,
        best=0.99,
    ),
    Region(
        "any",
        "256 MB or more, any N",
        _cases(LARGE, ODD, _TWO)
        + _cases(LARGE, (781, 12345, 50257), [_F16])
        + _cases(EDGE, (781, 50257), _TWO),
        share=0.93,
    ),
    Region(
        "strided",
        "256 MB or more, any row stride",
        _cases(LARGE, WIDTHS, _TWO),
        share=0.93,
        stem="fastest_strided",
    ),
    Region(
        "middle",
        "16 to 256 MB, any N",
        tuple(
            case
            for total in (16 * MEGA, 64 * MEGA, 200 * MEGA)
            for case in _cases(
                total, (100, 1024, 4097, 8192, 32768, 50257, 131072), _TWO
            )
        ),
        best=0.99,
    ),
    Region(
        "longest",
        "N above 1M",
        _cases(LARGE, (2097152, 3000001, 4194304), _TWO),
        share=0.90,
    ),
    Region(
        "few",
        "few rows, N from 64k to 1M",
        tuple(
            (dtype, n_rows, n_cols)
            for dtype, columns in (
                (_BF16, (65536, 131072, 262144, 524288, 1048576)),
                (_F32, (65536, 151936, 1048576)),
            )
            for n_cols in columns
            for n_rows in (1, 2, 4, 8, 16, 32, 64, 128)
        ),
        best=1.0,
    ),
    Region(
        "small",
        "under 1 MB",
        tuple(
            (dtype, n_rows, n_cols)
            for dtype in _TWO
            for n_rows, n_cols in (
                *((1, 1024), (8, 128), (32, 512), (128, 128)),
                *((64, 1024), (128, 512), (256, 256), (1, 65536)),
            )
        ),
        best=1.0,
    ),
)
BY_NAME = {region.name: region for region in REGIONS}
HOST = ((_F32, 8, 128), (_F32, 64, 1024), (_BF16, 128, 512))
"""Where the host's cost of a call is measured: the GPU needs less than it does."""
HOST_BAR = 1.3
"""Times a bare launch with `empty_like`, at most."""


def sliced(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """The first n_cols columns of a wider matrix, for the region of row strides.

    Raises:
        ValueError: WIDTHS has no such n_cols.
    """
    if n_cols not in WIDTHS:
        raise ValueError(f"n_cols must be one of {[*WIDTHS]}, got {n_cols}")
    return bench.random(dtype, n_rows, WIDTHS[n_cols])[:, :n_cols]


def of(region: Region, results: Results) -> Results:
    """The measurements of a region, in the order of its cases."""
    names = {named(case): place for place, case in enumerate(region.cases)}
    some = [one for one in results if _case(one) in names]
    return Results(sorted(some, key=lambda one: names[_case(one)]), results.source)


def against(results: Results, names: Sequence[str]) -> dict[tuple, tuple[str, float]]:
    """The fastest of these providers, and its median in µs, for each case."""
    best: dict[tuple, tuple[str, float]] = {}
    for one in results:
        case = _case(one)
        if one.provider in names and one.p50_us < best.get(case, ("", math.inf))[1]:
            best[case] = one.provider, one.p50_us
    return best


def losses(
    region: Region,
    results: Results,
    ours: str = "fastest",
    peers: Sequence[str] = PEERS,
) -> list[Loss]:
    """Where a provider of the course is below a bar of the region.

    Args:
        region: with the bars.
        results: measurements of all its cases, and more.
        ours: the provider that the bars are for.
        peers: those that it is compared with.

    Raises:
        ValueError: there is no measurement of it, or no copy, for a case.
    """
    lost = []
    ratios = _ratios(region, results, ours, peers)
    for case, *both in ratios:
        bars = ("share of the copy", region.share), ("best peer", region.best)
        for (bar, wanted), (other, got) in zip(bars, both, strict=True):
            if wanted is not None and got < wanted:
                lost.append(Loss(region.name, bar, *case, other, got, wanted))
    mean = statistics.geometric_mean(share for _, (_, share), _ in ratios)
    if region.mean is not None and mean < region.mean:
        lost.append(
            Loss(region.name, "mean share", "", 0, 0, "copy", mean, region.mean)
        )
    return lost


def standing(
    region: Region,
    results: Results,
    ours: str = "fastest",
    peers: Sequence[str] = PEERS,
) -> Standing:
    """How a provider of the course stands in a region; arguments as in `losses`.

    Raises:
        ValueError: there is no measurement of it, or no copy, for a case.
    """
    ratios = _ratios(region, results, ours, peers)
    shares = [share for _, (_, share), _ in ratios]
    best = min(ratio for *_, (_, ratio) in ratios)
    return Standing(min(shares), statistics.geometric_mean(shares), best)


def _ratios(
    region: Region, results: Results, ours: str, peers: Sequence[str]
) -> list[tuple[tuple, tuple[str, float], tuple[str, float]]]:
    """For each case: the copy's and the fastest peer's name, and time over ours."""
    some = of(region, results)
    mine, copies, best = (against(some, who) for who in ([ours], ["copy"], peers))
    ratios = []
    for case in map(named, region.cases):
        if case not in mine or case not in copies:
            raise ValueError(f"results must have {ours!r} and 'copy' at {case}")
        pair = copies[case], best.get(case, ("", math.inf))
        ratios.append((case, *((who, time / mine[case][1]) for who, time in pair)))
    return ratios


def _case(one: Measurement) -> tuple[str, int, int]:
    return one.dtype, one.n_rows, one.n_cols


def named(case: Case) -> tuple[str, int, int]:
    return str(case[0]).removeprefix("torch."), *case[1:]
