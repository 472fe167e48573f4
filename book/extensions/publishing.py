"""What a published page has beside its text: a version, a card, a 404 page.

- The book's version is that of pyproject.toml, and every page's footer says when the
  record that it shows was measured.
- `sphinxext.opengraph` and `notfound.extension` need the address of the published book.
  It follows from the one setting of the repository's address (GitHub Pages).
- Images are loaded when the reader comes near them, MathJax where a page has
  mathematics (Sphinx loads it on the first page, too, for the pages below).
- `MENDS` are faults of the theme's pages that `make browser` finds.
- The theme brings 0.8 MB of icons, compressed, and a script that draws them a second
  time. The pages keep the 20 icons that they show, in fonts that fontTools cuts.

Weighed: fonts cut once and kept in book/static (they break when the theme takes another
icon), a theme without icon fonts (none that Jupyter Book 1 knows).
"""

import csv
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
ICON = re.compile(r"\bfa-[a-z0-9-]+")
RULE = re.compile(r"([^{}]*)\{([^{}]*)\}")
# What the browser's suite found in the theme's pages, as (pattern, replacement).
MENDS = [
    # Icons are drawn by fonts: the script that draws them again is not needed.
    (r'\s*<script src="[^"]*/fontawesome\.js[^"]*"></script>', ""),
    # A landmark that holds the whole column of contents.
    (
        '<div class="(sidebar-primary-items__start)',
        r'<div role="navigation" aria-label="Book" class="\1',
    ),
    # Buttons that unfold a part of the contents, named by the page beside them.
    (
        r"(<a [^>]*>([^<]*)</a><details[^>]*>)<summary>",
        r'\1<summary aria-label="Pages of \2">',
    ),
    # Not everything between citations is a list's item.
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),
    # The first visit has no mode yet: a complaint on the console, and a flash of light.
    (r'(getItem\("mode"\) \|\| )""', r'\1"auto"'),
    (
        r'(getItem\("theme"\) \|\| )""',
        r"""\1(matchMedia("(prefers-color-scheme: dark)").matches"""
        """ ? "dark" : "light")""",
    ),
]
WOFF2 = re.compile(r'url\([^)]*/fontawesome/[^)]*\.woff2\) format\("woff2"\),')
# Sphinx 7's search takes "#term-torch.compile" for an element of the class "compile".
TERM_WITH_A_DOT = (
    '`[role="main"] ${anchor}`',
    '`[role="main"] #${CSS.escape(anchor.slice(1))}`',
)
CODE = re.compile(r'content:\s*"\\([ef][0-9a-f]{3})"|:\s*"\\([ef][0-9a-f]{3})"')


def pages_address(repository: str) -> str:
    """Where GitHub Pages publishes the book of https://github.com/OWNER/NAME.

    Raises:
        ValueError: repository is no such address.
    """
    parts = urlsplit(repository)
    names = parts.path.strip("/").split("/")
    if parts.netloc != "github.com" or len(names) != 2:
        raise ValueError(f"expected https://github.com/OWNER/NAME, got {repository!r}")
    return f"https://{names[0]}.github.io/{names[1]}/"


def record_line(folder: Path) -> str:
    """When the files of a record were measured, and on which GPU; "" without files."""
    rows = [
        row
        for file in sorted(folder.glob("*/*.csv"))
        for row in csv.DictReader(file.open(newline=""))
        if row.get("recorded_at")
    ]
    if not rows:
        return ""
    gpus = " and ".join(sorted({row["gpu"] for row in rows}))
    dates = sorted({row["recorded_at"][:10] for row in rows})
    span = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    return f"Measured on {gpus}, {span}."


