"""Opens the course: see notebooks/open_course.py."""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
runpy.run_path(str(HERE.parent / "open_course.py"), run_name="open_course")
