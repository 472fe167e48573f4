"""The classroom: what each learner gets, and two learners who log in at once.

`make hub-test` starts a hub. Its learners run the notebooks that COURSE_HUB_NOTEBOOKS
names (chapter 3 and its neighbour's exercises without it), as a browser would: login
form, REST API, the kernel's WebSocket.
"""

import contextlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

requests = pytest.importorskip("requests")  # comes with JupyterLab
websocket = pytest.importorskip("websocket")

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "hub" / "jupyterhub_config.py"
LEARNERS, PASSWORD = ("ada", "grace"), "softmax-classroom"
CHAPTER = "notebooks/03_program.ipynb"
EXERCISES = "notebooks/exercises/04_strided.ipynb"
NOTEBOOKS = os.environ.get("COURSE_HUB_NOTEBOOKS", "").split() or [
    name for name in (CHAPTER, EXERCISES) if (ROOT / name).exists()
]
START_S, CELL_S = 120, 300
needs_hub = pytest.mark.skipif(
    not os.environ.get("COURSE_HUB_TEST"),
    reason="starts a JupyterHub and runs notebooks in it: type make hub-test",
)


# ---- what a learner gets -------------------------------------------------------------


@pytest.fixture(scope="module")
def learner():
    return runpy.run_path(str(ROOT / "hub" / "learner.py"))


def test_a_learner_gets_copies_that_are_never_overwritten(learner, tmp_path):
    new = learner["hand_out"](tmp_path)
    chapter = tmp_path / CHAPTER
    assert chapter in new and (tmp_path / "book" / "glossary.md") in new
    assert chapter.read_bytes() == (ROOT / CHAPTER).read_bytes()
    chapter.write_text("mine")
    (tmp_path / "notebooks" / "01_eager.ipynb").unlink()
    assert learner["hand_out"](tmp_path) == [tmp_path / "notebooks" / "01_eager.ipynb"]
    assert chapter.read_text() == "mine"


def test_a_learner_gets_no_solutions(learner, tmp_path):
    new = learner["hand_out"](tmp_path)
    assert not [path for path in new if "solutions" in path.parts]


def test_the_modules_are_linked_to_where_the_course_is_now(learner, tmp_path):
    (tmp_path / "kernels").symlink_to("/moved/away")
    learner["hand_out"](tmp_path)
    assert (tmp_path / "kernels").resolve() == ROOT / "kernels"


@pytest.mark.thorough
@pytest.mark.parametrize("below", ["notebooks", "notebooks/exercises"])
def test_a_first_cell_opens_the_course_from_the_learners_folder(
    learner, tmp_path, monkeypatch, below
):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the link is enough
    learner["hand_out"](tmp_path)
    code = "import open_course, kernels; print(open_course.__file__, kernels.__file__)"
    command = [sys.executable, "-c", code]
    folder = tmp_path / below
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    module = ROOT / "kernels" / "__init__.py"
    linked = folder / "open_course.py"
    assert done.stdout.split() == [str(linked), str(module)], done.stderr


# ---- the settings --------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Reads the settings, given variables of the environment and a user's id."""
    loader = pytest.importorskip("traitlets.config").PyFileConfigLoader
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "configurable-http-proxy").touch(mode=0o755)

    def read(uid=1000, path=str(tools), **variables):
        monkeypatch.setattr(os, "getuid", lambda: uid)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        variables = {"PATH": path, "COURSE_CLASSROOM": str(tmp_path / "x"), **variables}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        return loader(str(CONFIG)).load_config()

    return read


def test_without_the_proxy_the_hub_says_how_to_get_it(settings, tmp_path):
    with pytest.raises(SystemExit, match="make hub` installs it"):
        settings(path=str(tmp_path))


def test_the_password_is_the_teachers_or_a_new_one(settings, capsys):
    chosen = settings(COURSE_PASSWORD=PASSWORD).SharedPasswordAuthenticator
    assert chosen.user_password == PASSWORD
    made = settings(COURSE_PASSWORD="").SharedPasswordAuthenticator.user_password
    assert len(made) == 8
    assert capsys.readouterr().out.endswith(f"the password {made}\n")


def test_root_gives_no_learner_its_own_rights(settings):
    hub = settings(uid=0).JupyterHub
    assert (hub.authenticator_class, hub.spawner_class) == ("pam", "localprocess")


