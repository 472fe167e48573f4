"""The course opens anywhere: its address, the first cell of a notebook, containers.

A local repository stands in for the network. `make fresh` also builds an environment
with PyTorch, Triton and ipykernel only, and opens a chapter there.
"""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from tests.helpers import loaded
from tests.test_course import code, opener

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted(
    path
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
CHAPTER = ROOT / "notebooks" / "14_tiled.ipynb"
CONTAINERS = sorted((ROOT / ".devcontainer").rglob("devcontainer.json"))
# What ours have of https://containers.dev/implementors/json_reference, and its types:
PROPERTIES = {
    "name": str,
    "image": str,
    "runArgs": list,
    "hostRequirements": dict,
    "postCreateCommand": str,
    "forwardPorts": list,
    "customizations": dict,
}


address = loaded(ROOT / ".ci" / "address.py")
# Under the name that runpy gives, the file defines its functions and calls none.
open_course = SimpleNamespace(**runpy.run_path(ROOT / "notebooks" / "open_course.py"))
URL, REVISION = address.setting()


# ---- the address ---------------------------------------------------------------------


def test_no_file_names_the_repository_in_another_way():
    found = {path: address.strays(path.read_text(), URL) for path in address.files()}
    found.pop(Path(__file__))  # it names strays, below
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "stray",
    [
        "git@github.com:example/softmax-at-the-speed-of-memory.git",
        "https://github.com/somebody/softmax-at-the-speed-of-memory",
        "https://gitlab.com/example/softmax-at-the-speed-of-memory/-/issues",
        "https://colab.research.google.com/github/example/softmax-at-the-speed-of-memory",
        "example/softmax-at-the-speed-of-memory",
        "https://example.github.io/softmax-at-the-speed-of-memory/",
    ],
)
def test_another_address_is_found(stray):
    url = "https://github.com/example/softmax-at-the-speed-of-memory"
    assert address.strays(f"clone {url} or {stray}", url)
    assert address.strays(f"clone {url}, {url}/issues; cd ~/softmax-course", url) == []


@pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=lambda path: path.relative_to(ROOT / "notebooks").as_posix()
)
def test_first_cells_fetch_the_revision_of_the_one_setting(path):
    lines = opener(nbformat.read(path, as_version=4))
    assert lines == opener(nbformat.read(CHAPTER, as_version=4))
    assert f'URL = "{URL}"\n' in lines
    assert f" -b {REVISION} {{URL}} course\n" in lines


