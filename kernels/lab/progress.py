"""Which exercises are solved: one line for each chapter, kept in a small file.

The file is `.progress.json` in the course's folder. COURSE_PROGRESS in the environment
names another file; if it is empty, nothing is kept. Nothing is kept of what runs in
`notebooks/solutions`, either.

Weighed: a column in the notebook's own metadata would need the front end to save it.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.lab import backend
from kernels.lab.trials import wrapped

__all__ = ["Lines", "chapter", "note", "progress"]

_chapter: list[str] = []  # the one that this notebook declared last
_exercises: dict[str, dict[str, str]] = {}  # of each chapter: its exercises' kinds
_solved: dict[str, list[str]] = {}


def chapter(stem: str, **exercises: str | Sequence[str]) -> None:
    """Declares the exercises of a chapter; a notebook's first cell calls it.

    Args:
        stem: the chapter's, such as "strided".
        exercises: the names of its functions by their kinds: repair="row_max",
            write=("log_softmax", "causal_softmax"), answer="bytes".
    """
    _chapter[:] = [stem]
    _exercises[stem] = {
        name: kind
        for kind, names in exercises.items()
        for name in ([names] if isinstance(names, str) else names)
    }


def progress(stem: str | None = None) -> "Lines":
    """Shows how many exercises are solved: of a chapter, or of all that were tried."""
    kept = _kept()
    stems = [stem] if stem else sorted({*kept, *_solved})
    lines = []
    for each in stems:
        exercises = _exercises.get(each) or kept.get(each, {}).get("exercises", {})
        solved = {*_solved.get(each, ()), *kept.get(each, {}).get("solved", ())}
        todo = [f"{exercises[name]} {name}" for name in exercises if name not in solved]
        done = f"{each}: {len(exercises) - len(todo)} of {len(exercises)} exercises"
        lines.append(f"{done} solved" + (f" (open: {', '.join(todo)})" if todo else ""))
    return Lines(lines or ["No exercise was tried yet."])


class Lines(list):
    """Lines of text, which a notebook shows as such."""

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
    stem = _chapter[0] if _chapter else None
    if stem and name in _exercises[stem]:
        solved = _solved.setdefault(stem, [])
        if right and name not in solved:
            solved.append(name)
        _keep(stem)


def _file() -> Path | None:
    named = os.environ.get("COURSE_PROGRESS")
    if named is not None:
        return Path(named) if named else None
    solutions = Path.cwd().name == "solutions"
    return None if solutions else backend.ROOT / ".progress.json"


def _kept() -> dict[str, dict]:
    """What the file says; nothing if there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        found = json.loads(_file().read_text()).items()
        return {stem: each for stem, each in found if {*each} == _FIELDS}
    return {}


_FIELDS = {"exercises", "solved"}


def _keep(stem: str) -> None:
    if (file := _file()) is None:
        return
    kept = _kept()
    solved = [*kept.get(stem, {}).get("solved", ()), *_solved[stem]]
    exercises = _exercises[stem]
    solved = [name for name in exercises if name in solved]
    kept[stem] = {"exercises": exercises, "solved": solved}
    with contextlib.suppress(OSError):  # of a course that cannot be written to
        file.write_text(json.dumps(kept, indent=1) + "\n")
