"""The benchmark's regions: which matrices are measured, and what the course must reach.

A region is a part of the plane of shapes in which one thing decides the time: the
bandwidth of memory, the alignment of rows, the number of programs, the start of a
kernel. Each region has bars, and shapes that cover it, edges included.

The bars compare medians of one run: the course's softmax with the copy of a contiguous
matrix of the same shape, and with the fastest peer that took the matrix. All functions
here take the measurements as `record.recorded("fastest")` or `record.sweep` returns
them, and use those of the clock "device".

The record misses some bars (`shortfalls`). For most of these, the following was tried
on an H200 and was no faster, or faster at some shapes and slower at others:

- 16 bits × 32768 (large, middle): 4 to 32 warps, each with several limits of registers;
  numerators kept or computed again; shared rows, also in parts of one warp.
- Rows from 512K values on (large, any, longest): programs that stay and read twice;
  parts read again from L2 or from shared memory; larger parts; prefetching a later
  program's part; other hints, patience, and orders of looking at words.
- Slices of 50257 values of 16 bits (strided; lower still in `windows.csv`, with another
  stride): parts of 8 to 64 KiB, 1 to 8 warps, accesses of 2 or 8 elements, two loads
  shifted in registers, one program for a row.
- Few rows: parts of 4 to 32 KiB, 1 to 32 warps; one program of 16 or 32 for a row.
- Small matrices: other tiles and warps. A kernel for one shape alone takes up to
  1.4 % less time (`benchmarks.classes`), but every shape would need one.

No trial is known of the others, where a peer takes 0.95 to 0.99 of our time: float32
1000000 × 32 and 31250 × 1024, bfloat16 489 × 8192, 123 × 131072, 15625 × 1024 and
3907 × 1024.

All cases are rows along the last dimension. Chapter `columns` measures others.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch

from kernels.lab import record
from kernels.lab.record import Case

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
"""In the region of row strides: the columns used, and the columns of the matrix."""

CASE = [*record.CASE, "input"]  # the columns that name a case


@dataclass(frozen=True)
class Region:
    """Cases, and the bars that hold for them.

    Attributes:
        name: for the command line.
        title: for figures.
        cases: the matrices.
        share: the least share of the copy's bandwidth, in every case; None demands
            nothing.
        mean: the least geometric mean of these shares.
        best: the least ratio of the fastest peer's time to ours, in every case.
        short: the cases of the short form, which other GPUs are measured with.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    share: float | None = None
    mean: float | None = None
    best: float | None = None
    short: tuple[Case, ...] = ()


def _cases(
    n_bytes: int,
    columns: Iterable[int],
    dtypes: Iterable[torch.dtype],
    input: str = "contiguous",
) -> tuple[Case, ...]:
    """The matrices of these columns, each of `n_bytes` bytes read and written."""
    columns = tuple(columns)
    return tuple(
        Case(dtype, rows_of(n_bytes, n_cols, dtype), n_cols, input)
        for dtype in dtypes
        for n_cols in columns
    )


def rows_of(n_bytes: int, n_cols: int, dtype: torch.dtype) -> int:
    """The fewest rows of n_cols values whose reading and writing moves `n_bytes`."""
    return math.ceil(n_bytes / (2 * n_cols * dtype.itemsize))


