"""Who holds a tile's elements, which bank serves them, which bytes they share."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernels.lab import models
from kernels.lab.draw.card import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RULE,
    SKY,
    YELLOW,
    Picture,
    count,
    plural,
    tint,
)
from kernels.lab.style import GRID, INK, MUTED, Figure

Threads = tuple[np.ndarray, np.ndarray]  # the warp and the lane of each element
SHOWN = 8  # rows and columns of a tile in `bank_tiles`


def tile_layout(
    tiles: Mapping[str, Threads], *, warp: int = 0, lane: int = 0, title: str = ""
) -> Figure:
    """Tiles, each element in its warp's colour and with its lane, one thread marked.

    Args:
        tiles: name → (warps, lanes), two arrays of the tile's shape: at most 2 tiles of
            at most 64 columns together, and of at most 32 rows.
        warp, lane: the thread whose elements are marked.
        title: of the picture.
    """
    count("the number of tiles", len(tiles), 2)
    shapes = [np.shape(warps) for warps, _ in tiles.values()]
    if any(len(shape) != 2 for shape in shapes):
        raise ValueError(f"tiles must have two axes, got shapes {shapes}")
    n_cols = count("the tiles' columns", sum(shape[1] for shape in shapes), 64)
    n_rows = count("a tile's rows", max(shape[0] for shape in shapes), 32)
    high = 2.6
    wide = (95 - 4 * len(tiles)) / n_cols
    pic = Picture(title or "Which lane holds which element", 21.5 + high * n_rows)
    left, top = 6.5, 13.6
    for (name, (warps, lanes)), shape in zip(tiles.items(), shapes, strict=True):
        right, below = left + wide * shape[1], top + high * shape[0]
        pic.bold(left, 9, name)
        mine = np.count_nonzero((warps == warp) & (lanes == lane))
        whole = f"lane {lane} of warp {warp}: {plural(mine, 'element')}"
        pic.text(right, 9, whole, "right")
        for row, col, height, width in _runs(np.stack([warps, lanes])):
            holder = int(warps[row, col]), int(lanes[row, col])
            place = (left + wide * col, top + high * row, wide * width, high * height)
            marked = holder == (warp, lane)
            fill = tint(YELLOW, 0.95) if marked else tint(holder[0], 0.4)
            gid = f"{name}: warp {holder[0]} lane {holder[1]} at {row},{col}"
            text = f"{holder[1]}" if wide * width > 2.2 else ""
            pic.box(place, text, fill, edgecolor="white", linewidth=0.6, gid=gid)
        for col in range(0, shape[1], 4 if n_cols <= 32 else 8):
            pic.quiet(left + wide * (col + 0.5), top - 1.5, f"{col}")
        for row in range(shape[0]):
            pic.quiet(left - 0.8, top + high * (row + 0.5), f"{row}", "right")
        left = right + 4
    y = below + 3.8
    used = sorted({int(w) for warps, _ in tiles.values() for w in np.unique(warps)})
    pic.text(6.5, y, "colour: the warp; number: the lane")
    for place, number in enumerate(used[:4]):
        pic.key(48 + 12.5 * place, y, f"warp {number}", tint(number, 0.4))
    return pic.figure


def _runs(holders: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Rectangles of one holder: (row, column, rows, columns), which cover the tile."""
    _, n_rows, n_cols = holders.shape
    seen, found = np.zeros((n_rows, n_cols), bool), []
    for row, col in np.ndindex(n_rows, n_cols):
        if seen[row, col]:
            continue
        same = (holders == holders[:, row, col][:, None, None]).all(0) & ~seen
        width = int(np.argmin([*same[row, col:], False]))
        rows = same[row:, col : col + width].all(1)
        height = int(np.argmin([*rows, False]))
        seen[row : row + height, col : col + width] = True
        found.append((row, col, height, width))
    return found


