"""Changes where the course's repository is, in every file that names it.

    python .ci/address.py https://github.com/you/course v1.0      (make address)

The setting is `repository` in _config.yml: `url`, and `branch`, the revision that Colab
opens and first cells fetch. README.md, CITATION.cff, book/setup.md and the first cells
of the notebooks hold copies, because they are read where the setting is not.
Needs Python alone.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FORM = r"https://github\.com/([\w.-]+)/([\w.-]+)"
KNOWN = {".ci", ".devcontainer", ".github"}  # the folders with a dot that are searched
NOT_SEARCHED = {"_build", "__pycache__", "recorded", "vendor", "node_modules"}
TEXTS = {"", ".cff", ".cfg", ".css", ".html", ".ipynb", ".js", ".json", ".md", ".py"}
TEXTS |= {".svg", ".toml", ".txt", ".yml"}


def setting(root: Path = ROOT) -> tuple[str, str]:
    """The repository's address and revision, as _config.yml has them."""
    text = (root / "_config.yml").read_text()
    block = re.search(r"^repository:\n((?:[ #].*\n)+)", text, re.M)[1]
    found = dict(re.findall(r"^  (url|branch): (\S+)", block, re.M))
    return found["url"], found["branch"]


def files(root: Path = ROOT) -> Iterator[Path]:
    """Every text file of the course; neither environments nor what is built."""
    for folder, below, names in os.walk(root):
        below[:] = [
            name
            for name in sorted(below)
            if name in KNOWN or not name.startswith(".")
            if name not in NOT_SEARCHED and not name.endswith(".egg-info")
        ]
        paths = [Path(folder, name) for name in sorted(names)]
        yield from (path for path in paths if path.suffix in TEXTS)


def changed(text: str, old: tuple[str, str], new: tuple[str, str]) -> str:
    """The text, with the new address and revision in place of the old ones."""
    text = text.replace(f" -b {old[1]} {{URL}} ", f" -b {new[1]} {{URL}} ")
    return re.sub(rf"{re.escape(old[0])}(?![\w-])", lambda _: new[0], text)


def strays(text: str, url: str) -> list[str]:
    """What names the repository in another way than `url`, which `changed` overlooks.

    Such as git@github.com:owner/name, owner/name in a badge's address, the address on
    another host, or the owner's pages.
    """
    owner, name = re.fullmatch(FORM, url).groups()
    rest = re.sub(rf"{re.escape(url)}(?![\w-])", "", text)
    if name not in rest and f"{owner}.github.io" not in rest:
        return []  # soon: an image in a notebook is a long line
    owner, name = re.escape(owner), re.escape(name)
    ways = [
        rf"[\w.@:/-]*\b{owner}/{name}\b",
        rf"(?:https?://|git@)[^\s\"'<>()]*/{name}\b",
        rf"\b{owner}\.github\.io",
    ]
    return re.findall("|".join(ways), rest)


def change(url: str, revision: str, root: Path = ROOT) -> list[str]:
    """Writes the new address and revision into every file; returns the files changed.

    Raises:
        ValueError: `url` is not the address of a repository on GitHub, or `revision`
            is not the name of a tag or branch.
    """
    if not re.fullmatch(FORM, url) or url.endswith(".git"):
        raise ValueError(
            f"URL must look like https://github.com/owner/name, without .git at its "
            f"end (Colab opens notebooks from GitHub only), got {url!r}"
        )
    if not re.fullmatch(r"\w[\w./-]*", revision):
        raise ValueError(f"REVISION must name a tag or a branch, got {revision!r}")
    old = setting(root)
    written = []
    for path in files(root):
        text = path.read_text()
        new = changed(text, old, (url, revision))
        if path == root / "_config.yml":
            new = new.replace(f"\n  branch: {old[1]}\n", f"\n  branch: {revision}\n")
        if new != text:
            path.write_text(new)
            written.append(path.relative_to(root).as_posix())
    return written


def main(url: str = "", revision: str = "") -> str:
    """Changes both and says what is left to do; nothing given: says what they are."""
    old = setting()
    if not url and not revision:
        return f"URL={old[0]} REVISION={old[1]}"
    url, revision = url or old[0], revision or old[1]
    written = change(url, revision)
    return (
        f"{len(written)} files name {url} at {revision} now. Commit them, tag the "
        f"commit ({revision} must exist there: a first cell fetches it), and push both."
    )


if __name__ == "__main__":
    try:
        print(main(*sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
