"""What the book is made of: its contents, words, sources, styles and numbers."""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from kernels.lab.style import contrast
from tests.helpers import loaded

yaml = pytest.importorskip("yaml", reason="comes with jupyter-book")

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
PAGES = [*sorted((ROOT / "book").glob("*.md")), *NOTEBOOKS]
UNDER_THE_HOOD = range(8, 14)  # chapters beside the ladder
# No softmax of their own, or one of short rows, of slices or of columns.
BESIDE = ("traffic", "residency", "gradient", "operator", "staged", "windows")
BESIDE += ("columns",)
STEPS = [
    path.stem[3:]
    for path in NOTEBOOKS
    if path.stem[3:] not in BESIDE and int(path.stem[:2]) not in UNDER_THE_HOOD
]
PEERS = ["torch", "torch.compile", "tutorial", "liger", "quack", "tileops"]


def glossary_terms(text: str) -> list[str]:
    """The terms that a page's glossary directives define, in order."""
    blocks = re.findall(r"^:::\{glossary\}\n(.*?)^:::$", text, re.S | re.M)
    return [
        line for block in blocks for line in block.splitlines() if re.match(r"\S", line)
    ]


def used_terms(text: str) -> set[str]:
    """The terms that {term} roles of a page refer to."""
    roles = re.findall(r"\{term\}`([^`]+)`", text)
    return {re.sub(r"^.*<(.+)>$", r"\1", " ".join(role.split())) for role in roles}


def prose(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )


def test_files_name_the_repository_of_the_one_setting() -> None:
    owner = REPOSITORY["url"].rsplit("/", 1)[0]
    for name in ("README.md", "CITATION.cff", "book/setup.md"):
        named = set(re.findall(rf"{owner}/[\w-]+", (ROOT / name).read_text()))
        assert named == {REPOSITORY["url"]}, name


def test_the_contents_list_every_chapter_and_page() -> None:
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [entry["file"] for part in contents["parts"] for entry in part["chapters"]]
    listed = sorted([contents["root"], *files])
    pages = [page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES]
    assert listed == sorted([*pages, "notebooks/exercises/project"])


def test_each_term_is_defined_once_and_each_term_used_is_defined() -> None:
    terms = glossary_terms((ROOT / "book" / "glossary.md").read_text())
    assert [term for term, count in Counter(terms).items() if count > 1] == []
    for page in PAGES:
        assert used_terms(prose(page)) <= set(terms), page


def test_each_term_has_the_link_target_that_contributing_promises() -> None:
    text = (ROOT / "book" / "glossary.md").read_text()
    for term in glossary_terms(text):
        target = term.lower().replace(" ", "-").replace("'", "")
        assert target == term or f"  ({target})=\n" in text, term


def test_an_undefined_or_repeated_term_is_seen() -> None:
    text = ":::{glossary}\nwarp\n  32 threads.\n\nSM\nmultiprocessor\n  One.\n:::\n"
    assert glossary_terms(text + text) == ["warp", "SM", "multiprocessor"] * 2
    use = "a {term}`lane` of {term}`two\nwarps <warp>`"
    assert used_terms(use) == {"lane", "warp"}


def extension(name: str) -> ModuleType:
    """A module of book/extensions."""
    return loaded(ROOT / "book" / "extensions" / f"{name}.py")


def cited_keys(text: str) -> set[str]:
    """The keys of the sources that a page cites."""
    return {key for _, key in extension("citations").CITATION.findall(text)}


def uncited(text: str) -> list[str]:
    """The items under the heading Sources that cite nothing."""
    items = text.partition("## Sources\n")[2].strip().removeprefix("- ").split("\n- ")
    own = "](../book/sources.md)"  # the page with the sources of the whole course
    return [item for item in items if not cited_keys(item) and own not in item]


