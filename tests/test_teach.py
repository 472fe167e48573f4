"""The teacher's page: its routes add up, and the cells that they name can be run."""

import builtins
import re
import symtable
from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "book" / "teach.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
LENGTHS = [90, 210, 360, 360]  # minutes: a short one, half a day, two days
ROUTE = re.compile(r"^\| minutes \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.M)


def routes(page: str) -> list[list[list[str]]]:
    """The cells of each route's table, row by row, without the header."""
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows.splitlines()]
        for rows in ROUTE.findall(page)
    ]


def headings(path: Path) -> set[str]:
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    return set(re.findall(r"^##+ (.*)", prose, re.M))


def faults(route: list[list[str]], length: int) -> list[str]:
    """What is wrong with a route: minutes that don't join, headings that aren't there.

    Args:
        route: rows of minutes, chapter, what to run, what to skip, what learners do.
        length: minutes in all.
    """
    found, clock = [], 0
    for minutes, chapter, run, skip, _ in route:
        begin, end = map(int, minutes.split("–"))
        if begin != clock or end <= begin:
            found.append(f"{minutes} does not follow minute {clock}")
        clock = end
        link = re.fullmatch(r"\[(\d+)\]\(\.\./(notebooks/(\d\d)_\w+\.ipynb)\)", chapter)
        if link is None:
            continue
        path = ROOT / link[2]
        if link[1] != str(int(link[3])) or not path.exists():
            found.append(f"{chapter} is no chapter")
        else:
            named = re.findall(r"\*([^*]+)\*", run + skip)
            found += [f"{path.stem}: {each}" for each in {*named} - headings(path)]
    return found + ([f"ends at {clock}"] if clock != length else [])


# ---- what a route's cells need from the cells that it skips --------------------------


def chosen(run: str, skip: str, ordered: list[str]) -> set[str]:
    """The headings that a row of a route runs.

    Args:
        run: "all", or headings in italics; "*A* to *B*" are all from A to B.
        skip: headings in italics.
        ordered: the chapter's headings.
    """
    if run == "all":
        names = {*ordered}
    else:
        names = set(re.findall(r"\*([^*]+)\*", run))
        for first, last in re.findall(r"\*([^*]+)\* to \*([^*]+)\*", run):
            names |= {*ordered[ordered.index(first) : ordered.index(last) + 1]}
    return names - {*re.findall(r"\*([^*]+)\*", skip)}


def sections(path: Path) -> list[tuple[str, str]]:
    """Each code cell of a chapter, with the heading above it; "" for the first cell."""
    transform = pytest.importorskip("IPython.core.inputtransformer2")
    heading, found = "", []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall(r"^##+ (.*)", cell.source, re.M)][-1]
        else:
            manager = transform.TransformerManager()
            found.append((heading, manager.transform_cell(cell.source)))
    return found


def names_of(code: str) -> tuple[set[str], set[str]]:
    """The global names that a cell uses without defining them, and those it defines."""
    tables, used, defined = [symtable.symtable(code, "cell", "exec")], set(), set()
    for table in tables:
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            here = symbol.is_assigned() or symbol.is_imported()
            if top and here:
                defined.add(symbol.get_name())
            elif symbol.is_global() or (top and symbol.is_referenced()):
                used.add(symbol.get_name())
    return used - defined, defined


def lacks(cells: Iterable[tuple[str, str]], headings: set[str]) -> set[str]:
    """The names that the cells below some headings need, and that no such cell defines.

    Args:
        cells: as `sections` returns them. The cell without a heading always runs.
        headings: the others that run.
    """
    known, missing = {*dir(builtins), "display", "get_ipython"}, set()
    for heading, code in cells:
        if heading in headings | {""}:
            used, defined = names_of(code)
            missing |= used - known
            known |= defined
    return missing


@pytest.mark.parametrize("length", sorted({*LENGTHS}))
def test_the_cells_of_a_route_need_no_cell_that_it_skips(length):
    for route in [r for r, n in zip(routes(PAGE), LENGTHS, strict=True) if n == length]:
        run: dict[str, set[str]] = {}
        for _, chapter, names, skip, _ in route:
            if link := re.search(r"notebooks/\d\d_\w+\.ipynb", chapter):
                ordered = [*dict.fromkeys(h for h, _ in sections(ROOT / link[0]))]
                found = chosen(names, skip, ordered)
                run[link[0]] = run.get(link[0], set()) | found
        for chapter, names in run.items():
            assert lacks(sections(ROOT / chapter), names) == set(), chapter


def test_a_cell_that_needs_a_skipped_cell_is_seen():
    cells = [
        ("", "import re"),
        ("A", "x = 1\ny = x"),
        ("B", "def f(z):\n    return x * z"),
    ]
    assert lacks(cells, {"A", "B"}) == set()
    assert lacks(cells, {"B"}) == {"x"}
    assert chosen("*A* to *C*, *E*", "*B*", [*"ABCDE"]) == {"A", "C", "E"}


# ---- the routes and the chapters -----------------------------------------------------


def test_every_route_adds_up_and_names_headings_that_there_are():
    found = routes(PAGE)
    assert len(found) == len(LENGTHS)
    for route, length in zip(found, LENGTHS, strict=True):
        assert faults(route, length) == []
        assert any(row[2] in ("break", "lunch") for row in route)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| 5–10 | | break | | |", "5–10 does not follow minute 0"),
        ("| 0–9 | | break | | |", "ends at 9"),
        (
            "| 0–10 | [1](../notebooks/01_eager.ipynb) | *Guest* | | |",
            "01_eager: Guest",
        ),
        ("| 0–10 | [2](../notebooks/01_eager.ipynb) | | | |", "is no chapter"),
    ],
)
def test_a_wrong_route_is_seen(row, fault):
    header = (
        "| minutes | chapter | run | skip | the learners |\n|---|---|---|---|---|\n"
    )
    (route,) = routes(f"{header}{row}\n")
    assert fault in faults(route, 10)[0]


def test_every_chapter_has_an_objective_and_mistakes_with_answers():
    sections = dict(re.findall(r"^### (\d+\. \w+)\n\n(.*?)(?=^##)", PAGE, re.M | re.S))
    titles = [
        nbformat.read(path, 4).cells[0].source.split("\n")[0][2:] for path in NOTEBOOKS
    ]
    assert [*sections] == titles
    for title, text in sections.items():
        assert text.startswith("They can "), title
        rows = re.findall(r"^\| (.+) \| (.+) \|$", text, re.M)[1:]
        assert len(rows) >= 3, title
