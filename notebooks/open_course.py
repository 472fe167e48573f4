"""Opens the course in the Python that runs this: the first cell of every notebook does.

1. Installs the packages that the course needs and this Python lacks, in the ranges of
   requirements.txt. PyTorch and Triton are never installed or replaced: on Colab and
   Kaggle they fit the GPU's driver, and a running notebook cannot exchange them.
2. Hides a warning of PyTorch 2.15 about PyTorch itself: its forward derivatives use
   TorchScript, which it deprecates.
3. Puts the course's folder first on `sys.path`, before other packages named `kernels`
   (Hugging Face publishes one). A package of that name that is imported already is
   forgotten, so that the next import finds the course's.

The cell imports this file, which lies beside the chapters. The root and the folders of
exercises and solutions have a file of the same name, which runs this one. Nothing else
of the course can be imported yet: this file imports Python's standard library only.
"""

import importlib
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("torch", "triton")


def install_what_is_missing() -> None:
    """Installs with pip what the course needs at run time and this Python lacks.

    Raises:
        RuntimeError: PyTorch or Triton is missing or too old, or pip failed.
    """
    tools = runpy.run_path(str(ROOT / ".ci" / "check_python.py"))
    name_of = tools["name_of"]
    lacking = {
        name_of(line): words
        for line in tools["requirements"](["run"])
        if (words := tools["missing"](line))
    }
    if kept := [lacking[name] for name in KEPT if name in lacking]:
        raise RuntimeError(
            "the course needs PyTorch 2.10 and Triton 3.6 or newer, which it does not "
            f"install into a running notebook; {sys.executable} has "
            f"{', '.join(kept)}. See book/setup.md in {ROOT}"
        )
    if not lacking:
        return
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    ranges = [
        line.split(";")[0].strip()
        for line in lines
        if line and not line.startswith("#") and name_of(line) in lacking
    ]
    print(f"Installing {', '.join(lacking)} ...")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *ranges], capture_output=True, text=True)
    if done.returncode:
        wanted = " ".join(f"'{line}'" for line in ranges)
        raise RuntimeError(
            f"pip could not install {wanted} into {sys.executable}: "
            f"{(done.stderr or done.stdout).strip()[-1000:]}"
        )
    importlib.invalidate_caches()


def find_the_course_first() -> None:
    """Makes `import kernels` and `import benchmarks` find the course's packages."""
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
    for package in ("kernels", "benchmarks"):
        found = getattr(sys.modules.get(package), "__file__", None)
        if found and Path(found).resolve() == ROOT / package / "__init__.py":
            continue
        for name in list(sys.modules):
            if name == package or name.startswith(f"{package}."):
                del sys.modules[name]


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - it may run on any Python
        raise RuntimeError(
            f"the course needs Python 3.11 or newer, got {sys.version.split()[0]}"
        )
    install_what_is_missing()
    deprecated = "`torch.jit.script` is deprecated"
    warnings.filterwarnings("ignore", deprecated, FutureWarning)
    find_the_course_first()


if __name__ in ("open_course", "__main__"):  # imported by a first cell, or run
    main()
