"""The quizzes: every code block is run, and prints what its page says."""

import contextlib
import io
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "book").glob("quiz_*.md"))
FOLD = "<details><summary>Answer</summary>\n\n"  # JupyterLab and GitHub fold it, too
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.S | re.M)


def blocks(page: str) -> list[tuple[str, str]]:
    """Each Python block of a page, and the output that the page gives for it.

    A text block is the output of the Python block before it. A Python block without one
    prints nothing.
    """
    found: list[tuple[str, str]] = []
    for language, text in BLOCK.findall(page):
        if language == "python":
            found.append((text, ""))
        else:
            code, before = found[-1]
            assert before == "", f"two outputs of one block: {text}"
            found[-1] = code, text
    return found


def printed(code: str, names: dict, path: Path) -> str:
    """Runs a block, as a cell of a notebook, and returns what it prints.

    Args:
        code: the block.
        names: the names that the blocks before it have defined; it adds its own.
        path: a file for the block: Triton reads a kernel's source from its file.
    """
    path.write_text(code)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, path, "exec"), names)
    return output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_prints_what_the_page_says(page, tmp_path):
    names = {"__name__": page.stem}
    for i, (code, said) in enumerate(blocks(page.read_text())):
        assert printed(code, names, tmp_path / f"block_{i}.py") == said, code


def test_a_wrong_output_is_seen(tmp_path):
    page = f"```python\nprint(1 + 1)\n```\n\n{FOLD}```text\n3\n```\n\n</details>\n"
    ((code, said),) = blocks(page)
    assert (printed(code, {}, tmp_path / "block.py"), said) == ("2\n", "3\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_question_has_four_choices_and_an_answer_to_each(page):
    start, *sections = re.split(r"^## \d\. ", page.read_text(), flags=re.M)
    count = {5: "Five", 6: "Six"}[len(sections)]
    assert f"\n{count} questions, " in start
    for section in sections:
        question, answer = section.split(FOLD)
        assert answer.rstrip().endswith("\n\n</details>")  # or the next is folded too
        assert re.findall(r"^- \*\*([A-D])\*\* ", question, re.M) == [*"ABCD"]
        assert "```text" not in question  # the answer is folded
        (right,) = re.findall(r"^\*\*([A-D])\.\*\*$", answer, re.M)
        reasons = re.findall(r"^- ([A-D](?: and [A-D])?)[ :]", answer, re.M)
        spoken = {letter for reason in reasons for letter in reason.split(" and ")}
        assert spoken == {*"ABCD"} - {right}
        assert re.search(r"\.\./notebooks/\d\d_\w+\.ipynb#", answer)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_answers_link_to_sections_that_there_are(page):
    links = re.findall(
        r"\[([^]]+)\]\(\.\./(notebooks/\S+)#([\w-]+)\)", page.read_text()
    )
    for words, path, _ in links:
        cells = nbformat.read(ROOT / path, as_version=4).cells
        text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
        assert f"## {' '.join(words.split())}" in text.splitlines()
