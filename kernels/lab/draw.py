"""Pictures of what kernels do, each computed from the parameters of the case it shows.

A picture is a card 100 units wide, its y axis pointing down, with boxes, arrows and
texts on it. What a box stands for is its `gid` ("program 3", "sector touched"), which
is also what the tests read. Each function returns a figure that a notebook shows once.

Colours are Okabe and Ito's, lightened under text; they only repeat what a number, a
name or a hatch also says.

Weighed: triton-viz, which records a run of a kernel to be explored in a browser; a page
of a book needs a still that reads without one.
"""

import heapq
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from kernels.lab import plot
from kernels.lab.gpu import Gpu
from kernels.lab.occupancy import resident
from kernels.lab.plot import CARD, EDGE, INK, MUTED, Figure

BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F"
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
RULE, ALERT, WELL = "#9aa0ab", "#a84800", "#00694d"
MASKED = "/////"  # the hatch of a lane that is masked off
MONO = {"family": "monospace"}


def _tint(colour: str | int, strength: float = 0.42) -> tuple[float, float, float]:
    """A lighter colour, or a lighter version of the palette's n-th."""
    if isinstance(colour, int):
        colour = PALETTE[colour % len(PALETTE)]
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour))
    return red, green, blue


CHIP = _tint(SKY, 0.14)


class _Picture:
    """A card with a title; (0, 0) is its top left corner, (100, height) the opposite.

    The `place` of a box is (left, top, width, height).
    """

    def __init__(self, title: str, height: float) -> None:
        pixels = round(plot.DPI * plot.WIDTH * height / 100)
        self.figure = plot.figure(pixels / plot.DPI)
        self.figure.set_layout_engine("none")
        limits = {"xlim": (0, 100), "ylim": (height, 0)}
        self.axes = self.figure.add_axes((0, 0, 1, 1), **limits)
        self.axes.set_axis_off()
        self.text(2.5, 4.2, title, size=plot.FONT + 2, weight="bold")

    def text(
        self, x: float, y: float, text: str, ha: str = "left", **look: Any
    ) -> None:
        look = {"size": plot.FONT, "color": INK} | look
        self.axes.text(x, y, text, ha=ha, va="center", **look)

    def bold(self, x: float, y: float, text: str, ha: str = "left") -> None:
        self.text(x, y, text, ha, weight="bold")

    def quiet(self, x: float, y: float, text: str, ha: str = "center") -> None:
        self.text(x, y, text, ha, color=MUTED)

    def box(
        self, place: tuple, text: str = "", fill: Any = "white", **look: Any
    ) -> None:
        """A box with a text in its middle."""
        x, y, width, height = place
        look = {"edgecolor": CARD, "linewidth": 0.8} | look
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, **look))
        if text:
            colour = INK if sum(to_rgb(fill)) > 1.5 else "white"
            self.text(x + width / 2, y + height / 2, text, "center", color=colour)

    def outline(self, place: tuple, **look: Any) -> None:
        self.box(place, "", "none", **({"edgecolor": INK, "linewidth": 1.1} | look))

    def frame(self, place: tuple, fill: Any = "white") -> None:
        """A rounded box for others to stand in."""
        x, y, width, height = place
        look = {"facecolor": fill, "edgecolor": RULE, "linewidth": 0.8}
        corner, style = (x + 0.6, y + 0.6), "round,pad=0.6"
        self.axes.add_patch(
            FancyBboxPatch(corner, width - 1.2, height - 1.2, style, **look)
        )

    def lane(self, place: tuple, text: str, index: int, masked: bool, gid: str) -> None:
        """A cell in the colour of a program; hatched and empty if masked off."""
        if masked:
            look = {"edgecolor": _tint(index, 0.8), "hatch": MASKED}
            self.box(place, "", _tint(index, 0.15), gid=f"{gid} masked", **look)
        else:
            self.box(place, text, _tint(index, 0.5), edgecolor="white", gid=gid)

    def arrow(self, start: tuple, end: tuple, style: str = "-|>") -> None:
        look = {"arrowstyle": style, "mutation_scale": 9, "linewidth": 0.9}
        look |= {"color": MUTED, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(start, end, **look))

    def line(self, xs: tuple, ys: tuple, color: Any = RULE, **look: Any) -> None:
        self.axes.plot(xs, ys, **({"color": color, "linewidth": 0.8} | look))

    def shape(self, corners: Sequence[tuple], fill: Any) -> None:
        self.axes.add_patch(Polygon(corners, facecolor=fill, linewidth=0))

    def bracket(
        self, left: float, right: float, y: float, text: str, side: int
    ) -> None:
        """Names a span from below (side 1) or from above (side −1)."""
        left, right, tip = left + 0.3, right - 0.3, y - 0.9 * side
        self.line((left, left, right, right), (tip, y, y, tip), MUTED)
        self.text((left + right) / 2, y + 2 * side, text, "center")

    def key(self, x: float, y: float, text: str, fill: Any, **look: Any) -> None:
        self.box((x, y - 1.4, 3.4, 2.8), "", fill, **look)
        self.text(x + 4.5, y, text)


def _count(name: str, value: Any, most: int | None = None, least: int = 1) -> int:
    """A whole number that the picture has room for."""
    try:
        number = operator.index(value)
    except TypeError:
        what = type(value).__name__
        raise TypeError(f"{name} must be a whole number, got {what}") from None
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {limits} to be drawn, got {number}")
    return number


def _power_of_two(name: str, value: Any, most: int) -> int:
    number = _count(name, value, most)
    if number & (number - 1):
        raise ValueError(f"{name} must be a power of two, got {number}")
    return number


def _check_gpu(gpu: Any) -> None:
    if not isinstance(gpu, Gpu):
        what = type(gpu).__name__
        raise TypeError(f"gpu must be a Gpu, as gpu.named('H200') gives, got {what}")


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _short(count: float, base: int = 1000) -> str:
    """1423763 as "1.42 M"."""
    power = 0
    while count >= base and power < 3:
        count, power = count / base, power + 1
    return f"{count:.3g} {' kMG'[power]}".rstrip()


def _bytes(count: int) -> str:
    return f"{_short(count, 1024)}iB".replace("kiB", "KiB")


def _signed(value: float) -> str:
    text = f"{value:.2f}" if value % 1 else f"{value:g}"
    return text.replace("inf", "∞").replace("-", "−")