_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_TWO = _F32, _BF16
_FEW_ROWS, _FEW_SHORT = (1, 2, 4, 8, 16, 32, 64, 128), (1, 16, 64)

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
        short=_cases(LARGE, (64, 1024, 8192, 32768, 262144), _TWO),
    ),
    Region(
        "any",
        "256 MB or more, any N",
        _cases(LARGE, ODD, _TWO)
        + _cases(LARGE, (781, 12345, 50257), [_F16])
        + _cases(EDGE, (781, 50257), _TWO),
        share=0.93,
        short=_cases(LARGE, (100, 781, 12345, 50257), _TWO),
    ),
    Region(
        "strided",
        "256 MB or more, any row stride",
        _cases(LARGE, WIDTHS, _TWO, "sliced"),
        share=0.93,
        short=_cases(LARGE, (1000, 50257), _TWO, "sliced"),
    ),
    Region(
        "middle",
        "16 to 256 MB, any N",
        tuple(
            case
            for n_bytes in (16 * MEGA, 64 * MEGA, 200 * MEGA)
            for case in _cases(
                n_bytes, (100, 1024, 4097, 8192, 32768, 50257, 131072), _TWO
            )
        ),
        best=0.99,
        short=_cases(16 * MEGA, (1024, 32768), _TWO)
        + _cases(200 * MEGA, (4097,), _TWO),
    ),
    Region(
        "longest",
        "N above 1M",
        _cases(LARGE, (2097152, 3000001, 4194304), _TWO),
        share=0.90,
        short=_cases(LARGE, (3000001,), _TWO),
    ),
    Region(
        "few",
        "few rows, N from 64k to 1M",
        tuple(
            Case(dtype, n_rows, n_cols)
            for dtype, columns in (
                (_BF16, (65536, 131072, 262144, 524288, 1048576)),
                (_F32, (65536, 151936, 1048576)),
            )
            for n_cols in columns
            for n_rows in _FEW_ROWS
        ),
        best=1.0,
        short=tuple(
            Case(dtype, n_rows, n_cols)
            for dtype in _TWO
            for n_cols in (65536, 1048576)
            for n_rows in _FEW_SHORT
        ),
    ),
    Region(
        "small",
        "under 1 MB",
        tuple(
            Case(dtype, n_rows, n_cols)
            for dtype in _TWO
            for n_rows, n_cols in (
                *((1, 1024), (8, 128), (32, 512), (128, 128)),
                *((64, 1024), (128, 512), (256, 256), (1, 65536)),
            )
        ),
        best=1.0,
        short=tuple(
            Case(dtype, n_rows, n_cols)
            for dtype in _TWO
            for n_rows, n_cols in ((8, 128), (64, 1024))
        ),
    ),
)
BY_NAME = {region.name: region for region in REGIONS}
SHORT = tuple(replace(region, cases=region.short) for region in REGIONS)
"""The regions with the cases of the short form only, and the same bars."""

HOST = (Case(_F32, 8, 128), Case(_F32, 64, 1024), Case(_BF16, 128, 512))
"""Where the host's time of a call is measured: the GPU needs less time than it."""


