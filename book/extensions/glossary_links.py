"""Makes a notebook's link to the glossary go to the term itself in the book.

A chapter links a word as `[warps](../book/glossary.md#warp)`. JupyterLab opens the
glossary; the book can do better, because every term is a target of its own. A term
that the glossary does not define is a warning, and so fails the strict build.
"""

import re

LINK = re.compile(r"\]\(\.\./book/glossary\.md#([\w-]+)\)")


def link_terms(app, name: str, source: list[str]) -> None:
    if name.startswith("notebooks/"):
        source[0] = LINK.sub(r"](#\1)", source[0])


def setup(app) -> dict[str, bool]:
    app.connect("source-read", link_terms)
    return {"parallel_read_safe": True}