def set_up(app, config) -> None:
    """Sets the project, its version, the footer, and the address of the book."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.project = config.html_title
    config.version = config.release = project["version"]
    address = pages_address(config.html_theme_options["repository_url"])
    config.ogp_site_url = address
    config.ogp_social_cards = {
        "image_mini": "book/static/card.png",
        "line_color": "#1f3a5f",
    }
    config.notfound_urls_prefix = prefix = urlsplit(address).path
    config.notfound_context = {
        "title": "Page not found",
        "body": "<h1>Page not found</h1>"
        "<p>The book has no page at this address. It may have moved to another "
        "chapter.</p>"
        f'<p><a href="{prefix}book/index.html">Start of the book</a> · '
        f'<a href="{prefix}search.html">Search</a></p>',
    }
    line = record_line(ROOT / "notebooks" / "recorded")
    config.html_theme_options["extra_footer"] = (
        f"<p>Version {project['version']}. {line}</p>"
        + config.html_theme_options.get("extra_footer", "")
    )


def load_late(app, doctree, name: str) -> None:
    """Images are loaded when the reader comes near them (docutils' `loading`)."""
    for image in doctree.findall(lambda node: node.tagname == "image"):
        image["loading"] = "lazy"


def no_idle_mathjax(app, name: str, template: str, context: dict, doctree) -> None:
    """Takes MathJax from a page without mathematics."""
    if not app.env.get_domain("math").data["has_equations"].get(name):
        context["script_files"] = [
            file for file in context["script_files"] if "mathjax" not in str(file)
        ]


def icon_codes(css: str, texts: list[str]) -> set[int]:
    """The code points of the icons that pages show.

    Args:
        css: style sheets: which class is which code point, and what rules show by
            themselves (`content`, custom properties).
        texts: pages and scripts, which name classes such as "fa-moon".
    """
    named = {name for text in texts for name in ICON.findall(text)}
    codes = set()
    for selector, body in RULE.findall(css):
        of_class = set(re.findall(r"\.(fa-[a-z0-9-]+):{1,2}before", selector))
        if not of_class or of_class & named:
            codes |= {int(a or b, 16) for a, b in CODE.findall(body)}
    return codes


def finish(app, error: Exception | None) -> None:
    """Mends the theme's pages and search, and cuts the icons that no page shows."""
    if error or app.builder.format != "html":
        return
    outdir = Path(app.outdir)
    for page in outdir.rglob("*.html"):
        text = page.read_text()
        for pattern, replacement in MENDS:
            text = re.sub(pattern, replacement, text)
        page.write_text(text)
    static = outdir / "_static"
    search = static / "searchtools.js"
    search.write_text(search.read_text().replace(*TERM_WITH_A_DOT))
    (static / "scripts" / "fontawesome.js").unlink(missing_ok=True)
    cut_icons(outdir, static / "vendor" / "fontawesome" / "webfonts")


def cut_icons(outdir: Path, fonts: Path) -> None:
    """Leaves in the fonts what pages, scripts and style sheets show.

    Args:
        outdir: the book, whose style sheets load the fonts.
        fonts: a folder with each font as .ttf and as .woff2. The .woff2 goes: it is no
            smaller once 20 icons are left.
    """
    from fontTools import subset, ttLib  # comes with matplotlib

    sheets = {file: file.read_text() for file in outdir.rglob("*.css")}
    texts = [
        file.read_text() for end in ("html", "js") for file in outdir.rglob(f"*.{end}")
    ]
    codes = icon_codes("\n".join(sheets.values()), texts)
    for font in fonts.glob("*.ttf"):
        cutter = subset.Subsetter(subset.Options(hinting=False))
        cutter.populate(unicodes=codes)
        whole = ttLib.TTFont(font)
        cutter.subset(whole)
        whole.save(font)
        font.with_suffix(".woff2").unlink()
    for file, text in sheets.items():
        file.write_text(WOFF2.sub("", text))


def setup(app) -> dict[str, bool]:
    app.connect("config-inited", set_up, priority=100)
    app.connect("doctree-resolved", load_late)
    app.connect("html-page-context", no_idle_mathjax, priority=900)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
