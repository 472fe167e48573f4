"""Which exercises are solved: one line for each chapter, kept in a small file.

The file is `.progress.json` in the course's folder. COURSE_PROGRESS in the environment
names another file; if it is empty, nothing is kept. What runs in `notebooks/solutions`
isn't kept either.

Weighed: the notebook's own metadata, which only the front end can save.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.lab import backend
from kernels.lab.verdict import wrapped

__all__ = ["Lines", "chapter", "note", "progress"]

_exercises: dict[str, dict[str, str]] = {}  # a chapter's exercises and their kinds
_solved: dict[str, set[str]] = {}  # a chapter's exercises that this process saw solved


def chapter(stem: str, **exercises: str | Sequence[str]) -> None:
    """Declares the exercises of a chapter; a notebook's first cell calls it.

    Args:
        stem: the chapter's, such as "strided".
        exercises: the names of its functions by their kinds: repair="row_max",
            write=("log_softmax", "causal_softmax").
    """
    _exercises.pop(stem, None)  # the chapter that was declared last stands last
    _exercises[stem] = {
        name: kind
        for kind, names in exercises.items()
        for name in ([names] if isinstance(names, str) else names)
    }


def progress(stem: str | None = None) -> "Lines":
    """Shows how many exercises are solved: of a chapter, or of all that were tried."""
    kept, lines = _kept(), []
    for each in [stem] if stem else sorted({*kept, *_solved}):
        exercises = _exercises.get(each) or kept.get(each, {}).get("exercises", {})
        solved = _all_solved(each, kept)
        todo = [f"{exercises[name]} {name}" for name in exercises if name not in solved]
        done = f"{each}: {len(exercises) - len(todo)} of {len(exercises)} exercises"
        lines.append(f"{done} solved" + (f" (open: {', '.join(todo)})" if todo else ""))
    return Lines(lines or ["No exercise was tried yet."])


class Lines(list):
    """Lines of text, which a notebook shows as text, not as a list."""

    def __repr__(self) -> str:
        return "\n".join(map(wrapped, self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def note(name: str | None, right: bool | None) -> None:
    """Notes that an exercise was tried, and whether it was solved.

    Args:
        name: of an exercise of the chapter that was declared last; others don't count.
        right: True if it was solved. What was solved once stays solved.
    """
    stem = next(reversed(_exercises), None)
    if stem and name in _exercises[stem]:
        _solved.setdefault(stem, set()).update([name] if right else [])
        _keep(stem)


def _file() -> Path | None:
    named = os.environ.get("COURSE_PROGRESS")
    if named is not None:
        return Path(named) if named else None
    solutions = Path.cwd().name == "solutions"
    return None if solutions else backend.ROOT / ".progress.json"


def _kept() -> dict[str, dict]:
    """The content of the file; nothing if there is none, or none that can be read."""
    fields = {"exercises", "solved"}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        found = json.loads(_file().read_text()).items()
        return {stem: each for stem, each in found if {*each} == fields}
    return {}


def _all_solved(stem: str, kept: dict[str, dict]) -> set[str]:
    """A chapter's exercises that were solved in this process or before."""
    return {*_solved.get(stem, ()), *kept.get(stem, {}).get("solved", ())}


def _keep(stem: str) -> None:
    if (file := _file()) is None:
        return
    kept, exercises = _kept(), _exercises[stem]
    solved = [name for name in exercises if name in _all_solved(stem, kept)]
    kept[stem] = {"exercises": exercises, "solved": solved}
    with contextlib.suppress(OSError):  # the folder cannot be written to
        file.write_text(json.dumps(kept, indent=1) + "\n")
