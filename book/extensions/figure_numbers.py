"""Links "figure 4.2" and "table 4.2" to the captions that chapters number by hand.

A chapter writes `**Figure 4.2.** Two fillings.` below an output, in plain Markdown,
which JupyterLab shows as it is. In the book the caption becomes a target, and each
mention on the page a link to it. `tests/test_course.py` counts the numbers.

Weighed: Sphinx numbers figures itself (numfig), but only where a directive or a cell's
metadata has the caption. Both of them JupyterLab does not show.
"""

import re

from docutils import nodes

CAPTION = re.compile(r"(Figure|Table) (\d+\.\d+)\.")
MENTION = re.compile(r"\b((?:[Ff]igures?|[Tt]ables?) )?(\d+\.\d+)\b")
KINDS = {"f": "figure", "t": "table"}


def link_numbers(app, doctree: nodes.document) -> None:
    """Gives captions an id, and makes links of the mentions of their numbers."""
    if not app.env.docname.startswith("notebooks/"):
        return
    ids = {}
    for paragraph in doctree.findall(nodes.paragraph):
        begins = [child for child in paragraph if child.astext()][:1]  # MyST adds ""
        bold = begins and isinstance(begins[0], nodes.strong)
        if bold and (found := CAPTION.fullmatch(begins[0].astext())):
            kind, number = found[1].lower(), found[2]
            ids[kind, number] = f"{kind}-{number.replace('.', '-')}"
            paragraph["ids"].append(ids[kind, number])
            paragraph["classes"].append("numbered-caption")
    for text in [*doctree.findall(nodes.Text)]:
        if isinstance(text.parent, nodes.paragraph):
            text.parent.replace(text, linked(text.astext(), ids))


def linked(text: str, ids: dict[tuple[str, str], str]) -> list[nodes.Node]:
    """A text's parts: mentions of what `ids` has are links, the rest is text."""
    parts, end, kind = [], 0, ""
    for found in MENTION.finditer(text):
        word, number = found[1] or "", found[2]
        between = text[end : found.start()]
        if word:
            kind = KINDS[word[0].lower()]
        elif between != " and ":
            kind = ""  # a number by itself
        if (kind, number) in ids:
            parts += [nodes.Text(between)] if between else []
            link = nodes.reference("", found[0], refid=ids[kind, number], internal=True)
            parts.append(link)
            end = found.end()
    rest = text[end:]
    return [*parts, nodes.Text(rest)] if rest or not parts else parts


def setup(app) -> dict[str, bool]:
    app.connect("doctree-read", link_numbers)
    return {"parallel_read_safe": True}