@pytest.fixture
def few_files(tmp_path):
    """A small course that holds its address in a setting, a page and a notebook."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_eager.ipynb").write_text(CHAPTER.read_text())
    for name in ("_config.yml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_the_address_is_changed_everywhere(few_files):
    url = "https://github.com/you/gpu.course"
    written = address.change(url, "v9", few_files)
    assert written == ["README.md", "_config.yml", "notebooks/01_eager.ipynb"]
    assert address.setting(few_files) == (url, "v9")
    notebook = nbformat.read(few_files / "notebooks" / "01_eager.ipynb", as_version=4)
    assert f'URL = "{url}"\n' in opener(notebook)
    assert " -b v9 {URL} course\n" in opener(notebook)
    for path in address.files(few_files):
        assert URL not in path.read_text(), path
    address.change(URL, REVISION, few_files)
    for path in address.files(few_files):
        where = path.relative_to(few_files)
        source = CHAPTER if path.suffix == ".ipynb" else ROOT / where
        assert path.read_text() == source.read_text(), path


@pytest.mark.parametrize(
    ("url", "revision", "said"),
    [
        ("https://gitlab.com/you/course", "v1", "URL must look like"),
        ("https://github.com/you/course.git", "v1", "without .git at its end"),
        ("https://github.com/you", "v1", "got 'https://github.com/you'"),
        ("https://github.com/you/course", "-f x", "REVISION must name a tag"),
    ],
)
def test_what_is_no_address_is_refused(few_files, url, revision, said):
    with pytest.raises(ValueError, match=said):
        address.change(url, revision, few_files)
    assert address.setting(few_files) == (URL, REVISION)


# ---- what the first cell runs --------------------------------------------------------


@pytest.fixture
def pip(monkeypatch):
    """What is installed, by package, to be changed; and the calls of pip."""
    versions = {"torch": "2.10.0+cu128", "triton": "3.6.0", "numpy": "2.0.2"}
    versions |= {"pandas": "2.2.2", "matplotlib": "3.10.0", "cloudpickle": "3.1.2"}
    versions |= {"filelock": "3.20.0"}
    told = SimpleNamespace(versions=versions, calls=[], returncode=0, stderr="")

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def run(command, **keywords):
        told.calls.append(command)
        return SimpleNamespace(returncode=told.returncode, stderr=told.stderr)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(open_course.subprocess, "run", run)
    return told


def test_nothing_is_installed_where_nothing_is_missing(pip, capsys):
    open_course.install_what_is_missing()
    assert (pip.calls, capsys.readouterr().out) == ([], "")


def test_only_what_is_missing_or_too_old_is_installed(pip, capsys):
    del pip.versions["pandas"]
    pip.versions["matplotlib"] = "3.7.1"
    open_course.install_what_is_missing()
    ((*_, last, second),) = pip.calls
    assert [last, second] == ["pandas>=2.2,<4", "matplotlib>=3.8,<4"]
    assert capsys.readouterr().out == "Installing pandas, matplotlib ...\n"


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [("torch", "2.9.1", "has torch 2.9.1"), ("triton", None, "has no triton")],
)
def test_pytorch_and_triton_are_never_installed(pip, name, version, said):
    del pip.versions["pandas"], pip.versions[name]
    pip.versions |= {name: version} if version else {}
    with pytest.raises(RuntimeError, match=said):
        open_course.install_what_is_missing()
    assert pip.calls == []


def test_a_failure_of_pip_is_shown(pip):
    del pip.versions["pandas"]
    pip.returncode, pip.stderr = 1, "ERROR: no network"
    with pytest.raises(RuntimeError, match=r"'pandas>=2.2,<4' into .*: ERROR: no net"):
        open_course.install_what_is_missing()


def test_an_old_python_is_refused(monkeypatch, pip):
    monkeypatch.setattr(open_course.sys, "version_info", (3, 10, 12))
    with pytest.raises(RuntimeError, match=r"needs Python 3\.11 or newer, got"):
        open_course.main()


# ---- the first cell, run -------------------------------------------------------------

HERE = "\nimport os, sys\nprint(sys.path[0], os.getcwd())"


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository of the course as it is here, with the tag that first cells fetch."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    folder = tmp_path_factory.mktemp("origin")
    skipped = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.ipynb")
    for name in ("kernels", "benchmarks", "notebooks", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    for name in ("open_course.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x.x"]
    for words in ("init -q", "add -A -f", "commit -q -m x", f"tag {REVISION}"):
        subprocess.run([*git, *words.split()], check=True, capture_output=True)
    return folder.as_uri()


@pytest.fixture
def site(tmp_path_factory):
    """A site folder with another package named `kernels`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text("from kernels import layer\n")
    (folder / "kernels" / "layer.py").touch()
    return folder


