"""Makes the slides: for each part one HTML file, from tagged cells of its chapters.

    make slides      writes _build/slides/part_1.html, part_2.html, part_3.html
    python .ci/slides.py FOLDER            writes them into another folder

A file loads nothing else: figures, styles, reveal.js and its speaker view are inside.
So it opens from a folder, an e-mail or a USB stick, without a network.

A cell is on a slide if its metadata say so, in nbconvert's form and with one key more:

    {"slideshow": {"slide_type": "slide", "show": ["figure"]}}

`slide_type` is "slide" for a cell that begins a slide, and "-" for one that goes on
with it. A heading in front of a shown piece begins a slide, too. `show` names the
pieces of the cell that the slide takes, in order: see PROSE and OUTPUTS. A number
behind a name takes a later piece of that kind: "paragraph 2". The whole text of a cell
of which a piece is shown becomes the speaker's notes (key S).

Weighed: `nbconvert --to slides` takes whole cells, and a chapter's cells are too long
for a slide; it loads reveal.js, RequireJS, jQuery and MathJax from other hosts.
`jupyterlab-rise` shows whole cells, too, and needs a running server. reveal.js itself
comes in the package `sphinx-revealjs`, of which only these files are used.
"""

import argparse
import base64
import html
import importlib.util
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import latex2mathml.converter
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1280, 720  # of a slide, px
BODY_WIDTH, BODY_HEIGHT = 1168, 556  # of what stands below its heading, px
SIDE_WIDTH = 420  # of the prose beside a figure or a table, px
PROSE = {
    "heading_open": "heading",
    "paragraph_open": "paragraph",
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "table_open": "table",
    "math_block": "formula",
    "fence": "code",
}
OUTPUTS = {  # the richest form of an output, and its name
    "image/png": "figure",
    "text/html": "table",
    "text/markdown": "code",
    "text/plain": "text",
}


@dataclass
class Piece:
    """A part of a cell: its kind, its HTML, and its size."""

    kind: str
    html: str
    lines: int = 0  # of code, text or a table
    columns: int = 0  # of code or text: characters of the longest line
    words: int = 0
    width: int = 0  # of a figure, px
    height: int = 0


@dataclass
class Slide:
    """What one slide shows, and what its speaker reads."""

    chapter: str  # "4. Strided"
    heading: str
    pieces: list[Piece] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)  # ids


def _formula(tex: str, options: dict) -> str:
    display = "block" if options["display_mode"] else "inline"
    return latex2mathml.converter.convert(tex, display=display)


def _without_links(state) -> None:
    """A link's words stay: the file that it leads to is not beside the slides."""
    for token in state.tokens:
        if token.children:
            kept = (each for each in token.children if not each.type.startswith("link"))
            token.children = [*kept]


MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.use(dollarmath_plugin, renderer=_formula)
MARKDOWN.core.ruler.push("without_links", _without_links)
MARKDOWN.add_render_rule(
    "fence", lambda _, tokens, i, *__: _code(tokens[i].content, tokens[i].info)
)


def _code(text: str, language: str) -> str:
    lexer = get_lexer_by_name(language.strip() or "text")
    return highlight(text.rstrip(), lexer, HtmlFormatter(nowrap=False))


def _lined(kind: str, text: str, language: str) -> Piece:
    lines = text.rstrip().splitlines()
    columns = max(map(len, lines), default=0)
    return Piece(kind, _code(text, language), lines=len(lines), columns=columns)


# ---- the pieces of a cell ------------------------------------------------------------


def blocks(text: str) -> Iterator[list[Token]]:
    """The top-level blocks of Markdown text, without what is folded in <details>."""
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    block, depth = [], 0
    for token in MARKDOWN.parse(text):
        block.append(token)
        depth += token.nesting
        if depth == 0:
            yield block
            block = []


def prose_pieces(text: str) -> Iterator[Piece]:
    """The pieces of a cell of prose, in order: headings, paragraphs, lists, …"""
    for block in blocks(text):
        kind = PROSE.get(block[0].type)
        if kind == "code":
            yield _lined(kind, block[0].content, block[0].info)
        elif kind:
            inside = " ".join(token.content for token in block if token.content)
            if kind == "paragraph" and re.match(r"\*\*(Figure|Table) \d", inside):
                kind = "caption"  # so that "paragraph" is the first that says more
            words = len(inside.split())
            rows = sum(token.type == "tr_open" for token in block)
            rows += words // 25 if rows else 0  # long cells take two lines
            made = MARKDOWN.renderer.render(block, MARKDOWN.options, {})
            yield Piece(kind, made, words=words, lines=rows)


