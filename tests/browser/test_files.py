"""The files of the built book: nothing comes from other hosts, the search finds every
page, and links go where they should."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.test_book import NOTEBOOKS, PAGES, REPOSITORY, ROOT

# Attributes by which an HTML element makes the browser load something.
LOADS = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
FOREIGN = re.compile(r"(?:https?:)?//[^\s\"')]+")
FOREIGN_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        values = dict(attrs)
        for name in LOADS.get(tag, ()):
            self.foreign += FOREIGN.findall(values.get(name) or "")
        self.foreign += FOREIGN_CSS.findall(values.get("style") or "")

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.foreign += FOREIGN.findall(data)
        elif self.inside == "style":
            self.foreign += FOREIGN_CSS.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def foreign_loads(text: str, suffix: str = ".html") -> list[str]:
    """Addresses on other hosts that a page or a style sheet would load from.

    Args:
        text: the file's content.
        suffix: ".html" or ".css".

    Returns:
        The addresses, in order. What a reader has to click is not among them.
    """
    if suffix == ".css":
        return FOREIGN_CSS.findall(text)
    parser = _Loads()
    parser.feed(text)
    return parser.foreign


def test_pages_load_nothing_from_other_hosts(book: Path) -> None:
    files = [*book.rglob("*.html"), *book.rglob("*.css")]
    assert len(files) > len(PAGES)
    found = {
        str(file.relative_to(book)): foreign
        for file in files
        if (foreign := foreign_loads(file.read_text(), file.suffix))
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('<script src="https://cdn.example/a.js"></script>', ".html"),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', ".html"),
        ('<img srcset="https://cdn.example/a.png 2x">', ".html"),
        ('<p style="background: url(https://cdn.example/a.png)">', ".html"),
        ('<script>load("https://cdn.example/a.js")</script>', ".html"),
        ("<style>@import 'https://cdn.example/a.css';</style>", ".html"),
        ('@font-face { src: url("https://cdn.example/a.woff"); }', ".css"),
    ],
)
def test_a_foreign_load_is_found(text: str, suffix: str) -> None:
    (address,) = foreign_loads(text, suffix)
    assert "//cdn.example/a" in address


def test_a_link_to_click_is_no_load() -> None:
    assert foreign_loads('<a href="https://example.org">there</a> https://x.org') == []


def test_mathjax_and_its_fonts_are_served(book: Path) -> None:
    page = (book / "book" / "notation.html").read_text()
    (script,) = re.findall(r'src="([^"]*mathjax[^"?]*)', page)
    mathjax = (book / "book" / script).resolve()
    assert mathjax.is_file()
    assert list(mathjax.parent.glob("output/chtml/fonts/woff-v2/*.woff"))


def test_search_covers_every_page(book: Path) -> None:
    index = (book / "searchindex.js").read_text()
    for page in PAGES:
        assert page.relative_to(ROOT).with_suffix("").as_posix() in index
    assert (book / "search.html").is_file()


def test_pages_switch_between_light_and_dark_and_code_can_be_copied(book: Path) -> None:
    for page in PAGES:
        html = (book / page.relative_to(ROOT)).with_suffix(".html").read_text()
        assert "theme-switch-button" in html, page
        assert "copybutton.js" in html, page


def test_chapters_launch_on_colab_from_the_one_setting(book: Path) -> None:
    path = REPOSITORY["url"].removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{path}/blob/"
    for notebook in NOTEBOOKS:
        page = (book / "notebooks" / notebook.name).with_suffix(".html").read_text()
        assert f"{colab}{REPOSITORY['branch']}/notebooks/{notebook.name}" in page


def test_the_book_labels_citations_and_links_them_to_the_bibliography(
    book: Path,
) -> None:
    page = (book / "notebooks" / "16_online.html").read_text()
    found = re.search(r'Gimelshein 2018 .*?href="([^"]+)"[^>]*>milakov2018<', page)
    target = found[1].removeprefix("../book/sources.html#")
    assert f'id="{target}"' in (book / "book" / "sources.html").read_text()


def test_the_book_links_numbered_figures_and_tables(book: Path) -> None:
    page = (book / "notebooks" / "04_strided.html").read_text()
    assert re.search(r'<p class="numbered-caption" id="figure-4-4">', page)
    for mention in ("Figures 4.3", "4.4", "table 4.3", "Figure 4.6"):
        target = mention.split()[-1].replace(".", "-")
        kind = "table" if "table" in mention else "figure"
        assert re.search(rf'href="#{kind}-{target}"[^>]*>{mention}</a>', page), mention


def test_links_to_terms_say_what_the_terms_mean(book: Path) -> None:
    """A title: the browser shows it on hover, and the style sheet at the keyboard."""
    page = (book / "notebooks" / "16_online.html").read_text()
    link = (
        r'<a class="term [^"]*" href="[^"]*glossary\.html#[^"]*"( title="[^"]{20,}")?'
    )
    titles = re.findall(link, page)
    assert len(titles) > 8 and all(titles)
    assert any("The cache that all SMs share" in title for title in titles)
    style = (book / "_static" / "course.css").read_text()
    assert re.search(r"a\.term:focus-visible::after \{[^}]*attr\(title\)", style)
