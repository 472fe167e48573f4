"""The compiler's stages: traced to a kernel's Python, compared, counted and timed.

`trace` compiles a launch once more, with line numbers, and says which lines of every
stage come from which statement of the kernel. `diff` compares two compiled kernels at a
stage, `opcodes` counts their instructions, and `times` says how long each stage takes.
Like `compile`, all of it needs no GPU.

A compiler moves, merges and drops instructions. So a trace is the compiler's own
account of where an instruction comes from: good for reading, and no proof.

Weighed: Compiler Explorer colours source and PTX alike, in a browser; `nvdisasm
--print-line-info` alone covers the last stage, and names Triton's library instead of
the kernel for whatever `tl.max` becomes.
"""

import ast
import difflib
import inspect
import itertools
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import triton
from triton.compiler import make_backend

from kernels.lab import compile as compiling
from kernels.lab import process
from kernels.lab.compile import STAGES, Compiled
from kernels.lab.gpu import Gpu, named
from kernels.lab.launch import Launch
from kernels.lab.show import Code


class Line(NamedTuple):
    """A line of a stage, and the kernel's statement that it comes from.

    Attributes:
        text: the line.
        number: the number of the statement's first line in its file; None where the
            compiler does not say.
    """

    text: str
    number: int | None


@dataclass(frozen=True)
class Trace:
    """A compiled kernel whose lines know their Python.

    Attributes:
        name: the kernel's name.
        gpu: the GPU that it was compiled for.
        source: the kernel's statements, by the number of their first line in the file.
        stages: the operations or instructions of each stage in `compile.STAGES`,
            without declarations.
    """

    name: str
    gpu: Gpu = field(repr=False)
    source: Mapping[int, str] = field(repr=False)
    stages: Mapping[str, tuple[Line, ...]] = field(repr=False)

    def statement(self, of: str) -> int:
        """Returns the number of the one statement that holds a piece of Python.

        Args:
            of: the piece, such as "tl.load(x_ptr".

        Raises:
            ValueError: no statement holds it, or several do.
        """
        found = [number for number, text in self.source.items() if of in text]
        if len(found) != 1:
            what = "several statements hold" if found else "no statement holds"
            raise ValueError(
                f"of must be a piece of one statement of {self.name}, got {of!r}: "
                f"{what} it; the statements are\n" + "\n".join(self.source.values())
            )
        return found[0]

    def lines(self, of: str, stage: str = "ptx") -> list[str]:
        """Returns the lines of a stage that come from a statement.

        Args:
            of: a piece of the statement, see `statement`.
            stage: one of `compile.STAGES`.

        Raises:
            ValueError: there is no such statement or stage.
        """
        number = self.statement(of)
        lines = self.stages[_stage(stage)]
        return [line.text for line in lines if line.number == number]

    def show(self, of: str, *stages: str, only: str = "") -> Code:
        """Returns a statement, and what becomes of it at each stage.

        Args:
            of: a piece of the statement, see `statement`.
            stages: of `compile.STAGES`; none means all.
            only: a regular expression; lines in which it is not found are left out, and
                counted.

        Raises:
            ValueError: there is no such statement or stage.
        """
        parts = [self.source[self.statement(of)]]
        for stage in stages or STAGES:
            lines = self.lines(of, stage)
            kept = [line for line in lines if re.search(only, line)]
            left = f", {len(kept)} of them shown" if len(kept) < len(lines) else ""
            parts.append(f"\n{stage} ({len(lines)} lines{left})")
            parts += [textwrap.indent(line, "    ") for line in kept]
        return Code("\n".join(parts), "text")

    def counts(self) -> list[list[Any]]:
        """Returns how many lines of each stage come from each statement.

        Returns:
            Rows (statement, lines of ttir, of ttgir, of llir, of ptx, of sass). A last
            row, "(no statement)", has the lines of which the compiler does not say it.
        """
        counts = {
            stage: Counter(line.number for line in self.stages[stage])
            for stage in STAGES
        }
        named = {**self.source, None: "(no statement)"}
        return [
            [text, *(counts[stage][number] for stage in STAGES)]
            for number, text in named.items()
        ]


