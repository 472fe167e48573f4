"""Says what an environment lacks of the packages that a target of the Makefile needs.

    python .ci/check_python.py run test        the groups of pyproject.toml
    python .ci/check_python.py ruff            single packages

`run` is what the course needs at run time; `lab`, `book` and `test` are the extras. The
lists and the ranges are those of pyproject.toml. Installs nothing. Exits with 1 and one
sentence, which ends in the command that installs what is missing.
"""

import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPERATORS: dict[str, Callable[[tuple, tuple], bool]] = {
    ">=": lambda version, bound: version >= bound,
    "<": lambda version, bound: version < bound,
}


def requirements(groups: list[str]) -> list[str]:
    """The requirements of these groups and packages, as pyproject.toml writes them.

    Args:
        groups: "run", the name of an extra, or a package that an extra names.

    Raises:
        ValueError: pyproject.toml has neither a group nor a package of that name.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {"run": project["dependencies"], **project["optional-dependencies"]}
    single = {name_of(line): [line] for lines in known.values() for line in lines}
    if unknown := [group for group in groups if group not in known | single]:
        raise ValueError(f"expected one of {sorted(known | single)}, got {unknown}")
    return [line for group in groups for line in (known | single)[group]]


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return re.match(r"[\w.-]+", requirement)[0]


def missing(requirement: str) -> str:
    """Says what is wrong with a package in this environment; "" if nothing is.

    A package that can be imported but has no metadata is taken as it is: Triton's
    nightly build, for example, has another name than Triton.

    Args:
        requirement: such as "torch>=2.10"; what follows a semicolon is not looked at.
    """
    name = name_of(requirement)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = util.find_spec(name.replace("-", "_")) is not None
        return "" if found else f"no {name}"
    for operator, bound in re.findall(r"(>=|<)([\d.]+)", requirement.split(";")[0]):
        if not OPERATORS[operator](numbers(version), numbers(bound)):
            return f"{name} {version}"
    return ""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 11) of "2.11.0a0+cu130"."""
    parts = tuple(map(int, re.match(r"\d+(\.\d+)*", version)[0].split(".")))
    while len(parts) > 1 and parts[-1] == 0:
        parts = parts[:-1]
    return parts


def main(groups: list[str]) -> str:
    """The sentence about what this environment lacks; "" if it lacks nothing."""
    lacking = {line: words for line in requirements(groups) if (words := missing(line))}
    if not lacking:
        return ""
    wanted = " ".join(f"'{line.split(';')[0].strip()}'" for line in lacking)
    return (
        f"PYTHON={sys.executable} has {', '.join(lacking.values())}. "
        f"Leave PYTHON out, or say: {sys.executable} -m pip install {wanted}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
