"""Starts one learner's JupyterLab in a classroom (`jupyterhub_config.py`).

JupyterHub runs this file as the learner, at every start of the learner's server. So the
copies belong to the learner.
"""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("notebooks/*.ipynb", "notebooks/exercises/*.ipynb", "book/*.md")
LINKED = (
    "kernels",
    "notebooks/open_course.py",  # which the first cells import
    "notebooks/exercises/open_course.py",
)


def hand_out(folder: Path) -> list[Path]:
    """Copies the notebooks, and the pages that they link to, where they are missing.

    A file that exists is never touched. To begin a chapter again, a learner renames or
    deletes the notebook and starts the server again. The course's modules are linked:
    all learners read the same ones.

    Args:
        folder: gets the folders `notebooks` and `book`, as the course has them.

    Returns:
        The copies that are new.
    """
    new = []
    for source in sorted(path for glob in COPIED for path in ROOT.glob(glob)):
        target = folder / source.relative_to(ROOT)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            new.append(target)
    for name in LINKED:
        link = folder / name
        if link.is_symlink():  # perhaps to where the course was before
            link.unlink()
        if not link.exists():
            link.symlink_to(ROOT / name)
    return new


if __name__ == "__main__":
    from jupyterhub.singleuser import main

    course = Path.home() / "course"
    hand_out(course)
    os.environ["COURSE_PROGRESS"] = str(course / ".progress.json")
    main()