def without_the_course(site: Path | None = None) -> dict[str, str]:
    """An environment whose PYTHONPATH has `site`, and every folder but the course's."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [folder for folder in path if folder and Path(folder).resolve() != ROOT]
    path = [str(site), *path] if site else path
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def test_packages_are_found_where_the_course_is_not(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}/packages")
    assert without_the_course()["PYTHONPATH"] == "/packages"
    assert without_the_course(Path("/site"))["PYTHONPATH"] == "/site:/packages"
    monkeypatch.delenv("PYTHONPATH")
    assert without_the_course()["PYTHONPATH"] == ""


def opening(origin: str) -> str:
    """The lines that open the course, or fetch it from `origin` if it is missing."""
    return opener(nbformat.read(CHAPTER, as_version=4)).replace(URL, origin) + HERE


def opened(
    folder: Path, origin: str, found: Path | None = None
) -> subprocess.CompletedProcess:
    """Runs the lines as IPython does in this folder, with `found` on PYTHONPATH."""
    cell = folder / "cell.ipy"
    cell.write_text(opening(origin))
    try:
        return subprocess.run(
            [sys.executable, "-m", "IPython", "--quick", "--colors=nocolor", cell],
            cwd=folder,
            env=without_the_course(found),
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        cell.unlink()


@pytest.fixture
def course(tmp_path):
    """What opens the course, in a folder with a name of its own."""
    folder = tmp_path / "another name"
    openers = {path.parent for path in ROOT.rglob("notebooks/**/open_course.py")}
    assert openers == {path.parent for path in NOTEBOOKS}
    for path in [*openers, ROOT]:
        name = path.relative_to(ROOT) / "open_course.py"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    return folder


@pytest.mark.parametrize(
    "below", [".", "notebooks", "notebooks/exercises", "notebooks/solutions"]
)
def test_the_course_is_found_beside_the_notebook(course, below):
    """Nothing is fetched: there is no such repository."""
    done = opened(course / below, "file:///nowhere")
    assert done.stdout.strip() == f"{course} {course / below}".rstrip("/."), done.stderr


def test_the_course_is_found_in_the_folder_that_make_names(course, tmp_path):
    done = opened(tmp_path, "file:///nowhere", found=course)
    assert done.stdout.strip() == f"{course} {tmp_path}", done.stderr


def test_a_notebook_alone_fetches_the_course_once(tmp_path, origin):
    said = f"{tmp_path}/course {tmp_path}/course/notebooks"
    done = opened(tmp_path, origin)
    assert done.stdout.strip() == said, done.stderr
    done = opened(tmp_path, "file:///nowhere")  # it is there: not fetched again
    assert done.stdout.strip() == said, done.stderr


# ---- in a notebook's kernel ----------------------------------------------------------


def run_alone(notebook, folder: Path, python: str, site: Path | None = None):
    """Executes a notebook in a folder as JupyterLab does, with a Python of its own."""
    nbclient = pytest.importorskip("nbclient")
    from jupyter_client import AsyncKernelManager

    manager = AsyncKernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = python
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=600, resources={"metadata": {"path": folder}}
    )
    client.execute(env=without_the_course(site))
    return notebook


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def alone(origin: str, cells: int | None = None):
    """The chapter, which fetches the course from `origin`; its first code cells."""
    notebook = nbformat.read(CHAPTER, as_version=4)
    notebook.cells = code(notebook)[:cells]
    first = notebook.cells[0]
    first.source = first.source.replace(URL, origin)
    asked = "import kernels, os\nprint(kernels.__file__, os.getcwd())"
    notebook.cells.append(nbformat.v4.new_code_cell(asked))
    return notebook


def test_the_course_is_found_where_another_kernels_was_imported(tmp_path, origin, site):
    notebook = alone(origin, cells=2)
    other = nbformat.v4.new_code_cell("import kernels.layer\nprint(kernels.__file__)")
    notebook.cells.insert(0, other)
    run_alone(notebook, tmp_path, sys.executable, site)
    course = tmp_path / "course"
    assert printed(other).strip() == str(site / "kernels" / "__init__.py")
    described = r".*\(.*torch .*, triton .*\)\.\n"  # in one line: git says nothing
    assert re.fullmatch(described, printed(notebook.cells[1]))
    assert printed(notebook.cells[-1]).split() == [
        str(course / "kernels" / "__init__.py"),
        str(course / "notebooks"),
    ]


def test_without_the_repository_git_says_why(tmp_path):
    """Git's words, then the error of the last line."""
    notebook = alone((tmp_path / "none").as_uri(), cells=1)
    with pytest.raises(Exception, match="No module named 'open_course'"):
        run_alone(notebook, tmp_path, sys.executable)
    *said, error = notebook.cells[0].outputs
    assert "fatal: " in "".join(output["text"] for output in said), said
    assert error["evalue"] == "No module named 'open_course'"
    assert not (tmp_path / "course").exists()


