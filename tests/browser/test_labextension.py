"""JupyterLab's extension of the course: alternative text, and a diff's two colours."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "book" / "labextensions" / "softmax-course"

PAGE = """
<div id="first"><div class="jp-OutputArea"><img id="drawn"></div></div>
<div id="second"><div class="jp-OutputArea"><img id="bare"></div></div>
"""
LATER = "<pre><code class='language-diff'>--- a\n+++ b\n same\n-old\n+new</code></pre>"
# As much of JupyterLab as the extension asks for: a notebook of two cells.
START = """async () => {
    const cell = (id, found) => ({
        node: document.getElementById(id), model: {getMetadata: () => found},
    });
    const widgets = [cell("first", {image: {alt: "Two lines."}}), cell("second")];
    const app = {shell: {widgets: () => [{content: {widgets}, context: {}}, {}]}};
    const module = await window._JUPYTERLAB["softmax-course"].get("./extension");
    module().default.activate(app);
}"""


@pytest.fixture
def page(chromium) -> Iterator:
    page = chromium.new_page()
    page.set_content(PAGE)
    page.add_script_tag(path=FOLDER / "static" / "remoteEntry.js")
    page.evaluate(START)
    page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", LATER)
    page.wait_for_function("document.querySelector('[data-coloured]') !== null")
    yield page
    page.close()


def test_a_figure_gets_the_alternative_text_of_its_cell(page) -> None:
    assert page.get_attribute("#drawn", "alt") == "Two lines."
    assert page.get_attribute("#bare", "alt") is None


def test_added_and_removed_lines_get_two_colours(page) -> None:
    lines = page.query_selector_all("code span")
    grounds = [line.evaluate("line => line.style.background") for line in lines]
    removed, added, same, *others = grounds
    assert removed and added and removed != added and not same
    assert others == [removed, added]
    assert page.inner_text("code").splitlines()[2] == " same"


def test_jupyterlab_finds_the_extension() -> None:
    config = pytest.importorskip("jupyterlab_server.config", reason="makes JupyterLab")
    lab = re.search(r"^lab:.*\n(.*\n)+?\n", (ROOT / "Makefile").read_text(), re.M)[0]
    (folder,) = re.findall(r"extra_labextensions_path=(\S+)", lab)
    found = config.get_federated_extensions([str(ROOT / folder)])["softmax-course"]
    load = found["jupyterlab"]["_build"]["load"]
    assert (FOLDER / load).is_file()
    assert json.loads((FOLDER / "package.json").read_text())["version"]
