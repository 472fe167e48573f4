"""The slides: one file a part, which shows what its chapters' tagged cells show."""

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from tests.helpers import loaded

pytest.importorskip("markdown_it", reason="comes with jupyter-book")
pytest.importorskip("latex2mathml", reason="makes the slides' formulas")
pytest.importorskip("sphinx_revealjs", reason="carries reveal.js")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
LOADS = {"src", "srcset", "data", "poster", "background"}  # attributes


def the_slides():
    """The module that makes the slides."""
    return loaded(ROOT / ".ci" / "slides.py")


@pytest.fixture(scope="module")
def slides():
    return the_slides()


@pytest.fixture(scope="module")
def files(slides, tmp_path_factory) -> dict[str, str]:
    """The text of each part's file, by the part's caption."""
    folder = tmp_path_factory.mktemp("slides")
    slides.main(folder)
    paths = sorted(folder.iterdir())
    return dict(zip(slides.parts(), (path.read_text() for path in paths), strict=True))


class _Loads(HTMLParser):
    """Collects what a page loads beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.found += [tag] if tag in ("link", "base", "iframe", "object") else []
        for name, value in attrs:
            if name in LOADS and not (value or "").startswith("data:image/png;base64,"):
                self.found.append(f"{tag} {name}={value}")
            self.found += re.findall(r"url\(.*?\)", value or "")

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.found += re.findall(r"@import.*|url\((?!.?data:).*?\)", data)


def loads(page: str) -> list[str]:
    """What a page asks the browser to load. Scripts are tested in a browser."""
    parser = _Loads()
    parser.feed(page)
    return parser.found


def words_of(page: str) -> str:
    """A page's text without its markup, as a browser would show it."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_there_is_a_file_for_each_part_with_slides_of_each_chapter(slides, files):
    listed = [path for chapters in slides.parts().values() for path in chapters]
    assert listed == NOTEBOOKS
    for caption, chapters in slides.parts().items():
        for path in chapters:
            made = slides.slides_of(path)
            assert 4 <= len(made) <= 8, path.stem
            assert made[0].heading == made[0].chapter, path.stem
            assert made[-1].heading == "What you now know", path.stem
            assert any(slide.notes for slide in made), path.stem
            foot = f'<p class="foot">{made[0].chapter}</p>'
            assert files[caption].count(foot) == len(made), path.stem


def test_the_command_line_names_the_folder(slides):
    assert slides.folder_of([]) == ROOT / "_build" / "slides"
    assert slides.folder_of(["talk"]) == Path("talk")


def test_help_is_shown_and_nothing_is_written(tmp_path):
    command = [sys.executable, ROOT / ".ci" / "slides.py", "--help"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "usage: slides.py" in ran.stdout
    assert not list(tmp_path.iterdir())


def test_a_file_loads_nothing(files):
    for page in files.values():
        assert loads(page) == []
        assert "<img" in page


@pytest.mark.parametrize(
    "page",
    [
        '<img src="https://cdn.example/a.png">',
        '<img src="figures/a.png">',
        '<script src="reveal.js"></script>',
        '<link rel="stylesheet" href="reveal.css">',
        "<style>@import 'theme.css';</style>",
        "<style>p { background: url(a.png) }</style>",
        '<p style="background: url(a.png)">',
    ],
)
def test_what_a_file_would_load_is_found(page):
    assert len(loads(page)) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_slides_show_the_outputs_of_the_notebook(slides, path):
    """Read by nbformat, the cells' outputs stand on the slides, letter for letter."""
    page = "".join(map(slides.slide_html, slides.slides_of(path)))
    words = words_of(page)
    for cell in nbformat.read(path, as_version=4).cells:
        tag = cell.metadata.get("slideshow")
        if tag is None or cell.cell_type != "code":
            continue
        for shown in tag["show"]:
            kind, _, number = shown.partition(" ")
            if kind == "source":
                assert cell.source in words
                continue
            form = {name: form for form, name in slides.OUTPUTS.items()}[kind]
            data = [o.get("data") or {"text/plain": o.text} for o in cell.outputs]
            if kind == "text":  # the other outputs have it, too, beside a richer form
                data = [each for each in data if list(each) == [form]]
            values = [each[form] for each in data if form in each]
            value = values[int(number or 1) - 1].strip()
            if kind == "code":
                assert "\n".join(value.splitlines()[1:-1]) in words
            else:
                assert value in (words if kind == "text" else page)


def test_a_changed_output_is_seen(slides):
    """The words of another notebook's outputs are not on a chapter's slides."""
    first, second = (
        "".join(map(slides.slide_html, slides.slides_of(p))) for p in NOTEBOOKS[:2]
    )
    figure = re.search(r"base64,(\S{200})", second)[1]
    assert figure in second and figure not in first


def test_a_piece_that_a_cell_has_not_is_named(slides):
    show = {"slideshow": {"slide_type": "slide", "show": ["figure"]}}
    cell = {
        "cell_type": "markdown",
        "metadata": show,
        "source": ["One.\n", "\n- two\n"],
    }
    with pytest.raises(
        ValueError, match=r"x has paragraph 1, list 1, but shows 'figure'"
    ):
        slides.chosen(cell, "x")


def test_prose_is_cut_into_pieces_without_what_is_folded(slides):
    text = "**Table 4.1.** Four.\n\n## A & B\n\nOne.\n\n"
    text += "<details><summary>More</summary>\n\nTwo.\n\n</details>\n"
    text += "\n$$\nx^2\n$$\n\n- [three](01_eager.ipynb)\n"
    pieces = [*slides.prose_pieces(text)]
    kinds = [piece.kind for piece in pieces]
    assert kinds == ["caption", "heading", "paragraph", "formula", "list"]
    assert "<math" in pieces[3].html and "href" not in pieces[4].html


def test_a_script_cannot_end_its_element(files):
    for page in files.values():
        assert page.count("</script>") == 3
