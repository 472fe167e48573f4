"""Memory: where values live, what a load touches, how a block spreads over lanes."""

import math
from collections.abc import Sequence

import torch

from kernels.lab import models
from kernels.lab.draw.card import (
    ALERT,
    BLUE,
    CHIP,
    GREEN,
    GREY,
    MONO,
    ORANGE,
    RULE,
    SKY,
    WELL,
    YELLOW,
    Picture,
    check_gpu,
    count,
    kibibytes,
    plural,
    power_of_two,
    signed,
    tint,
)
from kernels.lab.gpu import Gpu
from kernels.lab.style import CARD, INK, Figure

FUNNEL = "#ecedee"


def memory_hierarchy(gpu: Gpu) -> Figure:
    """Where values can live on a GPU, from nearest to farthest from the arithmetic.

    Args:
        gpu: the picture's numbers are its facts.
    """
    check_gpu(gpu)
    registers = kibibytes(4 * gpu.registers_per_sm)
    pic = Picture(f"Memory of the {gpu.name}", 63)
    pic.frame((2.5, 7.5, 58, 40), CHIP)
    for x, number in ((4.5, 0), (21.5, 1), (42.5, gpu.sms - 1)):
        pic.frame((x, 9.2, 16, 24.5))
        pic.bold(x + 8, 11.8, f"SM {number}", "center")
        register_file, shared = (x + 1.5, 14.2, 13, 7), (x + 1.5, 24.2, 13, 7.5)
        pic.box(register_file, "registers", tint(BLUE, 0.35), edgecolor=INK)
        pic.box(shared, "shared\nmemory, L1", tint(GREEN, 0.35), edgecolor=INK)
        pic.arrow((x + 8, 21.2), (x + 8, 24.2), "<|-|>")
        pic.arrow((x + 8, 31.7), (x + 8, 37.7), "<|-|>")
    pic.text(40, 21.5, "…", "center", size=14)
    pic.box((4.5, 37.7, 54, 7.5), "L2 cache", tint(ORANGE, 0.45), edgecolor=INK)
    pic.arrow((31.5, 45.2), (31.5, 51.5), "<|-|>")
    dram = "DRAM (global memory)"
    pic.box((2.5, 51.5, 58, 8), dram, tint(GREY, 0.3), edgecolor=INK)
    shared, block = kibibytes(gpu.shared_per_sm), kibibytes(gpu.shared_per_block)
    thread = 4 * gpu.max_registers_per_thread
    facts = {
        11.5: f"""Registers: a thread's own
            {registers} per SM
            at most {thread:,} bytes per thread""",
        24.6: f"""Shared memory: a block's own
            {shared} per SM
            at most {block} per block""",
        38.6: f"""L2: all SMs share it
            {kibibytes(gpu.l2_bytes)}, on the chip""",
        52.2: f"""DRAM: where tensors live
            {gpu.peak_bandwidth_gbps:,.0f} GB/s peak
            beside the chip""",
    }
    for y, lines in facts.items():
        heading, *rest = map(str.strip, lines.splitlines())
        pic.bold(63, y, heading)
        for number, line in enumerate(rest, 1):
            pic.text(63, y + 2.9 * number, line)
    return pic.figure


# ---- one row, or one view ------------------------------------------------------------