# ---- where the values go -------------------------------------------------------------


def _operations(name: str, traffic: Any) -> list[tuple[str, int, int]]:
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


def fusion(eager: Any, fused: Any) -> Figure:
    """A chain of kernels beside the one that replaces it, and what each of them moves.

    Args:
        eager, fused: a `meter.Traffic`, or a list of tuples (name, values read, values
            written), one per kernel. An arrow is as wide as its values are many.

    Raises:
        TypeError, ValueError: one is no such list, or they hold over 8 kernels.
    """
    chains = [_operations("eager", eager), _operations("fused", fused)]
    columns = _count("the number of kernels", sum(map(len, chains)), 8)
    totals = [sum(read + written for _, read, written in chain) for chain in chains]
    _count("the number of values that a chain moves", min(totals))
    most = max(max(row[1:]) for chain in chains for row in chain)
    pic = _Picture("Every kernel reads from DRAM and writes to DRAM", 59)
    pic.box((14, 12, 83, 5), "DRAM", _tint(GREY, 0.25), edgecolor=INK)
    pic.quiet(2.5, 36, "kernels", "left")
    pic.line((2.5, 97), (43.5, 43.5))
    pic.text(2.5, 46.5, "values read", color=BLUE)
    pic.text(2.5, 50, "written", color=RED)
    pitch, left = 80 / columns, 14.0
    for title, chain in zip(("eager", "fused"), chains, strict=True):
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
                pic.text(middle, y, _short(values), "center", color=colour)
            left += pitch
        left += 3
    moved = [
        f"{_plural(len(chain), 'kernel')} move{'s' * (len(chain) == 1)} {_short(total)}"
        for chain, total in zip(chains, totals, strict=True)
    ]
    fewer = f"{totals[0] / totals[1]:.1f} times fewer"
    pic.bold(2.5, 55, f"eager: {moved[0]} values; fused: {moved[1]}, {fewer}")
    return pic.figure


def memory_hierarchy(gpu: Gpu) -> Figure:
    """Where values can live on a GPU, from nearest to farthest from the arithmetic.

    Args:
        gpu: each number in the picture is one of its facts.
    """
    _check_gpu(gpu)
    registers = 4 * gpu.registers_per_sm
    pic = _Picture(f"Memory of the {gpu.name}", 63)
    pic.frame((2.5, 7.5, 58, 40), CHIP)
    for x, number in ((4.5, 0), (21.5, 1), (42.5, gpu.sms - 1)):
        pic.frame((x, 9.2, 16, 24.5))
        pic.bold(x + 8, 11.8, f"SM {number}", "center")
        register_file, shared = (x + 1.5, 14.2, 13, 7), (x + 1.5, 24.2, 13, 7.5)
        pic.box(register_file, "registers", _tint(BLUE, 0.35), edgecolor=INK)
        pic.box(shared, "shared\nmemory, L1", _tint(GREEN, 0.35), edgecolor=INK)
        pic.arrow((x + 8, 21.2), (x + 8, 24.2), "<|-|>")
        pic.arrow((x + 8, 31.7), (x + 8, 37.7), "<|-|>")
    pic.text(40, 21.5, "…", "center", size=14)
    pic.box((4.5, 37.7, 54, 7.5), "L2 cache", _tint(ORANGE, 0.45), edgecolor=INK)
    pic.arrow((31.5, 45.2), (31.5, 51.5), "<|-|>")
    dram = "DRAM (global memory)"
    pic.box((2.5, 51.5, 58, 8), dram, _tint(GREY, 0.3), edgecolor=INK)
    for y, *lines in (
        (11.5, "Registers: a thread's own", f"{_bytes(registers)} per SM"),
        (17.3, "", f"at most {4 * gpu.max_registers_per_thread:,} bytes per thread"),
        (24.6, "Shared memory: a block's own", f"{_bytes(gpu.shared_per_sm)} per SM"),
        (30.4, "", f"at most {_bytes(gpu.shared_per_block)} per block"),
        (38.6, "L2: all SMs share it", f"{_bytes(gpu.l2_bytes)}, on the chip"),
        (52.2, "DRAM: where tensors live", f"{gpu.peak_bandwidth_gbps:,.0f} GB/s peak"),
        (58.0, "", "beside the chip"),
    ):
        heading, fact = lines
        pic.bold(63, y, heading)
        pic.text(63, y + (2.9 if heading else 0), fact)
    return pic.figure


# ---- programs ------------------------------------------------------------------------


