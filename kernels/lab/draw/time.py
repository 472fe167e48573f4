"""What fits on an SM at once, and who works, waits or idles when."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kernels.lab import models
from kernels.lab.draw.card import (
    ALERT,
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Picture,
    check_gpu,
    check_positive,
    count,
    plural,
    tint,
)
from kernels.lab.gpu import Gpu
from kernels.lab.occupancy import resident
from kernels.lab.style import MUTED, Figure

IDLE = {"fill": "#eceef0", "linewidth": 0, "edgecolor": "#c4c9d0", "hatch": "...."}
WORK, STORE = {"fill": tint(BLUE, 0.55)}, {"fill": tint(GREEN, 0.65)}
PARTS = {  # what a program does with its part of a row, in this order
    "loads": ("loads row.part", WORK),
    "waits": ("waits", IDLE),
    "helps": ("helps, then loads its own part", {"fill": tint(ORANGE, 0.8)}),
    "stores": ("stores", STORE),
}


def occupancy(gpu: Gpu, *, num_warps: int, registers: int, shared: int) -> Figure:
    """One SM's four budgets, filled by the blocks that are resident at once.

    Args:
        gpu: the GPU whose SM it is.
        num_warps: warps per block.
        registers: 32-bit registers per thread.
        shared: bytes of shared memory per block.

    Raises:
        TypeError, ValueError: as `occupancy.resident`, which computes the residency.
    """
    check_gpu(gpu)
    result = resident(gpu, num_warps=num_warps, registers=registers, shared=shared)

    def rounded(amount: int, granule: int) -> int:
        return math.ceil(amount / granule) * granule

    per_warp = rounded(registers * gpu.warp_size, gpu.register_granularity)
    shared = rounded(shared + gpu.shared_reserved_per_block, gpu.shared_granularity)
    budgets = {
        "threads": (num_warps * gpu.warp_size, gpu.threads_per_sm),
        "blocks": (1, gpu.blocks_per_sm),
        "registers": (num_warps * per_warp, gpu.registers_per_sm),
        "shared memory": (shared, gpu.shared_per_sm),
    }
    blocks = result.blocks_per_sm
    title = f"{plural(blocks, 'block')} of {plural(num_warps, 'warp')} on one SM"
    pic = Picture(title, 56)
    for row, (name, (each, budget)) in enumerate(budgets.items()):
        y, binds = 9.5 + 10.3 * row, name == result.limit
        look = {"color": ALERT, "weight": "bold"} if binds else {}
        unit = " bytes" if name == "shared memory" else ""
        pic.text(2.5, y + 4.7, name, **look)
        pic.quiet(20, y, f"{each:,}{unit} per block", "left")
        pic.quiet(80, y, f"{budget:,}{unit}", "right")
        pic.box((20, y + 2.2, 60, 5), gid=f"budget: {name}")
        wide, fill = 60 * each / budget, tint(RED if binds else BLUE, 0.5)
        thin = min(0.5, wide / 4)
        for block in range(blocks):
            place = (20 + wide * block, y + 2.2, wide, 5)
            pic.box(place, "", fill, linewidth=thin, gid=f"used: {name}")
        edge, line = (RED, 2.2) if binds else (BLUE, 0.9)
        pic.outline((20, y + 2.2, 60, 5), edgecolor=edge, linewidth=line)
        room = result.limits[name]
        pic.text(82, y + 4.7, f"room for {'any' if room == math.inf else room}", **look)
    most = gpu.threads_per_sm // gpu.warp_size
    share = f"{result.warps_per_sm} of {most} warps, an occupancy of {result.share:.1%}"
    pic.text(2.5, 51.8, f"{gpu.name}: {share}; what binds: {result.limit}")
    return pic.figure


# ---- lines over time -----------------------------------------------------------------

Span = tuple[int, str, str, float, float]  # line, kind, what, begin, end


def _timelines(
    title: str,
    labels: Sequence[str],
    panels: Mapping[str, tuple[str, Sequence[Span]]],
    kinds: Mapping[str, tuple[str, Mapping[str, Any]]],
    high: float = 3.6,
) -> Figure:
    """Panels of lines over time, all to one scale, above a key.

    Args:
        title: of the picture.
        labels: of the lines, the same in each panel.
        panels: name → (note, spans), from top to bottom. A span that never ends is
            drawn to the end of the others.
        kinds: kind → (its words in the key, its look). Spans of the first kind have
            `what` written on them where there is room.
        high: of a line.
    """
    height = high * len(labels) + 9
    pic = Picture(title, height * len(panels) + 14)
    ends = [end for _, spans in panels.values() for *_, end in spans if end < math.inf]
    last = max(ends)
    for number, (name, (note, spans)) in enumerate(panels.items()):
        top = 10 + height * number
        pic.bold(2.5, top, name)
        pic.text(97.5, top, note, "right")
        for line, label in enumerate(labels):
            pic.quiet(14.6, top + 2.3 + high * (line + 0.5), label, "right")
        for line, kind, what, begin, end in spans:
            x, wide = 15.5 + 82 * begin / last, 82 * (min(end, last) - begin) / last
            if wide <= 0:
                continue
            fits = kind == next(iter(kinds)) and wide > 1.3 * len(what)
            place = (x, top + 2.5 + high * line, wide, high - 0.4)
            gid = f"{name}: {kind} {what}".rstrip()
            pic.box(place, what if fits else "", **kinds[kind][1], gid=gid)
    x = 2.5
    for words, look in kinds.values():
        pic.key(x, height * len(panels) + 9.4, words, **look)
        x += 8 + 1.15 * len(words)
    return pic.figure


def schedule(
    n_rows: int,
    slots: int,
    *,
    duration: float | Sequence[float] = 1.0,
    start: float = 0.2,
    speeds: Sequence[float] | None = None,
) -> Figure:
    """One program per row against persistent programs, over time.

    Above, a program per row, each on the slot that is free first. Below, a program per
    slot, which starts once and takes every `slots`-th row. The times are a model's
    (`models.scheduled_by_queue` and `models.scheduled_by_stride`), not measured.

    Args:
        n_rows: rows of the tensor, at most 120.
        slots: programs resident at once on the whole GPU, at most 16.
        duration: the time of a row, or of each row.
        start: the time to start a program, in the same unit.
        speeds: how fast each slot works, if not all at speed 1.
    """
    n_rows, slots = count("n_rows", n_rows, 120), count("slots", slots, 16)
    times = [duration] * n_rows if isinstance(duration, int | float) else list(duration)
    if len(times) != n_rows:
        raise ValueError(
            f"duration must be one time, or {n_rows}, one for each row, "
            f"got {len(times)}"
        )
    for time in (*times, start or 1):
        check_positive("duration or start", time)
    if speeds is not None and len(speeds) != slots:
        raise ValueError(f"speeds must be {slots}, one per slot, got {len(speeds)}")
    for speed in speeds or ():
        check_positive("speeds", speed)
    labels = [
        f"{slot}, at ×{speeds[slot]:g}"
        if speeds and speeds[slot] != 1
        else f"slot {slot}"
        for slot in range(slots)
    ]
    panels = {}
    for name, model, starts in (
        ("one program per row", models.scheduled_by_queue, n_rows),
        ("persistent", models.scheduled_by_stride, min(slots, n_rows)),
    ):
        runs = model(times, slots, start, speeds)
        end = max(run.end for run in runs)
        busy = sum(run.end - run.begin for run in runs) + start * starts
        note = f"ends at {end:.3g}; {1 - busy / (slots * end):.0%} idle"
        spans = [(slot, "idle", "", 0.0, end) for slot in range(slots)]
        for row, (slot, begin, done) in enumerate(runs):
            if start and row < starts:
                spans.append((slot, "start", "", begin - start, begin))
            spans.append((slot, "row", f"{row}", begin, done))
        panels[f"{name}: {plural(starts, 'program')}"] = note, spans
    kinds = {"row": ("a row, by its number", WORK), "idle": ("idle", IDLE)}
    if start:
        kinds["start"] = f"a program starts ({start:g})", {"fill": MUTED}
    title = f"{plural(n_rows, 'row')}, {plural(slots, 'program')} resident at once"
    return _timelines(title, labels, panels, kinds, 4.2 if slots <= 8 else 3.4)


def sharing(n_rows: int, n_parts: int, slots: int, *, patience: float = 1.0) -> Figure:
    """Programs that wait for each other, over time: in order, stuck, and with help.

    Above, the programs of a row begin one after another. In the middle the first parts
    of all rows begin first. If they take every slot, no program ever goes on. Below, a
    program whose patience ends loads the missing parts, and then its own again. The
    times are a model's (`models.scheduled_with_waiting`), not measured; a load takes 1.

    Args:
        n_rows, n_parts: of the tensor, at most 48 programs.
        slots: programs resident at once, at most 8.
        patience: how long a program of the last panel waits.
    """
    n_rows, n_parts = count("n_rows", n_rows), count("n_parts", n_parts)
    count("the number of programs", n_rows * n_parts, 48)
    slots = count("slots", slots, 8)
    check_positive("patience", patience)
    in_order = [(row, part) for row in range(n_rows) for part in range(n_parts)]
    by_part = [(row, part) for part in range(n_parts) for row in range(n_rows)]
    plans = {
        "in order": (in_order, {}),
        "all first parts first": (by_part, {}),
        "all first parts first, with help": (by_part, {"patience": patience}),
    }
    store, panels = 0.5, {}
    for name, (order, waits) in plans.items():
        runs = models.scheduled_with_waiting(order, slots, store=store, **waits)
        end, begun = max(run.end for run in runs), sum(run.slot >= 0 for run in runs)
        note = f"never ends: {begun} of {len(runs)} programs began"
        spans = []
        for (row, part), (slot, begin, *later, done) in zip(order, runs, strict=True):
            moments = begin, *later, done - store, done
            for kind, first, until in zip(PARTS, moments, moments[1:], strict=False):
                spans.append((slot, kind, f"{row}.{part}", first, until))
        panels[name] = (f"ends at {end:g}" if end < math.inf else note), spans
    labels = [f"slot {slot}" for slot in range(slots)]
    title = f"{plural(n_rows, 'row')} of {plural(n_parts, 'part')}, "
    return _timelines(title + plural(slots, "slot"), labels, panels, PARTS)


def pipeline(
    num_stages: Sequence[int] = (1, 2, 3),
    *,
    iterations: int = 4,
    load: float = 3.0,
    compute: float = 1.0,
    store: float = 0.5,
) -> Figure:
    """A loop's loads, arithmetic and stores over time, for each number of stages.

    The times are a model's (`models.pipelined`), not measured.

    Args:
        num_stages: one panel each, at most 4.
        iterations: of the loop, at most 8.
        load: the time from issuing a load to its arrival.
        compute, store: the time of each, in the same unit.
    """
    iterations = count("iterations", iterations, 8)
    num_stages = [count("num_stages", number, 8) for number in num_stages]
    count("the panels", len(num_stages), 4)
    for name, time in (("load", load), ("compute", compute), ("store", store)):
        check_positive(name, time)
    panels = {}
    for stages in num_stages:
        runs = models.pipelined(iterations, stages, load, compute, store)
        spans = [
            (i, kind, f"{i}", begin, end)
            for i, run in enumerate(runs)
            for kind, begin, end in (
                ("load", run.issued, run.issued + load),
                ("waits", run.issued + load, run.begin),
                ("compute", run.begin, run.begin + compute),
                ("store", run.begin + compute, run.end),
            )
        ]
        total = f"{plural(iterations, 'iteration')}: {runs[-1].end:.3g}"
        panels[f"num_stages = {stages}"] = total, spans
    labels = [f"iteration {i}" for i in range(iterations)]
    kinds = {
        "load": ("load under way", WORK),
        "compute": ("compute", {"fill": tint(ORANGE, 0.65)}),
        "store": ("store", STORE),
        "waits": ("arrived, waits for its turn", IDLE),
    }
    return _timelines("num_stages: loads under way at once", labels, panels, kinds)
