"""A block of threads in Python: shuffles, barriers, shared memory, and their faults.

A reader without a GPU cannot run CUDA C++. So the exercises of chapter `cuda` say in
Python what one thread does, and `run_block` runs that for each thread of a block. It
refuses what is undefined in CUDA, whatever a GPU would happen to compute.

Weighed: Numba's simulator (`kernels.lab.simt`) has no shuffles and finds no races;
compute-sanitizer's racecheck needs a GPU.
"""

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple

BARRIER = "a barrier"
"""What a thread of `run_block` yields to wait for all others (`__syncthreads`)."""

END = "its end"


class Shuffle(NamedTuple):
    """What a thread of `run_block` yields to get the value of lane ^ distance."""

    value: Any
    distance: int


class SharedMemory:
    """The shared memory of a block: values at places, and who used which since when.

    Raises:
        RuntimeError: two warps use a place, one of them writes, and no barrier lies
            between; or nobody has written what is read.
    """

    def __init__(self) -> None:
        self.warp = 0  # whose thread runs
        self._held: dict[Hashable, Any] = {}
        self.forget()

    def forget(self) -> None:
        """Begins to record who uses what; at a barrier, everyone has finished."""
        self._written: dict[Hashable, int] = {}
        self._read: dict[Hashable, set[int]] = {}

    def __getitem__(self, place: Hashable) -> Any:
        writer = self._written.get(place, self.warp)
        if writer != self.warp or place not in self._held:
            who = "no warp has written yet"
            if place in self._held:
                who = f"warp {writer} writes with no barrier between"
            raise RuntimeError(f"warp {self.warp} reads shared[{place!r}], which {who}")
        self._read.setdefault(place, set()).add(self.warp)
        return self._held[place]

    def __setitem__(self, place: Hashable, value: Any) -> None:
        writer = self._written.setdefault(place, self.warp)
        readers = self._read.get(place, set()) - {self.warp}
        if writer != self.warp or readers:
            other = min(readers or {writer})
            verb = "reads" if readers else "writes"
            raise RuntimeError(
                f"warp {self.warp} writes shared[{place!r}], which warp {other} {verb} "
                "with no barrier between"
            )
        self._held[place] = value


def run_block(
    function: Callable[..., Generator],
    values: Sequence[Any],
    *arguments: Any,
    warp_size: int = 32,
) -> list[Any]:
    """Runs a function for each thread of a block, and returns what they return.

    The function yields what one thread cannot do alone: `Shuffle(value, distance)`, and
    gets the other lane's value, or BARRIER. Between two barriers the warps run one
    after the other. An access that another order could change is an error, whatever
    the order.

    Args:
        function: is called with the thread's number, its value, the block's
            SharedMemory, and the arguments; a generator function.
        values: one per thread.
        arguments: the same for all threads.
        warp_size: lanes of a warp.

    Raises:
        RuntimeError: as for SharedMemory; or a shuffle or a barrier that not all lanes
            of a warp take part in.
    """
    shared, count = SharedMemory(), len(values)
    threads = [function(i, value, shared, *arguments) for i, value in enumerate(values)]
    results: list[Any] = [None] * count
    running = list(range(math.ceil(count / warp_size)))
    while running:
        shared.forget()
        waiting = []
        for warp in running:
            shared.warp = warp
            numbers = range(warp * warp_size, min((warp + 1) * warp_size, count))
            if _until_barrier(warp, numbers, threads, results):
                waiting.append(warp)
        running = waiting
    return results


def _until_barrier(
    warp: int, numbers: range, threads: Sequence[Generator], results: list[Any]
) -> bool:
    """Runs a warp until its next barrier; False if it has ended."""
    answers: list[Any] = [None] * len(numbers)
    while True:
        asked: list[Any] = []
        for number, answer in zip(numbers, answers, strict=True):
            try:
                asked.append(threads[number].send(answer))
            except StopIteration as end:
                results[number] = end.value
                asked.append(END)
            if not isinstance(asked[-1], Shuffle) and asked[-1] not in (BARRIER, END):
                raise TypeError(
                    f"a thread must yield a Shuffle or BARRIER, got {asked[-1]!r}"
                )
        at = [f"a shuffle by {a[1]}" if isinstance(a, Shuffle) else a for a in asked]
        other = next((lane for lane in range(len(at)) if at[lane] != at[0]), None)
        if other is not None:
            raise RuntimeError(
                f"lane 0 of warp {warp} is at {at[0]}, and lane {other} is at "
                f"{at[other]}: all lanes must take part"
            )
        if not isinstance(asked[0], Shuffle):
            return asked[0] == BARRIER
        partners = [lane ^ asked[0].distance for lane in range(len(asked))]
        if max(partners) >= len(asked):
            lane = partners.index(max(partners))
            raise RuntimeError(
                f"lane {lane} of warp {warp} shuffles with lane {partners[lane]}, and "
                f"this warp has {len(asked)} lanes"
            )
        answers = [asked[its].value for its in partners]
