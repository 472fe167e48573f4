"""The teacher's page: its routes add up, and name cells and chapters that there are."""

import re
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
