"""The book as a browser shows it: every page, on three widths, light and dark."""

import os
import re
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.browser.pages import CHECKS, Visitor, dead_links, serve
from tests.test_book import REPOSITORY, ROOT, glossary_terms

BOOK = Path(os.environ.get("BOOK") or ROOT / "_build" / "html")
PAGES = sorted(
    file.relative_to(BOOK).as_posix()
    for file in BOOK.rglob("*.html")
    if "_static" not in file.parts and file.parent != BOOK
)
SPECIAL = ["search.html", "genindex.html"]
WIDTHS = (1280, 768, 390)
THEMES = ("light", "dark")
PAPER = 718  # pixels of CSS between the margins of A4
FIRST_PAGE = 1_000_000  # bytes
SEARCH = """async ([term, hit]) => {
  document.getElementById('search-results').replaceChildren();
  Search.performSearch(term);
  const done = () => Search.status.textContent.match(/found|did not match/);
  for (let turn = 0; turn < 1000 && !done(); turn++)
    await new Promise(soon => setTimeout(soon, 5));
  return document.querySelector(hit) !== null;
}"""
LOOKS = ("squashed", "too wide")


def too_much(sent: dict[str, int]) -> list[str]:
    """Says that a first page is too large, and what of it is largest."""
    total = sum(sent.values())
    if total <= FIRST_PAGE:
        return []
    largest = sorted(sent, key=sent.get, reverse=True)[:3]
    return [f"sends {total} bytes, most of them for {', '.join(largest)}"]


@pytest.fixture(scope="module")
def visitor(chromium, book):
    """Reads the book as its address shows it: under the repository's name."""
    with serve(book, f"/{REPOSITORY['url'].rsplit('/', 1)[1]}/") as site:
        yield Visitor(chromium, site)


@pytest.mark.parametrize("path", [*PAGES, *SPECIAL])
def test_a_page_is_in_order(visitor: Visitor, path: str) -> None:
    """Every width, light and dark.

    axe-core compares the colours of each theme on the widest page, where everything is
    shown: colours do not depend on the width, and comparing them takes longest.
    """
    faults = []
    for width in WIDTHS:
        visitor.site.sent.clear()
        visitor.open(path, width)
        found = too_much(visitor.site.sent)
        visitor.draw_all()
        found += visitor.faults("no alternative text") + visitor.faults("mathematics")
        if width == WIDTHS[0]:
            found += dead_links(visitor.site, visitor.links())
        for theme in THEMES:
            visitor.theme(theme)
            looks = [fault for check in LOOKS for fault in visitor.faults(check)]
            if width == WIDTHS[0]:
                looks += visitor.accessibility("contrast")
            found += [f"{theme}: {fault}" for fault in looks]
        found += visitor.accessibility("structure")
        faults += [f"{width}: {fault}" for fault in found + visitor.noted()]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_says_what_it_is(visitor: Visitor, path: str) -> None:
    """Version, date of the record, description, card and icon; MathJax if needed."""
    visitor.site.sent.clear()
    visitor.open(path)
    page = visitor.page
    footer = page.locator("footer.bd-footer-content").inner_text()
    assert re.search(r"Version \d+\.\d+", footer)
    assert re.search(r"Measured on NVIDIA [\w ]+, 20\d\d-\d\d-\d\d", footer)
    meta = {
        name: page.locator(f"meta[{name}]").get_attribute("content")
        for name in ("name=description", "property='og:title'", "property='og:image'")
    }
    assert all(len(content) > 5 for content in meta.values())
    card = urlsplit(meta["property='og:image'"]).path
    assert visitor.site.file(card), "the card's address is not one of the book"
    icon = page.evaluate("document.querySelector('link[rel=icon]').href")
    assert dead_links(visitor.site, [icon]) == []
    loads_mathjax = any("mathjax" in address for address in visitor.site.sent)
    assert loads_mathjax == (page.locator(".math").count() > 0)


@pytest.mark.parametrize("path", PAGES)
def test_printing_a_page_cuts_nothing(visitor: Visitor, path: str) -> None:
    visitor.page.emulate_media(media="print")
    try:
        visitor.open(path, PAPER)
        visitor.draw_all()
        faults = visitor.faults("cut on paper") + visitor.faults("squashed")
    finally:
        visitor.page.emulate_media(media="screen")
    assert not faults, "\n".join(faults)


def test_every_page_is_looked_at() -> None:
    """Every page is in the book, but for the exercises' solutions."""
    patterns = "notebooks/*.ipynb", "notebooks/exercises/*.ipynb", "book/*.md"
    written = {
        file.relative_to(ROOT).with_suffix(".html").as_posix()
        for pattern in patterns
        for file in ROOT.glob(pattern)
    }
    shown = {path for path in PAGES if path.startswith(("notebooks/", "book/"))}
    assert written == shown


def test_the_search_finds_every_term_of_the_glossary(visitor: Visitor) -> None:
    """As an address with `?q=` once, then in place, as fast as one can type."""
    terms = glossary_terms((ROOT / "book" / "glossary.md").read_text())
    assert len(terms) > 20
    hit = "#search-results a[href*='book/glossary.html']"
    visitor.open(f"search.html?q={quote(terms[0])}")
    visitor.page.locator(hit).first.wait_for()
    lost = [term for term in terms if not visitor.page.evaluate(SEARCH, [term, hit])]
    assert not lost
    assert not visitor.page.evaluate(SEARCH, ["marzipan", hit])
    assert not visitor.noted()