def trace(
    kernel: Launch | Any, *args: Any, gpu: Gpu | str = "H200", **options: Any
) -> Trace:
    """Compiles a launch with line numbers, and traces every stage to its Python.

    Args:
        kernel, args, gpu, options: as for `compile.aot`.

    Raises:
        TypeError, ValueError, KeyError, triton.CompilationError: as `compile.aot`.
    """
    compiling.aot(kernel, *args, gpu=gpu, **options)  # raises what is to be raised
    gpu = gpu if isinstance(gpu, Gpu) else named(gpu)
    if isinstance(kernel, Launch):
        kernel, args, options = compiling.bare(kernel)
    name, owners, source = _statements(kernel)
    args = tuple(map(compiling.without_data, args))
    texts = process.call_in("compiler", _with_lines, kernel, args, options, gpu)
    stages = {
        stage: tuple(Line(text, owners.get(number)) for text, number in found)
        for stage, found in texts.items()
    }
    return Trace(name, gpu, source, stages)


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {STAGES}, got {stage!r}")
    return stage


def _statements(kernel: Any) -> tuple[str, dict[int, int], dict[int, str]]:
    """A kernel's name, the statement of each of its lines, and the statements.

    Statements are known by the number of their first line. A loop's statement is its
    head; the statements of its body stand for themselves.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    lines, first = inspect.getsourcelines(kernel)
    lines = textwrap.dedent("".join(lines)).splitlines()
    (function,) = ast.parse("\n".join(lines)).body
    owners: dict[int, int] = {}
    source: dict[int, str] = {}
    for node in (function, *_inside(function.body)):
        inner = getattr(node, "body", None)
        last = inner[0].lineno - 1 if inner else node.end_lineno
        last = max(last, node.lineno)
        number = node.lineno + first - 1
        start = 1 if node is function else node.lineno  # decorators stand before it
        code = [line.split("  #")[0].strip() for line in lines[node.lineno - 1 : last]]
        code = [line for line in code if line and not line.startswith("#")]
        source[number] = f"def {node.name}" if node is function else " ".join(code)
        for line in range(start, last + 1):
            owners[line + first - 1] = number
    return function.name, owners, source


def _inside(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """The statements of a body and of the loops in it, without its docstring."""
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        for inner in (getattr(node, "body", []), getattr(node, "orelse", [])):
            yield from _inside(inner)


# ---- in the compiler's world ---------------------------------------------------------

Numbered = list[tuple[str, int | None]]  # lines, and their line of the kernel's file


class _WithLines(compiling.Target):
    """A target whose kernels Triton keeps apart from those without line numbers."""

    def get_current_device(self) -> int:
        return -self.target.arch


def _with_lines(kernel: Any, args: tuple, options: dict, gpu: Gpu) -> dict:
    triton.runtime.driver.set_active(_WithLines(gpu.compute_capability))
    knobs = triton.knobs.compilation
    with knobs.scope():
        knobs.disable_line_info = False
        made = kernel.warmup(*args, grid=(1,), **options)
        ptx = list(_ptx_lines(made.asm["ptx"]))
        target = made.metadata.target
        assemble = make_backend(target).make_cubin
        cubin = assemble(_renumbered(ptx), {}, made.metadata, target.arch)
    sass = compiling.tool("nvdisasm", cubin, "--print-code", "--print-line-info")
    return {
        "ttir": _mlir(made.asm["ttir"]),
        "ttgir": _mlir(made.asm["ttgir"]),
        "llir": _llvm(made.asm["llir"]),
        "ptx": _instructions(ptx),
        "sass": _sass(sass),
    }


def _mlir(text: str) -> Numbered:
    """The operations of a function, with the line of the outermost call of each."""
    aliases = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.M))

    def line_of(place: str) -> int | None:
        """The line of a location, such as `#loc3` or `callsite(#loc1 at #loc2)`."""
        if place.startswith("callsite("):
            return line_of(place.rpartition(" at ")[2].rstrip(")"))
        if direct := re.match(r'"[^"]*":(\d+):', place):
            return int(direct[1])
        inner = re.search(r"#loc\d*", place)
        return line_of(aliases[inner[0]]) if inner else None

    body = text[text.index("tt.func") :].splitlines()[1:]
    found: Numbered = []
    for line in body[: body.index(next(each for each in body if each[:3] == "  }"))]:
        place = re.search(r" loc\(((?:[^()]|\([^()]*\))*)\)\)?:?$", line)
        number = line_of(place[1]) if place else None
        found.append((re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", line[4:]), number))
    closing: dict[int, int | None] = {}  # an operation's region ends with its location
    for i, (line, number) in reversed(list(enumerate(found))):
        depth = len(line) - len(line.lstrip())
        if line.lstrip().startswith("}"):
            closing[depth] = number
        elif line.endswith("{"):
            found[i] = line, closing[depth]
        elif line.endswith("):"):  # the arguments of a region
            found[i] = line, found[i + 1][1]
    return found


def _llvm(text: str) -> Numbered:
    """The instructions, with the line of the outermost call of each."""
    places = {}
    for name, line, rest in re.findall(
        r"^(!\d+) = (?:distinct )?!DILocation\(line: (\d+)(.*)\)$", text, re.M
    ):
        places[name] = int(line), re.search(r"inlinedAt: (!\d+)", rest)

    def line_of(name: str) -> int | None:
        line, caller = places.get(name, (None, None))
        return line_of(caller[1]) if caller else line

    found = re.findall(
        r"^  (\S.*?)(?: #\d+)?(?:, !srcloc !\d+)?, !dbg (!\d+)", text, re.M
    )
    return [
        (line.replace(r"\0A\09", "\n        "), line_of(name)) for line, name in found
    ]


def _ptx_lines(text: str) -> Iterable[tuple[str, int | None]]:
    """Every line of the PTX but its line numbers, with the line of the outermost call.

    LLVM writes what is inlined after a comment or after `inlined_at`, by version. In
    inline assembly it counts on from the first line; all of it is the first line's.
    """
    callers: dict[str, str] = {}
    number, inline = None, False
    for line in text.splitlines():
        inline = (inline or "begin inline asm" in line) and "end inline" not in line
        place = re.match(r"\s*\.loc\s+(\d+ \d+ \d+)(.*)", line)
        if line.lstrip().startswith((".file", ".section")):
            break  # debugging information follows, to the end
        if not place:
            yield line, number
            continue
        if inline and number is not None:
            continue
        here, rest = place.groups()
        if caller := re.search(r"inlined_at (\d+ \d+ \d+)", rest):
            callers[here] = caller[1]
            seen = {here}
            while here in callers and callers[here] not in seen:
                here = callers[here]
                seen.add(here)
            number = int(here.split()[1])
        elif chain := re.findall(r"@\[ [^:]*:(\d+):", rest):
            number = int(chain[-1])
        else:
            number = int(here.split()[1])


def _renumbered(lines: Numbered) -> str:
    """PTX whose line numbers are the kernel's own, so that SASS will have these."""
    text, current = [], None
    for line, number in lines:
        if line.rstrip().endswith(";") and number and number != current:
            text.append(f"\t.loc\t1 {number} 0")
            current = number
        text.append(line)
    return "\n".join([*text, '\t.file\t1 "/kernel.py"', ""])


