"""What chapter `traffic` judges, collects, tabulates and draws.

The chapter shows the measurements themselves, calls of `record.sweep` and of
`record.observe`. What stands here turns their rows into a sentence, a table, a figure.
`busy_kernel` is the control for a kernel's arithmetic, as the copy is for its bytes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable

import pandas as pd
import torch
import triton
import triton.language as tl

from benchmarks import dram
from kernels import eager, program, traffic
from kernels.lab import compile, gpu, meter, plot, record, show, verdict

# ---- the learner's count -------------------------------------------------------------

Count = Callable[[int, int], dict[str, tuple[int, int]]]


def judge(count: Count) -> str:
    """Compares a count of the five lines with the meter's, and says the first mistake.

    Args:
        count: (M, N) → the name of each line in `traffic.LINES` → the values that it
            reads, and the values that it writes. Indices don't count.
    """
    if place := verdict.unfinished(count):
        return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
    shapes = (7, 64), (64, 7), (1, 100)
    for n_rows, n_cols in shapes:
        counted = count(n_rows, n_cols)
        operations = meter.count(eager.five_lines, torch.ones(n_rows, n_cols)).rows
        for name, op in zip(traffic.LINES, operations, strict=True):
            moved = {"reads": op.read_values, "writes": op.written_values}
            for (does, right), said in zip(moved.items(), counted[name], strict=True):
                if said != right:
                    return (
                        f"Not yet: with {n_rows} × {n_cols} values, {name} {does} "
                        f"{right} values, not {said}."
                    )
    return f"Right: the meter counts the same for {len(shapes)} matrices."


# ---- what DRAM saw -------------------------------------------------------------------


def dram_table(counts: pd.DataFrame) -> show.Table:
    """MB that each of the five lines moves: as counted, and as DRAM's counters say.

    Args:
        counts: what `dram.traffic_experiment` observed.
    """
    alone, together = _runs(counts, "emptied"), _runs(counts, "as left")
    rows = []
    for line in traffic.predicted(*dram.LARGE):
        seen, after = alone.loc[line.name], together.loc[line.name]
        read = line.read_bytes(4), seen["read_bytes"]
        written = seen["written_bytes"], after["written_bytes"]
        moved = _megabytes(*read, line.written_bytes(4), *written)
        rows.append([line.name, *moved])
    rows.append(["all five", *map(sum, list(zip(*rows, strict=True))[1:])])
    header = ["line", "reads, counted", "reads, DRAM", "writes, counted"]
    return show.table(rows, [*header, "writes, DRAM", "in sequence, DRAM"], digits=0)


def _runs(counts: pd.DataFrame, l2: str) -> pd.DataFrame:
    """The rows of the large matrix, by their step."""
    return record.select(counts, l2=l2, n_rows=dram.LARGE[0]).set_index("step")


def _megabytes(*n_bytes: float) -> list[float]:
    return [float(n) / 1e6 for n in n_bytes]


def small_sentence(counts: pd.DataFrame) -> str:
    """What the five lines ask for on the small matrix, and what DRAM saw of it."""
    small = record.select(counts, l2="as left", n_rows=dram.SMALL[0])
    lines = traffic.predicted(*dram.SMALL)
    asked = _megabytes(
        sum(line.read_bytes(4) for line in lines),
        sum(line.written_bytes(4) for line in lines),
    )
    seen = _megabytes(small["read_bytes"].sum(), small["written_bytes"].sum())
    pairs = [
        f"to {to} {a:.1f} MB, DRAM {did} {s:.1f} MB"
        for to, did, a, s in zip(
            ("read", "write"), ("read", "wrote"), asked, seen, strict=True
        )
    ]
    return f"{dram.SMALL[0]} × {dram.SMALL[1]} values: {'; '.join(pairs)}"


# ---- times ---------------------------------------------------------------------------


def lines_figure(times: pd.DataFrame) -> plot.Figure:
    """Predicted and measured times of the five lines, two controls, and all five.

    Args:
        times: a sweep of the copy, `eager`, `eager.<line>` for each line, and
            `control.scalar` and `control.amax`, on one matrix of float32.
    """
    took = times.set_index("provider")
    n_rows, n_cols = (int(took[name].iloc[0]) for name in ("n_rows", "n_cols"))
    lines = {line.name: line.bytes(4) for line in traffic.predicted(n_rows, n_cols)}
    moved = {f"eager.{name}": n_bytes for name, n_bytes in lines.items()}
    moved["eager"] = sum(lines.values())
    moved["control.scalar"] = 8 * n_rows * n_cols
    moved["control.amax"] = 4 * (n_rows * n_cols + n_rows)
    names = ["eager.exp", "control.scalar", "eager.subtract", "eager.divide"]
    names += ["eager.sum", "control.amax", "eager.max", "eager"]
    copy_gbps = took["effective_gbps"]["copy"]
    bars = {
        _label(name): {
            "predicted": traffic.predicted_us(moved[name], copy_gbps),
            "measured": took["p50_us"][name],
        }
        for name in names
    }
    title = f"Time of each line, {n_rows} × {n_cols} float32 values"
    return plot.bars(bars, "µs", title=title, source=times.attrs["source"])


def _label(name: str) -> str:
    if name == "eager":
        return "all five lines"
    return name.removeprefix("eager.").replace("control.", "control: ")


def rates_table(counts: pd.DataFrame) -> show.Table:
    """Effective and achieved bandwidth of two softmaxes, by the profiler's counts."""
    alone = _runs(counts, "emptied")
    runs = {
        "five lines": alone.loc[[*traffic.LINES]],
        "torch.softmax": alone.loc[["torch"]],
    }
    least = 8 * math.prod(dram.LARGE)
    rows = []
    for name, ran in runs.items():
        us, moved = ran["duration_us"].sum(), ran["read_bytes"] + ran["written_bytes"]
        rows.append([name, us, least / us / 1e3, moved.sum() / us / 1e3])
    header = ["", "µs", "effective, GB/s", "achieved, GB/s"]
    return show.table(rows, header, digits=0)


