"""Chapter `columns`: which way a warp goes, the size of blocks, and other dimensions.

    from benchmarks import columns as experiments
    experiments.judge(my_sectors)
    experiments.lanes_across(launch)
    code = record.observe("columns_code", experiments.code)
    blocks = record.observe("columns_blocks", experiments.blocks)
    parts = record.observe("columns_parts", experiments.parts)
    times = record.observe("columns", experiments.times)

All functions that measure return rows for `record.observe`, with times in µs.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pandas as pd
import torch

import kernels
from kernels import columns, online
from kernels.lab import backend, clock, compile, occupancy
from kernels.lab import judge as judges
from kernels.lab.direct import CachedLaunch
from kernels.lab.launch import Launch

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
SECTOR, LANES = 32, 32  # bytes; threads of a warp


class Case(NamedTuple):
    """A tensor, and the dimension along which its softmax is taken."""

    what: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int

    def stack(self) -> tuple[int, int, int]:
        """The shape as a stack of matrices whose columns sum to 1."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return math.prod(before), self.shape[self.dim], math.prod(after)


CASES = (
    Case("150 classes of pixels", BFLOAT16, (4, 150, 480, 640), 1),
    Case("19 classes of pixels", FLOAT32, (2, 19, 1024, 2048), 1),
    Case("queries of attention", BFLOAT16, (32, 16, 385, 385), 2),
    Case("tokens", BFLOAT16, (256, 77, 768), 1),
    Case("short columns, few of each", FLOAT32, (500_000, 12, 5), 1),
    Case("columns of a matrix", FLOAT32, (10_000, 10_000), 0),
    Case("columns of a vocabulary", BFLOAT16, (50_257, 3000), 0),
    Case("few columns", BFLOAT16, (2, 300_001, 100), 1),
)
"""What `times` measures. The sizes of blocks were not chosen with these; the number of
programs that share a column was, with the last three among others."""

FULL = Case("255 × 255", BFLOAT16, (64, 12, 255, 255), 2)
SQUARES = Case("256 × 256", BFLOAT16, (64, 12, 256, 256), 2)
FEW = Case("4096 × 4096", BFLOAT16, (4096, 4096), 0)
UNEVEN = Case("197 × 197", BFLOAT16, (64, 12, 197, 197), 2)


# ---- one warp ------------------------------------------------------------------------


