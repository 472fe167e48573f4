"""Citations that read well in JupyterLab and in the book, from one `sources.bib`.

A page cites `[Milakov and Gimelshein 2018](../book/sources.md#milakov2018)`. JupyterLab
opens `sources.md`, whose list is plain Markdown. In the book, sphinxcontrib-bibtex adds
the key, as a link to the source, and sets the list. A key that `sources.bib`
lacks is a warning, and so fails the strict build.

    python book/extensions/citations.py

writes the list of `sources.md` anew.

Weighed: roles ({cite}) in the pages stand there raw in JupyterLab. Anchors in a list
written by hand have no check, no labels, and nothing that keeps their form alike.
"""

import re
from pathlib import Path

BIBLIOGRAPHY = Path(__file__).resolve().parents[1] / "sources.bib"
CITATION = re.compile(r"\[([^][\n]+)\]\((?:\.\./book/)?sources\.md#([\w-]+)\)")
LIST = re.compile(r"(<!-- from sources\.bib -->\n).*?(<!-- end -->)", re.DOTALL)
DIRECTIVE = "\n```{bibliography}\n:all:\n```\n"


def register_style() -> None:
    """Adds the style `keyed` to pybtex: its style `plain`, with the keys as labels."""
    from pybtex.plugin import register_plugin
    from pybtex.style.formatting.plain import Style as Plain
    from pybtex.style.labels import BaseLabelStyle

    class Keys(BaseLabelStyle):
        def format_labels(self, sorted_entries):
            return [entry.key for entry in sorted_entries]

    class Keyed(Plain):
        default_label_style = Keys

    register_plugin("pybtex.style.formatting", "keyed", Keyed, force=True)


def as_markdown(path: Path = BIBLIOGRAPHY) -> str:
    """The sources of a BibTeX file as a list in plain Markdown, each with its key."""
    from pybtex.backends.markdown import Backend
    from pybtex.database import parse_file
    from pybtex.plugin import find_plugin

    class Plain(Backend):
        def format_str(self, text: str) -> str:
            return text  # no sign of ours needs a backslash

    register_style()
    style, backend = find_plugin("pybtex.style.formatting", "keyed")(), Plain()
    lines = (
        f"- `{entry.label}`: {' '.join(entry.text.render(backend).split())}\n"
        for entry in style.format_bibliography(parse_file(path))
    )
    return "\n" + "".join(lines) + "\n"


def cite(app, name: str, source: list[str]) -> None:
    source[0] = CITATION.sub(r"\1 {cite}`\2`", source[0])
    if name == "book/sources":
        source[0] = LIST.sub(rf"\1{DIRECTIVE}\2", source[0])


def setup(app) -> dict[str, bool]:
    register_style()
    app.connect("source-read", cite)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    page = BIBLIOGRAPHY.with_suffix(".md")
    text = LIST.sub(lambda found: found[1] + as_markdown() + found[2], page.read_text())
    page.write_text(text)
