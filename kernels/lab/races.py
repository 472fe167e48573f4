"""What the interpreter hides: programs of one launch that do not wait for each other.

The interpreter runs a launch's programs one after the other. So each program finds all
that earlier programs wrote, also without a wait. On a GPU they run at the same time.
`Order` notes which program has waited for what, and shows two kinds of mistakes:

- A *race*: two programs touch an element, and nothing orders the two accesses. Three
  kinds are found: a plain load of what another program wrote, a plain store to what
  another program loaded, and an atomic on what another program stored. Two plain stores
  are not reported: they are wrong only if their values differ.
- A program looks once where it should wait in a loop. Its first look at an element
  gives the value from before another program wrote it, and the second look gives the
  new value. Looks are volatile loads, and atomics on integers that change nothing.

A program knows what another program did before it released: before an atomic that is
not relaxed. It learns of that by an atomic on the same element that is not relaxed, or
by a volatile load, which counts as a wait here.

A kernel that throws away what it read in a race is reported, too: `kernels.cooperative`
in place is one. Only the judge asks for this.

Weighed: compute-sanitizer's racecheck, which needs a GPU and sees shared memory only.
The clocks are those of Flanagan and Freund, "FastTrack", PLDI 2009.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Program = tuple[int, ...]


class Event(NamedTuple):
    """An access: of which program, and when."""

    program: Program
    time: int


class Order:
    """What the running program of a launch knows of the other programs' accesses.

    Addresses are those of elements. The programs run one after the other.
    """

    def __init__(self) -> None:
        self.program: Program | None = None
        self.time = 0
        self.known: dict[Program, int] = {}  # up to which time, of each other program
        self.seen: set[int] = set()  # what the running program looked at
        self.once: dict[int, Event] = {}  # what it found old, and did not look at again
        self.read: dict[int, Event] = {}  # the last plain load of each element
        self.stored: dict[int, Event] = {}  # the last plain store
        self.written: dict[int, Event] = {}  # the last store or atomic
        self.before: dict[int, Any] = {}  # the element's value before that
        self.released: dict[int, dict[Program, int]] = {}  # what an acquire learns

    def begin(self, program: Program) -> dict[int, Event]:
        """Notes which program runs; returns `once` of a program that has ended."""
        self.time += 1
        if program == self.program:
            return {}
        ended, self.program = self.once, program
        self.known, self.seen, self.once = {}, set(), {}
        return ended

    def _unknown(
        self, addresses: Sequence[int], events: dict[int, Event]
    ) -> dict[int, Event]:
        """Those events at these addresses that the running program hasn't waited for.

        Args:
            addresses: of the lanes.
            events: `read`, `stored` or `written`.
        """
        if events.keys().isdisjoint(addresses):
            return {}
        found = {a: events[a] for a in addresses if a in events}
        return {
            address: event
            for address, event in found.items()
            if event.program != self.program
            and self.known.get(event.program, -1) < event.time
        }

    def load(self, addresses: Sequence[int]) -> dict[int, Event]:
        """Notes a plain load; returns the writes that it races with."""
        self.read.update(dict.fromkeys(addresses, Event(self.program, self.time)))
        return self._unknown(addresses, self.written)

    def store(
        self, addresses: Sequence[int], before: Sequence[Any]
    ) -> dict[int, Event]:
        """Notes a plain store over the values `before`; returns the loads it races."""
        self._write(addresses, before)
        self.stored.update(dict.fromkeys(addresses, Event(self.program, self.time)))
        for address in self.released.keys() & set(addresses):
            del self.released[address]
        return self._unknown(addresses, self.read)

    def _write(self, addresses: Sequence[int], before: Sequence[Any]) -> None:
        self.written.update(dict.fromkeys(addresses, Event(self.program, self.time)))
        self.before.update(zip(addresses, before, strict=True))

    def look(self, addresses: Sequence[int], acquires: bool = True) -> dict[int, Any]:
        """Notes a look at elements; returns the old values of those that it gives."""
        early = self._unknown(addresses, self.written)
        early = {a: event for a, event in early.items() if a not in self.seen}
        for address in addresses:
            self.once.pop(address, None)
        if acquires:
            self._acquire(a for a in addresses if a not in early)
        self.seen.update(addresses)
        self.once.update(early)
        return {address: self.before[address] for address in early}

    def _acquire(self, addresses: Iterable[int]) -> None:
        for address in self.released.keys() & set(addresses):
            self.known = _later(self.known, self.released[address])

    def atomic_races(self, addresses: Sequence[int]) -> dict[int, Event]:
        """The plain stores that an atomic races with, before it is noted."""
        return self._unknown(addresses, self.stored)

    def atomic(
        self,
        addresses: Sequence[int],
        before: Sequence[Any],
        idle: Sequence[bool],
        failed: Sequence[bool],
        *,
        acquires: bool,
        releases: bool,
    ) -> dict[int, Any]:
        """Notes an atomic; where it is a look, returns the old values that it gives.

        Args:
            addresses: of the lanes.
            before: the values there before it.
            idle: for each lane, whether it changes nothing, whatever is there.
            failed: for each lane, whether it compared, and wrote nothing.
            acquires, releases: what it does by its `sem` and its scope.
        """
        lanes = [*zip(addresses, before, idle, failed, strict=True)]
        busy = {address for address, _, is_idle, _ in lanes if not is_idle}
        old = self.look([a for a in addresses if a not in busy], acquires)
        self.seen |= busy
        for address in busy:
            self.once.pop(address, None)
        if acquires:
            self._acquire(busy)
        wrote = {
            a: value for a, value, is_idle, missed in lanes if not is_idle | missed
        }
        self._write([*wrote], [*wrote.values()])
        if releases:
            own = {**self.known, self.program: self.time}
            for address, _, _, missed in lanes:
                if not missed:
                    others = self.released.get(address, {})
                    self.released[address] = _later(own, others)
        return old


def _later(a: dict[Program, int], b: dict[Program, int]) -> dict[Program, int]:
    """For each program the later one of two times."""
    return a | {program: max(time, a.get(program, -1)) for program, time in b.items()}