def output_pieces(cell: dict) -> Iterator[Piece]:
    """The pieces of a code cell: its source, then its outputs in their richest form."""
    yield _lined("source", "".join(cell["source"]), "python")
    alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
    for output in cell["outputs"]:
        data = output.get("data") or {"text/plain": output.get("text", "")}
        form = next(form for form in OUTPUTS if form in data)
        text = "".join(data[form])
        if form == "image/png":
            # A PNG file begins with 16 bytes, and then its width and height.
            width, height = struct.unpack(">II", base64.b64decode(text[:32])[16:24])
            source = f"data:image/png;base64,{text.strip()}"
            made = f'<img src="{source}" alt="{html.escape(alt)}">'
            yield Piece("figure", made, width=width, height=height)
        elif form == "text/html":
            yield Piece("table", text, lines=text.count("<tr"))
        elif form == "text/markdown":
            _, language, code = re.split(r"^`{3,}(.*)\n", text, maxsplit=1)
            yield _lined("code", code.rstrip("`\n"), language)
        else:
            yield _lined("text", text, "text")


def pieces_of(cell: dict) -> list[Piece]:
    """All pieces of a cell, in order."""
    if cell["cell_type"] == "markdown":
        return [*prose_pieces("".join(cell["source"]))]
    return [*output_pieces(cell)]


def chosen(cell: dict, where: str) -> list[Piece]:
    """The pieces that `show` names, and the headings in front of them, in their order.

    Raises:
        ValueError: the cell has no such piece.
    """
    pieces, taken, counts = pieces_of(cell), set(), {}
    names = {}
    for i, piece in enumerate(pieces):
        counts[piece.kind] = n = counts.get(piece.kind, 0) + 1
        names[f"{piece.kind} {n}"] = i
    for wanted in cell["metadata"]["slideshow"]["show"]:
        name = wanted if wanted[-1].isdigit() else f"{wanted} 1"
        if name not in names:
            raise ValueError(f"{where} has {', '.join(names)}, but shows {wanted!r}")
        taken.add(names[name])
    last = max(taken, default=-1)
    heads = [i for i, each in enumerate(pieces[:last]) if each.kind == "heading"]
    return [pieces[i] for i in sorted(taken | {*heads})]


# ---- the slides of a chapter ---------------------------------------------------------


def slides_of(path: Path) -> list[Slide]:
    """The slides that a chapter's tagged cells make.

    Raises:
        ValueError: a cell shows a piece that it has not, or continues no slide.
    """
    cells = json.loads(path.read_text())["cells"]
    title = re.match("# (.*)", "".join(cells[0]["source"]))[1]
    slides, heading, new = [], title, False
    for cell in cells:
        tag = cell["metadata"].get("slideshow")
        if tag is None:
            text = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            heading = [heading, *re.findall("^##+ (.*)", text, re.M)][-1]
            continue
        where = f"{path.stem}, cell {cell['id']},"
        if tag["slide_type"] not in ("slide", "-"):
            raise ValueError(f"{where} has the slide_type {tag['slide_type']!r}")
        new |= tag["slide_type"] == "slide"
        for piece in chosen(cell, where):
            if piece.kind == "heading":
                words = re.sub("<.*?>", "", piece.html).strip()
                new, heading = True, html.unescape(words)
                continue
            if new:
                slides.append(Slide(title, heading.replace("`", "")))
            elif not slides:
                raise ValueError(f"{where} continues no slide")
            new = False
            slides[-1].pieces.append(piece)
            slides[-1].cells.append(cell["id"])
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            slides[-1].notes.append(MARKDOWN.render(text))
            heading = [heading, *re.findall("^##+ (.*)", text, re.M)][-1]
    return slides


def _fitted(piece: Piece, width: int, height: int) -> str:
    """A piece's HTML, in a size with which it fits."""
    if piece.kind == "figure":
        scale = min(width / piece.width, height / piece.height)
        size = (round(scale * each) for each in (piece.width, piece.height))
        return piece.html.replace(
            "<img", '<img width="{}" height="{}"'.format(*size), 1
        )
    size = 26 if piece.words <= 60 else 23 if piece.words <= 110 else 20
    if piece.kind in ("code", "source", "text"):
        size = min(24, height / piece.lines / 1.32, (width - 24) / piece.columns / 0.61)
    elif piece.lines:  # a table
        size = min(24 if width == BODY_WIDTH else 21, height / piece.lines / 1.85)
    elif width < BODY_WIDTH:
        size = min(size, 22)
    return (
        f'<div class="{piece.kind}" style="font-size: {size:.1f}px">{piece.html}</div>'
    )