def test_settings_of_the_course_reach_the_learners_and_the_password_does_not(settings):
    given = {"COURSE_GPU_GB": "5", "COURSE_MEASURE": "recorded"}
    passed = settings(COURSE_PASSWORD=PASSWORD, **given).Spawner.environment
    assert passed["PYTHONPATH"] == str(ROOT)
    assert passed.items() >= given.items()
    assert PASSWORD not in passed.values()


@pytest.mark.parametrize(
    ("name", "good"),
    [
        *[("ada", True), ("g.hopper-2", True), ("..", False), (".ssh", False)],
        *[("a/b", False), ("", False), ("ada\n", False), ("-rf", False)],
    ],
)
def test_a_name_is_a_folder_of_its_own(settings, name, good):
    pattern = settings().Authenticator.username_pattern
    assert bool(re.match(pattern, name)) == good  # JupyterHub calls match, too


# ---- two learners --------------------------------------------------------------------


class Learner:
    """A learner at a browser.

    Args:
        hub: the hub's address.
        name: the learner's name.
    """

    def __init__(self, hub: str, name: str):
        self.hub, self.name = hub, name
        self.server = f"{hub}/user/{name}"
        self.http = requests.Session()

    def log_in(self, password: str = PASSWORD) -> "requests.Response":
        """Fills in the form; the answer is the page that the learner sees next."""
        self.http.get(f"{self.hub}/hub/login")
        form = {"username": self.name, "password": password, "_xsrf": self.xsrf()}
        return self.http.post(f"{self.hub}/hub/login", data=form)

    def xsrf(self) -> str:
        return self.http.cookies.get("_xsrf", path="/hub/")

    def start_server(self) -> None:
        """Waits until the page of JupyterLab is there."""
        deadline = time.monotonic() + START_S
        self.http.get(f"{self.hub}/hub/spawn")
        while not (page := self.http.get(f"{self.server}/lab")).url.endswith("/lab"):
            assert time.monotonic() < deadline, f"{self.name}'s server: {page.url}"
            time.sleep(0.3)
        assert page.ok and "jupyter-config-data" in page.text
        (self.token,) = re.findall('"token": "([^"]+)"', page.text)

    def stop_server(self) -> None:
        """Presses Stop My Server."""
        url = f"{self.hub}/hub/api/users/{self.name}/server"
        answer = self.http.delete(url, headers={"X-XSRFToken": self.xsrf()})
        assert answer.status_code in (202, 204), answer.text

    def call(self, method: str, path: str, /, **body):
        """Asks the learner's server; returns what it answers."""
        headers = {"Authorization": f"token {self.token}"}
        url = f"{self.server}/api/{path}"
        answer = requests.request(method, url, headers=headers, json=body or None)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.text else None

    def run(self, path: str) -> list[float]:
        """Runs a notebook whole and saves it with what its cells print.

        Returns:
            When each code cell was done, in seconds of one clock.
        """
        notebook = self.call("GET", f"contents/{path}")["content"]
        session = self.call(
            "POST",
            "sessions",
            path=path,
            name=path,
            type="notebook",
            kernel={"name": "python3"},
        )
        kernel = session["kernel"]["id"]
        url = f"{self.server}/api/kernels/{kernel}/channels".replace("http", "ws", 1)
        header = [f"Authorization: token {self.token}"]
        done = []
        with contextlib.closing(
            websocket.create_connection(url, header=header, timeout=CELL_S)
        ) as channel:
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code" and cell["source"]:
                    cell["outputs"] = execute(channel, cell["source"])
                    done.append(time.monotonic())
        self.call("DELETE", f"sessions/{session['id']}")
        self.call("PUT", f"contents/{path}", type="notebook", content=notebook)
        return done


def execute(channel: "websocket.WebSocket", source: str) -> list[dict]:
    """Runs a cell; its outputs, of which text and errors are kept.

    Raises:
        AssertionError: the cell raised.
    """
    message = uuid.uuid4().hex
    header = {"msg_id": message, "msg_type": "execute_request", "session": message}
    header |= {"username": "", "version": "5.3"}
    content = {"code": source, "silent": False, "store_history": True}
    content |= {"user_expressions": {}, "allow_stdin": False, "stop_on_error": True}
    empty = {"parent_header": {}, "metadata": {}, "buffers": []}
    request = {"header": header, "content": content, "channel": "shell", **empty}
    channel.send(json.dumps(request))
    outputs = []
    while True:
        answer = json.loads(channel.recv())
        if answer["parent_header"].get("msg_id") != message:
            continue
        kind, content = answer["msg_type"], answer["content"]
        assert kind != "error", "\n".join([source, *content["traceback"]])
        if kind == "stream":
            outputs.append({"output_type": kind, **content})
        if kind == "status" and content["execution_state"] == "idle":
            return outputs