def mask(
    row: Sequence[float] | torch.Tensor,
    block_cols: int,
    *,
    others: Sequence[float] = (-math.inf, 0.0),
) -> Figure:
    """A row padded to a block, and the softmax that each filling of the padding gives.

    Args:
        row: the n_cols finite elements of the row; computed in float32.
        block_cols: BLOCK_COLS, a power of two, at most 8.
        others: what `tl.load(…, other=…)` puts into masked elements, one panel each.
    """
    real = torch.as_tensor(row, dtype=torch.float32)
    if real.ndim != 1 or not bool(real.isfinite().all()):
        raise ValueError(f"row must be one row of finite numbers, got {row!r}")
    block_cols = power_of_two("block_cols", block_cols, 8)
    n_cols = count("the row's length", len(real), block_cols)
    count("the number of others", len(others))
    wanted, wide = torch.softmax(real, 0), 60 / block_cols
    title = f"n_cols = {n_cols} in a block of BLOCK_COLS = {block_cols}"
    pic = Picture(title, 9 + 21.5 * len(others))
    for panel, other in enumerate(others):
        top, filler = 11.5 + 21.5 * panel, signed(float(other))
        block = torch.full((block_cols,), float(other))
        block[:n_cols] = real
        powers = torch.exp(block - block.max())
        output = powers / powers.sum()
        right = torch.allclose(output[:n_cols], wanted, atol=1e-6)
        total = f"{output[:n_cols].sum():.2f} in all: {'right' if right else 'wrong'}"
        pic.bold(2.5, top - 1.1, f"other = {filler}")
        edge = 18 + wide * n_cols
        pic.bracket(18, edge, top + 0.9, plural(n_cols, "element"), -1)
        if n_cols < block_cols:
            pic.bracket(edge, 78, top + 0.9, "masked", -1)
        verdict = {"weight": "bold", "color": WELL if right else ALERT}
        for step, (name, values, result, look) in enumerate(
            (
                ("loaded", block, f"max = {signed(block.max().item())}", {}),
                ("exp(x − max)", powers, f"sum = {powers.sum():.2f}", {}),
                ("÷ sum", output, total, verdict),
            )
        ):
            y = top + 2.2 + 4.7 * step
            pic.text(2.5, y + 2.2, name)
            pic.text(79, y + 2.2, result, **look)
            for col, value in enumerate(values.tolist()):
                masked = col >= n_cols
                fill = tint(ORANGE, 0.28) if masked else tint(SKY, 0.35)
                text = f"{value:.2f}" if step else signed(value)
                gid = f"{filler} {name}{' masked' if masked else ''}"
                pic.box((18 + wide * col, y, wide, 4.4), text, fill, gid=gid)
    return pic.figure


