"""Progress: one line a chapter, kept where the environment says, or nowhere."""

import json

import pytest

from kernels.lab import progress as module
from kernels.lab.progress import chapter, note, progress


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is declared or solved yet, in this process."""
    for name in ("_exercises", "_solved"):
        monkeypatch.setattr(module, name, {})


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file that progress is kept in."""
    file = tmp_path / "progress.json"
    monkeypatch.setenv("COURSE_PROGRESS", str(file))
    return file


def forget() -> None:
    """As a new process knows nothing."""
    module._exercises.clear()
    module._solved.clear()


def test_a_line_says_what_is_open():
    chapter("strided", repair="row_range", write=("log_softmax", "causal"))
    opened = "(open: repair row_range, write log_softmax, write causal)"
    assert repr(progress("strided")).split() == (
        f"strided: 0 of 3 exercises solved {opened}".split()
    )
    note("row_range", True)
    note("causal", False)
    note("another", True)
    assert "1 of 3" in repr(progress("strided")) and "row_range" not in str(progress())
    note("causal", True)
    note("log_softmax", True)
    assert repr(progress("strided")) == "strided: 3 of 3 exercises solved"


def test_what_was_solved_once_stays_solved(kept):
    chapter("strided", repair="row_range")
    note("row_range", True)
    note("row_range", False)
    assert repr(progress("strided")) == "strided: 1 of 1 exercises solved"
    forget()
    chapter("strided", repair="row_range")
    assert repr(progress("strided")) == "strided: 1 of 1 exercises solved"


def test_every_chapter_that_was_tried_has_a_line_in_a_later_process(kept):
    for stem in ("tiled", "eager"):
        chapter(stem, repair="a", write="b")
        note("a", True)
    chapter("online", repair="a")  # not tried
    forget()
    assert list(progress()) == [
        "eager: 1 of 2 exercises solved (open: write b)",
        "tiled: 1 of 2 exercises solved (open: write b)",
    ]
    forget()
    assert next(iter(progress("tiled"))).startswith("tiled: 1 of 2")


def test_the_chapter_that_was_declared_last_counts():
    for stem in ("tiled", "eager", "tiled"):
        chapter(stem, repair="a")
    note("a", True)
    assert "1 of 1" in repr(progress("tiled")) and "0 of 1" in repr(progress("eager"))


def test_nothing_is_known_at_first(kept):
    assert repr(progress()) == "No exercise was tried yet."
    assert not kept.exists()


def test_an_exercise_that_is_gone_does_not_count(kept):
    kept.write_text(json.dumps({"eager": {"exercises": {}, "solved": ["old"]}}))
    chapter("eager", repair="a")
    note("a", False)
    assert json.loads(kept.read_text())["eager"]["solved"] == []


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"eager": 3}'])
def test_a_file_that_cannot_be_read_is_written_anew(kept, text):
    kept.write_text(text)
    chapter("eager", repair="a")
    note("a", True)
    assert list(progress()) == ["eager: 1 of 1 exercises solved"]


def test_a_folder_that_cannot_be_written_to_does_not_matter(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "none" / "progress.json"))
    chapter("eager", repair="a")
    note("a", True)
    assert list(progress()) == ["eager: 1 of 1 exercises solved"]


def test_nothing_is_kept_in_tests_nor_of_solutions(monkeypatch, tmp_path):
    assert module._file() is None  # conftest.py sees to it
    monkeypatch.delenv("COURSE_PROGRESS")
    monkeypatch.chdir(tmp_path)
    assert module._file() == module.backend.ROOT / ".progress.json"
    (tmp_path / "solutions").mkdir()
    monkeypatch.chdir(tmp_path / "solutions")
    assert module._file() is None


def test_the_file_is_not_in_git():
    ignored = (module.backend.ROOT / ".gitignore").read_text().split()
    assert ".progress.json" in ignored
