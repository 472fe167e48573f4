"""What takes longer than a notebook: the benchmark, its peers, and the experiments.

Notebooks read what these modules recorded, and import their names and bars. A module
here may import chapters and the lab; no chapter and no module of the lab imports one.
"""

from kernels.lab import backend  # noqa: F401 - picks the world before Triton is imported
