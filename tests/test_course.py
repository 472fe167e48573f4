"""The course itself: its layout, its notebooks and its record keep their own rules."""

import ast
import csv
import functools
import operator
import re
from pathlib import Path

import nbformat
import pytest

import kernels
from kernels.lab import clock, record
from tests.helpers import loaded

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
NUMBERS = {path.stem[3:]: int(path.stem[:2]) for path in NOTEBOOKS}
LAB = ROOT / "kernels" / "lab"
CHAPTERS = [ROOT / "kernels" / f"{stem}.py" for stem in kernels.CHAPTERS]
INSTRUMENTS = sorted(path for path in LAB.rglob("*.py") if path.parent != LAB)
INSTRUMENTS += sorted(LAB.glob("[a-z]*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
RECORDED = sorted((ROOT / "notebooks" / "recorded").glob("*/*.csv"))

LONGEST_CELL = 20
LONGEST_PAGE = {"cells": 25, "words": 1800}
LONGER_PAGES: set[str] = set()
LONGEST_MODULE = 560
LONGEST_CHAPTER = {"I": 150, "II": 220, "III": 220}  # lines of a module, by part
LONGER = {
    "matmul": 232,  # its tiles are loaded by pointers, or by descriptors
    "unaligned": 270,  # short rows have a rule of their own, and rows of slices
    "columns": 275,  # whole columns, or parts of them in two steps
    "online": 295,  # one launch, or two steps of programs that share rows
    "staged": 295,  # every access to shared memory is a function of its own
    "cooperative": 350,  # its kernel waits for the other parts, and helps
    "windows": 375,  # from chunks to words, of a whole row or of a part
    "gradient": 478,  # its kernels do what those of three chapters do
}
LATER = {"fastest": {"kernels.operator"}}  # imported within a function, by its call
IGNORED = {"nbval-ignore-output", "nbval-skip"}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", ()))


def text(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


@functools.cache
def definitions() -> set[str]:
    """All functions and classes of the course, with their docstrings and without."""
    found = set()
    for path in (*CHAPTERS, *INSTRUMENTS, *BENCHMARKS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(ast.unparse(node))
                if ast.get_docstring(node) and len(node.body) > 1:
                    node.body = node.body[1:]
                    found.add(ast.unparse(node))
    return found


def part(stem: str) -> str:
    """The part of the course that a chapter belongs to, by its number."""
    return "I" if NUMBERS[stem] <= 7 else "II" if NUMBERS[stem] <= 13 else "III"


def imports(path: Path) -> set[str]:
    """Every module, and every name of a module, that a file imports, with dots."""
    found = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def imports_any(path: Path, modules: list[str]) -> set[str]:
    """What a file imports of these modules."""
    return {
        name
        for name in imports(path)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a recorded file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# ---- one stem per chapter ------------------------------------------------------------


def test_notebooks_follow_the_chapters():
    stems = [re.fullmatch(r"\d\d_([a-z]+)", path.stem)[1] for path in NOTEBOOKS]
    assert tuple(stems) == kernels.CHAPTERS


def test_every_chapter_has_its_three_files():
    modules = {path.stem for path in (ROOT / "kernels").glob("*.py")} - {"__init__"}
    assert modules == set(kernels.CHAPTERS)
    for stem in kernels.CHAPTERS:
        assert (ROOT / "tests" / f"test_{stem}.py").exists(), stem


def test_every_instrument_has_its_test():
    for path in [*LAB.glob("[a-z]*.py"), *(path.parent for path in LAB.glob("*/*.py"))]:
        assert (ROOT / "tests" / "lab" / f"test_{path.stem}.py").exists(), path


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_has_its_test(path):
    assert (ROOT / "tests" / "benchmarks" / f"test_{path.name}").exists()


def test_table_of_contents_lists_every_notebook_in_order():
    files = re.findall(r"file: (notebooks/\d\S+)", (ROOT / "_toc.yml").read_text())
    assert files == [f"notebooks/{path.stem}" for path in NOTEBOOKS]


@pytest.mark.parametrize("page", ["README.md", "book/index.md"])
def test_tables_list_every_chapter_with_its_number(page):
    listed = re.findall(
        r"^\| (?:(\d+) \| `(\w+)`|\[(\d+)\. (\w+)\]\(\.\./notebooks/\S+?\)) \|",
        (ROOT / page).read_text(),
        re.MULTILINE,
    )
    assert {a + c: b + d for a, b, c, d in listed} == {
        str(number): stem for stem, number in NUMBERS.items()
    }


def test_ladder_names_every_chapter():
    for stem in kernels.CHAPTERS:
        assert re.search(rf"^    {stem} ", kernels.__doc__, re.MULTILINE), stem


@pytest.mark.parametrize(
    "path",
    [*CHAPTERS, *INSTRUMENTS, *BENCHMARKS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_no_module_knows_the_number_of_a_chapter(path):
    """Identifiers and docstrings name a chapter by its stem: numbers may change."""
    stems = "|".join(kernels.CHAPTERS)
    numbered = rf"(?i)\bchapters?[ _-]?\d+|\d+_?(?:{stems})\b|\b(?:{stems})_?\d+\b"
    assert re.findall(numbered, path.read_text()) == []


# ---- what may touch what -------------------------------------------------------------


@pytest.mark.parametrize(
    "path", INSTRUMENTS, ids=lambda path: path.relative_to(LAB).as_posix()
)
def test_instruments_import_no_chapter_and_no_benchmark(path):
    chapters = [f"kernels.{stem}" for stem in kernels.CHAPTERS]
    assert not imports_any(path, [*chapters, "benchmarks"])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapters_import_only_earlier_chapters(path):
    place = kernels.CHAPTERS.index(path.stem)
    later = [f"kernels.{stem}" for stem in kernels.CHAPTERS[place:]]
    found = imports_any(path, [*later, "benchmarks"])
    assert found == LATER.get(path.stem, set())


def test_models_import_nothing_of_the_course():
    assert not imports_any(LAB / "models.py", ["kernels", "benchmarks"])


@pytest.mark.parametrize("name", ["plot", "draw"])
def test_pictures_import_no_clock(name):
    for path in [LAB / f"{name}.py", *(LAB / name).glob("*.py")]:
        clocks = ["kernels.lab.clock", "kernels.lab.record"]
        assert not path.exists() or not imports_any(path, clocks), path


# ---- the form of a module ------------------------------------------------------------


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_module_keeps_to_its_length(path):
    n_lines = len(path.read_text().splitlines())
    assert n_lines <= LONGER.get(path.stem, LONGEST_CHAPTER[part(path.stem)])


@pytest.mark.parametrize(
    "path",
    [*INSTRUMENTS, *BENCHMARKS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_an_instrument_keeps_to_its_length(path):
    n_lines = len(path.read_text().splitlines())
    assert n_lines <= LONGEST_MODULE


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_module_says_what_it_builds_on(path):
    said = ast.get_docstring(ast.parse(path.read_text()))
    places = [
        re.search(rf"^{words}: ", said, re.MULTILINE).start()
        for words in ("Builds on", "Changes", "Costs", "Source")
    ]
    assert places == sorted(places)


# ---- the record ----------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_rows_say_what_made_them(path):
    for row in rows_of(path):
        assert all(row[name] for name in record.PROVENANCE), row
        assert list(row)[-len(record.PROVENANCE) :] == record.PROVENANCE


@pytest.mark.parametrize(
    "path",
    [path for path in RECORDED if set(record.TIMES) & set(rows_of(path)[0])],
    ids=lambda path: path.stem,
)
def test_recorded_measurements_have_the_columns_of_record(path):
    rows = rows_of(path)
    assert list(rows[0]) == record.COLUMNS
    keys = [tuple(row[name] for name in record.KEY) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {row["clock"] for row in rows} <= set(clock.CLOCKS)
    assert any(row["provider"] == "copy" for row in rows)


# ---- the form of a chapter -----------------------------------------------------------


def test_listings_in_outputs_are_of_the_code_as_it_is(notebook):
    """Comments apart. Each listing of a function or a class is in some module."""
    for cell in code(notebook):
        for output in cell.outputs:
            listing = output.get("data", {}).get("text/plain", "")
            if re.match(r"(@[\w.]+(\(.*\))?\n)*(def|class) \w", listing):
                for node in ast.parse(listing).body:
                    assert ast.unparse(node) in definitions(), listing


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_title_carries_the_number(path):
    title = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
    stem = path.stem[3:]
    words = {"cuda": "CUDA"}.get(stem, stem.capitalize())
    assert title == f"# {NUMBERS[stem]}. {words}"


def test_chapters_are_cited_by_the_numbers_that_they_have(notebook):
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    for words, stem in re.findall(r"\[([^]]*)\]\(\d\d_(\w+)\.ipynb\)", prose):
        assert words in (stem, f"chapter {NUMBERS[stem]}"), words
    assert cited(prose) <= set(NUMBERS.values())


PAGES = [*sorted((ROOT / "book").glob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "Makefile"], ids=lambda path: path.name
)
def test_pages_cite_chapters_that_there_are(path):
    assert cited(path.read_text()) <= set(NUMBERS.values())


def cited(prose: str) -> set[int]:
    """The numbers of the chapters that a text speaks of."""
    words = re.findall(r"\bchapters? (\d+(?:(?:, | and | to )\d+)*)", prose, re.I)
    return {int(number) for number in re.findall(r"\d+", " ".join(words))}


def test_every_code_cell_was_executed_in_order_without_error(notebook):
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", output.get("evalue")


def test_what_a_cell_prints_is_one_output(notebook):
    for cell in code(notebook):
        names = [
            output.get("name", number) for number, output in enumerate(cell.outputs)
        ]
        assert not any(map(operator.eq, names, names[1:])), cell.source


def test_outputs_hold_no_warnings(notebook):
    """They name the recording machine's folders, and no learner needs them."""
    for cell in code(notebook):
        said = [
            output.text for output in cell.outputs if output.get("name") == "stderr"
        ]
        assert said == [], cell.source


OPENED = "\n    import open_course\n"


def opener(notebook) -> str:
    """The lines of the first cell that open the course, up to the second import."""
    source = code(notebook)[0].source
    assert OPENED in source, source
    return source[: source.index(OPENED) + len(OPENED)]


def test_first_cell_opens_the_course_as_in_every_notebook(notebook):
    """tests/test_open.py runs these lines; they come before anything is imported."""
    lines = opener(notebook)
    assert lines == opener(nbformat.read(NOTEBOOKS[0], as_version=4))
    assert set(re.findall(r"^ *(?:import|from) (\S+)", lines, re.M)) == {"open_course"}


def test_triton_is_imported_after_the_course(notebook):
    """Triton first leaves no choice. nbval hides this: its processes inherit it."""
    source = "\n".join(cell.source for cell in code(notebook))
    ours = re.search(r"^from (?:kernels|benchmarks)", source, re.MULTILINE)
    others = re.search(r"^(?:import|from) triton", source, re.MULTILINE)
    assert others is None or ours.start() < others.start()


def test_outputs_name_the_gpu_that_made_them(notebook):
    first = code(notebook)[0]
    said = "".join(output.get("text", "") for output in first.outputs)
    assert "NVIDIA H200" in said and "timed" in said, said


def words(notebook) -> int:
    """The words of a page's text.

    A table's bars are no words. A caption's number and the line that leads to the
    exercises are not counted.
    """
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    text = re.sub(r"^\*\*(Figure|Table) [\d.]+\*\* ", "", "\n".join(prose), flags=re.M)
    text = re.sub(r"\n## Exercises\n.*?(?=\n## )", "", text, flags=re.S)
    return sum(word.strip("|:-") != "" for word in text.split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_keeps_to_its_length(path):
    """A page that has become short enough leaves the list of the longer pages."""
    page = nbformat.read(path, as_version=4)
    size = {"cells": len(page.cells), "words": words(page)}
    longer = any(size[what] > most for what, most in LONGEST_PAGE.items())
    assert longer == (path.stem[3:] in LONGER_PAGES), size


def test_cells_are_short(notebook):
    for cell in code(notebook):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.source


@pytest.mark.parametrize(
    "path",
    [*NOTEBOOKS, *sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_lines_of_code_fit_a_page(path):
    """A formatter's 88 columns are for modules. It does not break a line of imports."""
    for cell in code(nbformat.read(path, as_version=4)):
        for line in cell.source.splitlines():
            assert len(line) <= 80 or line.startswith("from kernels.lab import"), line


def test_most_outputs_are_compared(notebook):
    ignored = [cell for cell in code(notebook) if tags(cell) & IGNORED]
    assert len(ignored) < len(code(notebook)) / 2


def test_every_figure_has_alternative_text(notebook):
    for cell in code(notebook):
        shows = any("image/png" in output.get("data", {}) for output in cell.outputs)
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        assert not shows or len(alt) > 30, cell.source


CAPTION = re.compile(r"\*\*(Figure|Table) (\d+\.\d+)\.\*\* \S.*\.")
MENTION = re.compile(r"\b([Ff]igure|[Tt]able)s? (\d+\.\d+(?:(?:, | and )\d+\.\d+)*)")


def shown(cell) -> list[str]:
    """Figure or Table, for each picture and each table among a cell's outputs."""
    kinds = {"image/png": "Figure", "text/html": "Table"}
    data = [output.get("data", {}) for output in cell.get("outputs", ())]
    return [kind for each in data for mime, kind in kinds.items() if mime in each]


def captions(notebook) -> list[tuple[list[list[str]], list[tuple[str, str]]]]:
    """What the code cells before each Markdown cell show, and its first paragraphs
    that are captions, as pairs of kind and number."""
    found, above = [], []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            above += [shown(cell)] if shown(cell) else []
            continue
        numbered = []
        for paragraph in cell.source.split("\n\n"):
            if not (caption := CAPTION.fullmatch(paragraph)):
                break
            numbered.append(caption.groups())
        found.append((above, numbered))
        above = []
    return [*found, (above, [])]


def fitting(above: list[list[str]]) -> list[list[str]]:
    """The kinds of captions that outputs may have: a cell of pictures may have one."""
    fits = [[]]
    for kinds in above:
        ways = [kinds, ["Figure"]] if set(kinds) == {"Figure"} else [kinds]
        fits = [fit + way for fit in fits for way in ways]
    return fits


def misnumbered(notebook, number: int) -> list[str]:
    """What is wrong with a chapter's captions and the mentions of their numbers."""
    wrong, numbers = [], {"Figure": [], "Table": []}
    for above, numbered in captions(notebook):
        kinds = [kind for kind, _ in numbered]
        if kinds not in fitting(above):
            wrong.append(f"{above} has the captions {kinds}")
        for kind, each in numbered:
            numbers[kind].append(each)
    for kind, found in numbers.items():
        if found != [f"{number}.{i}" for i in range(1, len(found) + 1)]:
            wrong.append(f"{kind}: {found}")
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    for kind, mentioned in MENTION.findall(" ".join(prose.split())):
        for each in re.findall(r"\d+\.\d+", mentioned):
            if each not in numbers[kind.capitalize()]:
                wrong.append(f"{kind} {each} is nowhere")
    return wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_figures_and_tables_are_numbered_and_mentions_have_targets(path):
    page = nbformat.read(path, as_version=4)
    assert misnumbered(page, NUMBERS[path.stem[3:]]) == []


@pytest.mark.parametrize(
    ("outputs", "text", "wrong"),
    [
        ("png html", "**Figure 4.1.** A.\n\n**Table 4.1.** B.\n\nIn table 4.1, …", ""),
        ("png png", "**Figure 4.1.** Both.\n\nText.", ""),
        ("png png", "**Figure 4.1.** A.\n\n**Figure 4.2.** B.", ""),
        ("png", "Text.", "captions"),
        ("html", "**Figure 4.1.** A table.", "captions"),
        ("", "**Figure 4.1.** Nothing.", "captions"),
        ("png", "**Figure 4.2.** A.", "Figure: "),
        ("png", "**Figure 5.1.** A.", "Figure: "),
        ("png", "**Figure 4.1.** A.\n\nSee table 4.1.", "table 4.1 is nowhere"),
        ("png", "**Figure 4.1.** A.\n\nFigures 4.1 and 4.2.", "Figure 4.2 is nowhere"),
        ("png", "**Figure 4.1.**\n\nNo words.", "captions"),
    ],
)
def test_a_missing_or_wrong_number_is_seen(outputs, text, wrong):
    mimes = {"png": "image/png", "html": "text/html"}
    cell = nbformat.v4.new_code_cell()
    cell.outputs = [
        nbformat.v4.new_output("display_data", {mimes[each]: ""})
        for each in outputs.split()
    ]
    below = nbformat.v4.new_markdown_cell(text)
    found = misnumbered(nbformat.v4.new_notebook(cells=[cell, below]), 4)
    assert (wrong in " ".join(found)) if wrong else not found


def test_sections_stand_in_their_order(notebook):
    prose = text(notebook)
    wanted = (
        r"\*\*You will\*\*",
        r"\*\*Before you start\*\*",
        "## Guess",
        "## Check",
        "## Measure",
        "## What you now know",
        "## Sources",
    )
    places = [re.search(words, prose).start() for words in wanted]
    assert places == sorted(places)


def test_no_cell_branches_on_the_world(notebook):
    for cell in code(notebook):
        # A process that a cell starts may be told its world; a cell must not ask.
        source = cell.source.replace('TRITON_INTERPRET="1"', "")
        for words in ("INTERPRETED", "has_gpu", "is_available", "TRITON_INTERPRET"):
            assert words not in source, source


def test_no_picture_is_embedded_in_prose(notebook):
    assert "base64" not in text(notebook)


def test_no_kernel_of_the_course_is_pasted(notebook):
    for cell in notebook.cells:
        assert "def softmax_kernel(" not in cell.source


def test_a_notebook_that_never_answers_is_started_again():
    again_if_mute = loaded(ROOT / "conftest.py").again_if_mute
    answers = iter([RuntimeError("mute"), "kernel", *4 * [RuntimeError("dead")]])

    def start(name):
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return f"{name}'s {answer}"

    assert again_if_mute(start)("page") == "page's kernel"
    with pytest.raises(RuntimeError, match="dead"):
        again_if_mute(start)("page")
    assert not list(answers)