def banks(accesses: Mapping[str, Sequence[int]]) -> Figure:
    """Accesses of a warp to 4 bytes of shared memory each, and the banks they meet.

    Args:
        accesses: name → the byte address of each of 32 lanes; at most 4 accesses.
    """
    count("the number of accesses", len(accesses), 4)
    pic = Picture("Which bank serves which lane", 6.5 + 21 * len(accesses))
    wide = 82 / 32
    for panel, (name, addresses) in enumerate(accesses.items()):
        addresses = [int(address) for address in addresses]
        if len(addresses) != 32 or min(addresses) < 0:
            raise ValueError(
                f"{name} must be 32 addresses, none below 0, got {addresses}"
            )
        top, passes = 10 + 21 * panel, models.bank_passes(addresses)
        pic.bold(2.5, top - 1, name)
        times = "1 pass" if passes == 1 else f"{passes} passes"
        pic.text(97.5, top - 1, times, "right")
        words = [
            sorted({a // 4 for a in addresses if a // 4 % 32 == b}) for b in range(32)
        ]
        pic.text(2.5, top + 3, "lane")
        pic.text(2.5, top + 13, "bank")
        for number in range(32):
            left = 15.5 + wide * number
            load = len(words[number])
            fill = tint(ORANGE, min(0.25 + load / 16, 0.95)) if load > 1 else "white"
            fill = tint(SKY, 0.4) if load == 1 else fill
            kind = "idle" if not load else f"{load} words"
            pic.box((left, top + 1.2, wide, 3.6), f"{number}", tint(BLUE, 0.25))
            gid = f"{name}: bank {number} {kind}"
            pic.box(
                (left, top + 11.2, wide, 3.6),
                f"{number}",
                fill,
                edgecolor=RULE,
                gid=gid,
            )
            ends = (left + wide / 2, 15.5 + wide * (addresses[number] // 4 % 32 + 0.5))
            pic.line(ends, (top + 4.8, top + 11.2), MUTED, linewidth=0.7)
    return pic.figure


def bank_tiles(tiles: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """The banks of a tile's first elements, and those that one access meets.

    Args:
        tiles: name → (addresses, loaded): the byte address in shared memory of each
            element of a tile, and whether a warp's access reads it. Elements have 4
            bytes. At most 4 tiles, of at least 8 × 8 elements.
    """
    count("the number of tiles", len(tiles), 4)
    cell, gap = 2.75, 2.4
    pic = Picture("One load of a warp, and the bank of each element", 46)
    for panel, (name, (tile, loaded)) in enumerate(tiles.items()):
        if np.ndim(tile) != 2 or min(np.shape(tile)) < SHOWN:
            raise ValueError(
                f"{name} must be a tile of at least {SHOWN} × {SHOWN} elements, got "
                f"shape {np.shape(tile)}"
            )
        left = 2.5 + panel * (SHOWN * cell + gap)
        middle = left + SHOWN * cell / 2
        banks_met = tile[loaded] // 4 % 32
        pic.bold(left, 9.5, name)
        for row, col in np.ndindex(SHOWN, SHOWN):
            bank = int(tile[row, col]) // 4 % 32
            meets = np.count_nonzero(banks_met == bank) > 1
            fill = tint(ORANGE if meets else SKY, 0.6) if loaded[row, col] else "white"
            kind = "loaded" if loaded[row, col] else "other"
            place = (left + cell * col, 12 + 2.9 * row, cell, 2.9)
            pic.box(
                place, f"{bank}", fill, edgecolor=RULE, gid=f"{name}: {kind} {bank}"
            )
        pic.quiet(middle, 36.4, "⋮")
        passes = models.bank_passes(tile[loaded].tolist())
        times = "1 pass" if passes == 1 else f"{passes} passes"
        pic.text(middle, 39.2, times, "center", weight="bold")
    pic.text(
        2.5, 43.4, f"the first {SHOWN} rows and columns; coloured: loaded together"
    )
    pic.text(97.5, 43.4, "orange: shares its bank", "right")
    return pic.figure


def allocation(buffers: Sequence[Any], title: str = "") -> Figure:
    """Buffers packed into shared memory: the order of operations × bytes.

    Args:
        buffers: at most 12, with operation, shape, size, offset, begin and end, as
            `allocation.buffers` gives them.
        title: of the picture.
    """
    buffers = list(buffers)
    count("the number of buffers", len(buffers), 12)
    total = max(each.offset + each.size for each in buffers)
    times = sorted({time for each in buffers for time in (each.begin, each.end)})
    whole = {(each.begin, each.end) for each in buffers}
    weights = [
        1.0
        if any(begin >= first and end <= last for begin, end in whole)
        else 0.25
        if any(begin <= first and end >= last for begin, end in whole)
        else 0.15
        for first, last in itertools.pairwise(times)
    ]
    left, bottom, high = 13, 53, 42 / total
    edges = np.cumsum([0, *weights]) * 84 / sum(weights) + left
    at = dict(zip(times, edges, strict=True))
    pic = Picture(title or "Who has which bytes of shared memory, and when", 62)
    names = list(dict.fromkeys(each.operation for each in buffers))
    colours = dict(zip(names, itertools.cycle((BLUE, GREEN, ORANGE, PINK, GREY))))
    for level in range(5):
        y = bottom - 42 * level / 4
        pic.line((left, 97), (y, y), GRID, zorder=0.5)
        pic.quiet(left - 1, y, f"{total * level // 4:,} B", "right")
    for each in buffers:
        height, top = high * each.size, bottom - high * (each.offset + each.size)
        place = (at[each.begin], top, at[each.end] - at[each.begin], height)
        gid = f"{each.operation} {each.size} at {each.offset}"
        fill = tint(colours[each.operation], 0.45)
        pic.box(place, "", fill, edgecolor=INK, gid=gid)
        words = filter(None, (each.operation, each.shape, f"{each.size:,} B"))
        y = top + height / 2 if height > 9 else top - 3.4
        pic.text(place[0] + place[2] / 2, y, "\n".join(words), "center")
    pic.arrow((left, 56), (97, 56))
    pic.text(left, 59, "the order of operations (not their time)")
    return pic.figure
