"""Which bytes each thread of a compiled kernel reads and writes, without a GPU.

`accesses` carries out the integer part of a kernel's PTX for all threads of one thread
block at once. Addresses follow from thread numbers and arguments by integer arithmetic,
so this is enough to know them. Values in global memory are unknown. In their place each
element holds its own address, so that a value also says which element it is: where a
kernel only moves values, one sees where each goes.

The block runs in the order of the text, each instruction for all threads. That is right
for kernels without loops: a loop's body is carried out once. What does not follow from
known integers (floats, shuffles, inline functions) is unknown, and stays so.

Weighed: GPGPU-Sim and Accel-Sim run PTX and SASS with timing, but need CUDA's own tools
and a build; NVBit watches accesses on a GPU only.

Source: https://docs.nvidia.com/cuda/parallel-thread-execution/
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels.lab.compile import Compiled

OFF = -1  # the address of a thread whose predicate is false


@dataclass(frozen=True)
class Access:
    """One load or store instruction, as all threads of a block carry it out.

    Attributes:
        kind: "ld" or "st".
        space: "global" or "shared".
        n_bytes: that a thread moves.
        addresses: of each thread, in bytes, shape (threads,); OFF where the thread is
            masked off. Shared memory starts at 0.
        values: what each thread moves, shape (threads, registers); None if unknown.
    """

    kind: str
    space: str
    n_bytes: int
    addresses: np.ndarray = field(repr=False)
    values: np.ndarray | None = field(repr=False)


def accesses(
    compiled: Compiled,
    *arguments: int,
    program: Sequence[int] = (0, 0, 0),
    space: str | None = None,
) -> list[Access]:
    """The accesses of one thread block, in the order of the PTX.

    An instruction that moves 8 × 8 matrices (stmatrix, ldmatrix) counts as one access
    of 4 bytes per thread for each matrix, which is how it meets the banks.

    Args:
        compiled: what `compile.aot` returned.
        arguments: of the kernel, without constexprs; 0 will do for a pointer. Numbers
            that are missing are unknown.
        program: the program's ids.
        space: "global" or "shared"; None means both.

    Raises:
        TypeError: compiled is no compiled kernel.
    """
    if not isinstance(compiled, Compiled):
        what = type(compiled).__name__
        raise TypeError(f"compiled must be what compile.aot returns, got {what}")
    block = _Block(32 * compiled.num_warps, arguments, program)
    for line in compiled.ptx.splitlines():
        block.step(line.split("//")[0].strip().rstrip(";"))
    return [each for each in block.found if space in (None, each.space)]


def stored(found: Iterable[Access], space: str = "global") -> dict[int, int]:
    """What the stores to a space leave there: the address of each register → its value.

    Stores of unknown values are left out.
    """
    left = {}
    for access in found:
        if (access.kind, access.space) == ("st", space) and access.values is not None:
            size = access.n_bytes // access.values.shape[1]
            for address, values in zip(access.addresses, access.values, strict=True):
                if address != OFF:
                    left |= {
                        int(address) + size * i: int(v) for i, v in enumerate(values)
                    }
    return left


Value = np.ndarray  # of each thread, int64; 32-bit values as 0 to 2**32 - 1


class _Block:
    """The registers and the shared memory of one thread block."""

    def __init__(self, threads: int, arguments: Sequence, program: Sequence) -> None:
        self.threads = threads
        self.arguments = arguments
        self.registers = {"%tid.x": np.arange(threads)}
        self.registers |= dict.fromkeys(("%tid.y", "%tid.z"), self.of(0))
        for axis, number in zip("xyz", program, strict=True):
            self.registers[f"%ctaid.{axis}"] = self.of(number)
        self.shared: dict[int, int] = {}
        self.found: list[Access] = []

    def of(self, number: int) -> Value:
        return np.full(self.threads, number, dtype=np.int64)

    def read(self, operand: str) -> Value | None:
        """A register, a number, or a name of shared memory; None if unknown."""
        operand = operand.strip()
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", operand):
            return self.of(int(operand, 0))
        if operand.startswith("global_smem"):
            return self.of(0)
        return self.registers.get(operand)

    def step(self, line: str) -> None:
        found = re.match(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s+(.*)", line)
        if not found:
            return
        negated, guard, name, rest = found.groups()
        runs = self.of(1) if guard is None else self.registers.get(guard)
        if runs is not None and negated:
            runs = 1 - runs
        parts = name.split(".")
        if parts[0] in ("ld", "st") and {"global", "shared"} & {*parts}:
            self.move(parts, rest, runs)
        elif parts[0] in ("stmatrix", "ldmatrix"):
            self.move_matrices(parts, rest, runs)
        elif parts[:2] == ["ld", "param"]:
            target, number = re.match(r"(\S+), \[\w+_(\d+)\]", rest).groups()
            known = int(number) < len(self.arguments)
            self.write(target, self.of(self.arguments[int(number)]) if known else None)
        else:
            self.compute(parts, rest, runs)

    def write(self, register: str, value: Value | None) -> None:
        if value is None:
            self.registers.pop(register, None)
        else:
            self.registers[register] = value

    def compute(self, parts: list[str], rest: str, runs: Value | None) -> None:
        target, *operands = (each.strip() for each in rest.split(","))
        if not target.startswith("%") or parts[0] not in _OPERATIONS:
            for register in re.findall(r"%\w+", rest.split(",")[0]):
                self.write(register, None)
            return
        values = [self.read(each) for each in operands]
        if runs is None or any(each is None for each in values):
            self.write(target, None)
            return
        result = _OPERATIONS[parts[0]](parts, *values)
        if result is not None and not runs.all():
            before = self.registers.get(target)
            result = None if before is None else np.where(runs, result, before)
        self.write(target, result)

    # ---- memory ----------------------------------------------------------------------

    def move(self, parts: list[str], rest: str, runs: Value | None) -> None:
        space = "shared" if "shared" in parts else "global"
        size = int(re.sub(r"\D", "", parts[-1])) // 8
        inside, after = re.search(r"\[([^]]*)\](.*)", rest).groups()
        base, *offset = inside.split("+")
        named = (after if parts[0] == "st" else rest.split("[")[0]).strip(" ,{}\t")
        names = [each.strip() for each in named.strip("{} ,").split(",")][
            : _many(parts)
        ]
        start = self.read(base)
        if start is None or runs is None:
            if parts[0] == "ld":
                for name in names:
                    self.write(name, None)
            return
        start = start + (int(offset[0], 0) if offset else 0)
        addresses = np.where(runs.astype(bool), start, OFF)
        words = [
            np.where(addresses == OFF, OFF, start + size * i) for i in range(len(names))
        ]
        self.exchange(parts[0], space, size, names, words, size * len(names), addresses)

    def move_matrices(self, parts: list[str], rest: str, runs: Value | None) -> None:
        """Lane l moves word l % 4 of the row at lane 8m + l // 4, of matrix m."""
        kind, inside = parts[0][:2], re.search(r"\[([^]]*)\]", rest)[1]
        base, *offset = inside.split("+")
        names = [each.strip() for each in re.search(r"\{([^}]*)\}", rest)[1].split(",")]
        start = self.read(base)
        if start is None or runs is None or "trans" in parts:
            for name in names if kind == "ld" else ():
                self.write(name, None)
            return
        rows = (start + (int(offset[0], 0) if offset else 0)).reshape(-1, 32)
        lane = np.arange(32)
        for matrix, name in enumerate(names):
            words = (rows[:, 8 * matrix + lane // 4] + 4 * (lane % 4)).ravel()
            self.exchange(kind, "shared", 4, [name], [words], 4, words)

    def exchange(
        self,
        kind: str,
        space: str,
        size: int,
        names: list[str],
        words: list[Value],
        n_bytes: int,
        addresses: Value,
    ) -> None:
        """Carries out one access: `words` are the addresses of each register."""
        if kind == "st":
            values = [self.read(name) for name in names]
            for at, value in zip(words, values, strict=True):
                self.keep(space, at, value)
        else:
            values = [self.look(space, at) for at in words]
            for name, value in zip(names, values, strict=True):
                self.write(name, None if value is None else value % 2 ** (8 * size))
        known = all(value is not None for value in values)
        moved = np.stack(values, axis=1) if known else None
        self.found.append(Access(kind, space, n_bytes, addresses, moved))

    def keep(self, space: str, at: Value, value: Value | None) -> None:
        if space == "shared":
            for thread, address in enumerate(at.tolist()):
                if address != OFF:
                    held = None if value is None else int(value[thread])
                    self.shared[address] = held

    def look(self, space: str, at: Value) -> Value | None:
        """Global memory holds at each address that address."""
        if space == "global":
            return at
        held = [OFF if a == OFF else self.shared.get(a) for a in at.tolist()]
        return None if None in held else np.array(held)


def _many(parts: list[str]) -> int:
    """How many registers a thread moves by an instruction, such as ld.global.v4.b32."""
    return next((int(each[1:]) for each in parts if re.fullmatch(r"v\d", each)), 1)


# ---- integer instructions ------------------------------------------------------------


def _bits(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:])


def _wrapped(kind: str, value: Value) -> Value:
    """The value as a register of this type holds it; int64 wraps by itself."""
    return value if _bits(kind) == 64 else value % 2 ** _bits(kind)


def _typed(kind: str, value: Value) -> Value:
    """The number that a register's bits mean in this type."""
    if kind[0] != "s" or _bits(kind) == 64:
        return _wrapped(kind, value)
    half = 2 ** (_bits(kind) - 1)
    return (value + half) % (2 * half) - half


def _arithmetic(combine: Callable[..., Value]) -> Callable:
    """An instruction whose operands have the type that its name ends with."""

    def carried_out(parts: list[str], *values: Value) -> Value | None:
        if parts[-1][0] not in "subp" or "hi" in parts:  # floats; the high half
            return None
        kind, wide = parts[-1], "wide" in parts
        factors = 2 if wide else len(values)  # what mad.wide adds has the result's type
        typed = [_typed(kind, v) if i < factors else v for i, v in enumerate(values)]
        result = combine(*typed)
        return _wrapped(f"b{2 * _bits(kind)}" if wide else kind, result)

    return carried_out


def _compared(parts: list[str], one: Value, other: Value) -> Value | None:
    kind, compare = parts[-1], parts[1]
    signs = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
    compare = signs.get(compare, compare)
    names = {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}
    names |= {"eq": "equal", "ne": "not_equal"}
    if kind[0] == "f" or compare not in names or len(parts) > 3:
        return None
    kind = {"lo": "u", "ls": "u", "hi": "u", "hs": "u"}.get(parts[1], kind[0]) + kind[
        1:
    ]
    result = getattr(np, names[compare])(_typed(kind, one), _typed(kind, other))
    return result.astype(np.int64)


def _converted(parts: list[str], value: Value) -> Value | None:
    target, source = parts[-2], parts[-1]
    if "f" in (target[0], source[0]):
        return None
    return _wrapped(target, _typed(source, value))


def _field(parts: list[str], value: Value, start: Value, length: Value) -> Value:
    """bfe: bits from `start` on, with the sign of the highest for a signed type."""
    field = (_wrapped(parts[-1], value) >> start) & ((1 << length) - 1)
    if parts[-1][0] == "s":
        top = 1 << np.maximum(length - 1, 0)
        field = (field ^ top) - top
    return _wrapped(parts[-1], field)


def _logic(parts: list[str], *values: Value) -> Value:
    """lop3: any function of three bits, as a table of eight."""
    *words, table = values
    result = np.zeros_like(words[0])
    for case in range(8):
        term = np.full_like(result, -1)
        for word, bit in zip(words, (4, 2, 1), strict=True):
            term &= word if case & bit else ~word
        result |= np.where(table >> case & 1, term, 0)
    return _wrapped(parts[-1], result)


_OPERATIONS: dict[str, Callable] = {
    "mov": _arithmetic(lambda a: a),
    "add": _arithmetic(lambda a, b: a + b),
    "sub": _arithmetic(lambda a, b: a - b),
    "mul": _arithmetic(lambda a, b: a * b),
    "mad": _arithmetic(lambda a, b, c: a * b + c),
    "shl": _arithmetic(lambda a, b: a << np.minimum(b, 63)),
    "shr": _arithmetic(lambda a, b: a >> np.minimum(b, 63)),
    "and": _arithmetic(lambda a, b: a & b),
    "or": _arithmetic(lambda a, b: a | b),
    "xor": _arithmetic(lambda a, b: a ^ b),
    "not": _arithmetic(lambda a: ~a),
    "neg": _arithmetic(lambda a: -a),
    "min": _arithmetic(np.minimum),
    "max": _arithmetic(np.maximum),
    "setp": _compared,
    "selp": lambda parts, one, other, which: np.where(which, one, other),
    "cvt": _converted,
    "cvta": lambda parts, value: value,
    "bfe": _field,
    "lop3": _logic,
}