def slide_html(slide: Slide) -> str:
    """A slide as reveal.js wants it: a <section>, its notes inside."""
    prose = [p for p in slide.pieces if p.kind in ("paragraph", "list")]
    shown = [p for p in slide.pieces if p not in prose]
    beside = prose and shown and all(p.kind in ("figure", "table") for p in shown)
    opening = slide.heading == slide.chapter
    height = BODY_HEIGHT
    if beside:
        width = BODY_WIDTH - SIDE_WIDTH - 32
        left = "".join(_fitted(p, width, height // len(shown) - 8) for p in shown)
        right = "".join(_fitted(p, SIDE_WIDTH, height) for p in prose)
        body = f'<div class="left">{left}</div><div class="right">{right}</div>'
    else:
        sized = [p for p in shown if p.kind != "formula"]  # the others' height is known
        height -= sum(40 + 34 * (p.words // 15 + 1) for p in prose)
        height -= 90 * (len(shown) - len(sized))
        parts = {id(p): p.lines + 1 if p.lines else 14 for p in sized}  # as in lines
        room = {key: height * n / sum(parts.values()) - 8 for key, n in parts.items()}
        body = "".join(
            _fitted(p, BODY_WIDTH, room.get(id(p), height)) for p in slide.pieces
        )
    kind = "body beside" if beside else "body"
    return (
        f'<section class="{"opening" if opening else "inside"}">\n'
        f"<h2>{html.escape(slide.heading)}</h2>\n"
        f'<div class="{kind}">{body}</div>\n'
        f'<p class="foot">{html.escape(slide.chapter)}</p>\n'
        f'<aside class="notes">{"".join(slide.notes)}</aside>\n</section>\n'
    )


# ---- the file of a part --------------------------------------------------------------


def parts() -> dict[str, list[Path]]:
    """The parts of the book, by their captions, and the notebooks of each."""
    contents = yaml.safe_load((ROOT / "_toc.yml").read_text())
    found = {}
    for part in contents["parts"]:
        files = [entry["file"] for entry in part["chapters"]]
        chapters = [ROOT / f"{f}.ipynb" for f in files if re.match(r"notebooks/\d", f)]
        if chapters:
            found[part["caption"]] = chapters
    return found


def measured_on(path: Path) -> str:
    """The sentence of a chapter's first cell: where its outputs come from."""
    cells = json.loads(path.read_text())["cells"]
    outputs = next(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    return "".join(outputs[0]["text"]).splitlines()[0]


def _reveal(name: str) -> str:
    package = Path(importlib.util.find_spec("sphinx_revealjs").origin).parent
    return (package / "_static" / "revealjs" / name).read_text()


def part_html(caption: str, chapters: list[Path]) -> str:
    """The whole file of a part. Chapters stand side by side, their slides below.

    Raises:
        ValueError: as `slides_of`; or a chapter has no slide.
    """
    title = yaml.safe_load((ROOT / "_config.yml").read_text())["title"]
    columns, names = [], []
    for path in chapters:
        slides = slides_of(path)
        if not slides:
            raise ValueError(f"{path.stem} has no cell with a slide")
        names.append(slides[0].chapter.split(". "))
        columns.append("".join(map(slide_html, slides)))
    listed = "".join(
        f'<li value="{number}">{html.escape(name)}</li>' for number, name in names
    )
    first = (
        f"<section>\n<h1>{html.escape(title)}</h1>\n"
        f'<div class="body"><p class="part">Part {html.escape(caption)}</p>\n'
        f"<ol>{listed}</ol></div>\n"
        f'<p class="foot">{html.escape(measured_on(chapters[0]))}</p>\n</section>\n'
    )
    styles = [_reveal("dist/reset.css"), _reveal("dist/reveal.css")]
    styles += [HtmlFormatter().get_style_defs(".highlight")]
    styles += [(ROOT / ".ci" / "slides.css").read_text()]
    scripts = [_reveal("dist/reveal.js"), _reveal("plugin/notes/notes.js")]
    size = f"width: {WIDTH}, height: {HEIGHT}, margin: 0, center: false"
    look = "hash: true, slideNumber: 'c/t', navigationMode: 'linear'"
    look += ", transition: 'none', controls: false"
    scripts += [f"Reveal.initialize({{{size}, {look}, plugins: [RevealNotes]}});"]
    # "</script" in a script's string would end the element.
    scripts = [re.sub("</(?=script)", r"<\\/", each, flags=re.I) for each in scripts]
    return "".join(
        [
            '<!doctype html>\n<html lang="en-GB">\n<head>\n<meta charset="utf-8">\n',
            f"<title>{html.escape(f'{title}. Part {caption}')}</title>\n",
            *(f"<style>\n{style}\n</style>\n" for style in styles),
            '</head>\n<body>\n<div class="reveal"><div class="slides">\n',
            *(f"<section>\n{column}</section>\n" for column in [first, *columns]),
            "</div></div>\n",
            *(f"<script>\n{script}\n</script>\n" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def folder_of(arguments: Sequence[str] | None = None) -> Path:
    """The folder that the command line names; None means this process's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    folder = ROOT / "_build" / "slides"
    words = "where to write the files (%(default)s)"
    parser.add_argument("folder", nargs="?", type=Path, default=folder, help=words)
    return parser.parse_args(arguments).folder


def main(folder: Path) -> None:
    """Writes the file of each part into a folder, and prints its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (caption, chapters) in enumerate(parts().items(), start=1):
        path = folder / f"part_{number}.html"
        path.write_text(part_html(caption, chapters))
        print(path)


if __name__ == "__main__":
    main(folder_of())
