"""Every notebook as a learner runs it: in JupyterLab, in a browser, in both themes.

`make browser-lab ARGS="-k 03_program"` tries one. JupyterLab works on a copy of the
course, because it saves what it runs. SHOTS names a folder for a picture of each
notebook in each theme.

The alternative text of images is an extension's work: `test_labextension` checks it.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from tests.browser.pages import Visitor

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if not path.parent.name.startswith(".")
)
THEMES = ("JupyterLab Light", "JupyterLab Dark")
LONGEST = 900  # seconds that a notebook may take
SETTINGS = {
    # Everything is drawn, also what is not near the window.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
RUN = """async seconds => {
  const late = new Promise(done => setTimeout(() => done('late'), seconds * 1000));
  const {commands} = window.jupyterapp;
  await jupyterapp.shell.currentWidget.context.sessionContext.ready;
  const run = commands.execute('notebook:run-all-cells').then(() => 'done');
  const how = await Promise.race([run, late]);
  await commands.execute('docmanager:save');
  return how;
}"""
THEME = """async theme => {
  await jupyterapp.commands.execute('apputils:change-theme', {theme});
  await new Promise(done => setTimeout(done, 500));
  return [document.body.dataset.jpThemeLight,
          getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor];
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """JupyterLab on a copy of the course, with settings of its own.

    Yields:
        A namespace with host, url and the folder of the copy.
    """
    home = tmp_path_factory.mktemp("lab")
    folder = home / "course"
    unwanted = shutil.ignore_patterns(
        ".git", ".venv*", ".*_cache", "_build", "__pycache__"
    )
    shutil.copytree(ROOT, folder, ignore=unwanted)
    for name, settings in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    folders = {"CONFIG": "config", "RUNTIME": "runtime"}
    env = os.environ | {f"JUPYTER_{k}_DIR": str(home / v) for k, v in folders.items()}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    env |= {"JUPYTERLAB_WORKSPACES_DIR": str(home / "spaces")}
    env |= {"PYTHONPATH": str(folder)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    host, log = f"127.0.0.1:{port}", (home / "log").open("w")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", "--ip=127.0.0.1"]
    command += [f"--IdentityProvider.token={token}", "--expose-app-in-browser"]
    server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://{host}/api", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            pytest.fail(f"JupyterLab does not start: {(home / 'log').read_text()}")
        url = f"http://{host}/"
        yield SimpleNamespace(host=host, url=url, token=token, folder=folder)
    finally:
        server.terminate()
        server.wait()
        log.close()


@pytest.fixture(scope="module")
def visitor(chromium, lab) -> Visitor:
    visitor = Visitor(chromium, lab)
    visitor.page.set_viewport_size({"width": 1280, "height": 900})
    visitor.page.goto(f"{lab.url}lab?token={lab.token}")  # sets the cookie
    visitor.page.wait_for_function("window.jupyterapp !== undefined", timeout=120_000)
    return visitor


def failures(notebook: nbformat.NotebookNode) -> list[str]:
    """Code cells that did not run, or raised without being meant to."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        meant = "raises-exception" in cell.metadata.get("tags", [])
        if not cell.get("execution_count"):
            found.append(f"cell {number} did not run")
        found += [
            f"cell {number} raises {output.ename}: {output.evalue}"
            for output in cell.outputs
            if output.output_type == "error" and not meant
        ]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_runs_in_both_themes(visitor: Visitor, lab, path: str) -> None:
    file, page = lab.folder / path, visitor.page
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # so that what is there afterwards is new
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, file)
    visitor.said.clear()
    visitor.foreign.clear()
    page.goto(f"{lab.url}lab/tree/{path}?reset")
    page.wait_for_function("window.jupyterapp !== undefined", timeout=120_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
    assert page.evaluate(RUN, LONGEST) == "done", f"longer than {LONGEST} s"
    faults = failures(nbformat.read(file, as_version=4))
    colours = []
    for theme in THEMES:
        colours.append(page.evaluate(THEME, theme))
        visitor.draw_all()
        faults += [f"{theme}: {fault}" for fault in visitor.faults("squashed")]
        if shots := os.environ.get("SHOTS"):
            name = path.replace("/", "-") + theme[10:] + ".png"
            page.screenshot(path=Path(shots) / name)
    assert [light for light, _ in colours] == ["true", "false"]
    assert colours[0] != colours[1]
    faults += [f"asks another host: {address}" for address in visitor.foreign]
    page.evaluate("jupyterapp.commands.execute('kernelmenu:shutdown')")
    assert not faults, "\n".join(faults)


def test_a_cell_that_raises_or_did_not_run_is_found() -> None:
    cells = [nbformat.v4.new_code_cell("1/0", execution_count=1) for _ in range(2)]
    for cell in cells:
        error = {"output_type": "error", "ename": "E", "evalue": "no", "traceback": []}
        cell.outputs = [nbformat.from_dict(error)]
    cells[1].metadata["tags"] = ["raises-exception"]
    cells.append(nbformat.v4.new_code_cell("2"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert failures(notebook) == ["cell 0 raises E: no", "cell 2 did not run"]
