"""Makes a notebook's link to the glossary go to the term itself in the book.

A chapter links a word as `[warps](../book/glossary.md#warp)`. JupyterLab opens the
glossary; the book can do better, because every term is a target of its own. A term
that the glossary does not define is a warning, and so fails the strict build. Every
link to a term carries its definition as a title, which the browser shows on hover, a
screen reader reads, and `course.css` shows while the link has the keyboard's focus.

Weighed: sphinx-hoverxref loads definitions from another host; sphinx-tippy needs a
script on every page, and shows nothing to a keyboard.
"""

import re

from docutils import nodes

GLOSSARY = "book/glossary"
LINK = re.compile(r"\]\((?:\.\./)+book/glossary\.md#([\w-]+)\)")


def link_terms(app, name: str, source: list[str]) -> None:
    if name.startswith("notebooks/"):
        source[0] = LINK.sub(r"](#\1)", source[0])


def definitions(glossary: nodes.document) -> dict[str, str]:
    """The definition of each term, by every id that a link may name."""
    found = {}
    for item in glossary.findall(nodes.definition_list_item):
        text = " ".join(item[-1].astext().split())
        for node in item.findall(nodes.Element):
            names = [*node.get("ids", ()), node.get("refid")]
            found |= {name: text for name in names if name}
    return found


def add_titles(app, doctree: nodes.document, name: str) -> None:
    env = app.env
    if GLOSSARY not in env.found_docs:
        return
    if not hasattr(env, "glossary_definitions"):
        env.glossary_definitions = definitions(env.get_doctree(GLOSSARY))
    for link in doctree.findall(nodes.reference):
        page, _, target = link.get("refuri", "").partition("#")
        here = name == GLOSSARY and not page
        if here or page.endswith("glossary.html"):
            target = target or link.get("refid", "")
            if text := env.glossary_definitions.get(target):
                link["reftitle"] = text
                link["classes"].append("term")


def setup(app) -> dict[str, bool]:
    app.connect("source-read", link_terms)
    app.connect("doctree-resolved", add_titles)
    return {"parallel_read_safe": True}
