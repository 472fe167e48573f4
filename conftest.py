"""Makes `python -m pytest` prove the course on any machine that has the packages.

The root comes first on the path, so that this course's `kernels` is found, and not the
package of that name that Hugging Face publishes; tests find `tests.helpers` there, too.
Notebook kernels are processes of their own: they find the course through PYTHONPATH.
Tests marked `gpu` are skipped, with the reason, where kernels cannot run on a GPU.
"""

import collections
import contextlib
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import nbval.kernel
import pytest
from jupyter_client.provisioning import local_provisioner

ROOT = Path(__file__).parent
collect_ignore = ["notebooks/exercises"]  # notebooks/solutions is where they are run
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path
)

# As many tests run at once as the CPU has cores. More threads wait for one another: in
# a container, for 5 ms in each small operation of PyTorch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a notebook prints while it waits for the GPU is no output to compare.
os.environ.setdefault("COURSE_WAIT_SILENTLY", "1")
os.environ["COURSE_PROGRESS"] = (
    ""  # what a learner has solved is not the tests' concern
)

# Only found once the root is on the path.
from kernels.lab import backend, clock  # noqa: E402, F401 - the clock reads BRIEFLY
from tests import forks, twins  # noqa: E402
from tests.helpers import TRITON, tries  # noqa: E402

# What this cell prints is the PTX of Triton 3.6 and 3.7, and its page says so.
OLDER_PTX = {("notebooks/12_cuda.ipynb", "Cell 8")}

# Their tests take seconds each on a GPU: these files start first.
SLOW_ON_A_GPU = [
    *("test_tiles.py", "test_variants.py", "test_matmul.py", "test_faults.py"),
    *("test_cuda_faults.py", "test_process.py", "test_backend.py"),
]


def pytest_configure(config: pytest.Config) -> None:
    """Every chapter runs in 14 GB of the GPU's memory: notebooks are tested in 14 GB.

    And they measure briefly there, for the tests compare no times. Both are read when
    the course is imported, which it is by now, so they hold for processes that this one
    starts. With xdist those are the workers, which run the unit tests: they set both
    themselves, for the notebooks' processes.
    """
    if not config.getoption("numprocesses", None):
        os.environ.setdefault("COURSE_GPU_GB", "14")
        os.environ.setdefault("COURSE_MEASURE", "briefly")
    nbval.kernel.start_new_kernel = again_if_mute(nbval.kernel.start_new_kernel)
    config.option.loadscopereorder = backend.INTERPRETED  # on a GPU: see in_turn
    if backend.INTERPRETED:  # a GPU's processes start from nothing, as a learner's do
        local_provisioner.launch_kernel = forks.launch
        if twins.ADDRESS not in os.environ:  # workers have it
            config.add_cleanup(twins.start())
        twins.install()


again_if_mute = tries(4, RuntimeError)
"""Starts a notebook's kernel again if it never answers.

Kernels that start at the same moment may be given one port: then one is mute."""


def pytest_report_header() -> str:
    return backend.describe()


def in_turn(n_tests: dict[Path, int]) -> list[Path]:
    """The files in the order in which workers take them on a GPU.

    Notebooks measure, one at a time, so most of those that run wait. They start early,
    each after two other files. Of these the slow ones come first, then those with the
    most tests.

    Args:
        n_tests: how many tests each file has.
    """
    notebooks = [path for path in n_tests if path.suffix == ".ipynb"]
    others = [path for path in n_tests if path.suffix != ".ipynb"]
    others.sort(key=lambda path: (path.name not in SLOW_ON_A_GPU, -n_tests[path]))
    order = []
    for place, path in enumerate(others):
        if place % 2 == 0 and notebooks:
            order.append(notebooks.pop(0))
        order.append(path)
    return order + notebooks


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it."""
    if backend.INTERPRETED:  # on a GPU, tests search for compiled kernels among it
        gc.freeze()
        gc.set_threshold(700, 10, 100)  # tenfold: figures and kernels are large


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not backend.INTERPRETED:
        order = in_turn(collections.Counter(item.path for item in items))
        places = {path: place for place, path in enumerate(order)}
        items.sort(key=lambda item: places[item.path])
    for item in items:
        if item.get_closest_marker("gpu") and backend.INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        cell = str(item.path.relative_to(ROOT)), item.name
        if cell in OLDER_PTX and TRITON >= (3, 9):
            item.add_marker(pytest.mark.xfail(reason="newer PTX", strict=True))
        if item.path.match("solutions/12_cuda.ipynb") and not _has("cuda.core"):
            item.add_marker(pytest.mark.skip(reason="compiles CUDA C++: cuda-core"))


def _has(module: str) -> bool:
    """Whether a module is installed."""
    with contextlib.suppress(ModuleNotFoundError):  # of a parent
        return importlib.util.find_spec(module) is not None
    return False


@pytest.fixture(autouse=True)
def free_memory_is_given_back() -> Iterator[None]:
    """Test files run side by side: what PyTorch keeps for reuse, the others lack."""
    yield
    from torch import cuda  # after the backend, as everything that may import Triton

    if not backend.INTERPRETED and cuda.memory_reserved() > 2**30:
        cuda.empty_cache()
