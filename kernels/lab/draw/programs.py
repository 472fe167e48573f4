"""Programs: how they are launched, what each one touches, what fusing them saves."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kernels.lab.draw.card import (
    BLUE,
    CHIP,
    GREY,
    MONO,
    RED,
    Picture,
    check_positive,
    count,
    plural,
    power_of_two,
    short,
    tint,
)
from kernels.lab.style import EDGE, INK, MUTED, STYLES, Figure


def launch(kernel: str, n_programs: int, *, sms: int = 4, per_sm: int = 3) -> Figure:
    """A launch: a wrapper launches a grid of programs, the GPU places them on its SMs.

    Args:
        kernel: the kernel's name, as the wrapper writes it.
        n_programs: the grid's size, at most 48.
        sms: the SMs of the GPU drawn, at most 8.
        per_sm: the programs that are resident on an SM at once, at most 6.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be its name, a str, got {type(kernel).__name__}")
    n_programs = count("n_programs", n_programs, 48)
    sms, per_sm = count("sms", sms, 8), count("per_sm", per_sm, 6)
    placed = min(n_programs, sms * per_sm)
    high = 6 + 4.4 * math.ceil(per_sm / 3)
    deep = 2.5 + (high + 1) * math.ceil(sms / 2)
    deep = max(18, 4.4 * math.ceil(n_programs / 6), deep)
    pic = Picture("A launch: the GPU places programs on its SMs", deep + 20)
    for x, heading in ((2.5, "Host (CPU)"), (37.5, "Grid"), (68.5, "GPU")):
        pic.bold(x, 9.2, heading)
    pic.frame((2.5, 11.5, 28.5, 18))
    pic.quiet(4.5, 15, "the wrapper, in Python", "left")
    for row, code in enumerate((kernel, f"[({n_programs},)]", "(output, input, …)")):
        pic.text(4.5, 19 + 2.9 * row, code, **MONO)
    pic.arrow((31.5, 20.5), (36.5, 20.5))
    for p in range(n_programs):
        place = (37.5 + 4.1 * (p % 6), 11.5 + 4.4 * (p // 6), 3.6, 3.8)
        fill = tint(p % sms) if p < placed else "white"
        pic.box(place, f"{p}", fill, edgecolor=INK, gid=f"program {p}")
    pic.arrow((62.5, 20.5), (67.5, 20.5))
    pic.frame((68.5, 11.5, 29, deep), CHIP)
    for sm in range(sms):
        x, y = 69.8 + 13.4 * (sm % 2), 13 + (high + 1) * (sm // 2)
        pic.frame((x, y, 13, high))
        pic.quiet(x + 1.2, y + 2.6, f"SM {sm}", "left")
        for slot in range(per_sm):
            p = sm + sms * slot
            place = (x + 0.9 + 3.8 * (slot % 3), y + 4.7 + 4.4 * (slot // 3), 3.4, 3.8)
            if p < placed:
                gid = f"SM {sm} holds {p}"
                pic.box(place, f"{p}", tint(sm), edgecolor=INK, gid=gid)
            else:
                pic.box(place, edgecolor=EDGE, gid=f"SM {sm} free")
    late = n_programs - placed
    rest = f"{late} (white) until a program ends" if late else "none"
    room = f"{plural(sms, 'SM')} × {per_sm} resident: {placed} at once"
    note = f"{plural(n_programs, 'program')}; {room}; waiting: {rest}"
    pic.text(2.5, deep + 15.5, note)
    return pic.figure


def coverage(
    shape: int | tuple[int, int],
    block: int | tuple[int, int],
    *,
    programs: int | None = None,
) -> Figure:
    """Which program touches which elements: a colour per program, hatched if masked.

    Args:
        shape: the length of a vector or (n_rows, n_cols) of a matrix.
        block: the size of one block: BLOCK, or (ROWS_PER_PROGRAM, BLOCK_COLS).
        programs: how many there are. None gives each block its own. Fewer programs than
            blocks loop: program p takes blocks p, p + programs, and so on, as in a
            persistent kernel.

    Raises:
        ValueError: a number is below 1, or the blocks have over 24 rows or 64 columns,
            which is more than the picture has room for.
    """
    n_rows, n_cols = _pair("shape", shape)
    block_rows, block_cols = _pair("block", block)
    down, across = math.ceil(n_rows / block_rows), math.ceil(n_cols / block_cols)
    blocks = down * across
    programs = blocks if programs is None else count("programs", programs, blocks)
    rows = count("the padded rows", down * block_rows, 24)
    cols = count("the padded columns", across * block_cols, 64)
    flat, top = rows == 1, 11.0
    left, high = (2.5, 4.5) if flat else (9.5, 3.0)
    wide = min(5.5, (95 if flat else 75) / cols)
    bottom = top + high * rows
    loop = ", looping over the blocks" if programs < blocks else ""
    size = block_cols if rows == 1 else f"{block_rows} × {block_cols}"
    title = f"{plural(programs, 'program')}, blocks of {size}{loop}"
    pic = Picture(title, bottom + (11 if flat else 7))
    for row in range(rows):
        for col in range(cols):
            p = (row // block_rows * across + col // block_cols) % programs
            place = (left + wide * col, top + high * row, wide, high)
            masked = row >= n_rows or col >= n_cols
            pic.cell(place, "", p, masked, f"program {p}")
    for col in range(0, n_cols, next(step for step in (1, 2, 4) if step * wide > 3.4)):
        pic.quiet(left + wide * (col + 0.5), top - 1.8, f"{col}")
    for row in range(0 if flat else n_rows):
        pic.quiet(left - 1, top + high * (row + 0.5), f"row {row}", "right")
    width, height = wide * block_cols, high * block_rows
    for number in range(blocks):
        p = number % programs
        x, y = left + width * (number % across), top + height * (number // across)
        pic.outline((x, y, width, height))
        if flat:
            name = f"program {p}" if width > 10.5 else f"{p}"
            pic.bracket(x, x + width, bottom + 2, name, 1)
        elif across == 1:
            pic.text(x + width + 1.5, y + height / 2, f"program {p}")
        else:
            pic.box((x + width / 2 - 1.7, y + height / 2 - 1.4, 3.4, 2.8), f"{p}")
    note = f"{plural(rows * cols, 'place')} for {plural(n_rows * n_cols, 'element')}"
    if off := rows * cols - n_rows * n_cols:
        note += f": {off} masked off (hatched), neither loaded nor stored"
    pic.text(left, bottom + (7.5 if flat else 3.2), note)
    return pic.figure


def _pair(name: str, value: Any) -> tuple[int, int]:
    """A vector's length as (1, length); a matrix's shape as it is."""
    pair = value if isinstance(value, tuple | list) else (1, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a length or (rows, columns), got {value!r}")
    return count(f"{name}'s rows", pair[0]), count(f"{name}'s columns", pair[1])


def thread_and_program(n_elements: int, block: int) -> Figure:
    """The same vector for Numba CUDA, one element per thread, and for Triton.

    Args:
        n_elements: the vector's length; at most 24 when padded to whole blocks.
        block: the threads of a CUDA block, and the elements of a Triton block.
    """
    block = power_of_two("block", block, 16)
    n_elements = count("n_elements", n_elements)
    blocks = math.ceil(n_elements / block)
    places = count("the padded length", blocks * block, 24)
    wide = min(5.5, 84 / places)
    pic = Picture("One element per thread, or one block per program", 71)
    pic.bold(2.5, 10, "Numba CUDA: the code is what one thread does")
    pic.text(2.5, 13.4, "i = cuda.grid(1); if i < n: z[i] = x[i] + y[i]", **MONO)
    pic.bold(2.5, 41, "Triton: the code is what one program does")
    code = f"i = tl.program_id(0) * {block} + tl.arange(0, {block}); mask = i < n"
    pic.text(2.5, 44.4, code, **MONO)
    rows = {22.6: "threads", 31.6: "vector", 50.5: "programs", 60.0: "vector"}
    for y, name in rows.items():
        pic.quiet(11.5, y, name, "right")
    for i in range(places):
        number, x, idle = i // block, 13 + wide * i, i >= n_elements
        thread = (x + 0.06 * wide, 20.5, 0.88 * wide, 4.2)
        pic.cell(thread, f"{i % block}", number, idle, "thread")
        pic.cell((x, 57.9, wide, 4.2), f"{i}", number, idle, "block's element")
        if not idle:
            pic.arrow((x + wide / 2, 25), (x + wide / 2, 29.3))
            pic.cell((x, 29.5, wide, 4.2), f"{i}", number, False, "thread's element")
    for number in range(blocks):
        width = wide * block
        x = 13 + width * number
        label = ("block {0}", "program {0}") if width > 11 else ("{0}", "{0}")
        block_name, program_name = (name.format(number) for name in label)
        pic.bracket(x, x + width, 19.3, block_name, -1)
        place = (x + 0.4, 48, width - 0.8, 5)
        pic.box(place, program_name, tint(number, 0.5), gid="program")
        pic.arrow((x + width / 2, 53.2), (x + width / 2, 57.6))
        pic.outline((x, 57.9, width, 4.2))
    cuda = f"{plural(places, 'thread')} in {plural(blocks, 'block')}"
    note = f"{plural(n_elements, 'element')}: {cuda}, or {plural(blocks, 'program')}"
    pic.text(2.5, 67, f"{note}; {places - n_elements} of {places} idle (hatched)")
    return pic.figure


def fusion(eager: Any, fused: Any) -> Figure:
    """A chain of kernels beside the kernel that replaces it, and what each one moves.

    The width of an arrow shows how many values the kernel moves.

    Args:
        eager, fused: a `meter.Traffic`, or a list of tuples (name, values read, values
            written), one per kernel.

    Raises:
        TypeError, ValueError: an argument is no such list, or both together hold over 8
            kernels.
    """
    chains = {"eager": _kernels("eager", eager), "fused": _kernels("fused", fused)}
    columns = count("the number of kernels", sum(map(len, chains.values())), 8)
    totals = [sum(read + written for _, read, written in c) for c in chains.values()]
    count("the number of values that a chain moves", min(totals))
    most = max(max(row[1:]) for chain in chains.values() for row in chain)
    pic = Picture("Every kernel reads its input and writes its result", 59)
    pic.box((14, 12, 83, 5), "memory", tint(GREY, 0.25), edgecolor=INK)
    pic.quiet(2.5, 36, "kernels", "left")
    pic.line((2.5, 97), (43.5, 43.5))
    pic.text(2.5, 46.5, "values read", color=BLUE)
    pic.text(2.5, 50, "written", color=RED)
    pitch, left = 80 / columns, 14.0
    for title, chain in chains.items():
        width = pitch * len(chain)
        pic.bold(left + width / 2, 9.3, title, "center")
        pic.frame((left, 31.5, width, 9), CHIP)
        for name, read, written in chain:
            middle = left + pitch / 2
            label = name.replace("_", "_\n", 1) if len(name) > 10 else name
            pic.box((left + 0.8, 33, pitch - 1.6, 6), label, edgecolor=INK)
            for kind, values, colour, x, start, end, y in (
                ("read", read, BLUE, middle - 0.22 * pitch, 17, 33, 46.5),
                ("written", written, RED, middle + 0.22 * pitch, 33, 17, 50),
            ):
                wide = 0.32 * pitch * values / most
                neck = end - math.copysign(2.2, end - start)
                look = {"edgecolor": colour, "gid": f"{title} {name} {kind}"}
                pic.box((x - wide / 2, start, wide, neck - start), "", colour, **look)
                half = wide / 2 + 0.6
                pic.shape([(x - half, neck), (x + half, neck), (x, end)], colour)
                pic.text(middle, y, short(values), "center", color=colour)
            left += pitch
        left += 3
    moved = [
        f"{plural(len(chain), 'kernel')} move{'s' * (len(chain) == 1)} {short(total)}"
        for chain, total in zip(chains.values(), totals, strict=True)
    ]
    fewer = f"{totals[0] / totals[1]:.1f} times fewer"
    pic.bold(2.5, 55, f"eager: {moved[0]} values; fused: {moved[1]}, {fewer}")
    return pic.figure


def _kernels(name: str, traffic: Any) -> list[tuple[str, int, int]]:
    """(name, values read, values written) of each kernel."""
    wanted = "a meter.Traffic or a list of (name, values read, values written)"
    rows = getattr(traffic, "rows", traffic)
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise TypeError(f"{name} must be {wanted}, got {type(traffic).__name__}")
    if hasattr(traffic, "rows"):
        rows = [(row.name, row.read_values, row.written_values) for row in rows]
    rows = list(rows)
    if not rows or any(not isinstance(row, tuple) or len(row) != 3 for row in rows):
        raise ValueError(f"{name} must be {wanted}, got {rows!r}")
    return rows


def ladder(
    steps: Sequence[tuple[str, float]],
    copy: float,
    *,
    source: str = "",
    peers: Sequence[tuple[str, float]] = (),
) -> Figure:
    """The course in one picture: the bandwidth of each step, beside the copy's.

    Args:
        steps: (provider, effective GB/s) in the order of the course, at most 12.
        copy: GB/s of the copy of the same tensor.
        source: what was measured, and on which GPU.
        peers: (provider, effective GB/s) of the kernels of others, at most 8; they
            stand apart, below the steps.
    """
    count("the number of steps", len(steps), 12)
    count("the number of peers", len(peers), 8, 0)
    for label, gbps in (*steps, *peers, ("copy", copy)):
        check_positive(f"the bandwidth of {label}", gbps)
    every, pitch, gap = [*steps, *peers], 6.2, 7.0 * bool(peers)
    bottom = 12 + pitch * len(every) + gap
    pic = Picture("Softmax, from eager to the speed of memory", bottom + 5.5)
    scale = 55 / max(copy, *(gbps for _, gbps in every))
    ceiling = 22 + scale * copy
    pic.line((ceiling, ceiling), (10.8, bottom), MUTED, linestyle="--", linewidth=1.4)
    pic.quiet(ceiling, 9.2, f"copy: {copy:,.0f} GB/s")
    if peers:
        pic.bold(20.5, 9.2, "the course", "right")
        pic.bold(20.5, 12 + pitch * len(steps) + gap - 2.6, "others", "right")
    for number, (label, gbps) in enumerate(every):
        is_peer = number >= len(steps)
        y, known = 12 + pitch * number + gap * is_peer, STYLES.get(label)
        fill = tint(known.colour if known else BLUE, 0.85)
        pic.text(20.5, y + 2.3, known.label if known else label, "right")
        gid = f"{'peer' if is_peer else 'step'}: {label}"
        pic.box((22, y, scale * gbps, 4.6), "", fill, gid=gid)
        pic.text(97.5, y + 2.3, f"{gbps:,.0f} GB/s · {gbps / copy:.0%}", "right")
    pic.quiet(97.5, bottom + 2, source or "effective bandwidth, % of the copy", "right")
    return pic.figure
