"""The exercises: made from their solutions, and each shown wrong first, and then right.

nbval runs `notebooks/solutions`. Here is tested what the committed notebooks hold.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import kernels
from kernels.lab import verdict
from tests.helpers import loaded
from tests.test_course import NUMBERS, tags

pytest.importorskip("nbconvert", reason="makes the exercises; comes with JupyterLab")

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
EXERCISES = ROOT / "notebooks" / "exercises"
PROJECT = "project"  # it ends the course, and belongs to no chapter
KINDS = ("Repair", "Write", "Answer")
LONGEST_STUB = 30


generator = loaded(ROOT / ".ci" / "exercises.py")


@pytest.fixture(params=SOLUTIONS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def stem_of(path: Path) -> str:
    """The chapter's, or PROJECT."""
    return path.stem.lstrip("0123456789_")


def exercises(notebook) -> dict[str, list]:
    """The cells of each exercise, by its heading: "Repair: the range of each row"."""
    found, cells = {}, None
    for cell in notebook.cells:
        heading = re.match(rf"## ((?:{'|'.join(KINDS)}): .+)", cell.source)
        if heading and cell.cell_type == "markdown":
            cells = found.setdefault(heading[1], [])
        elif cell.cell_type == "markdown" and cell.source.startswith("## "):
            cells = None
        if cells is not None and "progress" not in tags(cell):
            cells.append(cell)
    return found


def tagged(cells, tag: str) -> list:
    """The code cells with a tag."""
    return [cell for cell in cells if cell.cell_type == "code" and tag in tags(cell)]


def said(cell) -> str:
    """What a cell shows, in one line."""
    texts = [out.get("text") or out.data["text/plain"] for out in cell.outputs]
    return " ".join("".join(texts).split())


# ---- the generator -------------------------------------------------------------------


def test_the_exercises_are_made_from_the_solutions(path):
    made = EXERCISES / path.name
    assert made.exists(), "run: make exercises"
    assert made.read_text() == generator.text_of(path), "run: make exercises"


def test_there_is_no_exercise_without_its_solution():
    assert {path.name for path in EXERCISES.glob("*.ipynb")} == {
        path.name for path in SOLUTIONS
    }


def example():
    """A notebook with one exercise."""
    right = new_output("execute_result", {"text/plain": "Right: …"}, execution_count=3)
    wrong = new_output("execute_result", {"text/plain": "Not yet"}, execution_count=2)
    source = "def f(x):\n    return x\n\n\ng = abs  # again\njudge.rows(\n    f, g\n)"
    solution = {"metadata": {"tags": ["solution"]}}
    done = new_output("execute_result", {"text/plain": "1 of 1"}, execution_count=4)
    return new_notebook(
        cells=[
            new_code_cell("f = ...", execution_count=1, metadata={"tags": ["stub"]}),
            new_code_cell(
                "g = abs\njudge.rows(f, g)",
                execution_count=2,
                outputs=[wrong],
                metadata={"tags": ["judge"]},
            ),
            new_markdown_cell("Because.", **solution),
            new_code_cell(source, execution_count=3, outputs=[right], **solution),
            new_code_cell(
                "judge.progress()",
                execution_count=4,
                outputs=[done],
                metadata={"tags": ["progress"]},
            ),
        ]
    )


def test_a_solution_is_folded_without_the_line_that_judges_it():
    made = generator.exercises_of(example())
    assert [cell.cell_type for cell in made.cells] == ["code"] * 2 + [
        "markdown",
        "code",
    ]
    assert made.cells[2].source == (
        "<details><summary>Solution</summary>\n\nBecause.\n\n"
        "```python\ndef f(x):\n    return x\n```\n\n</details>"
    )


def test_outputs_are_kept_except_the_progress():
    made = generator.exercises_of(example())
    code = [cell for cell in made.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3]
    assert [len(cell.outputs) for cell in code] == [0, 1, 0]
    assert code[1].outputs[0].data == {"text/plain": "Not yet"}


@pytest.mark.parametrize(
    ("source", "closed"),
    [("g = abs\njudge.rows(f, g)", False), ("def g(x):\n    f\n\n\nj(f, g)", True)],
)
def test_a_judge_that_holds_the_answer_is_closed(source, closed):
    notebook = example()
    notebook.cells[1].source = source
    notebook.cells[3].source = f"def f(x):\n    return x\n\n\n{source}"
    metadata = generator.exercises_of(notebook).cells[1].metadata
    assert ("hide-input" in metadata.tags) == closed
    assert metadata.get("jupyter", {}).get("source_hidden", False) == closed
    assert notebook.cells[1].metadata == {"tags": ["judge"]}


def test_the_notebook_with_the_solutions_stays_as_it_is():
    notebook = example()
    before = nbformat.writes(notebook)
    first, second = (nbformat.writes(generator.exercises_of(notebook)) for _ in "ab")
    assert first == second and nbformat.writes(notebook) == before


