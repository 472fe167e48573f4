"""Experiments of chapter `debugging`: what tools say of a faulty kernel.

A faulty kernel may break the process that it runs in: it may end it, or lose its GPU,
or never return. So each runs in a process of its own, as from a terminal:

    python -m benchmarks.faults unmasked
    TRITON_DEBUG=1 python -m benchmarks.faults asserting

In the chapter:

    said = record.observe("debugging_assert", faults.run("asserting", TRITON_DEBUG="1"))
"""

import functools
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kernels import debugging
from kernels.lab import backend, description
from kernels.lab.record import Unavailable

LIMIT_S = 150  # for a command
INTERPRETER = "kernels/lab/interpreter.py"
TIMEOUT = ("timeout", "--signal=ABRT", "--kill-after=10")  # and then the seconds
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--show-backtrace", "no")
LONGEST = 130  # characters of a line

# ---- the calls -----------------------------------------------------------------------


@triton.jit
def printing_kernel(input_ptr, BLOCK: tl.constexpr):
    """One program prints a row of BLOCK values, and its maximum in two ways."""
    x = tl.load(input_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.device_print("x", x)
    tl.device_print("device_print says", tl.max(x, axis=0))
    print("print says", tl.max(x, axis=0))


def _matrix(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, device=backend.DEVICE)


def _say(y: torch.Tensor) -> None:
    print("the call returned", flush=True)
    if y.is_cuda:
        torch.cuda.synchronize()  # before anything is allocated that must be freed
    totals = [round(total, 3) for total in y.sum(dim=1).tolist()]
    print("sums of the rows:", totals, flush=True)


def unshifted() -> None:
    """A row of small scores, and a row of large ones."""
    x = _matrix([1.0, 2.0, 3.0], [100.0, 101.0, 102.0])
    _say(debugging.unshifted(x))


def asserting() -> None:
    """The same rows, for the kernel that asserts that no score is large."""
    x = _matrix([1.0, 2.0, 3.0], [100.0, 101.0, 102.0])
    _say(debugging.asserting(x))


def unmasked() -> None:
    """A matrix with nothing behind its last row."""
    x = torch.zeros(2, 1000, device=backend.DEVICE)
    _say(debugging.unmasked(x))


def narrow_offset() -> None:
    """Three rows of four values, 2^30 elements apart; only they are touched."""
    where = {"dtype": torch.float16, "device": backend.DEVICE}
    x = torch.empty_strided((3, 4), (2**30, 1), **where)
    _say(debugging.narrow_offset(x.fill_(1.0)))


def in_turn() -> None:
    """Two calls on the same rows."""
    x = _matrix([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    for _ in range(2):
        _say(debugging.in_turn(x))


def printing() -> None:
    """Two programs with two values each."""
    printing_kernel[(2,)](_matrix([1.0, 2.0], [3.0, 4.0]), BLOCK=2)


CALLS = {
    call.__name__: call
    for call in (unshifted, asserting, unmasked, narrow_offset, in_turn, printing)
}


def main(name: str) -> None:
    """Makes one of CALLS, waits for the GPU, and prints an exception's first line."""
    try:
        CALLS[name]()
        if backend.DEVICE == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        first = (str(error).splitlines() or [""])[0]
        print(f"{type(error).__name__}: {first}", flush=True)
        os._exit(1)  # the context may be lost: nothing is cleaned up


# ---- in a process of its own ---------------------------------------------------------


def run(
    name: str, tool: tuple[str, ...] = (), **variables: str
) -> Callable[[], list[dict[str, Any]]]:
    """A function that makes a call in a process of its own and returns what was said.

    Args:
        name: of CALLS.
        tool: a command that runs the process, such as SANITIZER.
        variables: of the process's environment.

    Returns:
        A function that returns rows of line; the first is the command. It raises
        `Unavailable` where the tool is not installed.
    """
    if name not in CALLS:
        raise ValueError(f"name must be one of {[*CALLS]}, got {name!r}")
    return functools.partial(_run, name, tool, variables)


def _run(
    name: str, tool: tuple[str, ...], variables: dict[str, str]
) -> list[dict[str, Any]]:
    words = [*tool, "python", "-m", "benchmarks.faults", name]
    typed = " ".join([f"{key}={value}" for key, value in variables.items()] + words)
    words[len(tool)] = sys.executable
    if tool:
        words[0] = _path(tool[0])
    try:
        done = subprocess.run(
            words,
            cwd=backend.ROOT,
            env=_environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
        said = done.stdout
        if done.returncode < 0:
            said += f"\nended by {signal.Signals(-done.returncode).name}"
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        said += f"\nended after {LIMIT_S} s"
    return [{"line": line} for line in (f"$ {typed}", *shortened(said))]


def tell(said: Any) -> None:
    """Prints the lines that `run` returned, or `record.observe` of it."""
    if hasattr(said, "attrs"):
        print(said.attrs["source"])
        said = said.to_dict("records")
    print(*(row["line"] for row in said), sep="\n")


def debug(name: str, kernel: Any, line: str, commands: Iterable[str]) -> str:
    """A session of pdb that stops in row 1 of an interpreted kernel.

    Args:
        name: of CALLS.
        kernel: a kernel that the call launches.
        line: the beginning of the kernel's line to stop at.
        commands: what is typed at pdb's prompts; the session goes on when they end.

    Returns:
        The session as a terminal shows it.

    Raises:
        RuntimeError: the interpreter does not work with the NumPy that is installed.
    """
    lines, first = inspect.getsourcelines(kernel.fn)
    at = first + next(
        i for i, text in enumerate(lines) if text.strip().startswith(line)
    )
    path = Path(inspect.getsourcefile(kernel.fn)).relative_to(backend.ROOT)
    start = ["-c", f"break {path}:{at}, row == 1", "-c", "continue"]
    description.require_interpreter()
    commands = [*commands]
    done = subprocess.run(
        [sys.executable, "-m", "pdb", *start, "-m", "benchmarks.faults", name],
        cwd=backend.ROOT,
        env=_environment({"TRITON_INTERPRET": "1"}),
        input="\n".join([*commands, "continue", "quit", ""]),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=LIMIT_S,
    )
    stop, *answers = done.stdout.replace(f"{backend.ROOT}/", "").split("(Pdb) ")
    prompts = [f"(Pdb) {command}" for command in commands]
    shown = [part.rstrip() for part in answers[: len(commands)]]
    pairs = zip(prompts, shown, strict=True)
    return "\n".join([stop.rstrip(), *(part for pair in pairs for part in pair)])


def _environment(variables: dict[str, str]) -> dict[str, str]:
    rest = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(backend.ROOT), rest)))
    return os.environ | {"PYTHONPATH": path} | variables


def _path(tool: str) -> str:
    found = shutil.which(tool) or f"/usr/local/cuda/bin/{tool}"
    if not Path(found).exists():
        raise Unavailable(f"{tool} is not on the PATH")
    return found


def shortened(said: str, most: int = 24) -> list[str]:
    """The lines of a text that tell something new.

    Of lines that differ in numbers only, two are kept, and of a traceback the innermost
    frame in the course's files, but for INTERPRETER, which every operation may pass.
    Empty lines are left out, and the folders before the course's files. Lines are cut
    at LONGEST characters.
    """
    alike: Counter = Counter()
    kept: list[str] = []
    for line in said.replace(f"{backend.ROOT}/", "").splitlines():
        if re.match(r"Extension modules|[= ]*$", line):
            continue
        key = re.sub(r"0x[0-9a-f]+|\d+", "#", line)
        if line.startswith("  File"):
            is_ours = re.match(r'  File "(kernels|benchmarks)/', line)
            if not is_ours or INTERPRETER in line or alike["frame"]:
                continue
            key = "frame"
        alike[key] += 1
        if alike[key] <= 2 and len(kept) < most:
            kept.append(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…")
    more = alike.total() - len(kept)
    return kept + ([f"({more} more lines, most of them like these)"] if more else [])


if __name__ == "__main__":
    main(sys.argv[1])