def sliced(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """The first n_cols columns of a wider matrix, for the region of row strides.

    Raises:
        ValueError: WIDTHS has no such n_cols.
    """
    if n_cols not in WIDTHS:
        raise ValueError(f"n_cols must be one of {[*WIDTHS]}, got {n_cols}")
    return record.random(dtype, n_rows, WIDTHS[n_cols])[:, :n_cols]


def key(case: Case) -> tuple[str, int, int, str]:
    """The case as the columns of CASE name it, with the dtype in words."""
    return str(case.dtype).removeprefix("torch."), *case[1:]


# ---- comparing -----------------------------------------------------------------------


def covered_by(df: pd.DataFrame) -> tuple[Region, ...]:
    """REGIONS where all their cases are measured, SHORT where only those of SHORT are.

    Args:
        df: a whole benchmark, or its short form.

    Raises:
        ValueError: df lacks a case of SHORT.
    """
    rows = df[(df["provider"] != "copy") & (df["clock"] == "device")]
    measured = set(rows[CASE].itertuples(index=False, name=None))
    for regions in (REGIONS, SHORT):
        cases = (case for region in regions for case in region.cases)
        lacking = [key(case) for case in cases if key(case) not in measured]
        if not lacking:
            return regions
    raise ValueError(
        f"df must have the cases of the short benchmark at least, but lacks {lacking}; "
        "`make bench` on a GPU measures them"
    )


def of(region: Region, df: pd.DataFrame) -> pd.DataFrame:
    """The measurements of a region, in the order of its cases, each case's copy first.

    Args:
        region: with the cases.
        df: measurements of these cases, and others.
    """
    rows = df[(df["clock"] == "device") & df["p50_us"].notna()]
    is_copy = rows["provider"] == "copy"
    cases = pd.DataFrame([key(case) for case in region.cases], columns=CASE)
    cases["place"] = range(len(cases))
    copies = cases.drop(columns="input").merge(rows[is_copy], on=record.CASE)
    found = pd.concat([copies, cases.merge(rows[~is_copy], on=CASE)])
    found = found.sort_values("place", kind="stable", ignore_index=True)[df.columns]
    found.attrs = dict(df.attrs)
    return found


def quickest(df: pd.DataFrame, providers: Sequence[str]) -> pd.DataFrame:
    """The fastest of these providers in each case.

    Returns:
        A frame with the columns provider and p50_us, whose index is the case: dtype,
        n_rows, n_cols, input. Cases that none of the providers took are absent.
    """
    rows = df[df["provider"].isin(list(providers)) & (df["clock"] == "device")]
    rows = rows[rows["p50_us"].notna()].reset_index(drop=True)
    best = rows.groupby(CASE, sort=False)["p50_us"].idxmin()
    return rows.loc[best].set_index(CASE)[["provider", "p50_us"]]


def compare(
    df: pd.DataFrame, ours: str = "fastest", peers: Sequence[str] = PEERS
) -> pd.DataFrame:
    """A provider's time in each case, beside the copy's and the fastest peer's.

    Args:
        df: measurements.
        ours: the provider that is compared.
        peers: what it is compared with, besides the copy.

    Returns:
        A frame whose index is the case (dtype, n_rows, n_cols, input), with the columns
        p50_us, copy_us, peer, peer_us (medians in µs; no value where nothing was
        measured), share (the copy's time over ours) and ratio (the fastest peer's time
        over ours; inf where no peer took the matrix).
    """
    copies = quickest(df, ["copy"])["p50_us"].droplevel("input").rename("copy_us")
    best = quickest(df, peers).set_axis(["peer", "peer_us"], axis=1)
    table = quickest(df, [ours])[["p50_us"]].join(copies, on=record.CASE).join(best)
    table["share"] = table["copy_us"] / table["p50_us"]
    table["ratio"] = (table["peer_us"] / table["p50_us"]).fillna(math.inf)
    return table


def standings(
    df: pd.DataFrame,
    regions: Sequence[Region] = REGIONS,
    ours: str = "fastest",
    peers: Sequence[str] = PEERS,
) -> pd.DataFrame:
    """How a provider stands in each region.

    Args:
        df: measurements of all cases of these regions, and others.
        regions: REGIONS, or SHORT for a short benchmark; see `covered_by`.
        ours: the provider of the course.
        peers: what it is compared with, besides the copy.

    Returns:
        A frame with a row for each region: region, title, cases (how many), then share
        (of the copy, in the worst case), mean (the geometric mean of the shares) and
        best (the fastest peer's time over ours, in the worst case; inf where no peer
        took any matrix), then their bars: share_bar, mean_bar, best_bar, NaN where
        there is no bar.

    Raises:
        ValueError: df lacks the provider or the copy in a case.
    """
    rows = []
    for region in regions:
        table = _compare_in(region, df, ours, peers)
        mean = statistics.geometric_mean(table["share"])
        reached = table["share"].min(), mean, table["ratio"].min()
        bars = region.share, region.mean, region.best
        rows.append([region.name, region.title, len(table), *reached, *bars])
    measures = ["share", "mean", "best"]
    columns = ["region", "title", "cases", *measures, *(f"{m}_bar" for m in measures)]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype(dict.fromkeys(columns[3:], float))


def shortfalls(
    df: pd.DataFrame,
    regions: Sequence[Region] = REGIONS,
    ours: str = "fastest",
    peers: Sequence[str] = PEERS,
) -> pd.DataFrame:
    """Every case in which a provider is below a bar, the worst first.

    Args:
        df, regions, ours, peers: as in `standings`.

    Returns:
        A frame with the columns region, bar (what was demanded, in words), dtype,
        n_rows, n_cols ("", 0, 0 for the mean of a region), against ("copy", or the peer
        that was faster), reached and demanded (ratios).

    Raises:
        ValueError: df lacks the provider or the copy in a case.
    """
    rows = []
    for region in regions:
        table = _compare_in(region, df, ours, peers)
        for (*case, _), row in table.iterrows():
            if region.share is not None and row["share"] < region.share:
                bar = region.name, "share of the copy"
                rows.append([*bar, *case, "copy", row["share"], region.share])
            if region.best is not None and row["ratio"] < region.best:
                bar = region.name, "best peer"
                rows.append([*bar, *case, row["peer"], row["ratio"], region.best])
        mean = statistics.geometric_mean(table["share"])
        if region.mean is not None and mean < region.mean:
            bar = region.name, "mean share"
            rows.append([*bar, "", 0, 0, "copy", mean, region.mean])
    rows.sort(key=lambda row: row[-2] / row[-1])
    columns = ["region", "bar", *record.CASE, "against", "reached", "demanded"]
    return pd.DataFrame(rows, columns=columns)


def losses(
    df: pd.DataFrame,
    regions: Sequence[Region] = REGIONS,
    ours: str = "fastest",
    peers: Sequence[str] = PEERS,
) -> pd.DataFrame:
    """Every matrix where a peer is faster, by however little, or a share is missed.

    Args:
        df, regions, ours, peers: as in `standings`.

    Returns:
        A frame with the columns region (its title), dtype, n_rows, n_cols, input, peer
        (the fastest one), peer / ours (its time over ours), copy / ours, and "why":
        "peer", "copy" (the region's share of the copy is missed) or both. By region,
        the worst first.

    Raises:
        ValueError: df lacks the provider or the copy in a case.
    """
    rows = []
    for region in regions:
        table = _compare_in(region, df, ours, peers).sort_values("ratio")
        for case, row in table.iterrows():
            slow = region.share is not None and row["share"] < region.share
            why = ["peer"] * bool(row["ratio"] < 1) + ["copy"] * slow
            if why:
                cells = row["peer"], row["ratio"], row["share"], " and ".join(why)
                rows.append([region.title, *case, *cells])
    columns = ["region", *CASE, "peer", "peer / ours", "copy / ours", "why"]
    return pd.DataFrame(rows, columns=columns)


def beside(folders: Iterable[str], stem: str = "fastest") -> pd.DataFrame:
    """How the course's softmax stands in each region on several GPUs.

    Prints which of the GPUs have no benchmark.

    Args:
        folders: of notebooks/recorded, the GPUs' names.
        stem: of the record's file.

    Returns:
        A row for each GPU and region that is recorded: GPU, region, shapes, "first" (at
        how many of them ours is the fastest), then, at the worst shape, "copy / ours"
        and "best peer / ours", ratios of times.
    """
    rows = []
    for folder in folders:
        try:
            df = record.recorded(stem, folder)
        except ValueError:
            print(f"{folder} has no benchmark yet.")
            continue
        for region in covered_by(df):
            table = _compare_in(region, df, "fastest", PEERS)
            first = int((table["ratio"] >= 1).sum())
            worst = table["share"].min(), table["ratio"].min()
            gpu = df["gpu"].iloc[0].removeprefix("NVIDIA ")
            rows.append([gpu, region.title, len(table), first, *worst])
    columns = ["GPU", "region", "shapes", "first", "copy / ours", "best peer / ours"]
    return pd.DataFrame(rows, columns=columns)


def _compare_in(
    region: Region, df: pd.DataFrame, ours: str, peers: Sequence[str]
) -> pd.DataFrame:
    """`compare` for the cases of a region, in their order, none missing."""
    table = compare(of(region, df), ours, peers)
    names = [key(case) for case in region.cases]
    table = table.reindex(pd.MultiIndex.from_tuples(names, names=CASE))
    for name, share in zip(names, table["share"], strict=True):
        if math.isnan(share):
            raise ValueError(f"df must have {ours!r} and 'copy' at {name}")
    return table