def _instructions(lines: Numbered) -> Numbered:
    found = [(" ".join(line.split()), number) for line, number in lines]
    return [each for each in found if each[0].endswith(";") and each[0][0] != "."]


def _sass(text: str) -> Numbered:
    number, found = None, []
    for line in text.splitlines():
        if place := re.search(r'//## File ".*", line (\d+)', line):
            number = int(place[1])
        code = re.match(r"\s+/\*\w{4,}\*/\s+(.*?) *;", line)
        if code and not re.match(r"NOP|BRA `\(\.L_x_\d+\)$", code[1]):
            found.append((code[1], number))
    return found


# ---- comparing -----------------------------------------------------------------------


def diff(old: Compiled, new: Compiled, stage: str = "ptx") -> Code:
    """The lines that change from one compiled kernel to another at a stage.

    The numbers of registers and values are left out, because one more instruction
    changes all that follow; equal lines that follow each other become one line with
    their number.

    Args:
        old, new: two compiled kernels, such as one launch for two GPUs.
        stage: one of `compile.STAGES`.

    Raises:
        ValueError: there is no such stage.
    """
    texts = [
        [
            f"{n} × {line}" if (n := len(list(same))) > 1 else line
            for line, same in itertools.groupby(_anonymous(made, stage))
        ]
        for made in (old, new)
    ]
    names = [
        f"{made.name}, {made.gpu.name}, {made.num_warps} warps" for made in (old, new)
    ]
    changes = difflib.unified_diff(*texts, *names, n=0, lineterm="")
    kept = [line for line in changes if not line.startswith("@@")]
    return Code("\n".join(kept) or "no line changes", "diff")