def test_the_root_leads_to_the_first_page(visitor: Visitor) -> None:
    visitor.page.goto(visitor.site.url)
    visitor.page.wait_for_url(f"{visitor.site.url}book/index.html")


def test_an_unknown_address_gets_a_page_that_helps(visitor: Visitor) -> None:
    visitor.open("notebooks/no/such/page.html", 390)
    unknown = visitor.page.url
    assert visitor.missing == [unknown]
    assert [said for said in visitor.said if "404" not in said] == []
    assert not visitor.foreign
    assert visitor.page.locator("article h1").inner_text() == "Page not found"
    links = visitor.links()
    # The theme's own links to a place on this page name the address that is missing.
    assert dead_links(visitor.site, [a for a in links if unknown not in a]) == []
    assert visitor.site.url + "book/index.html" in links
    for theme in THEMES:
        visitor.theme(theme)
        assert visitor.accessibility() == []
        assert visitor.faults("too wide") == []


# ---- the checks see what they are for ------------------------------------------------

DOT = "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'/>"
PAGE = """<!DOCTYPE html><html lang="en"><head><title>A page</title>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><article><h1>A page</h1>{body}</article></main>{after}</body></html>"""


@pytest.fixture
def small(chromium, tmp_path):
    """Opens a page of one's own: small(body, style, after) gives a Visitor on it."""
    (tmp_path / "dot.svg").write_text(DOT)
    with serve(tmp_path) as site:
        visitor = Visitor(chromium, site)

        def opened(body: str = "", style: str = "", after: str = "") -> Visitor:
            page = PAGE.format(body=body, style=style, after=after)
            (tmp_path / "page.html").write_text(page)
            site.bodies.clear()
            visitor.open("page.html", 390)
            return visitor

        yield opened
        visitor.page.close()


GOOD = """<p>Words, <a href="#here">here</a>.</p>
<p id="here"><img src="dot.svg" alt="A dot"></p>"""


def test_a_good_page_has_no_faults(small) -> None:
    visitor = small(GOOD)
    assert [fault for check in CHECKS for fault in visitor.faults(check)] == []
    assert visitor.noted() + visitor.accessibility() == []
    assert dead_links(visitor.site, visitor.links()) == []


@pytest.mark.parametrize(
    ("check", "body", "style"),
    [
        ("squashed", '<img src="dot.svg" alt="A dot" width="40" height="60">', ""),
        ("squashed", '<img src="none.svg" alt="Nothing">', ""),
        ("too wide", "<p>Words</p>", "p {width: 700px}"),
        ("too wide", "<div><p>Words</p></div>", "p {position: relative; left: 400px}"),
        ("no alternative text", '<img src="dot.svg">', ""),
        ("no alternative text", '<img src="dot.svg" alt=" ">', ""),
        ("mathematics", '<p class="math">x</p>', ""),
        ("mathematics", r"<p>So \(x\) it is.</p>", ""),
        ("mathematics", r"<p>So \exp x it is.</p>", ""),
        ("cut on paper", f"<pre>{'word ' * 90}</pre>", "pre {overflow: auto}"),
        ("cut on paper", "<details><summary>More</summary><p>Much</p></details>", ""),
    ],
)
def test_a_check_sees_its_fault(small, check: str, body: str, style: str) -> None:
    visitor = small(body, style)
    assert len(visitor.faults(check)) == 1
    if "src" not in body:
        seen = {name for name in CHECKS if visitor.faults(name)}
        assert seen - {"cut on paper"} <= {check}


def test_a_page_of_more_than_a_megabyte_is_found() -> None:
    assert too_much({"a.png": FIRST_PAGE}) == []
    (sentence,) = too_much({"a.js": 1, "b.png": FIRST_PAGE})
    assert sentence == "sends 1000001 bytes, most of them for b.png, a.js"


def test_a_table_that_scrolls_is_not_too_wide(small) -> None:
    visitor = small("<div><p>Words</p></div>", "p {width: 700px} div {overflow: auto}")
    assert visitor.faults("too wide") == []
    assert len(visitor.faults("cut on paper")) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('<img src="http://127.0.0.2:9/a.png" alt="A">', "asks another host"),
        ('<script src="none.js"></script>', "is not there"),
        ("<script>console.warn('careful')</script>", "warning: careful"),
        ("<script>nobody()</script>", "nobody is not defined"),
    ],
)
def test_what_a_page_asks_and_says_is_noted(small, body: str, words: str) -> None:
    assert any(words in noted for noted in small(body).noted())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('<a href="#nowhere">x</a>', "has no such anchor"),
        ('<a href="none.html">x</a>', "leads nowhere"),
        ('<a href="/../secret.html">x</a>', "leads nowhere"),
        ('<a href="dot.svg">x</a><a href="https://example.org/x">y</a>', ""),
    ],
)
def test_dead_links_are_found(small, body: str, words: str) -> None:
    visitor = small(body)
    dead = dead_links(visitor.site, visitor.links())
    assert bool(dead) == bool(words)
    assert all(words in sentence for sentence in dead)


@pytest.mark.parametrize(
    ("body", "style", "after", "rule"),
    [
        ("<p>Pale</p>", "p {color: #bbb; background: #fff}", "", "color-contrast"),
        ('<a href="#x"></a>', "", "", "link-name"),
        ("", "", "<p>Outside</p>", "region"),
    ],
)
def test_axe_sees_its_faults(small, body, style, after, rule) -> None:
    assert any(f.startswith(rule) for f in small(body, style, after).accessibility())