def clocks_table(sweeps: Iterable[pd.DataFrame]) -> show.Table:
    """The copy's median time by each clock, µs, for the sizes that all clocks timed."""
    names = {
        "device": "GPU, L2 flushed by reading (ours)",
        "written": "GPU, L2 flushed by writing",
        "unflushed": "GPU, no flush",
        "wall": "host, waiting for the GPU",
        "launch": "host, not waiting",
    }
    times = record.select(record.concat(sweeps), provider="copy")
    us = times.pivot(index="clock", columns="n_rows", values="p50_us").loc[[*names]]
    us = us.rename(index=names).dropna(axis=1)
    return show.table(us, ["clock", *(f"{m} rows" for m in us.columns)], digits=1)


# ---- instructions --------------------------------------------------------------------

STEPS = (128, 512)
SHAPE = (65536, 1024)
BLOCK = 1024  # values per program of 4 warps: 8 values per thread


@triton.jit
def busy_kernel(output_ptr, input_ptr, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """`traffic.copy_kernel`, with STEPS multiply-adds for each value on the way."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    x = tl.load(input_ptr + places, mask=inside)
    for _ in tl.static_range(STEPS):
        x = x * 0.5 + 0.5
    tl.store(output_ptr + places, x, mask=inside)


def busy(steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy of a contiguous tensor that adds so many instructions for each value."""

    def copy_busily(x: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), BLOCK),)
        busy_kernel[grid](output, x, x.numel(), STEPS=steps, BLOCK=BLOCK)
        return output

    return copy_busily


NAMES = {"program": "softmax", "traffic.copy": "copy kernel"}
BUSY = {f"traffic.busy{steps}": busy(steps) for steps in STEPS}


@functools.cache
def instructions(of: gpu.Gpu) -> dict[tuple[str, str], float]:
    """Instructions for each value, read off the machine code for a GPU.

    Every instruction up to the last `EXIT` counts: none of these kernels has a loop.

    Returns:
        (provider, dtype) → instructions of a program's threads over its values.
    """
    launches = {}
    for dtype in ("float32", "bfloat16"):
        x, size = compile.pointer(getattr(torch, dtype)), math.prod(SHAPE)
        row = {"BLOCK_COLS": SHAPE[1]}
        launches["program", dtype] = program.softmax_kernel, (x, x, SHAPE[1]), row
        block = {"BLOCK": BLOCK}
        launches["traffic.copy", dtype] = traffic.copy_kernel, (x, x, size), block
    x = compile.pointer(torch.float32)
    for steps, provider in zip(STEPS, BUSY, strict=True):
        constants = {"STEPS": steps, **block}
        launches[provider, "float32"] = busy_kernel, (x, x, size), constants
    made = compile.aot_all(launches.values(), gpu=of)
    return {
        key: _length(each.sass) * 32 * each.num_warps / BLOCK
        for key, each in zip(launches, made, strict=True)
    }


def _length(sass: str) -> int:
    """The number of instructions before those that pad the code's end."""
    lines = [line for line in sass.splitlines() if line.startswith(" ")]
    return max(i for i, line in enumerate(lines) if re.search(r"\bEXIT\b", line)) + 1


def rates(times: pd.DataFrame) -> pd.DataFrame:
    """Instructions per value, per byte and per second for each row of a sweep.

    Args:
        times: rows of a sweep of `program`, `traffic.copy` and BUSY on SHAPE.

    Returns:
        By name: per_value, per_byte, rate (10¹² instructions of threads per second),
        slots (that rate over the largest), copy (the share of the copy's bandwidth).
    """
    times = times[times["provider"] != "copy"]
    counted = instructions(gpu.of(times["gpu"].iloc[0]))
    keys = zip(times["provider"], times["dtype"], strict=True)
    df = pd.DataFrame({"per_value": [counted[key] for key in keys]})
    df.index = [
        name.removeprefix("traffic.") if name in BUSY else f"{NAMES[name]}, {dtype}"
        for name, dtype in zip(times["provider"], times["dtype"], strict=True)
    ]
    moved = [2 * getattr(torch, dtype).itemsize for dtype in times["dtype"]]
    df["per_byte"] = df["per_value"] / moved
    df["rate"] = df["per_value"] * math.prod(SHAPE) / times["p50_us"].to_numpy() / 1e6
    df["slots"] = df["rate"] / df["rate"].max()
    df["copy"] = times["share_of_copy"].to_numpy()
    return df


def roofline(times: pd.DataFrame) -> plot.Figure:
    """The roofline of instructions, whose two limits are measured.

    The slope is the copy's bandwidth, the flat roof the fastest of BUSY.

    Args:
        times: as for `rates`, with the copy in float32.
    """
    df = rates(times)
    copies = record.select(times, provider="copy", dtype="float32")
    gbps = round(copies["effective_gbps"].iloc[0])
    here = gpu.of(times["gpu"].iloc[0])
    return plot.roofline(
        dataclasses.replace(here, name="the copy", peak_bandwidth_gbps=gbps),
        {name: (row["per_byte"], row["rate"]) for name, row in df.iterrows()},
        peak_tflops=round(df["rate"].max(), 1),
        unit="×10¹² instructions/s",
        xlabel="instructions per byte moved",
        title="The limit of bytes, and the limit of instructions",
        source=times.attrs["source"],
    )