def _anonymous(made: Compiled, stage: str) -> list[str]:
    """The lines of a stage, without the numbers of registers and values."""
    text = getattr(made, _stage(stage)).replace(made.name, "kernel")
    lines = [line.strip() for line in text.splitlines()]
    if stage in ("ptx", "sass"):
        code = r";$" if stage == "ptx" else r"^(?!NOP|\.L_|BRA `\(\.L)\S"
        lines = [line for line in lines if re.search(code, line) and line[0] != "."]
        lines = [" ".join(line.split()) for line in lines]
        return [re.sub(r"(%\w?[a-z]|\bU?[RP])\d+(\.reuse)?\b", r"\1", s) for s in lines]
    code = r"^(%|tail |ret|tt\.|ttg\.|scf\.|#|\}\))"
    lines = [line for line in lines if re.search(code, line)]
    return [re.sub(r"%[\w#]+", "%", line) for line in lines]


def opcodes(made: Compiled, stage: str = "ptx") -> Counter[str]:
    """Counts the instructions of a compiled kernel, by name.

    Args:
        made: a compiled kernel.
        stage: "ptx", with names such as "ld.global.v4.b32", or "sass", with names such
            as "LDG.E.128".

    Raises:
        ValueError: stage is neither.
    """
    if stage not in ("ptx", "sass"):
        raise ValueError(f"stage must be 'ptx' or 'sass', got {stage!r}")
    lines = (re.sub(r"^@!?%?\w+ +", "", line) for line in _anonymous(made, stage))
    return Counter(line.split()[0].rstrip(";") for line in lines)


# ---- timing --------------------------------------------------------------------------


def times(
    kernel: Launch | Any,
    *args: Any,
    gpu: Gpu | str = "H200",
    repeats: int = 5,
    **options: Any,
) -> dict[str, float]:
    """Measures how long the host works on each stage of a compilation.

    Nothing is taken from a cache.

    Args:
        kernel, args, gpu, options: as for `compile.aot`.
        repeats: how often the kernel is compiled, after a first time that warms up.

    Returns:
        The median in ms of: "ast", Python's syntax tree and the first TTIR made from
        it; "ttir", "ttgir", "llir", "ptx" and "cubin", the passes that end in each.

    Raises:
        TypeError, ValueError, KeyError, triton.CompilationError: as `compile.aot`.
        ValueError: repeats is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    compiling.aot(kernel, *args, gpu=gpu, **options)  # raises what is to be raised
    gpu = gpu if isinstance(gpu, Gpu) else named(gpu)
    if isinstance(kernel, Launch):
        kernel, args, options = compiling.bare(kernel)
    args = tuple(map(compiling.without_data, args))
    return process.call_in("compiler", _timed, kernel, args, options, gpu, repeats)


class _Anew(compiling.Target):
    """A target that no kernel was compiled for before."""

    def get_current_device(self) -> object:
        return self


def _timed(kernel: Any, args: tuple, options: dict, gpu: Gpu, repeats: int) -> dict:
    seen: list[dict[str, int]] = []

    def listen(*, times: Any, **_: Any) -> None:
        first = {"ast": times.ir_initialization}
        seen.append(first | dict(times.lowering_stages))

    knobs = triton.knobs.compilation
    with knobs.scope():
        knobs.disable_line_info, knobs.always_compile = True, True
        knobs.listener = listen
        for _ in range(1 + repeats):
            triton.runtime.driver.set_active(_Anew(gpu.compute_capability))
            kernel.warmup(*args, grid=(1,), **options)
    return {
        stage: statistics.median(each[stage] for each in seen[1:]) / 1000
        for stage in seen[0]
    }