def sectors(apart: int, itemsize: int) -> int:
    """The 32-byte sectors that a warp's load touches.

    Args:
        apart: elements from one lane's value to the next lane's.
        itemsize: bytes of a value. Lane 0's begins a sector.
    """
    return len({lane * apart * itemsize // SECTOR for lane in range(LANES)})


def judge(found: Callable[[int, int], int]) -> judges.Verdict:
    """Judges a learner's function of (apart, itemsize), in a sentence."""
    cases = [(apart, size) for apart in (3, 1000, 1, 2, 4, 16) for size in (4, 2, 8)]
    return judges.formula(found, sectors, cases, mistakes=MISTAKES)


MISTAKES = {
    "How many sectors can 32 lanes touch at most?": (
        lambda apart, itemsize: apart * itemsize
    ),
    "A sector has 32 bytes, not 32 values.": (
        lambda apart, itemsize: len({lane * apart // SECTOR for lane in range(LANES)})
    ),
    "How far apart are the lanes' values?": (
        lambda apart, itemsize: LANES * itemsize // SECTOR
    ),
    "Do all lanes touch sectors of their own, however near their values are?": (
        lambda apart, itemsize: LANES
    ),
}


# ---- launches ------------------------------------------------------------------------


def on_meta(case: Case) -> torch.Tensor:
    """A stack without memory, from which a launch can be made."""
    return torch.empty(case.stack(), dtype=case.dtype, device="meta")


def launches(case: Case) -> dict[str, Launch]:
    """A case's launches by two chapters' kernels, with the same blocks and warps."""
    x = on_meta(case)
    ours = columns.launch_for(x, x)
    sizes = [ours.constants[n] for n in ("COLS", "BLOCK_ROWS", "ACCUMULATORS")]
    same = online.Config(*sizes, num_warps=ours.constants["num_warps"])
    return {"online": online.launch_for(x, x, same), "columns": ours}


def lanes_across(launch: Launch) -> int:
    """How many lanes of a warp this Triton gives to neighbouring columns, for an H200.

    The first dimension of a block is that of columns, in both chapters' kernels.
    """
    code = compile.aot(launch, gpu="H200").ttgir
    layout = re.search(r"tt\.load .*tensor<\d+x\d+x\d+x.*(#\w+)>", code)[1]
    return int(re.search(rf"{layout} = .*threadsPerWarp = \[(\d+)", code)[1])


def with_rows(case: Case, block_rows: int) -> Launch:
    """The launch with blocks of so many rows, and 16 values of each thread."""
    x = on_meta(case)
    config = columns.launch_for(x, x).constants
    warps = block_rows * config["COLS"] // (16 * LANES)
    vector = config["VECTOR"]
    changed = columns.Config(config["COLS"], block_rows, block_rows, warps, 1, vector)
    return columns.launch_for(x, x, changed)


# ---- what is measured ----------------------------------------------------------------


def taken(function: Callable, x: torch.Tensor, dim: int) -> float:
    """The median time of a softmax in µs. It must be PyTorch's within 2 %."""
    wanted, mean = torch.softmax(x, dim), 1 / x.shape[dim]
    torch.testing.assert_close(function(x), wanted, rtol=0.02, atol=0.002 * mean)
    return clock.device_us(function, x)[1]


def through(run: Callable, case: Case) -> Callable[[torch.Tensor], torch.Tensor]:
    """A softmax of tensors like the case's by run(output, x), which takes stacks."""

    def softmax(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        run(output.view(case.stack()), x.view(case.stack()))
        return output

    return softmax


def tensor(case: Case) -> torch.Tensor:
    """Random values of the case's shape and dtype."""
    return torch.randn(case.shape, device=backend.DEVICE).to(case.dtype)


def code() -> Iterator[dict[str, Any]]:
    """UNEVEN and FULL by two launches: their code for an H200, and their times."""
    for case in (UNEVEN, FULL):
        x = tensor(case)
        for name, launch in launches(case).items():
            made = compile.aot(launch, gpu="H200")
            yield {
                "kernel": name,
                "n_cols": case.shape[-1],
                "registers": made.registers,
                "bytes spilled": made.spills,
                "instructions": len(made.sass.splitlines()),
                "us": taken(through(CachedLaunch(launch), case), x, case.dim),
            }


def blocks() -> Iterator[dict[str, Any]]:
    """SQUARES with blocks of several heights: the time, and warps that fit on an SM."""
    x = tensor(SQUARES)
    for block_rows in (32, 64, 128, 256):
        launch = with_rows(SQUARES, block_rows)
        made = occupancy.of(launch)
        softmax = through(CachedLaunch(launch), SQUARES)
        yield {
            "rows of a block": block_rows,
            "warps": launch.constants["num_warps"],
            "programs on an SM": made.blocks_per_sm,
            "us": taken(softmax, x, SQUARES.dim),
        }


def parts() -> Iterator[dict[str, Any]]:
    """FEW in one launch, and by programs that share columns, in two launches."""
    x, meta = tensor(FEW), on_meta(FEW)
    ways = {
        "one launch": CachedLaunch(columns.launch_for(meta, meta)),
        "two launches": columns.prepare(meta, meta, CachedLaunch),
    }
    if isinstance(ways["two launches"], CachedLaunch):
        del ways["two launches"]  # a GPU of few SMs has enough tiles
    for name, run in ways.items():
        yield {"way": name, "us": taken(through(run, FEW), x, FEW.dim)}


def times() -> Iterator[dict[str, Any]]:
    """Each of CASES, and the copy of a tensor of its shape."""
    for case in CASES:
        x, dim, meta = tensor(case), case.dim, on_meta(case)
        ways = {
            "torch": lambda x, dim=dim: torch.softmax(x, dim),
            "torch.compile": torch.compile(lambda x, dim=dim: torch.softmax(x, dim)),
            "online": through(online.prepare(meta, meta, CachedLaunch), case),
            "columns": lambda x, dim=dim: kernels.softmax(x, dim),
        }
        row = {"what": case.what, "dtype": str(case.dtype).removeprefix("torch.")}
        row |= {"shape": " × ".join(map(str, case.shape)), "dim": dim}
        yield row | {"provider": "copy", "us": clock.device_us(torch.clone, x)[1]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile tells how it splits columns
            for name, function in ways.items():
                yield row | {"provider": name, "us": taken(function, x, dim)}
        torch.compiler.reset()


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of `times` by tensor and provider, in µs, in the order of CASES."""
    rows = rows.assign(tensor=rows["shape"] + ", dim " + rows["dim"].astype(str))
    wide = rows.pivot(index=["what", "tensor"], columns="provider", values="us")
    order = list(rows["what"].unique())
    names = list(rows["provider"].unique())
    return wide.loc[order][names].reset_index(level="what", drop=True)
