"""What the course needs is listed once for pip and once for make: the lists agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import loaded

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = PROJECT["dependencies"]
EXTRAS = PROJECT["optional-dependencies"]
WHOLE = [
    line
    for line in (ROOT / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def parsed(requirement: str) -> SimpleNamespace:
    """A requirement taken apart: name, bounds (a set of strings) and marker."""
    words, _, marker = requirement.replace('"', "'").partition(";")
    name, bounds = re.fullmatch(r"([\w-]+)(.*)", words.strip()).groups()
    return SimpleNamespace(
        name=name, bounds=set(bounds.split(",")), marker=marker.strip()
    )


def by_name(lines: list[str]) -> dict[str, SimpleNamespace]:
    return {requirement.name: requirement for requirement in map(parsed, lines)}


@pytest.fixture(scope="module")
def check_python():
    return loaded(ROOT / ".ci" / "check_python.py")


@pytest.fixture
def installed(check_python, monkeypatch):
    """Replaces what is installed: a dict from package to version, to be filled."""
    versions = {}

    def version(name):
        if name not in versions:
            raise check_python.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(check_python.metadata, "version", version)
    monkeypatch.setattr(check_python.util, "find_spec", lambda name: None)
    return versions


# ---- the two lists -------------------------------------------------------------------


def test_requirements_name_the_packages_of_pyproject():
    groups = ("cuda", "lab", "book", "slides", "test")
    extras = [line for name in groups for line in EXTRAS[name]]
    assert [parsed(line).name for line in WHOLE] == [
        parsed(line).name for line in RUN + extras
    ]


@pytest.mark.parametrize("extra", ["cuda", "lab", "book", "slides", "test"])
def test_requirements_have_the_ranges_of_the_extras(extra):
    whole = by_name(WHOLE)
    for name, requirement in by_name(EXTRAS[extra]).items():
        assert whole[name] == requirement


def test_requirements_add_only_upper_bounds_at_run_time():
    whole = by_name(WHOLE)
    for name, requirement in by_name(RUN).items():
        assert whole[name].marker == requirement.marker, name
        added = whole[name].bounds - requirement.bounds
        assert requirement.bounds <= whole[name].bounds, name
        assert len(added) == 1 and added.pop().startswith("<"), name


def test_pip_replaces_no_torch_from_2_10_on():
    """Run-time ranges are lower bounds: pip keeps the version that it finds."""
    for requirement in map(parsed, RUN):
        (bound,) = requirement.bounds
        assert bound.startswith(">="), requirement
    assert by_name(RUN)["torch"].bounds == {">=2.10"}


def test_the_newest_torch_of_make_is_2_13():
    assert by_name(WHOLE)["torch"].bounds == {">=2.10", "<2.14"}


def test_imports_are_listed():
    """Every package that the course's modules import is needed at run time.

    The book's extensions run in Sphinx, which brings docutils.
    """
    listed = {parsed(line).name for line in RUN} | {"docutils"}
    folders = (ROOT / name for name in ("kernels", "benchmarks", "book"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.M):
            ours = name in {"kernels", "benchmarks"}
            known = ours or name in sys.stdlib_module_names
            assert known or name in listed, f"{path.name} imports {name}"


# ---- an environment of the learner's own ---------------------------------------------


@pytest.mark.parametrize(
    ("torch", "triton", "numpy"),
    [
        ("2.10.0+cu128", "3.6.0", "2.0.2"),
        ("2.11.0+cu130", "3.6.0", "2.3.5"),
        ("2.13.0+cpu", "3.9.0", "2.4.6"),
        ("2.15.0a0+git12", "3.9.0", "2.5.2"),
        ("3.0", "4.0", "3.0"),
    ],
)
def test_any_pair_from_torch_2_10_on_is_accepted(
    check_python, installed, torch, triton, numpy
):
    installed |= {"torch": torch, "triton": triton, "numpy": numpy, "pandas": "2.2.2"}
    installed |= {"matplotlib": "3.10.0", "cloudpickle": "3.1.2", "filelock": "3.20.0"}
    assert check_python.main(["run"]) == ""


def test_what_is_missing_is_named_with_the_command_that_installs_it(
    check_python, installed
):
    installed |= {"torch": "2.9.1", "triton": "3.6.0", "numpy": "2.3.5"}
    installed |= {"matplotlib": "3.10.0", "cloudpickle": "3.1.2", "filelock": "3.20.0"}
    said = check_python.main(["run"])
    assert "has torch 2.9.1, no pandas." in said
    assert said.endswith("-m pip install 'torch>=2.10' 'pandas>=2.2'")


def test_an_upper_bound_of_a_tool_counts(check_python, installed):
    installed |= {"jupyter-book": "2.0.1", "sphinx-book-theme": "1.2.0"}
    installed["sphinxcontrib-bibtex"] = "2.7.0"
    installed |= {"sphinx-notfound-page": "1.1.0", "sphinxext-opengraph": "0.13.0"}
    assert "has jupyter-book 2.0.1." in check_python.main(["book"])


def test_a_package_without_metadata_is_accepted(check_python, installed, monkeypatch):
    monkeypatch.setattr(check_python.util, "find_spec", lambda name: object())
    assert check_python.missing("triton>=3.6; sys_platform == 'linux'") == ""


def test_a_target_needs_only_its_own_groups(check_python, installed):
    installed |= {"ruff": "0.17.6"}
    assert check_python.main(["ruff"]) == ""
    with pytest.raises(ValueError, match=r"got \['ruf'\]"):
        check_python.main(["ruf"])


# ---- the Makefile --------------------------------------------------------------------


def test_the_makefile_asks_for_groups_that_exist(check_python):
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^needs-(\w+) := (.+)$", makefile, re.M))
    used = set(re.findall(r"\$\(call ready,(\w+)\)", makefile))
    assert used == set(needs)
    for groups in needs.values():
        assert check_python.requirements(groups.split())


def test_pairs_names_a_pair_that_is_none():
    command = [str(ROOT / ".ci" / "pairs"), "2.13"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "2.13: a pair is written TORCH+TRITON, such as 2.13+3.9.0\n"


def test_pairs_goes_on_after_a_pair_that_cannot_be_installed(tmp_path):
    """`false` stands in for the Python that makes the environments."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "pairs"
    script.write_text((ROOT / ".ci" / "pairs").read_text())
    (tmp_path / "pyproject.toml").touch()
    command = ["bash", str(script), "2.11+3.6.0", "2.13+3.7.1"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "BASE_PYTHON": "false"},
    )
    assert done.returncode == 1
    assert done.stdout.count("cannot be installed here, so it was not tried") == 2
