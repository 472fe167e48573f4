"""A Chromium and a folder that it reads, for the tests that look at pages.

Where Playwright or Chromium is missing, the tests are skipped with a sentence. CHROMIUM
names another Chromium than the one on the path, BOOK another folder than _build/html.

Weighed: pytest-playwright (downloads browsers of its own; every test gets a new page),
Selenium (needs a driver that fits the browser's version).
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One Chromium with a profile of its own, for the whole session."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install '.[browser]'"
    )
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium: install the package chromium, or name one: CHROMIUM=")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=program,
            args=FLAGS,
            reduced_motion="reduce",
        )
        yield context
        context.close()


@pytest.fixture(scope="session")
def book() -> Path:
    """The folder of the built book."""
    folder = Path(os.environ.get("BOOK") or ROOT / "_build" / "html").resolve()
    if not (folder / "search.html").is_file():
        pytest.fail(f"no book in {folder}: run `make book` first")
    return folder