def test_a_cell_that_raises_is_caught():
    class Channel:
        def send(self, request):
            self.header = json.loads(request)["header"]

        def recv(self):
            answer = {"parent_header": self.header, "msg_type": "error"}
            return json.dumps({**answer, "content": {"traceback": ["ValueError: no"]}})

    with pytest.raises(AssertionError, match="ValueError: no"):
        execute(Channel(), "raise ValueError('no')")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub of its own on this machine: its address, and the folder of its learners."""
    folder = tmp_path_factory.mktemp("classroom")
    public, internal, proxy = free_port(), free_port(), free_port()
    address = f"http://127.0.0.1:{public}"
    command = [sys.executable, "-m", "jupyterhub", "-f", str(CONFIG)]
    command += [f"--JupyterHub.bind_url={address}", f"--JupyterHub.hub_port={internal}"]
    command += [f"--ConfigurableHTTPProxy.api_url=http://127.0.0.1:{proxy}"]
    if os.getuid() == 0:  # only root's test learns as root
        command += ["--JupyterHub.authenticator_class=shared-password"]
        command += [f"--SharedPasswordAuthenticator.user_password={PASSWORD}"]
        command += ["--JupyterHub.spawner_class=simple", "--Spawner.args=--allow-root"]
        home = f"{folder}/learners/{{username}}"
        command += [f"--SimpleLocalProcessSpawner.home_dir_template={home}"]
    environment = {**os.environ, "COURSE_PASSWORD": PASSWORD}
    environment["COURSE_CLASSROOM"] = str(folder)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while answer(f"{address}/hub/api/") != 200:
            running = process.poll() is None and time.monotonic() < deadline
            assert running, (folder / "log").read_text()
            time.sleep(0.3)
        yield address, folder / "learners"
    finally:
        process.terminate()
        process.wait(60)
    deadline = time.monotonic() + 10
    while answer(address):
        assert time.monotonic() < deadline, "the proxy runs on, and keeps the port"
        time.sleep(0.3)


def answer(address: str) -> int | None:
    """The status of what answers at an address; None if nothing does."""
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(address).status_code
    return None


@needs_hub
def test_two_learners_at_once(hub, capsys):
    address, folder = hub
    both = Barrier(2)

    def learn(name):
        learner = Learner(address, name)
        began = time.monotonic()
        both.wait()
        learner.log_in()
        learner.start_server()
        ready = time.monotonic()
        both.wait()
        done = {path: learner.run(path) for path in NOTEBOOKS}
        return learner, began, ready, done

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(learn, LEARNERS))

    for learner, began, ready, done in results:
        line = f"\n{learner.name}: JupyterLab after {ready - began:.1f} s"
        for path, times in done.items():
            line += f", {Path(path).name} {times[-1] - ready:.1f} s"
            ready = times[-1]
        with capsys.disabled():
            print(line)
    for path in NOTEBOOKS:  # neither waited until the other was done
        first, second = (done[path] for *_, done in results)
        assert first[0] < second[-1] and second[0] < first[-1], path

    # Each has files of their own, and a new start of the server keeps them.
    mine, yours = (folder / name / "course" / CHAPTER for name in LEARNERS)
    assert not mine.samefile(yours)
    assert (mine.parents[1] / "kernels").samefile(ROOT / "kernels")
    mine.write_text(mine.read_text().replace("# 3. Program", "# Ada's program"))
    ada = results[0][0]
    ada.stop_server()
    ada.start_server()
    assert "# Ada's program" in mine.read_text()
    assert "# 3. Program" in yours.read_text()


@needs_hub
@pytest.mark.parametrize(
    ("name", "password"), [("ada", "guess-guess"), ("..", PASSWORD), (".hub", PASSWORD)]
)
def test_nobody_else_gets_in(hub, name, password):
    page = Learner(hub[0], name).log_in(password)
    assert page.status_code == 403
