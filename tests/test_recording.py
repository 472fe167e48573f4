"""The whole record on several GPUs: each task once, in order, and nothing twice."""

import itertools
import sys
from pathlib import Path

import pytest

from benchmarks import fastest, peers, regions
from tests.helpers import loaded

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
NOTES = """
import os, sys, time
start = time.monotonic()
time.sleep(float(sys.argv[2]))
line = f"{sys.argv[1]} {os.environ['CUDA_VISIBLE_DEVICES']} {start} {time.monotonic()}"
print(line, file=open(sys.argv[3], "a"), flush=True)
sys.exit(sys.argv[1] == "bad")
"""


@pytest.fixture(scope="module")
def recording():
    return loaded(ROOT / ".ci" / "record.py")


@pytest.fixture
def task(recording, tmp_path):
    """Makes a task that notes when it ran, and on which GPU; `bad` fails."""

    def make(name, after=(), seconds=0.3, alone=False):
        words = name, str(seconds), str(tmp_path / "notes")
        command = (sys.executable, "-c", NOTES, *words)
        return recording.Task(name, command, tuple(after), alone)

    return make


def noted(folder: Path) -> dict[str, tuple[str, float, float]]:
    """Each task's GPU, start and end; a task that ran twice is an error."""
    lines = (folder / "notes").read_text().splitlines()
    found = [
        (name, gpu, float(a), float(b)) for name, gpu, a, b in map(str.split, lines)
    ]
    assert len({name for name, *_ in found}) == len(found)
    return {name: when for name, *when in found}


def overlap(one, other) -> bool:
    return one[1] < other[2] and other[1] < one[2]


def test_a_gpu_has_one_task_at_a_time_and_all_gpus_work(recording, task, tmp_path):
    assert recording.run([task(f"t{i}") for i in range(6)], "01", tmp_path, 1) == []
    found = noted(tmp_path)
    assert {gpu for gpu, *_ in found.values()} == {"0", "1"}
    pairs = list(itertools.combinations(found.values(), 2))
    assert not any(a[0] == b[0] and overlap(a, b) for a, b in pairs)
    assert any(a[0] != b[0] and overlap(a, b) for a, b in pairs)


def test_a_task_begins_after_those_it_needs(recording, task, tmp_path):
    todo = [task("late", ["early"]), task("early", seconds=1), task("other", seconds=1)]
    assert recording.run(todo, "012", tmp_path, 1) == []
    found = noted(tmp_path)
    assert found["late"][1] >= found["early"][2]
    assert overlap(found["early"], found["other"])


def test_nothing_runs_beside_a_task_that_is_alone(recording, task, tmp_path):
    todo = [task("one"), task("two"), task("host", alone=True), task("after", ["host"])]
    assert recording.run(todo, "01", tmp_path, 1) == []
    found = noted(tmp_path)
    host = found.pop("host")
    assert not any(overlap(host, other) for other in found.values())


def test_what_failed_is_left_and_done_again_alone(recording, task, tmp_path):
    todo = [task("bad"), task("needs", ["bad"]), task("good")]
    left = recording.run(todo, "0", tmp_path, 1)
    assert [each.name for each in left] == ["bad", "needs"]
    assert {*noted(tmp_path)} == {"bad", "good"}
    (tmp_path / "notes").unlink()
    assert recording.run(todo, "0", tmp_path, 1) == left
    assert {*noted(tmp_path)} == {"bad"}


@pytest.mark.thorough
def test_when_the_minutes_are_over_a_task_is_stopped(recording, task, tmp_path):
    todo = [task("short", seconds=0), task("long", seconds=60), task("never")]
    left = recording.run(todo, "0", tmp_path, 4 / 60)
    assert [each.name for each in left] == ["long", "never"]
    assert {*noted(tmp_path)} == {"short"}


def test_the_plan_has_every_notebook_and_every_region_once(recording):
    todo = recording.tasks(PAGES)
    names = [each.name for each in todo]
    others = ["benchmark", "classes", "flush", "ladder", "host"]
    assert sorted(names) == sorted([*PAGES, *others])
    by_name = {each.name: each for each in todo}
    assert {*by_name["benchmark"].command[3:]} == {*regions.BY_NAME}
    for stem in PAGES:
        assert by_name[stem].command[-1] == f"notebooks/{stem}.ipynb"
    assert by_name["18_fastest"].after == by_name["ladder"].after == ("benchmark",)
    assert by_name["20_operator"].after == ("host",)
    assert {*by_name["host"].after} == {*names} - {"host", "20_operator"}
    assert [each.name for each in todo if each.alone] == ["host"]


def test_a_peer_that_is_not_found_is_named(recording, monkeypatch):
    here = dict.fromkeys([*peers.providers(), "tiled"])
    for name in ("liger", "quack"):
        del here[name]
    monkeypatch.setattr(fastest, "providers", lambda: here)
    assert recording.lacking([]) == ["liger", "quack"]
    assert recording.lacking(["quack"]) == ["liger"]


def test_tasks_find_no_kernel_that_another_folder_compiled(recording):
    outside = {"TRITON_CACHE_DIR": "/elsewhere", "PYTHONPATH": "/site", "HOME": "/home"}
    found = recording.environment("abc1234", outside)
    assert Path(found.pop("TRITON_CACHE_DIR")).is_relative_to(ROOT / "_build")
    assert found == {
        "HOME": "/home",
        "PYTHONPATH": f"{ROOT}:/site",
        "COURSE_RECORD": "1",
        "COURSE_COMMIT": "abc1234",
    }
    assert recording.environment("abc1234", {})["PYTHONPATH"] == str(ROOT)