def launch(kernel: str, n_programs: int, *, sms: int = 4, per_sm: int = 3) -> Figure:
    """A launch: the host enqueues a grid of programs, the GPU deals them to its SMs.

    Args:
        kernel: the kernel's name, as the driver calls it.
        n_programs: the grid's size, at most 48.
        sms: the SMs of the GPU drawn, at most 8.
        per_sm: the programs that are resident on an SM at once, at most 6.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a name, got {type(kernel).__name__}")
    n_programs = _count("n_programs", n_programs, 48)
    sms, per_sm = _count("sms", sms, 8), _count("per_sm", per_sm, 6)
    placed = min(n_programs, sms * per_sm)
    high = 6 + 4.4 * math.ceil(per_sm / 3)
    deep = 2.5 + (high + 1) * math.ceil(sms / 2)
    deep = max(18, 4.4 * math.ceil(n_programs / 6), deep)
    pic = _Picture("The driver launches a grid; the GPU deals it out", deep + 20)
    for x, heading in ((2.5, "Host (CPU)"), (37.5, "Grid"), (68.5, "GPU")):
        pic.bold(x, 9.2, heading)
    pic.frame((2.5, 11.5, 28.5, 18))
    pic.quiet(4.5, 15, "the driver, in Python", "left")
    for row, code in enumerate((kernel, f"[({n_programs},)]", "(output, input, …)")):
        pic.text(4.5, 19 + 2.9 * row, code, **MONO)
    pic.arrow((31.5, 20.5), (36.5, 20.5))
    for p in range(n_programs):
        place = (37.5 + 4.1 * (p % 6), 11.5 + 4.4 * (p // 6), 3.6, 3.8)
        fill = _tint(p % sms) if p < placed else "white"
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
                pic.box(place, f"{p}", _tint(sm), edgecolor=INK, gid=gid)
            else:
                pic.box(place, edgecolor=EDGE, gid=f"SM {sm} free")
    room = f"{_plural(sms, 'SM')} × {per_sm} resident: {placed} start at once"
    late = n_programs - placed
    rest = f"{late} (white) wait for one to end" if late else "none waits"
    pic.text(2.5, deep + 15.5, f"{_plural(n_programs, 'program')}. {room}, {rest}.")
    return pic.figure


def _pair(name: str, value: Any) -> tuple[int, int]:
    """A vector's length as (1, length); a matrix's shape as it is."""
    pair = value if isinstance(value, tuple | list) else (1, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a length or (rows, columns), got {value!r}")
    return _count(f"{name}'s rows", pair[0]), _count(f"{name}'s columns", pair[1])


def coverage(
    shape: int | tuple[int, int],
    block: int | tuple[int, int],
    *,
    programs: int | None = None,
) -> Figure:
    """Which program touches which elements: a colour per program, hatched if masked.

    Args:
        shape: the length of a vector or (n_rows, n_cols) of a matrix.
        block: the lanes of one block: BLOCK, or (ROWS_PER_PROGRAM, BLOCK_COLS).
        programs: how many there are. None gives each block its own; if there are fewer
            programs than blocks, program p takes blocks p, p + programs, and so on, as
            a persistent kernel does.

    Raises:
        ValueError: a number is below 1, or there are over 24 rows or 64 columns of
            lanes, which is more than the picture has room for.
    """
    n_rows, n_cols = _pair("shape", shape)
    block_rows, block_cols = _pair("block", block)
    down, across = math.ceil(n_rows / block_rows), math.ceil(n_cols / block_cols)
    blocks = down * across
    programs = blocks if programs is None else _count("programs", programs, blocks)
    rows = _count("the padded rows", down * block_rows, 24)
    cols = _count("the padded columns", across * block_cols, 64)
    flat, top = rows == 1, 11.0
    left, high = (2.5, 4.5) if flat else (9.5, 3.0)
    wide = min(5.5, (95 if flat else 75) / cols)
    bottom = top + high * rows
    lanes = _plural(block_rows * block_cols, "lane")
    loop = ", looping over the blocks" if programs < blocks else ""
    title = f"{_plural(programs, 'program')}, {lanes} each{loop}"
    pic = _Picture(title, bottom + (11 if flat else 7))
    for row in range(rows):
        for col in range(cols):
            p = (row // block_rows * across + col // block_cols) % programs
            place = (left + wide * col, top + high * row, wide, high)
            masked = row >= n_rows or col >= n_cols
            pic.lane(place, "", p, masked, f"program {p}")
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
    count = f"{_plural(rows * cols, 'lane')} for {_plural(n_rows * n_cols, 'element')}"
    off = f"{rows * cols - n_rows * n_cols} masked off (hatched)"
    note = f"{count}: {off}, neither loaded nor stored"
    pic.text(left, bottom + (7.5 if flat else 3.2), note)
    return pic.figure


def thread_and_program(n_elements: int, block: int) -> Figure:
    """The same vector for Numba CUDA, one element per thread, and for Triton.

    Args:
        n_elements: the vector's length; at most 24 when padded to whole blocks.
        block: the threads of a CUDA block, and the lanes of a Triton program.
    """
    block = _power_of_two("block", block, 16)
    n_elements = _count("n_elements", n_elements)
    blocks = math.ceil(n_elements / block)
    lanes = _count("the padded length", blocks * block, 24)
    wide = min(5.5, 84 / lanes)
    pic = _Picture("One element per thread, or one block per program", 71)
    pic.bold(2.5, 10, "Numba CUDA: the code is what one thread does")
    pic.text(2.5, 13.4, "i = cuda.grid(1); if i < n: z[i] = x[i] + y[i]", **MONO)
    pic.bold(2.5, 41, "Triton: the code is what one program does")
    code = f"i = tl.program_id(0) * {block} + tl.arange(0, {block}); mask = i < n"
    pic.text(2.5, 44.4, code, **MONO)
    rows = {22.6: "threads", 31.6: "vector", 50.5: "programs", 60.0: "vector"}
    for y, name in rows.items():
        pic.quiet(11.5, y, name, "right")
    for i in range(lanes):
        number, x, idle = i // block, 13 + wide * i, i >= n_elements
        thread = (x + 0.06 * wide, 20.5, 0.88 * wide, 4.2)
        pic.lane(thread, f"{i % block}", number, idle, "thread")
        pic.lane((x, 57.9, wide, 4.2), f"{i}", number, idle, "lane")
        if not idle:
            pic.arrow((x + wide / 2, 25), (x + wide / 2, 29.3))
            pic.lane((x, 29.5, wide, 4.2), f"{i}", number, False, "element")
    for number in range(blocks):
        width = wide * block
        x = 13 + width * number
        label = ("block {0}", "program {0}") if width > 11 else ("{0}", "{0}")
        block_name, program_name = (name.format(number) for name in label)
        pic.bracket(x, x + width, 19.3, block_name, -1)
        place = (x + 0.4, 48, width - 0.8, 5)
        pic.box(place, program_name, _tint(number, 0.5), gid="program")
        pic.arrow((x + width / 2, 53.2), (x + width / 2, 57.6))
        pic.outline((x, 57.9, width, 4.2))
    cuda = f"{_plural(lanes, 'thread')} in {_plural(blocks, 'block')}"
    note = f"{_plural(n_elements, 'element')}: {cuda}, or {_plural(blocks, 'program')}"
    pic.text(2.5, 67, f"{note}; {lanes - n_elements} of {lanes} lanes idle (hatched)")
    return pic.figure


# ---- one row -------------------------------------------------------------------------


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
        others: what `tl.load(…, other=…)` puts into masked lanes, one panel each.
    """
    real = torch.as_tensor(row, dtype=torch.float32)
    if real.ndim != 1 or not bool(real.isfinite().all()):
        raise ValueError(f"row must be one row of finite numbers, got {row!r}")
    block_cols = _power_of_two("block_cols", block_cols, 8)
    n_cols = _count("the row's length", len(real), block_cols)
    _count("the number of others", len(others))
    wanted, wide = torch.softmax(real, 0), 60 / block_cols
    title = f"n_cols = {n_cols} in a block of BLOCK_COLS = {block_cols}"
    pic = _Picture(title, 9 + 21.5 * len(others))
    for panel, other in enumerate(others):
        top, filler = 11.5 + 21.5 * panel, _signed(float(other))
        block = torch.full((block_cols,), float(other))
        block[:n_cols] = real
        powers = torch.exp(block - block.max())
        output = powers / powers.sum()
        right = torch.allclose(output[:n_cols], wanted, atol=1e-6)
        total = f"{output[:n_cols].sum():.2f} in all: {'right' if right else 'wrong'}"
        pic.bold(2.5, top, f"other = {filler}")
        edge = 18 + wide * n_cols
        pic.bracket(18, edge, top + 0.9, _plural(n_cols, "element"), -1)
        if n_cols < block_cols:
            pic.bracket(edge, 78, top + 0.9, "masked", -1)
        verdict = {"weight": "bold", "color": WELL if right else ALERT}
        for step, (name, values, result, look) in enumerate(
            (
                ("loaded", block, f"max = {_signed(block.max().item())}", {}),
                ("exp(x − max)", powers, f"sum = {powers.sum():.2f}", {}),
                ("÷ sum", output, total, verdict),
            )
        ):
            y = top + 2.2 + 4.7 * step
            pic.text(2.5, y + 2.2, name)
            pic.text(79, y + 2.2, result, **look)
            for col, value in enumerate(values.tolist()):
                masked = col >= n_cols
                fill = _tint(ORANGE, 0.28) if masked else _tint(SKY, 0.35)
                text = f"{value:.2f}" if step else _signed(value)
                gid = f"{filler} {name}{' masked' if masked else ''}"
                pic.box((18 + wide * col, y, wide, 4.4), text, fill, gid=gid)
    return pic.figure