def strides(tensor: torch.Tensor, name: str = "A view") -> Figure:
    """A matrix over its storage: which cell of memory holds which (row, column).

    Args:
        tensor: 2-D, at most 8 × 10, over a storage of at most 96 elements. Its shape,
            strides and storage offset are drawn, not its values.
        name: the title's first words, such as "Transposed" or "x[:, :3]".
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 2:
        raise ValueError(f"tensor must be 2-D, got shape {tuple(tensor.shape)}")
    n_rows = count("the tensor's rows", tensor.shape[0], 8)
    n_cols = count("the tensor's columns", tensor.shape[1], 10)
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    size = count("the storage's elements", size, 96)
    (by_row, by_col), start = tensor.stride(), tensor.storage_offset()
    held: dict[int, list[tuple[int, int]]] = {}
    memory = 24 + max(3.6 * n_rows, 14)
    title = f"{name}: memory is one strip, read by strides"
    pic = Picture(title, memory + 7 * math.ceil(size / 24) + 1.5)
    pic.text(2.5, 9, "the view: at (row, column), its cell of the storage")
    for row in range(n_rows):
        pic.quiet(9.5, 15.3 + 3.6 * row, f"row {row}", "right")
        for col in range(n_cols):
            cell = start + row * by_row + col * by_col
            held.setdefault(cell, []).append((row, col))
            place = (10.5 + 4.4 * col, 13.5 + 3.6 * row, 4.4, 3.6)
            pic.box(place, f"{cell}", tint(row), edgecolor="white", gid=f"{row},{col}")
    for col in range(n_cols):
        pic.quiet(12.7 + 4.4 * col, 12, f"{col}")
    formula = f"cell = {start} + {by_row}·row + {by_col}·column"
    facts = f"shape   ({n_rows}, {n_cols})", f"strides ({by_row}, {by_col})"
    for number, fact in enumerate((*facts, f"offset  {start}", formula)):
        pic.text(60, 15.3 + 3.6 * number, fact, **MONO)
    pic.text(2.5, memory - 6, "the storage: each cell with its (row, column)")
    wide = 95 / 24
    for cell in range(size):
        x, y = 2.5 + wide * (cell % 24), memory + 7 * (cell // 24)
        places = held.get(cell, [])
        fill = "white" if not places else "#dfe2e6"
        if len(places) == 1:
            fill = tint(places[0][0])
        text = _places(places, n_rows, n_cols)
        gid = f"cell {cell}: " + " ".join(f"{row},{col}" for row, col in places)
        pic.box((x, y, wide, 3.8), text, fill, edgecolor=RULE, gid=gid)
        if cell % 4 == 0:
            pic.quiet(x + wide / 2, y - 1.5, f"{cell}")
    return pic.figure


def _places(places: list[tuple[int, int]], n_rows: int, n_cols: int) -> str:
    """An element as "1,2", all rows of a column as "∗,2", any three cells as "3×"."""
    if len(places) < 2:
        return "".join(f"{row},{col}" for row, col in places)
    rows, cols = ({place[axis] for place in places} for axis in (0, 1))
    if len(places) == n_rows and len(cols) == 1:
        return f"∗,{cols.pop()}"
    if len(places) == n_cols and len(rows) == 1:
        return f"{rows.pop()},∗"
    return f"{len(places)}×"


def rereading(n_blocks: int, capacity: int) -> Figure:
    """A row read twice through a cache, the second time forwards or backwards.

    Args:
        n_blocks: of the row, at most 16.
        capacity: blocks that the cache holds, at most 32; see `models.served_by_lru`.
    """
    n_blocks = count("n_blocks", n_blocks, 16)
    capacity = count("capacity", capacity, 32)
    once, wide, high = list(range(n_blocks)), 82 / (2 * n_blocks), 2.6
    height = high * n_blocks + 9
    title = f"A row of {plural(n_blocks, 'block')}, a cache of {capacity}"
    pic = Picture(title, 2 * height + 14)
    looks = {
        "first reading": tint(GREY, 0.45),
        "from memory again": tint(ORANGE, 0.8),
        "from the cache": tint(BLUE, 0.55),
    }
    orders = {"forwards": once, "backwards": once[::-1]}
    for top, (name, second) in zip((10, 10 + height), orders.items(), strict=True):
        found = models.served_by_lru([*once, *second], capacity)
        saved = f"{sum(found)} of {n_blocks} again from the cache"
        pic.bold(2.5, top, f"second reading {name}")
        pic.text(97.5, top, saved, "right")
        pic.quiet(12.6, top + 2.4 + high / 2, "block", "right")
        for time, block in enumerate([*once, *second]):
            again = "from the cache" if found[time] else "from memory again"
            kind = "first reading" if time < n_blocks else again
            place = (14 + wide * time, top + 2.4 + high * block, wide, high)
            pic.box(place, f"{block}", looks[kind], gid=f"{name}: {kind} {block}")
    y = 2 * height + 9.4
    for x, (kind, look) in zip((14, 40, 70), looks.items(), strict=True):
        pic.key(x, y, kind, look)
    return pic.figure


# ---- inside a program ----------------------------------------------------------------


def coalescing(
    *starts: int, itemsize: int = 4, vector: int = 1, stride: int = 1
) -> Figure:
    """One load by the 32 lanes of a warp, and the 32-byte sectors that it touches.

    Args:
        starts: the byte address that lane 0 reads, one panel each: row r of a
            contiguous float32 matrix starts at byte 4 · r · n_cols.
        itemsize: bytes of an element.
        vector: elements that a lane reads by one instruction, 16 bytes at most.
        stride: from one lane's vector to the next lane's, in vectors.

    Raises:
        ValueError: a start is no multiple of the vector's bytes (a misaligned address
            on the hardware), or the lanes span over 1024 bytes.
    """
    itemsize = power_of_two("itemsize", itemsize, 8)
    each = itemsize * power_of_two("vector", vector, 16 // itemsize)
    apart = each * count("stride", stride)
    count("the bytes from the first lane to the last", 31 * apart + each, 1024)
    count("the number of starts", len(starts), 4)
    for start in starts:
        if count("a start", start, least=0) % each:
            raise ValueError(
                f"a start must be a multiple of the {each} bytes that a lane reads at "
                f"once, got {start}: the hardware calls it a misaligned address"
            )
    window = max(start % 128 + 31 * apart + each for start in starts)
    window = math.ceil(window / 32) * 32
    scale = 90 / window
    pic = Picture(f"A warp's load, {each} bytes per lane", 6 + 30 * len(starts))
    for panel, start in enumerate(starts):
        top, base = 10 + 30 * panel, start - start % 128
        firsts = [start % 128 + lane * apart for lane in range(32)]
        touched = {byte // 32 for first in firsts for byte in (first, first + each - 1)}
        sectors = f"{plural(len(touched), 'sector')} of 32 bytes fetched"
        pic.bold(2.5, top, f"lane 0 reads at byte {start:,}")
        share = f"{100 * each / len(touched):.3g}% of it used"
        pic.text(97.5, top, f"{sectors}, {share}", "right")
        for sector in range(window // 32):
            hit, left = sector in touched, 5 + 32 * scale * sector
            look = {"edgecolor": RULE, "gid": f"sector {'' if hit else 'un'}touched"}
            fill = tint(ORANGE, 0.35) if hit else "white"
            pic.box((left, top + 15.5, 32 * scale, 5), "", fill, **look)
        for lane, first in enumerate(firsts):
            x, colour = 2.5 + 2.97 * lane, tint(BLUE, 0.85 if lane % 2 else 0.4)
            left, wide = 5 + scale * first, scale * each
            pic.box((x, top + 2.8, 2.87, 3.8), f"{lane}", colour)
            pic.box((left, top + 16.2, wide, 3.6), "", colour, linewidth=0, gid="used")
            ends = (x + 1.43, left + wide / 2)
            pic.line(ends, (top + 6.6, top + 16.2), colour)
        for byte in range(0, window + 1, 32 if window <= 320 else 128):
            pic.quiet(5 + scale * byte, top + 22.4, f"{base + byte}")
    return pic.figure


def block_layout(
    block_cols: int,
    *,
    size_per_thread: int = 4,
    threads_per_warp: int = 32,
    warps_per_cta: int = 4,
    warp: int = 0,
    lane: int = 1,
) -> Figure:
    """How a block is spread over warps, over lanes, and over the registers of a lane.

    Args:
        block_cols: BLOCK_COLS, a power of two.
        size_per_thread, threads_per_warp, warps_per_cta: the `#ttg.blocked` layout, as
            the TTGIR states it.
        warp, lane: whose elements to show; see `models.elements_of_lane`.
    """
    block_cols = power_of_two("block_cols", block_cols, 2**16)
    layout = {
        "size_per_thread": power_of_two("size_per_thread", size_per_thread, 16),
        "threads_per_warp": power_of_two("threads_per_warp", threads_per_warp, 32),
        "warps_per_cta": power_of_two("warps_per_cta", warps_per_cta, 32),
    }
    warp = count("warp", warp, warps_per_cta - 1, 0)
    lane = count("lane", lane, threads_per_warp - 1, 0)
    chunk = min(size_per_thread * threads_per_warp, block_cols)
    chunks, per_round = block_cols // chunk, math.prod(layout.values())
    wide, slot, cell = 95 / chunks, 95 / threads_per_warp, 7.0
    elements = plural(block_cols, "element")
    title = f"A block of {elements} over {plural(warps_per_cta, 'warp')}"
    pic = Picture(title, 58)
    pic.text(2.5, 9.5, f"the block: {plural(chunk, 'neighbour')} to each warp in turn")
    for number in range(chunks):
        owners = range(number % warps_per_cta, warps_per_cta, chunks)
        numbers = ", ".join(map(str, owners))
        name = f"warp{'s' * (len(owners) > 1)} {numbers}" if wide > 9 else numbers
        look = {"linewidth": min(0.8, wide / 4), "gid": f"warp {owners[0]}"}
        name, fill = name if wide > 2.8 else "", tint(owners[0])
        pic.box((2.5 + wide * number, 12, wide, 6), name, fill, **look)
    left = 2.5 + wide * (warp % chunks)
    pic.shape([(left, 18), (left + wide, 18), (97.5, 27), (2.5, 27)], FUNNEL)
    each = plural(min(size_per_thread, block_cols), "neighbour")
    pic.text(50, 24.8, f"warp {warp}: {each} to each lane", "center")
    for number in range(threads_per_warp):
        fill = tint(warp, 0.75 if number == lane else 0.35)
        pic.box((2.5 + slot * number, 27, slot, 6), f"{number}", fill, gid="lane")
    mine = models.elements_of_lane(block_cols, warp, lane, **layout)
    shown = mine if len(mine) <= 12 else [*mine[:8], "…", *mine[-3:]]
    at, half = 2.5 + slot * lane, cell * len(shown) / 2
    left = min(max(at + slot / 2 - half, 2.5), 97.5 - 2 * half)
    right = left + 2 * half
    pic.shape([(at, 33), (at + slot, 33), (right, 42), (left, 42)], FUNNEL)
    for number, element in enumerate(shown):
        fill = tint(warp, 0.55 if number // size_per_thread % 2 else 0.3)
        fill = CARD if element == "…" else fill
        place = (left + cell * number, 42, cell, 5)
        pic.box(place, f"{element}", fill, gid=f"element {element}")
    registers = f"lane {lane} of warp {warp}: {plural(len(mine), 'register')}"
    pic.text(min(left, 40), 49.2, f"{registers}, holding the elements above")
    product = f"{size_per_thread} × {threads_per_warp} lanes × {warps_per_cta} warps"
    rounds = plural(math.ceil(block_cols / per_round), "round")
    note = f"{product} = {per_round:,} per round: {rounds} for {elements}"
    if per_round > block_cols:
        note += f"; each is held {per_round // block_cols} times"
    pic.text(2.5, 54, note)
    return pic.figure


def reduction(values: Sequence[float], *, warp_size: int = 8) -> Figure:
    """The maximum of a row: by shuffles within warps, by shared memory between them.

    Args:
        values: one per lane; a power of two of them, at most 16. See
            `models.block_reduction`.
        warp_size: the lanes of a warp in the picture (on the hardware 32), of which
            there are no more warps.

    Raises:
        ValueError: the values are too many, or don't fill warps of that size.
    """
    lanes = power_of_two("the number of values", len(values), 16)
    warp_size = power_of_two("warp_size", warp_size, lanes)
    warps, done = (
        lanes // warp_size,
        models.block_reduction(values, warp_size=warp_size),
    )
    rows = len(done.first) + (len(done.second) + 1 if warps > 1 else 0)
    title = f"The maximum of {plural(lanes, 'value')} in {plural(warps, 'warp')}"
    pic = Picture(title, 20.5 + 8.5 * rows)
    wide = 75 / lanes
    middles = [22.5 + wide * (lane + 0.5) for lane in range(lanes)]
    for warp in range(warps):
        left = 22.5 + wide * warp_size * warp
        pic.bracket(left, left + wide * warp_size, 11, f"warp {warp}", -1)
    y = _shuffles(pic, done.first, 12.3, middles, warp_size, "one value per lane", "")
    if warps > 1:
        pic.text(2.5, y + 2, "shared memory")
        for warp, value in enumerate(done.shared):
            first, x = warp * warp_size, 60 + 8 * (warp - (warps - 1) / 2)
            pic.arrow((middles[first], y - 4.3), (x, y - 0.2))
            gid = f"shared memory: {warp}"
            pic.box((x - 3, y, 6, 4), signed(value), tint(warp, 0.5), gid=gid)
            for lane in range(warp, lanes, warp_size):  # of each warp, one reads it
                pic.line((x, middles[lane]), (y + 4, y + 8.5), tint(warp, 0.9))
        pic.quiet(97.5, y + 2, "barrier", "right")
        again = [step * warps for step in done.second]
        name = "all warps' values"
        y = _shuffles(pic, again, y + 8.5, middles, warp_size, name, " again")
    pic.arrow((60, y - 4.3), (60, y - 0.2))
    pic.text(2.5, y + 2, "the row's maximum")
    look = {"edgecolor": INK, "gid": "result"}
    pic.box((56, y, 8, 4), signed(done.result), tint(YELLOW, 0.6), **look)
    return pic.figure


def _shuffles(
    pic: Picture,
    steps: list[list[float]],
    y: float,
    middles: list[float],
    warp_size: int,
    before: str,
    after: str,
) -> float:
    """Draws a butterfly in each warp, a row for each step.

    Args:
        pic: what to draw on.
        steps: each with a value per lane of all warps.
        y: where the first row begins.
        middles: of the lanes, in x.
        warp_size: lanes of a warp.
        before: the first row's name.
        after: what follows the names of the other rows.

    Returns:
        Where the next row begins, in y.
    """
    wide = 75 / len(middles)
    for number, state in enumerate(steps):
        distance = warp_size >> number
        name = f"shuffle, xor {distance}{after}" if number else before
        pic.text(2.5, y + 2, name)
        for lane, value in enumerate(state):
            warp = lane // warp_size
            best = value == max(state[warp * warp_size : (warp + 1) * warp_size])
            place = (middles[lane] - 0.44 * wide, y, 0.88 * wide, 4)
            fill = tint(warp, 0.7 if best else 0.25)
            pic.box(place, signed(value), fill, gid=f"{name}: {lane}")
            if number:
                ys, partner = (y - 4.5, y), middles[lane ^ distance]
                pic.line((middles[lane], middles[lane]), ys)
                pic.line((partner, middles[lane]), ys, tint(warp, 0.9))
        y += 8.5
    return y
