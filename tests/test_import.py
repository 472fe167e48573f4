"""The product imports alone: what it loads, what it leaves as it was, and its name.

Every test asks a new process, since this one has loaded the course already.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from kernels.lab import backend

ALLOWED = {
    "kernels",
    *("kernels.tiled", "kernels.unaligned", "kernels.online", "kernels.cooperative"),
    *("kernels.fastest", "kernels.operator"),
    *("kernels.lab", "kernels.lab.backend", "kernels.lab.launch"),
}
INTERPRETED = {"kernels.lab.interpreter"} if backend.INTERPRETED else set()
MAX_LINES = 1600
COURSE = backend.ROOT / "kernels"
NOT_LOADED = {"matplotlib", "pandas", "IPython", "cloudpickle", "filelock", "ipykernel"}


def python(code: str, folder: Path, *path: str) -> subprocess.CompletedProcess:
    """Runs code in a folder as a reader would, without what conftest.py has set.

    A limit of memory is a course's: with it, `kernels.lab.description` is loaded.

    Args:
        code: for `python -c`, which looks for packages in the folder first.
        folder: the working directory.
        path: folders to find packages in.
    """
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [entry for entry in rest if entry and Path(entry) != backend.ROOT]
    ours = {"TRITON_INTERPRET", "COURSE_GPU_GB"}
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | {"PYTHONPATH": os.pathsep.join([*path, *rest])},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def told(code: str) -> dict:
    """What code prints last, as JSON, in the course's folder."""
    run = python(code, backend.ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loaded():
    """The modules that `from kernels import softmax` loads: name to file, or None."""
    return told("""
import sys, json
from kernels import softmax
modules = sys.modules.items()
print(json.dumps({name: getattr(module, "__file__", None) for name, module in modules}))
""")


def test_product_loads_its_kernels_and_two_instruments(loaded):
    ours = {"kernels", "benchmarks", "tests", "conftest"}
    found = {name for name in loaded if name.partition(".")[0] in ours}
    assert found == ALLOWED | INTERPRETED


def test_product_is_short(loaded):
    """Of what a GPU loads: without one, `lab.interpreter` comes to it."""
    lengths = {
        name: len(Path(loaded[name]).read_text().splitlines())
        for name in ALLOWED & set(loaded)
    }
    assert sum(lengths.values()) <= MAX_LINES, lengths


def test_product_loads_nothing_that_draws_or_tabulates(loaded):
    packages = {name.partition(".")[0] for name in loaded}
    assert packages & NOT_LOADED == set()


# PyTorch and Matplotlib are there first, so that what they change is not counted.
# `rcParams.copy` does not ask for the backend, which would load pyplot.
SETTINGS = """
import json, os, sys, warnings
import matplotlib, numpy, torch

def settings():
    return {
        "rcParams": repr(matplotlib.rcParams.copy()),
        "filters": [repr(entry) for entry in warnings.filters],
        "path": list(sys.path),
        "finders": [repr(finder) for finder in sys.meta_path],
        "hooks": [repr(sys.excepthook), repr(sys.displayhook)],
        "numpy": repr((numpy.geterr(), numpy.get_printoptions())),
        "torch": repr((torch.get_default_dtype(), torch.get_num_threads())),
        "environment": dict(os.environ),
    }

before = settings()
from kernels import softmax
print(json.dumps([before, settings()]))
"""


def test_import_changes_nobodys_settings():
    first = (
        "" if backend.INTERPRETED else "import triton"
    )  # then too early: see backend
    before, after = told(f"{first}{SETTINGS}")
    added = [entry for entry in after["filters"] if entry not in before["filters"]]
    after["filters"] = [entry for entry in after["filters"] if entry not in added]
    variables = set(after["environment"].items()) - set(before["environment"].items())
    if backend.INTERPRETED:  # the two settings that the interpreter needs
        assert variables == {("TRITON_INTERPRET", "1")}
        assert len(added) == 1 and "triton\\\\.runtime\\\\.interpreter" in added[0]
        assert "RuntimeWarning" in added[0]
        del after["environment"]["TRITON_INTERPRET"]
    else:
        assert (added, variables) == ([], set())
    assert after == before


# ---- the other package named kernels -------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site folder that has Hugging Face's package, and a package that uses it."""
    folder = tmp_path_factory.mktemp("site")
    files = {
        "kernels/__init__.py": "def get_kernel(repo):\n    return f'from {repo}'\n",
        "kernels/layer.py": "class Device: pass\n",
        "kernels-0.16.0.dist-info/METADATA": "Name: kernels\nVersion: 0.16.0\n",
        "transformers/__init__.py": "from .integrations import get_kernel\n",
        "transformers/integrations.py": "from kernels import get_kernel\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_course_is_found_in_its_folder_and_from_a_notebook(site):
    code = "import kernels; print(kernels.__file__, kernels.CHAPTERS[0])"
    expected = f"{kernels.__file__} eager\n"
    assert python(code, backend.ROOT, site).stdout == expected
    first_cell = "import sys; sys.path.insert(0, '..'); "
    run = python(first_cell + code, backend.ROOT / "notebooks", site)
    assert Path(run.stdout.split()[0]).resolve() == Path(kernels.__file__), run.stderr


def test_other_package_is_usable_outside_of_the_courses_folder(site, tmp_path):
    code = "import transformers; print(transformers.get_kernel('hub'))"
    assert python(code, tmp_path, site).stdout == "from hub\n"


def test_mix_up_is_one_sentence(site):
    run = python("import transformers", backend.ROOT, site)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ImportError: get_kernel is a part of Hugging Face's package 'kernels', but "
        f"the package of that name found here is the course's, in {COURSE}; run this "
        "outside of the course's folder, or import transformers in another process"
    )
    assert "During handling" not in run.stderr


NAMES = (  # the other package's, in its version 0.17.2
    *("Benchmark", "CUDAProperties", "Device", "KernelizeFallback", "ROCMProperties"),
    *("FuncRepository", "LayerRepository", "LoadedKernel", "LocalFuncRepository"),
    *("LocalLayerRepository", "LockedFuncRepository", "LockedLayerRepository"),
    *("Metadata", "Mode", "RepoInfo", "VariantAccepted", "VariantRejected"),
    *("get_kernel", "get_kernel_dep", "get_kernel_variants", "get_loaded_kernels"),
    *("get_local_kernel", "get_locked_kernel", "has_kernel", "install_kernel"),
    *("kernelize", "load_kernel", "register_kernel_mapping", "use_kernel_mapping"),
    *("replace_kernel_forward_from_hub", "use_kernel_forward_from_hub"),
    *("use_kernel_func_from_hub", "use_kernelized_func"),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_other_package_say_which_was_found(name):
    with pytest.raises(ImportError, match=f"^{name} is a part of Hugging Face's"):
        getattr(kernels, name)


def test_other_names_are_missing_as_usual():
    with pytest.raises(AttributeError, match="'kernels' has no attribute"):
        _ = kernels.softmin
    with pytest.raises(ImportError, match="cannot import name 'softmin'"):
        from kernels import softmin  # noqa: F401
    assert not hasattr(kernels, "__wrapped__")
    assert not hasattr(kernels, "softmax_kernel")
