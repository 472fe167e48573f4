"""The course itself: its layout, its notebooks and its record keep their own rules."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
import yaml

import kernels

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST_CELL = 20
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


# ---- one stem per chapter ------------------------------------------------------------


def test_notebooks_follow_the_chapters():
    stems = [re.fullmatch(r"\d\d_(\w+)", path.stem)[1] for path in NOTEBOOKS]
    assert tuple(stems) == kernels.CHAPTERS


def test_every_chapter_has_its_three_files():
    modules = {path.stem for path in (ROOT / "kernels").glob("*.py")} - {"__init__"}
    assert modules == set(kernels.CHAPTERS)
    for stem in kernels.CHAPTERS:
        assert (ROOT / "tests" / f"test_{stem}.py").exists(), stem


def test_every_instrument_has_its_test():
    for path in (ROOT / "kernels" / "lab").glob("[a-z]*.py"):
        assert (ROOT / "tests" / f"test_{path.name}").exists(), path.name


def test_instruments_import_no_chapter():
    for path in (ROOT / "kernels" / "lab").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            for name in [*names, module, *(f"{module}.{name}" for name in names)]:
                stem = name.removeprefix("kernels.").split(".")[0]
                assert not (name.startswith("kernels.") and stem in kernels.CHAPTERS), (
                    f"{path.name} imports {name}"
                )


def test_table_of_contents_lists_every_notebook_in_order():
    toc = (ROOT / "_toc.yml").read_text()
    files = re.findall(r"file: (notebooks/\S+)", toc)
    assert files == [f"notebooks/{path.stem}" for path in NOTEBOOKS]
    for name in yaml.safe_load(toc)["parts"][0]["chapters"]:
        assert (ROOT / f"{name['file']}.md").exists()


def test_ladder_names_every_chapter():
    for stem in kernels.CHAPTERS:
        assert re.search(rf"^    {stem} ", kernels.__doc__, re.MULTILINE), stem


# ---- the form of a chapter -----------------------------------------------------------


def test_every_code_cell_was_executed_in_order_without_error(notebook):
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error", output.get("evalue")


def test_outputs_name_the_gpu_that_made_them(notebook):
    first = code(notebook)[0]
    said = "".join(output.get("text", "") for output in first.outputs)
    assert "NVIDIA H200" in said and "compiled and timed" in said, said


def test_size(notebook):
    assert 20 <= len(notebook.cells) <= 40
    for cell in code(notebook):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.source


def test_most_outputs_are_compared(notebook):
    ignored = [cell for cell in code(notebook) if tags(cell) & IGNORED]
    assert len(ignored) < len(code(notebook)) / 2


def test_every_figure_has_alternative_text(notebook):
    for cell in code(notebook):
        shows = any("image/png" in output.get("data", {}) for output in cell.outputs)
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        assert not shows or len(alt) > 30, cell.source


def test_sections_stand_in_their_order(notebook):
    prose = text(notebook)
    places = [
        prose.index(words)
        for words in (
            "**You will**",
            "**Before you start**",
            "## Predict",
            "## Check",
            "## Measure",
            "**What you now know**",
            "**Sources**",
        )
    ]
    assert places == sorted(places)


def test_no_cell_branches_on_the_world(notebook):
    for cell in code(notebook):
        for words in ("INTERPRETED", "has_gpu", "is_available", "TRITON_INTERPRET"):
            assert words not in cell.source, cell.source


def test_no_picture_is_embedded_in_prose(notebook):
    assert "base64" not in text(notebook)


def test_no_kernel_of_the_course_is_pasted(notebook):
    for cell in notebook.cells:
        assert "def softmax_kernel(" not in cell.source