def known_keys() -> list[str]:
    text = (ROOT / "book" / "sources.bib").read_text()
    return re.findall(r"^@\w+\{(.+),$", text, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_key_that_a_page_cites_is_known(page: Path) -> None:
    assert cited_keys(prose(page)) <= set(known_keys())


def broken_citations(text: str) -> int:
    """How many links to a source the book would not find."""
    return text.count("sources.md#") - len(
        extension("citations").CITATION.findall(text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_text_of_a_citation_stands_on_one_line(page: Path) -> None:
    assert broken_citations(page.read_text()) == 0


def test_a_citation_over_two_lines_is_found() -> None:
    assert broken_citations("[The\n  text](../book/sources.md#key).") == 1


def never_cited(pages: list[Path]) -> set[str]:
    """The keys of the sources that none of these pages cites."""
    return set(known_keys()).difference(*(cited_keys(prose(page)) for page in pages))


def test_each_source_is_cited() -> None:
    assert never_cited(PAGES) == set()
    layouts = next(page for page in NOTEBOOKS if page.stem.endswith("_layouts"))
    assert "zhou2025" in never_cited([page for page in PAGES if page != layouts])


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_each_source_of_a_chapter_has_a_key(page: Path) -> None:
    assert uncited(prose(page)) == []


def test_a_source_without_a_key_and_an_unknown_key_are_seen() -> None:
    text = "## Sources\n\n- [A](../book/sources.md#no-key).\n- [B](https://b.org)."
    assert cited_keys(text) - set(known_keys()) == {"no-key"}
    assert uncited(text) == ["[B](https://b.org)."]


def test_the_list_of_sources_is_that_of_the_bibtex_file() -> None:
    pytest.importorskip("pybtex", reason="comes with sphinxcontrib-bibtex")
    keys = known_keys()
    assert len(set(keys)) == len(keys) > 30
    citations = extension("citations")
    written = citations.as_markdown()
    assert sorted(re.findall(r"^- `(.+?)`: ", written, re.M)) == sorted(keys)
    assert written in (ROOT / "book" / "sources.md").read_text(), citations.__doc__


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("See figure 4.1.", ["figure 4.1"]),
        ("Figures 4.1 and 4.2 show 4.1 TB/s.", ["Figures 4.1", "4.2"]),
        ("Table 4.1 and figure 4.2", ["Table 4.1", "figure 4.2"]),
        ("It takes 4.1 µs, or 4.2. In figure 9.9, 4.2", []),
    ],
)
def test_numbers_of_figures_and_no_others_are_linked(
    text: str, links: list[str]
) -> None:
    pytest.importorskip("docutils", reason="comes with jupyter-book")
    ids = {("figure", "4.1"): "a", ("figure", "4.2"): "b", ("table", "4.1"): "c"}
    parts = extension("figure_numbers").linked(text, ids)
    assert "".join(part.astext() for part in parts) == text
    assert [part.astext() for part in parts if part.tagname == "reference"] == links


@pytest.mark.parametrize(
    ("theme", "ground"), [("light", "#eaeef2"), ("dark", "#343b47")]
)
def test_a_diffs_two_colours_can_be_read(theme: str, ground: str) -> None:
    """Pygments' style for dark pages has none for added lines."""
    style = (ROOT / "book" / "static" / "course.css").read_text()
    begin = rf'html\[data-theme="{theme}"\] \.bd-article \.highlight \.'
    colours = re.findall(begin + r"g[id] \{[^}]*?[^-]color: (#\w+);", style)
    assert len(set(colours)) == 2
    assert min(contrast(colour, ground) for colour in colours) > 5


def test_the_summary_figure_shows_the_record() -> None:
    """The steps and the peers of `ladder.csv`, and the benchmark's other peers."""
    shown = (ROOT / "book" / "figures" / "ladder.svg").read_text()
    rows = {
        row["provider"]: row
        for stem in ("fastest", "ladder")
        for row in recorded(stem)
        if (row["dtype"], row["n_rows"], row["n_cols"]) == ("bfloat16", "4096", "32768")
        and row["clock"] == "device"
        and (stem == "ladder" or row["provider"] in PEERS)
        and row["p50_us"] != "nan"  # absent: it raised there
    }
    assert {*STEPS, *PEERS, "copy"} == set(rows)
    for row in rows.values():
        n_bytes = 2 * int(row["n_rows"]) * int(row["n_cols"]) * 2  # of bfloat16
        assert f"{n_bytes / float(row['p50_us']) / 1e3:,.0f} GB/s" in shown, row


@pytest.mark.parametrize("page", ["README.md", "book/index.md"])
def test_the_first_table_shows_the_record(page: str) -> None:
    text = (ROOT / page).read_text()
    shown = re.findall(r"^\| .* \| ([\d,]+) µs \|$", text, re.M)
    us = {row["provider"]: float(row["p50_us"]) for row in recorded("ladder")}
    providers = ("eager", "torch.compile", "torch", "fastest", "copy")
    assert shown == [f"{us[name]:,.0f}" for name in providers]


def recorded(stem: str) -> list[dict[str, str]]:
    """The rows of a file of the record."""
    path = ROOT / "notebooks" / "recorded" / "nvidia-h200" / f"{stem}.csv"
    return list(csv.DictReader(path.read_text().splitlines()))