def test_a_solution_that_is_not_judged_is_refused():
    notebook = example()
    notebook.cells[3].source = "def f(x):\n    return x"
    with pytest.raises(ValueError, match="must end in the judge's call"):
        generator.exercises_of(notebook)
    notebook.cells[3:] = []
    with pytest.raises(ValueError, match="no code follows"):
        generator.exercises_of(notebook)


# ---- the form ------------------------------------------------------------------------


def test_every_chapter_has_exercises():
    numbered = [path for path in SOLUTIONS if stem_of(path) != PROJECT]
    stems = set(map(stem_of, numbered))
    assert stems == set(kernels.CHAPTERS)
    for path in numbered:
        assert path.stem == f"{NUMBERS[stem_of(path)]:02}_{stem_of(path)}"


@pytest.mark.parametrize("stem", kernels.CHAPTERS)
def test_chapter_and_contents_lead_to_the_exercises(stem):
    name = f"{NUMBERS[stem]:02}_{stem}"
    chapter = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    last = chapter.cells[-1].source
    section = re.search(r"## Exercises\n\n(.+?)\n\n## ", last, re.S)
    assert section, "no section Exercises in the last cell"
    assert f"](exercises/{name}.ipynb)" in section[1]
    contents = (ROOT / "_toc.yml").read_text()
    below = f"  sections:\n          - file: notebooks/exercises/{name}\n"
    assert f"- file: notebooks/{name}\n      {below}" in contents


def test_last_chapter_index_and_contents_lead_to_the_project():
    last = f"{len(kernels.CHAPTERS)}_{kernels.CHAPTERS[-1]}"
    cell = nbformat.read(ROOT / "notebooks" / f"{last}.ipynb", as_version=4).cells[-1]
    assert f"](exercises/{PROJECT}.ipynb)" in cell.source
    index = (ROOT / "book" / "index.md").read_text()
    assert f"](../notebooks/exercises/{PROJECT}.ipynb)" in index
    contents = (ROOT / "_toc.yml").read_text()
    assert f"\n      - file: notebooks/exercises/{PROJECT}\n" in contents
    assert contents.index(f"/{last}\n") < contents.index(f"/{PROJECT}\n")


def test_the_title_leads_back_to_the_chapter(path, notebook):
    stem = stem_of(path)
    words = {"cuda": "CUDA"}.get(stem, stem.capitalize())
    title, link = f"Exercises: {NUMBERS.get(stem)}. {words}", path.name
    if stem == PROJECT:
        title = "Project: two norms of your own"
        link = f"{len(kernels.CHAPTERS)}_{kernels.CHAPTERS[-1]}.ipynb"
    first = notebook.cells[0].source
    assert first.splitlines()[0] == f"# {title}"
    assert f"(../{link})" in first and "minutes" in first


def test_the_first_code_cell_declares_the_exercises_and_prints_nothing(path, notebook):
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert f'judge.chapter("{stem_of(path)}"' in first.source.replace("(\n    ", "(")
    assert first.outputs == []
    imports = first.source.index
    if "import triton" in first.source:
        assert imports("from kernels.lab") < imports("import triton")


def test_the_title_says_that_judging_cells_are_closed(notebook):
    judges = tagged(generator.exercises_of(notebook).cells, "judge")
    closed = [cell for cell in judges if "jupyter" in cell.metadata]
    title = " ".join(notebook.cells[0].source.split())
    assert ("closed, because" in title) == bool(closed)


def test_there_are_two_exercises_or_three(notebook):
    found = exercises(notebook)
    assert 2 <= len(found) <= 3, list(found)


def test_each_exercise_has_its_parts_in_order(notebook):
    for heading, cells in exercises(notebook).items():
        parts = [
            tag
            for cell in cells
            for tag in ("stub", "judge", "solution")
            if cell.cell_type == "code" and tag in tags(cell)
        ]
        assert parts == ["stub", "judge", "solution"], heading
        task, solution = cells[0], tagged(cells, "solution")[0]
        assert len(task.source.split()) > 15, heading
        assert solution is cells[-1], heading
        hints = [
            int(number)
            for cell in cells
            for number in re.findall(r"<summary>Hint (\d)</summary>\n\n", cell.source)
        ]
        assert hints in ([1, 2], [1, 2, 3]), heading


def test_every_fold_is_closed_and_has_blank_lines_around_its_text(notebook):
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        opened = re.findall(r"<details><summary>[^<\n]+</summary>\n\n", cell.source)
        closed = re.findall(r"\n\n</details>(?:\n\n|\n?$)", cell.source)
        assert len(opened) == cell.source.count("<details>") == len(closed), cell.source


