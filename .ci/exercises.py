"""Makes the exercises' notebooks from those with the solutions.

    python .ci/exercises.py                 all of notebooks/solutions
    python .ci/exercises.py 04_strided      some

A solutions notebook holds, for each exercise, a stub and its solution, and both are
executed. So its tests prove that the stub is not right and that the solution is. In
`notebooks/exercises` the solution is folded Markdown, without the line that judges it,
and judging cells that hold the answer are closed; a click opens them. Everything else,
outputs too, is as it was executed. Only the progress has no output: the reader has
solved nothing yet.

Built on nbconvert's preprocessors, and `TagRemovePreprocessor` takes the progress away.
Weighed: nbgrader's `ClearSolutions` cuts what lies between two comments. The stub would
not be in the source then, and nobody would know what the learner sees first. nbgrader
also brings a database along.
"""

import ast
import re
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import Preprocessor, TagRemovePreprocessor
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
SOLUTIONS = ROOT / "notebooks" / "solutions"
EXERCISES = ROOT / "notebooks" / "exercises"

FOLDED = """<details><summary>Solution</summary>

{}

</details>"""


class FoldSolutions(Preprocessor):
    """Makes one folded Markdown cell of neighbouring cells tagged `solution`."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple:
        cells, folding, judge = [], [], ""
        for cell in nb.cells:
            if not is_tagged(cell, "solution"):
                cells.append(cell)
                judge = cell.source if is_tagged(cell, "judge") else judge
                continue
            folding.append(cell)
            if cell.cell_type == "code":  # the last of its solution
                cells.append(folded(folding, judge))
                folding = []
        if folding:
            raise ValueError(f"no code follows the solution {folding[0].source!r}")
        nb.cells = cells
        return nb, resources


class CloseJudges(Preprocessor):
    """Closes the cells that judge by functions of their own: they hold the answer."""

    def preprocess_cell(
        self, cell: NotebookNode, resources: dict, index: int
    ) -> tuple[NotebookNode, dict]:
        if is_tagged(cell, "judge") and re.search(r"^def ", cell.source, re.M):
            cell.metadata["jupyter"] = {"source_hidden": True}  # JupyterLab's
            cell.metadata.tags.append("hide-input")  # the book's
        return cell, resources


class NumberCells(Preprocessor):
    """Numbers the code cells anew, as if they had been executed in their order."""

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple:
        code = (cell for cell in nb.cells if cell.cell_type == "code")
        for count, cell in enumerate(code, 1):
            cell.execution_count = count
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = count
        return nb, resources


def is_tagged(cell: NotebookNode, tag: str) -> bool:
    """Whether a cell has the tag."""
    return tag in cell.metadata.get("tags", ())


def folded(cells: list[NotebookNode], judge: str) -> NotebookNode:
    """One folded Markdown cell of prose and a solution's code.

    Args:
        cells: those of the solution, its code last.
        judge: the code of the cell that judges the stub.
    """
    parts = [cell.source.strip() for cell in cells[:-1]]
    parts.append(f"```python\n{without_judge(cells[-1].source, judge)}\n```")
    cell = nbformat.v4.new_markdown_cell(FOLDED.format("\n\n".join(parts)))
    cell.id = cells[-1].id
    return cell


def statements(source: str) -> list[str]:
    """A cell's statements, without comments, each in one form."""
    return [ast.unparse(node) for node in ast.parse(source).body]


def without_judge(source: str, judge: str) -> str:
    """A solution's code without the statements at its end that judge it.

    Args:
        source: of the solution.
        judge: of the cell that judges the stub: a call of judge, and what it needs.

    Raises:
        ValueError: the last statement is not the judge's.
    """
    tree, known = ast.parse(source).body, statements(judge)
    if not known or not tree or ast.unparse(tree[-1]) != known[-1]:
        raise ValueError(f"a solution must end in the judge's call, got {source!r}")
    while tree and ast.unparse(tree[-1]) in known:
        last = tree.pop()
    first = min(node.lineno for node in (last, *getattr(last, "decorator_list", ())))
    return "\n".join(source.splitlines()[: first - 1]).strip()


def exercises_of(solutions: NotebookNode) -> NotebookNode:
    """The notebook for the reader, from the one with the solutions."""
    steps = (
        FoldSolutions(),
        CloseJudges(),
        TagRemovePreprocessor(remove_all_outputs_tags={"progress"}),
        NumberCells(),
    )
    made, resources = nbformat.from_dict(solutions), {}
    for step in steps:
        step.enabled = True
        made, resources = step(made, resources)
    nbformat.validate(made)
    return made


def text_of(solutions: Path) -> str:
    """The file that belongs to a notebook with solutions."""
    made = exercises_of(nbformat.read(solutions, as_version=4))
    return nbformat.writes(made) + "\n"


def main(stems: list[str]) -> None:
    EXERCISES.mkdir(exist_ok=True)
    for path in sorted(SOLUTIONS.glob("*.ipynb")):
        if not stems or path.stem in stems:
            (EXERCISES / path.name).write_text(text_of(path))
            print(EXERCISES.relative_to(ROOT) / path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
