"""Tiles of a matrix product: what one of them needs, and in which order they come."""

from collections.abc import Sequence

from kernels.lab import models
from kernels.lab.draw.card import (
    BLUE,
    GREEN,
    ORANGE,
    Picture,
    count,
    plural,
    tint,
)
from kernels.lab.style import EDGE, Figure


def product(
    shape: tuple[int, int, int],
    block: tuple[int, int, int],
    tile: tuple[int, int] = (0, 0),
    step: int = 0,
) -> Figure:
    """One tile of C = A · B, with the bands of A and B that it needs.

    A stands to the left of C, and B above it. Along the bands, the blocks carry the
    number of the step that multiplies them.

    Args:
        shape: (M, N, K).
        block: (BLOCK_M, BLOCK_N, BLOCK_K).
        tile: the row and the column of the tile, counted in tiles.
        step: the step whose blocks are filled.

    Raises:
        ValueError: a size is below 1, there are over 8 blocks along a side, or the tile
            or the step is not there.
    """
    names = ("M", "N", "K")
    sizes = [count(name, size) for name, size in zip(names, shape, strict=True)]
    blocks = [
        count(f"BLOCK_{name}", size, whole)
        for name, size, whole in zip(names, block, sizes, strict=True)
    ]
    across = [-(-size // part) for size, part in zip(sizes, blocks, strict=True)]
    for name, number in zip(names, across, strict=True):
        count(f"the blocks along {name}", number, 8)
    (m, n, k), (bm, bn, bk) = sizes, blocks
    row = count("tile's row", tile[0], across[0] - 1, 0)
    col = count("tile's column", tile[1], across[1] - 1, 0)
    step = count("step", step, across[2] - 1, 0)
    unit = min(84 / (k + n), 62 / (k + m))  # of the picture, for an element
    left, top = 6.0, 11.0
    middle, below = left + unit * k + 4, top + unit * k + 4
    pic = Picture("One tile of C, and what it is made of", below + unit * m + 9.5)
    matrices = {
        "A": (left, below, unit * k, unit * m),
        "B": (middle, top, unit * n, unit * k),
        "C": (middle, below, unit * n, unit * m),
    }
    for place in matrices.values():
        pic.box(place, "", "white", edgecolor=EDGE)
    for i in range(across[2]):
        deep = unit * min(bk, k - i * bk)
        strength = 0.7 if i == step else 0.25
        high, wide = unit * min(bm, m - row * bm), unit * min(bn, n - col * bn)
        of_a = (left + unit * i * bk, below + unit * row * bm, deep, high)
        of_b = (middle + unit * col * bn, top + unit * i * bk, wide, deep)
        for name, place, colour in (("A", of_a, BLUE), ("B", of_b, ORANGE)):
            fill = tint(colour, strength)
            pic.box(place, f"{i}", fill, edgecolor="white", gid=f"{name} step {i}")
    place = (middle + unit * col * bn, below + unit * row * bm, wide, high)
    pic.box(place, "", tint(GREEN, 0.6), edgecolor="white", gid="tile of C")
    for place in matrices.values():
        pic.outline(place)
    pic.bold(left, below - 2, f"A, {m} × {k}")
    pic.bold(middle, top - 2, f"B, {k} × {n}")
    pic.bold(middle + unit * n, below + unit * m + 2.2, f"C, {m} × {n}", "right")
    note = (
        f"{plural(across[0] * across[1], 'tile')} of {bm} × {bn}, one per program; "
        f"{plural(across[2], 'step')} of {bk} along K; step {step} is filled"
    )
    pic.text(2.5, below + unit * m + 6, note)
    return pic.figure


def orders(tiles: tuple[int, int], groups: Sequence[int], programs: int) -> Figure:
    """The order in which programs take the tiles of C, and what the first ones need.

    Args:
        tiles: how many rows and columns of tiles C has, at most 10 each.
        groups: a GROUP_M for each panel; 1 is the plain order. At most two.
        programs: how many of the first programs are coloured.

    Raises:
        ValueError: a number is below 1 or above what the picture has room for.
    """
    tiles_m, tiles_n = (count("tiles", number, 10) for number in tiles)
    programs = count("programs", programs, tiles_m * tiles_n)
    count("the number of groups", len(groups), 2)
    size = min(39.0 / (tiles_n + 1.6), 44.0 / (tiles_m + 1.6))
    title = f"The first {plural(programs, 'program')} and the bands that they need"
    pic = Picture(title, 17 + size * (tiles_m + 1.6) + 5.5)
    for panel, group_m in enumerate(groups):
        group_m = count("group_m", group_m, tiles_m)
        left, top = 2.5 + 49 * panel, 15.0
        x, y = left + 1.6 * size, top + 1.6 * size
        name = "plain order" if group_m == 1 else f"grouped order, GROUP_M = {group_m}"
        pic.bold(left, 10.5, name)
        rows, cols = set(), set()
        for program in range(tiles_m * tiles_n):
            row, col = models.grouped_tile(program, tiles_m, tiles_n, group_m)
            first = program < programs
            if first:
                rows.add(row)
                cols.add(col)
            fill = tint(GREEN, 0.5) if first else "white"
            place = (x + size * col, y + size * row, size, size)
            gid = f"{panel}: {program} at {row}, {col}"
            pic.box(place, f"{program}", fill, edgecolor=EDGE, gid=gid)
        for row in range(tiles_m):
            fill = tint(BLUE, 0.5) if row in rows else "white"
            gid = f"{panel}: A {row}{' needed' if row in rows else ''}"
            pic.box(
                (left, y + size * row, size, size), "", fill, edgecolor=EDGE, gid=gid
            )
        for col in range(tiles_n):
            fill = tint(ORANGE, 0.5) if col in cols else "white"
            gid = f"{panel}: B {col}{' needed' if col in cols else ''}"
            pic.box(
                (x + size * col, top, size, size), "", fill, edgecolor=EDGE, gid=gid
            )
        pic.bold(left + size / 2, y - 1.8, "A", "center")
        pic.bold(x - 1.2, top + size / 2, "B", "right")
        below = y + size * tiles_m + 3
        needed = f"{len(rows)} of A + {len(cols)} of B = {len(rows) + len(cols)} bands"
        pic.text(left, below, needed)
    return pic.figure
