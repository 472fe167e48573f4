"""Chapter `windows`: a row's chunks in the input, and its words in the output.

Also judges a learner's way to a row's first word, makes slices to measure on, and
counts what the compiled kernels do with them.

    from benchmarks import slices
    slices.picture(11, 20, 1)
    print(slices.alt(11, 20, 1))
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks import edges
from benchmarks.spans import CHUNK, LABEL, NUMBER
from kernels import windows
from kernels.lab import compile, record, style
from kernels.lab import judge as judges
from kernels.lab.draw.card import ALERT, MASKED, Picture, Place, count, tint
from kernels.lab.launch import Launch
from kernels.lab.style import MUTED

WORD = 2  # values of 16 bits in 4 bytes
MOST_COLS, MOST_WIDE, MOST_ROW = 16, 99, 99  # that a picture has room for
LEFT, ROOM, WIDE, HIGH = 2.5, 95.0, 5.9, 5.2
ROW = {"fill": tint(0)}
OTHER = {"fill": tint(7, 0.12), "hatch": MASKED, "edgecolor": tint(7, 0.45)}
WINDOW = {"linewidth": 2.4, "edgecolor": ALERT}
ALONE = WINDOW | {"linestyle": ":"}


# ---- where a row lies ----------------------------------------------------------------


def first_word(row: int, n_cols: int, width: int) -> dict[str, int]:
    """A row's first word, and where its column lies in the input.

    Both tensors start at an aligned address, and the output's rows have no gaps.

    Args:
        row: of the slice.
        n_cols: of the slice, and of the output.
        width: of the matrix that the slice is of.

    Returns:
        "first word": its column, 0; or -1, where its other value is another row's.
        "chunk": in which that column lies in the input, counted from the start.
        "shift": how many values of the chunk come before it.
    """
    column = -(row * n_cols % WORD)
    chunk, shift = divmod(row * width + column, CHUNK)
    return {"first word": column, "chunk": chunk, "shift": shift}


def chunks(row: int, n_cols: int, width: int) -> list[range]:
    """The columns in each chunk, from the first word's to the last column's.

    Columns below 0 or from n_cols on are values beside the row.
    """
    found = first_word(row, n_cols, width)
    first = found["first word"] - found["shift"]
    return [range(col, col + CHUNK) for col in range(first, n_cols, CHUNK)]


def words(row: int, n_cols: int) -> list[range]:
    """The two columns of each of a row's words in the output; see `chunks`."""
    first = -(row * n_cols % WORD)
    return [range(col, col + WORD) for col in range(first, n_cols, WORD)]


def judge(found: Callable[[int, int, int], dict]) -> judges.Verdict:
    """Judges a learner's function of (row, n_cols, width), in a sentence.

    It is right if it returns what `first_word` does.
    """
    shapes = [(12, 37), (11, 20), (781, 784), (1000, 1003)]
    cases = [(row, *shape) for shape in shapes for row in (0, 1, 2, 5)]
    return judges.formula(found, first_word, cases, mistakes=MISTAKES)


MISTAKES = {
    "How many values of 2 bytes has a chunk of 16 bytes?": (
        lambda row, n_cols, width: {
            "chunk": (row * width - row * n_cols % WORD) // (2 * CHUNK)
        }
    ),
    "A row that starts at an odd place of the output starts within a word.": (
        lambda row, n_cols, width: {"first word": 0}
    ),
    "Where does this row start in the output? Is that place odd?": (
        lambda row, n_cols, width: {"first word": -(row * width % WORD)}
    ),
    "The word's other value comes before the row, not after its start.": (
        lambda row, n_cols, width: {"first word": row * n_cols % WORD}
    ),
    "In the input, rows lie `width` values apart.": (
        lambda row, n_cols, width: {
            "chunk": (row * n_cols - row * n_cols % WORD) // CHUNK,
            "shift": (row * n_cols - row * n_cols % WORD) % CHUNK,
        }
    ),
    "Go from the first word's column, which may be -1, not from column 0.": (
        lambda row, n_cols, width: {
            "chunk": row * width // CHUNK,
            "shift": row * width % CHUNK,
        }
    ),
}


# ---- the picture ---------------------------------------------------------------------