def test_stubs_are_short(notebook):
    for heading, cells in exercises(notebook).items():
        n_lines = len(tagged(cells, "stub")[0].source.splitlines())
        assert n_lines <= LONGEST_STUB, (heading, n_lines)


def test_each_solution_is_judged_as_the_stub_is(notebook):
    """The generator holds that a solution ends in the judge's call."""
    for heading, cells in exercises(notebook).items():
        call = generator.statements(tagged(cells, "judge")[0].source)[-1]
        assert re.match(
            r"judge\.(softmax|rows|operator|registered|formula|value)\(", call
        ), heading


def lines(source: str) -> list[str]:
    """A cell's lines, without comments, indentation and blank lines."""
    found = (re.sub(r"(?:^|\s)#.*", "", line).strip() for line in source.splitlines())
    return [line for line in found if line]


def lost(stub: str, solution: str) -> list[str]:
    """Lines of a stub that its solution has not, in the stub's order.

    Each "..." stands for code. A line that is nothing else may be left out.
    """
    ahead, missing = lines(solution), []
    for line in lines(stub):
        if line == "...":
            continue
        form = re.escape(line).replace(re.escape("..."), ".+")
        found = [i for i, other in enumerate(ahead) if re.fullmatch(form, other)]
        if found:
            ahead = ahead[found[0] + 1 :]
        else:
            missing.append(line)
    return missing


def test_a_kernel_that_is_written_keeps_the_lines_of_its_stub(notebook):
    for heading, cells in exercises(notebook).items():
        if heading.startswith("Write"):
            stub = tagged(cells, "stub")[0].source
            solution = tagged(cells, "solution")[0].source
            names = re.findall(r"^def (\w+)", solution, re.M)
            assert lost(only(stub, names), solution) == [], heading


def only(source: str, names: list[str]) -> str:
    """A cell's functions of these names: a solution need not repeat the others."""
    kept = []
    for node in ast.parse(source).body:
        first = min(
            [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
        )
        if getattr(node, "name", None) in names:
            kept += source.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(kept)


def test_a_line_that_the_solution_changes_is_seen():
    stub = "a = 1\nb = ...  # what is b?\n...\nreturn ...\n"
    assert lost(stub, "a = 1\nb = 2\nc = 3\nreturn b\n") == []
    assert lost(stub, "a = 2\nb = 2\nreturn b\n") == ["a = 1"]
    assert lost(stub, "b = 2\na = 1\nreturn b\n") == ["b = ..."]
    assert lost("return b\n", "return b / 2\n") == ["return b"]
    both = "def f():\n    ...\n\n\ndef g():\n    return 1\n"
    assert lost(only(both, ["f"]), "def f():\n    return 2\n") == []
    assert lost(only(both, ["f", "g"]), "def f():\n    return 2\n") != []


# ---- what was executed ---------------------------------------------------------------


def test_every_cell_was_executed_in_order_without_error(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        assert all(output.output_type != "error" for output in cell.outputs)


def test_each_stub_is_told_what_is_wrong_in_a_sentence(notebook):
    for heading, cells in exercises(notebook).items():
        sentence = said(tagged(cells, "judge")[0])
        assert sentence.endswith((".", "?")), heading
        assert not sentence.startswith(("Right", "Not judged")), heading
        assert "Traceback" not in sentence, heading


def test_a_repair_runs_and_is_wrong(notebook):
    for heading, cells in exercises(notebook).items():
        sentence = said(tagged(cells, "judge")[0])
        unwritten = '"..."' in sentence
        assert unwritten == ("..." in code_of(tagged(cells, "stub")[0])), heading
        if heading.startswith("Repair"):
            assert not unwritten, heading


def code_of(cell) -> str:
    """A cell's code without comments, and without the dots of an index."""
    return "\n".join(
        re.sub(r"\[\.\.\.|\.\.\.\]|print\(.*", "", line) for line in lines(cell.source)
    )


def test_each_solution_is_right(notebook):
    for heading, cells in exercises(notebook).items():
        assert said(tagged(cells, "solution")[0]).startswith("Right: "), heading


def test_all_are_solved_at_the_end(path, notebook):
    last = notebook.cells[-1]
    assert "progress" in tags(last)
    stem, count = stem_of(path), len(exercises(notebook))
    assert last.source == f'judge.progress("{stem}")'
    assert said(last) == f"{stem}: {count} of {count} exercises solved"


def test_no_exercise_names_the_gpus_world(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":  # "cuda" may be the chapter's name
            code = re.sub(r'judge\.(chapter|progress)\("cuda"', "", cell.source)
            for words in ('"cuda"', "INTERPRETED", "is_available", ".cuda()"):
                assert words not in code, code


def test_the_stub_of_a_cell_is_found_unfinished():
    """What the sentence of a stub rests on."""

    def stub(x):
        y = ...
        return y

    assert verdict.unfinished(stub) == ("stub", 2)