def strides(tensor: torch.Tensor, name: str = "A view") -> Figure:
    """A matrix over its storage: which cell of memory holds which (row, column).

    Args:
        tensor: 2-D, at most 8 × 10, over a storage of at most 96 elements. Its shape,
            strides and storage offset are drawn, not its values.
        name: what to call it, such as "Transposed" or "x[:, :3]".
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.ndim != 2:
        raise ValueError(f"tensor must be 2-D, got shape {tuple(tensor.shape)}")
    n_rows = _count("the tensor's rows", tensor.shape[0], 8)
    n_cols = _count("the tensor's columns", tensor.shape[1], 10)
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    size = _count("the storage's elements", size, 96)
    (by_row, by_col), start = tensor.stride(), tensor.storage_offset()
    held: dict[int, list[tuple[int, int]]] = {}
    memory = 24 + max(3.6 * n_rows, 14)
    title = f"{name}: memory is one strip, read by strides"
    pic = _Picture(title, memory + 7 * math.ceil(size / 24) + 1.5)
    pic.text(2.5, 9, "the view: at (row, column), its cell of the storage")
    for row in range(n_rows):
        pic.quiet(9.5, 15.3 + 3.6 * row, f"row {row}", "right")
        for col in range(n_cols):
            cell = start + row * by_row + col * by_col
            held.setdefault(cell, []).append((row, col))
            place = (10.5 + 4.4 * col, 13.5 + 3.6 * row, 4.4, 3.6)
            pic.box(place, f"{cell}", _tint(row), edgecolor="white", gid=f"{row},{col}")
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
            fill = _tint(places[0][0])
        text = _places(places, n_rows, n_cols)
        gid = f"cell {cell}: " + " ".join(f"{row},{col}" for row, col in places)
        pic.box((x, y, wide, 3.8), text, fill, edgecolor=RULE, gid=gid)
        if cell % 4 == 0:
            pic.quiet(x + wide / 2, y - 1.5, f"{cell}")
    return pic.figure


def _places(places: list[tuple[int, int]], n_rows: int, n_cols: int) -> str:
    """One element as "1,2"; all rows of a column as "∗,2"; any other three as "3×"."""
    if len(places) < 2:
        return "".join(f"{row},{col}" for row, col in places)
    rows, cols = ({place[axis] for place in places} for axis in (0, 1))
    if len(places) == n_rows and len(cols) == 1:
        return f"∗,{cols.pop()}"
    if len(places) == n_cols and len(rows) == 1:
        return f"{rows.pop()},∗"
    return f"{len(places)}×"


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
        ValueError: a start is no multiple of the vector's bytes (on the hardware, a
            misaligned address), or the lanes span over 1024 bytes.
    """
    itemsize = _power_of_two("itemsize", itemsize, 8)
    each = itemsize * _power_of_two("vector", vector, 16 // itemsize)
    apart = each * _count("stride", stride)
    _count("the bytes from the first lane to the last", 31 * apart + each, 1024)
    _count("the number of starts", len(starts), 4)
    for start in starts:
        if _count("a start", start, least=0) % each:
            raise ValueError(
                f"a start must be a multiple of the {each} bytes that a lane reads at "
                f"once, got {start}: the hardware calls it a misaligned address"
            )
    window = max(start % 128 + 31 * apart + each for start in starts)
    window = math.ceil(window / 32) * 32
    scale = 90 / window
    pic = _Picture(f"A warp's load, {each} bytes per lane", 6 + 30 * len(starts))
    for panel, start in enumerate(starts):
        top, base = 10 + 30 * panel, start - start % 128
        firsts = [start % 128 + lane * apart for lane in range(32)]
        touched = {byte // 32 for first in firsts for byte in (first, first + each - 1)}
        sectors = f"{_plural(len(touched), 'sector')} of 32 bytes fetched"
        pic.bold(2.5, top, f"lane 0 reads at byte {start:,}")
        share = f"{100 * each / len(touched):.3g}% of it used"
        pic.text(97.5, top, f"{sectors}, {share}", "right")
        for sector in range(window // 32):
            hit, place = sector in touched, 5 + 32 * scale * sector
            look = {"edgecolor": RULE, "gid": f"sector {'' if hit else 'un'}touched"}
            fill = _tint(ORANGE, 0.35) if hit else "white"
            pic.box((place, top + 15.5, 32 * scale, 5), "", fill, **look)
        for lane, first in enumerate(firsts):
            x, colour = 2.5 + 2.97 * lane, _tint(BLUE, 0.85 if lane % 2 else 0.4)
            left, wide = 5 + scale * first, scale * each
            pic.box((x, top + 2.8, 2.87, 3.8), f"{lane}", colour)
            pic.box((left, top + 16.2, wide, 3.6), "", colour, linewidth=0, gid="used")
            ends = (x + 1.43, left + wide / 2)
            pic.line(ends, (top + 6.6, top + 16.2), colour)
        for byte in range(0, window + 1, 32 if window <= 320 else 128):
            pic.quiet(5 + scale * byte, top + 22.4, f"{base + byte}")
    return pic.figure


def elements_of(
    block_cols: int,
    warp: int,
    lane: int,
    *,
    size_per_thread: int = 4,
    threads_per_warp: int = 32,
    warps_per_cta: int = 4,
) -> list[int]:
    """The elements of a block that one lane holds, in the order of its registers.

    Triton's blocked layout in one dimension: a lane takes `size_per_thread` neighbours,
    the next lane the next ones, then the next warp, and from the start again until the
    block is covered. Where all warps together are larger than the block, it wraps
    round: some hold copies.
    """
    first = (warp * threads_per_warp + lane) * size_per_thread
    tile = size_per_thread * threads_per_warp * warps_per_cta
    return [
        (start + first + element) % block_cols
        for start in range(0, block_cols, tile)
        for element in range(min(size_per_thread, block_cols))
    ]


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
        warp, lane: whose elements to show.
    """
    block_cols = _power_of_two("block_cols", block_cols, 2**16)
    layout = {
        "size_per_thread": _power_of_two("size_per_thread", size_per_thread, 16),
        "threads_per_warp": _power_of_two("threads_per_warp", threads_per_warp, 32),
        "warps_per_cta": _power_of_two("warps_per_cta", warps_per_cta, 32),
    }
    warp = _count("warp", warp, warps_per_cta - 1, 0)
    lane = _count("lane", lane, threads_per_warp - 1, 0)
    chunk = min(size_per_thread * threads_per_warp, block_cols)
    pieces, tile = block_cols // chunk, math.prod(layout.values())
    wide, slot, cell = 95 / pieces, 95 / threads_per_warp, 7.0
    title = f"A block of {block_cols:,} elements over {_plural(warps_per_cta, 'warp')}"
    pic = _Picture(title, 58)
    pic.text(2.5, 9.5, f"the block: {_plural(chunk, 'neighbour')} to each warp in turn")
    for piece in range(pieces):
        owners = range(piece % warps_per_cta, warps_per_cta, pieces)
        numbers = ", ".join(map(str, owners))
        name = f"warp{'s' * (len(owners) > 1)} {numbers}" if wide > 9 else numbers
        look = {"linewidth": min(0.8, wide / 4), "gid": f"warp {owners[0]}"}
        name, fill = name if wide > 2.8 else "", _tint(owners[0])
        pic.box((2.5 + wide * piece, 12, wide, 6), name, fill, **look)
    left = 2.5 + wide * (warp % pieces)
    pic.shape([(left, 18), (left + wide, 18), (97.5, 27), (2.5, 27)], "#ecedee")
    each = _plural(min(size_per_thread, block_cols), "neighbour")
    pic.text(50, 24.8, f"warp {warp}: {each} to each lane", "center")
    for number in range(threads_per_warp):
        fill = _tint(warp, 0.75 if number == lane else 0.35)
        pic.box((2.5 + slot * number, 27, slot, 6), f"{number}", fill, gid="lane")
    mine = elements_of(block_cols, warp, lane, **layout)
    shown = mine if len(mine) <= 12 else [*mine[:8], "…", *mine[-3:]]
    at = 2.5 + slot * lane
    left = min(
        max(at + slot / 2 - cell * len(shown) / 2, 2.5), 97.5 - cell * len(shown)
    )
    right = left + cell * len(shown)
    pic.shape([(at, 33), (at + slot, 33), (right, 42), (left, 42)], "#ecedee")
    for number, element in enumerate(shown):
        fill = _tint(warp, 0.55 if number // size_per_thread % 2 else 0.3)
        fill = CARD if element == "…" else fill
        place = (left + cell * number, 42, cell, 5)
        pic.box(place, f"{element}", fill, gid=f"element {element}")
    registers = f"lane {lane} of warp {warp}: {_plural(len(mine), 'register')}"
    pic.text(min(left, 40), 49.2, f"{registers}, holding the elements above")
    product = f"{size_per_thread} × {threads_per_warp} lanes × {warps_per_cta} warps"
    rounds = _plural(math.ceil(block_cols / tile), "round")
    copies = f"; each is held {tile // block_cols} times" if tile > block_cols else ""
    note = f"{product} = {tile:,} per round: {rounds} for {block_cols:,} elements"
    pic.text(2.5, 54, note + copies)
    return pic.figure


def reduction(values: Sequence[float], *, warp_size: int = 8) -> Figure:
    """The maximum of a row: by shuffles within warps, by shared memory between them.

    Args:
        values: one per lane; a power of two of them, at most 16.
        warp_size: the lanes of a warp in the picture (on the hardware 32).
    """
    lanes = _power_of_two("the number of values", len(values), 16)
    warp_size = _power_of_two("warp_size", warp_size, lanes)
    warps, state = lanes // warp_size, list(values)
    shuffles = [warp_size >> step for step in range(1, warp_size.bit_length())]
    title = f"The maximum of {_plural(lanes, 'value')} in {_plural(warps, 'warp')}"
    pic = _Picture(title, 29 + 8.5 * len(shuffles) + (10 if warps > 1 else 0))
    wide = 75 / lanes
    middles = [22.5 + wide * (lane + 0.5) for lane in range(lanes)]

    def show(y: float, name: str) -> None:
        pic.text(2.5, y + 2, name)
        for lane, value in enumerate(state):
            first = lane // warp_size * warp_size
            best = value == max(state[first : first + warp_size])
            fill = _tint(lane // warp_size, 0.7 if best else 0.25)
            place = (middles[lane] - 0.44 * wide, y, 0.88 * wide, 4)
            pic.box(place, _signed(value), fill, gid=f"{name}: {lane}")

    for warp in range(warps):
        left = 22.5 + wide * warp_size * warp
        pic.bracket(left, left + wide * warp_size, 11, f"warp {warp}", -1)
    y = 12.3
    show(y, "one value per lane")
    for distance in shuffles:
        for lane, middle in enumerate(middles):
            colour = _tint(lane // warp_size, 0.9)
            pic.line((middle, middle), (y + 4, y + 8.5))
            pic.line((middles[lane ^ distance], middle), (y + 4, y + 8.5), colour)
        state = [max(value, state[lane ^ distance]) for lane, value in enumerate(state)]
        y += 8.5
        show(y, f"shuffle, xor {distance}")
    if warps > 1:
        y += 10
        pic.text(2.5, y + 2, "shared memory")
        for warp, value in enumerate(state[::warp_size]):
            x, below = (
                60 + 6 * (warp - warps / 2),
                22.5 + wide * warp_size * (warp + 0.5),
            )
            pic.arrow((below, y - 5.7), (x + 3, y - 0.2))
            gid = f"shared memory: {warp}"
            pic.box((x, y, 6, 4), _signed(value), _tint(warp, 0.5), gid=gid)
    pic.arrow((60, y + 4.2), (60, y + 8.3))
    pic.text(2.5, y + 10.5, "the row's maximum")
    look = {"edgecolor": INK, "gid": "result"}
    pic.box((56, y + 8.5, 8, 4), _signed(max(state)), _tint(YELLOW, 0.6), **look)
    return pic.figure


# ---- residency and time --------------------------------------------------------------


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
    _check_gpu(gpu)
    result = resident(gpu, num_warps=num_warps, registers=registers, shared=shared)
    granule, reserved = gpu.register_granularity, gpu.shared_reserved_per_block
    per_warp = math.ceil(registers * gpu.warp_size / granule) * granule
    granule = gpu.shared_granularity
    budgets = {
        "threads": (num_warps * gpu.warp_size, gpu.threads_per_sm),
        "blocks": (1, gpu.blocks_per_sm),
        "registers": (num_warps * per_warp, gpu.registers_per_sm),
        "shared memory": (
            math.ceil((shared + reserved) / granule) * granule,
            gpu.shared_per_sm,
        ),
    }
    blocks = result.blocks_per_sm
    title = f"{_plural(blocks, 'block')} of {_plural(num_warps, 'warp')} on one SM"
    pic = _Picture(title, 56)
    for row, (name, (each, budget)) in enumerate(budgets.items()):
        y, binds = 9.5 + 10.3 * row, name == result.limit
        look = {"color": ALERT, "weight": "bold"} if binds else {}
        unit = " bytes" if name == "shared memory" else ""
        pic.text(2.5, y + 4.7, name, **look)
        pic.quiet(20, y, f"{each:,}{unit} per block", "left")
        pic.quiet(80, y, f"{budget:,}{unit}", "right")
        pic.box((20, y + 2.2, 60, 5), gid=f"budget: {name}")
        wide, fill = 60 * each / budget, _tint(RED if binds else BLUE, 0.5)
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


def list_schedule(
    durations: Sequence[float],
    slots: int,
    start: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> list[tuple[int, float, float]]:
    """(slot, begin, end) of tasks in order, each begun on the first free slot.

    A slot needs the time `start` before each task, and works at its speed.
    """
    speeds = speeds or [1.0] * slots
    free, plan = [0.0] * slots, []
    for duration in durations:
        slot = min(range(slots), key=free.__getitem__)
        begin = free[slot] + start
        free[slot] = begin + duration / speeds[slot]
        plan.append((slot, begin, free[slot]))
    return plan


def stride_schedule(
    durations: Sequence[float],
    slots: int,
    start: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> list[tuple[int, float, float]]:
    """(slot, begin, end) of rows when program p takes rows p, p + slots, and so on.

    A slot needs the time `start` before its first row, and works at its speed.
    """
    speeds = speeds or [1.0] * slots
    free, plan = [start] * slots, []
    for row, duration in enumerate(durations):
        slot = row % slots
        begin = free[slot]
        free[slot] = begin + duration / speeds[slot]
        plan.append((slot, begin, free[slot]))
    return plan


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
    slot, which starts once and takes every `slots`-th row.

    Args:
        n_rows: rows of the tensor, at most 120.
        slots: programs resident at once on the whole GPU, at most 16.
        duration: the time of a row, or of each row.
        start: the time to start a program, in the same unit; a model, not measured.
        speeds: how fast each slot works, if not all at speed 1.
    """
    n_rows, slots = _count("n_rows", n_rows, 120), _count("slots", slots, 16)
    times = [duration] * n_rows if isinstance(duration, int | float) else list(duration)
    if len(times) != n_rows:
        raise ValueError(f"duration must be one time or {n_rows}, got {len(times)}")
    for time in (*times, start or 1):
        _positive("duration or start", time)
    if speeds is not None and len(speeds) != slots:
        raise ValueError(f"speeds must be {slots}, one per slot, got {len(speeds)}")
    for speed in speeds or ():
        _positive("speeds", speed)
    fresh = list_schedule(times, slots, start, speeds)
    lasting = stride_schedule(times, slots, start, speeds)
    scale = 84 / max(end for *_, end in fresh + lasting)
    high = 4.2 if slots <= 8 else 3.4
    height = slots * high + 9
    title = f"{_plural(n_rows, 'row')}, {_plural(slots, 'program')} resident at once"
    pic = _Picture(title, 2 * height + 14)
    idle = {"fill": "#eceef0", "linewidth": 0, "edgecolor": "#c4c9d0", "hatch": "...."}
    for top, name, plan, starts in (
        (10, "one program per row", fresh, n_rows),
        (10 + height, "persistent", lasting, min(slots, n_rows)),
    ):
        end = max(end for *_, end in plan)
        busy = sum(finish - begin for _, begin, finish in plan) + start * starts
        share = 1 - busy / (slots * end)
        pic.bold(2.5, top, f"{name}: {_plural(starts, 'program')}")
        pic.text(97.5, top, f"ends at {end:.3g}; {share:.0%} idle", "right")
        for slot in range(slots):
            y = top + 2.5 + high * slot
            uneven = speeds and speeds[slot] != 1
            label = f"{slot}, at ×{speeds[slot]:g}" if uneven else f"slot {slot}"
            pic.quiet(12.6, y + high / 2, label, "right")
            pic.box((13.5, y, scale * end, high - 0.4), **idle, gid=f"{name}: idle")
        turns = [0] * slots
        for row, (slot, begin, finish) in enumerate(plan):
            x, y, wide = 13.5 + scale * begin, top + 2.5 + high * slot, scale * start
            if start and (plan is fresh or turns[slot] == 0):
                place = (x - wide, y, wide, high - 0.4)
                pic.box(place, "", MUTED, gid=f"{name}: start")
            wide = scale * (finish - begin)
            wave = _tint(SKY if turns[slot] % 2 else BLUE, 0.55)
            fill = wave if plan is fresh else _tint(slot % 6, 0.5)
            text = f"{row}" if wide > 3.6 else ""
            pic.box((x, y, wide, high - 0.4), text, fill, gid=f"{name}: row {row}")
            turns[slot] += 1
    y = 2 * height + 9.4
    pic.key(2.5, y, "a row, by its number", _tint(BLUE, 0.55))
    pic.key(33, y, "idle, the tail", **idle)
    if start:
        pic.key(58, y, f"a program starts ({start:g})", MUTED)
    return pic.figure


def waiting_schedule(
    order: Sequence[tuple[int, int]],
    slots: int,
    *,
    load: float = 1.0,
    store: float = 0.5,
    patience: float = math.inf,
    alone: float = 2.0,
) -> list[tuple[int, float, float, float, float]]:
    """(slot, begin, published, resumed, end) of programs that wait for each other.

    A program loads, publishes, waits until all parts of its row are published, and
    stores. Who has waited for `patience` does without the others, in the time `alone`.
    Programs are begun in order, each on the first free slot; what never happens is at
    `math.inf`, and a program that never begins has slot -1.

    Args:
        order: (row, part) of each program.
        slots: programs resident at once.
        load, store, patience, alone: times, in one unit.
    """
    never = math.inf
    plan = [[-1, never, never, never, never] for _ in order]
    missing = Counter(row for row, _ in order)
    events = [(0.0, "free", slot) for slot in range(slots)]
    begun = 0

    def resume(program: int, now: float, work: float) -> None:
        plan[program][3:] = now, now + work
        heapq.heappush(events, (now + work, "free", plan[program][0]))

    while events:
        now, what, number = heapq.heappop(events)
        if what == "free" and begun < len(order):
            plan[begun][:3] = number, now, now + load
            heapq.heappush(events, (now + load, "published", begun))
            begun += 1
        elif what == "published":
            row = order[number][0]
            missing[row] -= 1
            heapq.heappush(events, (now + patience, "tired", number))
            if not missing[row]:
                for program, (its_row, _) in enumerate(order):
                    if its_row == row and plan[program][3] == never:
                        resume(program, now, store)
        elif what == "tired" and now < never == plan[number][3]:
            resume(number, now, alone + store)
    return [tuple(one) for one in plan]


def sharing(n_rows: int, n_parts: int, slots: int, *, patience: float = 1.0) -> Figure:
    """Programs that wait for each other, over time: in order, stuck, and with patience.

    Above, the programs of a row begin one after another. In the middle all first parts
    do, and if they take every slot, nobody ever goes on. Below, who has waited too long
    computes its part alone.

    Args:
        n_rows, n_parts: of the tensor, at most 48 programs.
        slots: programs resident at once, at most 8; see `waiting_schedule`.
        patience: how long a program waits, if a load takes 1.
    """
    n_rows, n_parts = _count("n_rows", n_rows), _count("n_parts", n_parts)
    _count("the number of programs", n_rows * n_parts, 48)
    slots = _count("slots", slots, 8)
    _positive("patience", patience)
    in_order = [(row, part) for row in range(n_rows) for part in range(n_parts)]
    by_part = [(row, part) for part in range(n_parts) for row in range(n_rows)]
    panels = {
        "in order": (in_order, math.inf),
        "all first parts first": (by_part, math.inf),
        "all first parts first, with patience": (by_part, patience),
    }
    plans = {
        name: waiting_schedule(order, slots, store=0.5, patience=limit)
        for name, (order, limit) in panels.items()
    }
    times = [time for plan in plans.values() for one in plan for time in one[1:]]
    last = max(time for time in times if time < math.inf)
    scale, high = 84 / last, 3.6
    height = slots * high + 9
    title = f"{_plural(n_rows, 'row')} of {_plural(n_parts, 'part')}, "
    pic = _Picture(title + _plural(slots, "slot"), 3 * height + 14)
    idle = {"fill": "#eceef0", "linewidth": 0, "edgecolor": "#c4c9d0", "hatch": "...."}
    for panel, (name, plan) in enumerate(plans.items()):
        top, order = 10 + height * panel, panels[name][0]
        end = max(one[-1] for one in plan)
        begun = sum(slot >= 0 for slot, *_ in plan)
        fate = f"never ends: {begun} of {len(plan)} programs began"
        pic.bold(2.5, top, name)
        pic.text(97.5, top, fate if end == math.inf else f"ends at {end:g}", "right")
        for slot in range(slots):
            pic.quiet(12.6, top + 2.5 + high * (slot + 0.5), f"slot {slot}", "right")
        for (row, part), (slot, begin, published, resumed, done) in zip(
            order, plan, strict=True
        ):
            if slot < 0:
                continue
            y, gid = top + 2.5 + high * slot, f"{name}: {row}.{part}"
            resumed, stores, done = (min(t, last) for t in (resumed, done - 0.5, done))
            for kind, first, until, look in (
                ("loads", begin, published, {"fill": _tint(BLUE, 0.55)}),
                ("waits", published, resumed, idle),
                ("alone", resumed, stores, {"fill": _tint(ORANGE, 0.8)}),
                ("stores", stores, done, {"fill": _tint(GREEN, 0.65)}),
            ):
                if first < until:
                    wide = scale * (until - first)
                    text = f"{row}.{part}" if kind == "loads" and wide > 4.8 else ""
                    place = (13.5 + scale * first, y, wide, high)
                    pic.box(place, text, **look, gid=f"{gid} {kind}")
    y = 3 * height + 9.4
    pic.key(2.5, y, "row.part loads", _tint(BLUE, 0.55))
    pic.key(28, y, "waits", **idle)
    pic.key(44, y, "reads the row alone", _tint(ORANGE, 0.8))
    pic.key(74, y, "stores", _tint(GREEN, 0.65))
    return pic.figure


def pipelined(
    iterations: int, num_stages: int, load: float, compute: float, store: float
) -> list[tuple[float, float, float]]:
    """(load issued, compute begins, store ends) of each iteration of a pipelined loop.

    As in the TTGIR of a softmax over rows: with s > 1 stages, s − 1 loads are issued
    before the loop, and an iteration waits for its own, computes, stores, and then
    issues the load of iteration i + s − 1 into the buffer that it has emptied. With one
    stage it issues its own load and waits. Loads do not slow each other here.
    """
    ahead = num_stages - 1
    issued, now, plan = [0.0] * ahead, 0.0, []
    for i in range(iterations):
        if not ahead:
            issued.append(now)
        begin = max(now, issued[i] + load)
        now = begin + compute + store
        plan.append((issued[i], begin, now))
        if ahead:
            issued.append(now)
    return plan


def pipeline(
    num_stages: Sequence[int] = (1, 2, 3),
    *,
    iterations: int = 4,
    load: float = 3.0,
    compute: float = 1.0,
    store: float = 0.5,
) -> Figure:
    """A loop's loads, arithmetic and stores over time, for each number of stages.

    Args:
        num_stages: one panel each, at most 4.
        iterations: of the loop, at most 8.
        load: the time from issuing a load to its arrival.
        compute, store: the time of each, in the same unit; a model, not measured.
    """
    iterations = _count("iterations", iterations, 8)
    stages = [_count("num_stages", number, 8) for number in num_stages]
    _count("the panels", len(stages), 4)
    for name, time in (("load", load), ("compute", compute), ("store", store)):
        _positive(name, time)
    plans = [pipelined(iterations, s, load, compute, store) for s in stages]
    scale = 81 / max(plan[-1][-1] for plan in plans)
    height = 3.2 * iterations + 7
    pic = _Picture("num_stages: loads under way at once", height * len(plans) + 14)
    for panel, plan in enumerate(plans):
        top, total = 10 + height * panel, f"{plan[-1][-1]:.3g}"
        pic.bold(2.5, top, f"num_stages = {stages[panel]}")
        pic.text(97.5, top, f"{_plural(iterations, 'iteration')}: {total}", "right")
        for i, (issued, begin, finish) in enumerate(plan):
            y, arrived, done = top + 2.4 + 3.2 * i, issued + load, begin + compute
            pic.quiet(15, y + 1.4, f"iteration {i}", "right")
            for kind, first, last, colour in (
                ("load", issued, arrived, BLUE),
                ("compute", begin, done, ORANGE),
                ("store", done, finish, GREEN),
            ):
                place = (16.5 + scale * first, y, scale * (last - first), 2.8)
                gid = f"{stages[panel]} stages: {kind} {i}"
                pic.box(place, "", _tint(colour, 0.65), gid=gid)
            waits = (16.5 + scale * arrived, 16.5 + scale * begin)
            pic.line(waits, (y + 1.4, y + 1.4), MUTED, linestyle=":")
    y = 9.4 + height * len(plans)
    pic.key(2.5, y, "load under way", _tint(BLUE, 0.65))
    pic.key(27, y, "compute", _tint(ORANGE, 0.65))
    pic.key(44, y, "store", _tint(GREEN, 0.65))
    pic.line((58, 62), (y, y), MUTED, linestyle=":")
    pic.text(63, y, "arrived, waits for its turn")
    return pic.figure


def cached(order: Iterable[Any], capacity: int) -> list[bool]:
    """Whether each access finds its block in a cache, which begins empty.

    The cache holds `capacity` blocks, and gives up the least recently used for a new
    one (LRU); a GPU's L2 only resembles it.

    Args:
        order: the blocks, in the order of the accesses.
        capacity: in blocks.
    """
    held: dict[Any, None] = {}  # the most recently used comes last
    found = []
    for block in order:
        found.append(block in held)
        held.pop(block, None)
        held[block] = None
        if len(held) > capacity:
            del held[next(iter(held))]
    return found


def rereading(n_blocks: int, capacity: int) -> Figure:
    """A row read twice through a cache, the second time forwards or backwards.

    Args:
        n_blocks: of the row, at most 16.
        capacity: blocks that the cache holds, at most 32; see `cached`.
    """
    n_blocks = _count("n_blocks", n_blocks, 16)
    capacity = _count("capacity", capacity, 32)
    once, wide, high = list(range(n_blocks)), 82 / (2 * n_blocks), 2.6
    height = high * n_blocks + 9
    title = f"A row of {_plural(n_blocks, 'block')}, a cache of {capacity}"
    pic = _Picture(title, 2 * height + 14)
    looks = {
        "first reading": _tint(GREY, 0.45),
        "from memory again": _tint(ORANGE, 0.8),
        "from the cache": _tint(BLUE, 0.55),
    }
    orders = {"forwards": once, "backwards": once[::-1]}
    for top, (name, second) in zip((10, 10 + height), orders.items(), strict=True):
        found = cached([*once, *second], capacity)
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


def ladder(
    steps: Sequence[tuple[str, float]], copy: float, *, source: str = ""
) -> Figure:
    """The course in one picture: the bandwidth of each step, below the copy's.

    Args:
        steps: (label, effective GB/s) in the order of the course, at most 12; the name
            of a provider brings its colour.
        copy: GB/s of the copy of the same tensor.
        source: what measured it, as `bench.Results.source` says.
    """
    _count("the number of steps", len(steps), 12)
    for label, gbps in (*steps, ("copy", copy)):
        _positive(f"the bandwidth of {label}", gbps)
    bottom = 12 + 6.5 * len(steps)
    pic = _Picture("Softmax, from eager to the speed of memory", bottom + 6)
    scale = 55 / max(copy, *(gbps for _, gbps in steps))
    ceiling = 22 + scale * copy
    for number, (label, gbps) in enumerate(steps):
        y, style = 12 + 6.5 * number, plot.STYLES.get(label)
        fill = _tint(style.colour if style else BLUE, 0.85)
        pic.text(20.5, y + 2.4, style.label if style else label, "right")
        pic.box((22, y, scale * gbps, 4.8), "", fill, gid=f"step: {label}")
        pic.text(97.5, y + 2.4, f"{gbps:,.0f} GB/s · {gbps / copy:.0%}", "right")
    pic.line((ceiling,) * 2, (10.5, bottom), MUTED, linestyle="--", linewidth=1.4)
    pic.quiet(ceiling, 9, f"copy: {copy:,.0f} GB/s")
    pic.quiet(
        97.5, bottom + 2.2, source or "effective bandwidth, % of the copy", "right"
    )
    return pic.figure