def picture(n_cols: int, width: int, row: int) -> Figure:
    """Draws a row three times: in the input, in shared memory, and in the output.

    A box is a value, with its column in it. A column has the same distance from the
    left in all three. Values beside the row are hatched.

    Args:
        n_cols: of the slice, at most 16.
        width: of the matrix, from n_cols on.
        row: of the slice.

    Raises:
        ValueError: the picture has no room for the row.
    """
    n_cols, width, row = _shape(n_cols, width, row)
    copied, stored = chunks(row, n_cols, width), words(row, n_cols)
    first, end = copied[0].start, max(copied[-1].stop, stored[-1].stop)
    wide = min(WIDE, ROOM / (end - first))
    title = f"Row {row} of x[:, :{n_cols}], where x is {width} values wide"
    pic = Picture(title, 72)

    def place(cols: range, y: float) -> Place:
        return LEFT + wide * (cols.start - first), y, wide * len(cols), HIGH

    def line(kind: str, cols: range, y: float, blank: str) -> None:
        for col in cols:
            inside = 0 <= col < n_cols
            look = {"gid": f"{kind} {col}"} | (ROW if inside else OTHER)
            if not inside and blank:
                look["hatch"] = None
            _value(pic, place(range(col, col + 1), y), col if inside else blank, **look)

    _heading(pic, 11, "Input:", "chunks of 16 bytes, at places that 8 divides")
    line("input", range(first, copied[-1].stop), 17.5, "")
    for cols in copied:
        x, y, *_ = place(cols, 17.5)
        at = row * width + cols.start
        _text(pic, x + 0.4, y - 2.3, f"place {at}", color=MUTED)
        pic.outline(place(cols, y), linewidth=2.4, gid=f"chunk {at // CHUNK}")
    _heading(pic, 29, "Shared memory:", "words of 4 bytes; −∞ beside the row")
    held = range(first, copied[-1].stop)
    line("held", held, 35.5, "−∞")
    for number in range(len(held) // WORD):
        cols = range(first + WORD * number, first + WORD * (number + 1))
        x, y, size, _ = place(cols, 35.5)
        _text(pic, x + size / 2, y - 2.3, f"{number}", "center", color=MUTED)
        pic.outline(place(cols, y), linewidth=1.8, gid=f"pair {number}")
    _heading(pic, 47, "Output:", "words of 4 bytes, at even places")
    line("output", range(stored[0].start, stored[-1].stop), 53.5, "")
    for cols in stored:
        x, y, size, _ = place(cols, 53.5)
        at = row * n_cols + cols.start
        _text(pic, x + size / 2, y - 2.3, f"{at}", "center", color=MUTED)
        own = range(max(cols.start, 0), min(cols.stop, n_cols))
        if len(own) == WORD:
            pic.outline(place(own, y), gid=f"word {at}", **WINDOW)
        else:
            pic.outline(place(own, y), gid=f"alone {own.start}", **ALONE)
    pic.outline((LEFT, 64.2, 5, 3.4), **WINDOW)
    _text(pic, LEFT + 6.2, 66, "a window")
    pic.box((30, 64.2, 5, 3.4), "", tint(0))
    pic.outline((30, 64.2, 5, 3.4), **ALONE)
    _text(pic, 36.2, 66, "stored alone")
    pic.box((62, 64.2, 5, 3.4), "", **OTHER)
    _text(pic, 68.2, 66, "not of this row")
    return pic.figure


def alt(n_cols: int, width: int, row: int) -> str:
    """The alternative text of `picture`, for the cell's metadata. Args: as there."""
    n_cols, width, row = _shape(n_cols, width, row)
    copied, stored = chunks(row, n_cols, width), words(row, n_cols)
    shift = first_word(row, n_cols, width)["shift"]
    said = [
        f"the chunk at place {row * width + cols.start} has {_content(cols, n_cols)}"
        for cols in copied
    ]
    taken = []
    for number, cols in enumerate(stored):
        own = [col for col in cols if 0 <= col < n_cols]
        held = shift // WORD + number
        if len(own) < WORD:
            taken.append(f"column {own[0]} alone")
        elif shift % WORD:
            taken.append(
                f"columns {own[0]} and {own[1]} from words {held} and {held + 1}"
            )
        else:
            taken.append(f"columns {own[0]} and {own[1]} from word {held}")
    return (
        f"Row {row} of the first {n_cols} columns of a matrix {width} values wide, "
        f"three times, each column below itself. In the input, {', '.join(said)}. "
        "In shared memory, the same values in words of two, numbered from 0, and minus "
        f"infinity beside the row. In the output, from place {row * n_cols} on: "
        f"{', '.join(taken)}."
    )


def _shape(n_cols: int, width: int, row: int) -> tuple[int, int, int]:
    n_cols = count("n_cols", n_cols, MOST_COLS)
    width = count("width", width, MOST_WIDE, least=n_cols)
    return n_cols, width, count("row", row, MOST_ROW, least=0)


def _content(cols: range, n_cols: int) -> str:
    """Columns 0 to 3 and 4 other values."""
    own = [col for col in cols if 0 <= col < n_cols]
    rest = len(cols) - len(own)
    others = f"{rest} other value{'' if rest == 1 else 's'}" if rest else ""
    if not own:
        return others
    span = f"columns {own[0]} to {own[-1]}" if len(own) > 1 else f"column {own[0]}"
    return f"{span} and {others}" if others else span


def _heading(pic: Picture, y: float, what: str, how: str) -> None:
    _text(pic, LEFT, y, what, weight="bold")
    _text(pic, LEFT + 1.5 + 1.57 * len(what), y, how)


def _text(
    pic: Picture, x: float, y: float, text: str, ha: str = "left", **look: Any
) -> None:
    pic.text(x, y, text, ha, **(LABEL | look))


def _value(pic: Picture, place: Place, value: int | str, **look: Any) -> None:
    """A box with a number that a phone shows, too."""
    x, y, wide, high = place
    pic.box(place, **look)
    if value != "":
        quiet = {"color": MUTED, "size": style.FONT + 1}
        look = quiet if isinstance(value, str) else NUMBER
        pic.text(x + wide / 2, y + high / 2, f"{value}", "center", **look)


# ---- what is measured and counted ----------------------------------------------------


def width_of(n_cols: int) -> int:
    """The smallest width above n_cols that 8 divides: every row starts aligned."""
    return n_cols // CHUNK * CHUNK + CHUNK


def sliced(dtype: torch.dtype, n_rows: int, n_cols: int) -> torch.Tensor:
    """The first n_cols columns of a matrix of `width_of` columns; random values."""
    return record.random(dtype, n_rows, width_of(n_cols))[:, :n_cols]


def between_nan(n_rows: int, n_cols: int, width: int) -> torch.Tensor:
    """As `sliced`, in bfloat16, with NaN in all columns beside the slice."""
    x = record.random(torch.bfloat16, n_rows, width)
    x[:, n_cols:] = float("nan")
    return x[:, :n_cols]


def with_warps(num_warps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The softmax of chapter `windows` by programs of so many warps.

    Args:
        num_warps: 1, 2, 4, … Rows must be of those that one program takes.
    """

    def softmax(x: torch.Tensor) -> torch.Tensor:
        config = windows.choose_config(x.shape[1])
        config = replace(config, threads=32 * num_warps, num_warps=num_warps)
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        windows.launch_for(output, x, config)(output, x)
        return output

    return softmax


def launch(chapter: ModuleType, n_cols: int) -> Launch:
    """A chapter's launch on many bfloat16 rows of a slice as `sliced` makes them."""
    x = torch.empty(4096, width_of(n_cols), dtype=torch.bfloat16, device="meta")
    y = torch.empty(4096, n_cols, dtype=torch.bfloat16, device="meta")
    return chapter.launch_for(y, x[:, :n_cols])


def work(chapter: ModuleType, n_cols: int) -> dict[str, float]:
    """Counts in the code of `launch`, compiled for an H200.

    Args:
        chapter: `unaligned` or `windows`.
        n_cols: of rows that one program takes.

    Returns:
        "instructions": of all threads, for each value.
        "loads", "stores": of a thread, from and to global memory.
        "load", "store": the bytes of the widest.

    Raises:
        ValueError: programs share a row.
    """
    launched = launch(chapter, n_cols)
    if launched.constants.get("BLOCK_PARTS", 1) > 1:
        raise ValueError(f"a row must be one program's, got n_cols = {n_cols}")
    made, (load, store) = compile.aot(launched), edges.widths(launched)
    return {
        "instructions": edges.counts(launched, n_cols)["instructions"],
        "loads": made.count(r"\bld\.global"),
        "load": load,
        "stores": made.count(r"\bst\.global"),
        "store": store,
    }


def parts(chapter: ModuleType, n_cols: int) -> dict[str, float]:
    """How a chapter's kernel shares rows of a slice, by its code for an H200.

    Args:
        chapter: `cooperative` or `windows`.
        n_cols: of rows that are shared.

    Returns:
        "warps": of a program.
        "values": of a part.
        "exponentials": for each value of a part, without those of a helper that has
            code of its own.

    Raises:
        ValueError: one program takes a row.
    """
    launched = launch(chapter, n_cols)
    chosen = launched.constants
    if chosen["BLOCK_PARTS"] == 1:
        raise ValueError(f"rows must be shared, got n_cols = {n_cols}")
    made = compile.aot(launched)
    values = chosen.get("BLOCK_COLS") or WORD * (chosen["WORDS"] + chosen["REST"])
    kernel = re.search(r"\.entry .*?^}", made.ptx, re.S | re.M)[0]
    each = 32 * made.num_warps * kernel.count("ex2.") / values
    return {"warps": made.num_warps, "values": values, "exponentials": each}