def test_a_restarted_kernel_uses_what_was_fetched(tmp_path, origin):
    """The restart takes the kernel back to the notebook's folder."""
    jupyter_client = pytest.importorskip("jupyter_client")
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(tmp_path), env=without_the_course())
    client = manager.blocking_client()
    client.start_channels()
    course = tmp_path / "course"
    try:
        for source in (opening(origin), opening("file:///nowhere")):
            said = []
            client.wait_for_ready(timeout=60)
            client.execute_interactive(source, output_hook=said.append, timeout=120)
            text = "".join(message["content"].get("text", "") for message in said)
            assert text.split() == [str(course), str(course / "notebooks")], said
            manager.restart_kernel(now=True)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def packages(python: str) -> dict[str, str]:
    """What is installed beside a Python: the version of each package."""
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"],
        env=without_the_course(),
        capture_output=True,
        check=True,
    )
    return {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}


@pytest.mark.skipif(
    not os.environ.get("COURSE_FRESH"),
    reason="downloads PyTorch into a new environment: make fresh",
)
def test_a_notebook_alone_runs_in_a_fresh_environment(tmp_path, origin):
    """PyTorch, Triton and ipykernel stay as they were; only the rest is installed."""
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    wanted = ("torch>=2.10,<=2.13.0", "triton>=3.6,<3.8", "ipykernel")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *wanted], env=without_the_course(), check=True)
    before = packages(python)
    assert not {"pandas", "matplotlib", "cloudpickle"} & set(before)

    folder = tmp_path / "empty"
    folder.mkdir()
    notebook = run_alone(alone(origin), folder, python)
    after = packages(python)
    said = printed(notebook.cells[0])
    print(f"{said}before: {before}\nadded: {sorted(set(after) - set(before))}")
    installed = re.search(r"^Installing (.*) \.\.\.$", said, re.M)[1].split(", ")
    assert not {"torch", "triton", "ipykernel"} & set(installed)
    assert {"pandas", "matplotlib", "cloudpickle"} <= set(installed) <= set(after)
    assert {name: after[name] for name in before} == before
    assert str(folder / "course" / "kernels") in printed(notebook.cells[-1])


# ---- containers ----------------------------------------------------------------------


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.parent.name)
def test_containers_say_what_they_are(path):
    container = json.loads(path.read_text())
    for name, value in container.items():
        assert isinstance(value, PROPERTIES[name]), name
    (target,) = re.findall(r"make (\S+)", container["postCreateCommand"])
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for opened_first in container["customizations"]["codespaces"]["openFiles"]:
        assert (ROOT / opened_first).is_file()
    settings = container["customizations"]["vscode"]["settings"]
    folder = "${containerWorkspaceFolder}/"
    assert settings["python.defaultInterpreterPath"] == f"{folder}.venv/bin/python"


def test_one_container_has_a_gpu_and_one_needs_none():
    with_gpu, without = (
        json.loads((ROOT / ".devcontainer" / name).read_text())
        for name in ("gpu/devcontainer.json", "devcontainer.json")
    )
    assert with_gpu.pop("hostRequirements") == {"gpu": True}
    assert with_gpu.pop("runArgs")[:2] == ["--gpus", "all"]
    assert with_gpu["name"] != without["name"]
    for name in ("name", "postCreateCommand"):
        del with_gpu[name], without[name]
    assert with_gpu == without
