"""Records everything anew, at one commit, on all GPUs of this machine.

    python .ci/record.py [--minutes 60] [--missing liger ...]

The record is what all notebooks, the benchmark, its controls (`classes`, `flush`) and
the figure of the ladder measure. Each of these is a task, and has a GPU of its own
while it runs. The host's times come last, when nothing else runs.

When the minutes are over, running tasks are stopped, and the command says what is left.
At the same commit, the next run goes on with that. A task's output is in
_build/record/<commit>/<task>.txt; it is done when <task>.done lies beside it.

All of the benchmark's peers must be found here, but those that --missing names.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REGIONS = ("large", "any", "strided", "middle", "longest", "few", "small")
AFTER = {"18_fastest": ("benchmark",), "20_operator": ("host",)}  # they show its rows
LONG = ("13_matmul", "19_gradient", "12_cuda")  # pages that begin first
PYTHON = (sys.executable, "-m")
EXECUTE = (*PYTHON, "nbconvert", "--to", "notebook", "--execute", "--inplace")
EXECUTE += ("--ExecutePreprocessor.record_timing=False",)
# A stream is flushed in pieces: this makes it one output again.
COALESCE = (*PYTHON, "nbconvert", "--to", "notebook", "--inplace", "--coalesce-streams")


@dataclass(frozen=True)
class Task:
    """A command for one GPU.

    Attributes:
        name: of its files.
        command: its words.
        after: the tasks that must be done before.
        alone: whether nothing else may run beside it.
    """

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    alone: bool = False


def tasks(pages: Iterable[str]) -> list[Task]:
    """What there is to do, in the order in which it begins.

    Args:
        pages: the stems of all notebooks.
    """
    pages = sorted(pages, key=lambda stem: (stem not in LONG, stem))
    first = [Task("benchmark", (*PYTHON, "benchmarks.fastest", *REGIONS))]
    first += [Task(n, (*PYTHON, f"benchmarks.{n}")) for n in ("classes", "flush")]
    for stem in pages:
        command = (*EXECUTE, f"notebooks/{stem}.ipynb")
        first.append(Task(stem, command, AFTER.get(stem, ())))
    ladder = Task("ladder", (sys.executable, "book/figures/ladder.py"), ("benchmark",))
    others = tuple(task.name for task in first if "host" not in task.after)
    host = (*PYTHON, "benchmarks.fastest", "host")
    return [*first, ladder, Task("host", host, (*others, "ladder"), alone=True)]


def run(
    todo: Sequence[Task],
    gpus: Sequence[str],
    logs: Path,
    minutes: float,
    env: Mapping[str, str] = os.environ,
) -> list[Task]:
    """Runs tasks, each on a GPU that is free.

    Args:
        todo: tasks whose files are in `logs` are done.
        gpus: what CUDA_VISIBLE_DEVICES calls them.
        logs: the folder for outputs, which exists.
        minutes: then what still runs is stopped.
        env: of the commands.

    Returns:
        The tasks that are left: failed, stopped, or not begun.
    """
    end = time.monotonic() + 60 * minutes
    left = [task for task in todo if not (logs / f"{task.name}.done").exists()]
    waiting, running, change = list(left), {}, threading.Condition()

    def next_task() -> Task | None:
        names = {task.name for task in left}
        for task in waiting:
            ready = names.isdisjoint(task.after)
            if ready and not (running and task.alone):
                return task
        return None

    def worker(gpu: str) -> None:
        while True:
            with change:
                while not (task := next_task()) or any(t.alone for t in running):
                    if not waiting or not running or time.monotonic() > end:
                        return
                    change.wait(1)
                if time.monotonic() > end:
                    return
                waiting.remove(task)
                running[task] = gpu
            code = execute(task, gpu, logs, end, env)
            with change:
                del running[task]
                if code == 0:
                    (logs / f"{task.name}.done").touch()
                    left.remove(task)
                change.notify_all()

    threads = [threading.Thread(target=worker, args=[gpu]) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return left


def execute(
    task: Task, gpu: str, logs: Path, end: float, env: Mapping[str, str]
) -> int | None:
    """Runs one task to its end, and returns its code; None if it was stopped."""
    start = time.monotonic()
    with (logs / f"{task.name}.txt").open("w") as log:
        process = subprocess.Popen(
            task.command,
            cwd=ROOT,
            env={**env, "CUDA_VISIBLE_DEVICES": gpu},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that what it has started stops with it
        )
        try:
            code = process.wait(max(0, end - start))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    word = {0: "done", None: "stopped"}.get(code, "failed")
    print(
        f"{task.name} {word} on GPU {gpu}, {time.monotonic() - start:.0f} s", flush=True
    )
    return code


def environment(commit: str, outside: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of all tasks of a record.

    Their cache of compiled kernels is this folder's. A kernel that was compiled in
    another folder would name that folder in messages that pages show.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), outside.get("PYTHONPATH")]))
    ours = {"COURSE_RECORD": "1", "COURSE_COMMIT": commit, "PYTHONPATH": path}
    return {**outside, **ours, "TRITON_CACHE_DIR": str(ROOT / "_build" / "triton")}


def lacking(allowed: Iterable[str]) -> list[str]:
    """The benchmark's peers that are neither found here nor allowed to be missing."""
    from benchmarks import fastest, peers

    return sorted({*peers.providers()} - {*fastest.providers()} - {*allowed})


def main() -> int:
    """Reads the command line, and records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1e4, help="stop after these")
    parser.add_argument("--missing", nargs="*", default=[], help="peers that may lack")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from kernels.lab import clock, record

    clock.require_gpu()
    import torch

    if names := lacking(args.missing):
        parser.exit(1, f"peers are not found here: {', '.join(names)}\n")
    commit = record.commit()
    logs = ROOT / "_build" / "record" / commit
    if not logs.exists():  # nothing is recorded yet at this commit
        logs.mkdir(parents=True)
        record.folder().mkdir(exist_ok=True)
        for file in record.folder().glob("*.csv"):
            file.unlink()
    every = range(torch.cuda.device_count())
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, every)))
    pages = [path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")]
    todo = tasks(pages)
    left = run(todo, shown.split(","), logs, args.minutes, environment(commit))
    if left:
        print(f"left: {', '.join(task.name for task in left)}; see {logs}")
        return 1
    files = [f"notebooks/{stem}.ipynb" for stem in sorted(pages)]
    return subprocess.run([*COALESCE, *files], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
