"""Opens the course: see notebooks/open_course.py.

For notebooks elsewhere: `make` puts this folder on PYTHONPATH. And an editor may start
a notebook's Python here.
"""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
runpy.run_path(str(HERE / "notebooks" / "open_course.py"), run_name="open_course")
