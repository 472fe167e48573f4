"""Models of a GPU's behaviour: schedules, a cache, a block's layout, a butterfly.

Each function takes the numbers of a case and returns what the model says about it. The
pictures of `draw` show the results; a test or a chapter can compare them with what the
compiler or a GPU does. The models leave much out: programs do not slow each other down,
and the cache is fully associative.

Weighed: SimPy simulates queues in general, in more code than these loops need;
GPGPU-Sim and Accel-Sim model a GPU cycle by cycle, and run no Triton kernel.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Run(NamedTuple):
    """One task on one slot, from its begin to its end."""

    slot: int
    begin: float
    end: float


def scheduled_by_queue(
    durations: Sequence[float],
    slots: int,
    start: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> list[Run]:
    """Runs tasks in order, each on the slot that is free first.

    The GPU schedules the programs of a grid like this.

    Args:
        durations: of each task, at speed 1.
        slots: how many tasks run at once.
        start: the time that a slot needs before each task.
        speeds: of each slot; all 1 by default. `start` does not depend on them.
    """
    speeds = speeds or [1.0] * slots
    free, runs = [0.0] * slots, []
    for duration in durations:
        slot = min(range(slots), key=free.__getitem__)
        begin = free[slot] + start
        free[slot] = begin + duration / speeds[slot]
        runs.append(Run(slot, begin, free[slot]))
    return runs


def scheduled_by_stride(
    durations: Sequence[float],
    slots: int,
    start: float = 0.0,
    speeds: Sequence[float] | None = None,
) -> list[Run]:
    """Runs tasks p, p + slots, p + 2·slots, … on slot p.

    The programs of a resident grid take the rows of a matrix like this.

    Args:
        durations, slots, speeds: as for `scheduled_by_queue`.
        start: the time that a slot needs before its first task.
    """
    speeds = speeds or [1.0] * slots
    free, runs = [start] * slots, []
    for task, duration in enumerate(durations):
        slot = task % slots
        begin = free[slot]
        free[slot] = begin + duration / speeds[slot]
        runs.append(Run(slot, begin, free[slot]))
    return runs


class PartRun(NamedTuple):
    """One program that computes one part of a row; a time is inf if it never comes.

    Attributes:
        slot: on which the program runs; -1 if it never begins.
        begin: the program begins to load its part.
        published: the other programs can see its result.
        resumed: it stops waiting.
        end: it has stored its part.
    """

    slot: int
    begin: float
    published: float
    resumed: float
    end: float


def scheduled_with_waiting(
    order: Sequence[tuple[int, int]],
    slots: int,
    *,
    load: float = 1.0,
    store: float = 0.5,
    patience: float = math.inf,
) -> list[PartRun]:
    """Runs programs that share rows and wait for each other.

    A program loads its part of a row, publishes its pair, waits until all parts of the
    row are published, and stores. Programs begin in order, each on the slot that is
    free first. If programs that wait hold all slots, none of them ever ends.

    Unless they help. A program that has waited for as long as its patience loads a
    missing part and publishes its pair, and so on until none is missing. Then it loads
    its own part again. Programs of one row choose as chapter `cooperative`'s do.

    Args:
        order: (row, part) of each program.
        slots: programs resident at once.
        load, store: times, in any one unit.
        patience: how long a program waits before it helps.
    """
    never = math.inf
    runs = [[-1, never, never, never, never] for _ in order]
    n_parts = Counter(row for row, _ in order)
    missing = {row: {part for its, part in order if its == row} for row in n_parts}
    events = [(0.0, "slot is free", slot, -1) for slot in range(slots)]
    begun = 0

    def compute(program: int, part: int, now: float) -> None:
        heapq.heappush(events, (now + load, "computed", program, part))

    def help_or_return(program: int, now: float) -> None:
        row, own = order[program]
        there = max(n_parts[row] - len(missing[row]), 1)
        nearest = sorted(missing[row], key=lambda part: ((part - own) % there, part))
        compute(program, [*nearest, own][0], now)

    def finish(program: int, now: float) -> None:
        run = runs[program]
        run[3:] = min(run[3], now), now + store
        heapq.heappush(events, (now + store, "slot is free", run[0], -1))

    while events:
        now, event, number, part = heapq.heappop(events)
        if event == "slot is free" and begun < len(order):
            runs[begun][:3] = number, now, now + load
            compute(begun, order[begun][1], now)
            begun += 1
        elif event == "computed":
            row, own = order[number]
            missing[row].discard(part)
            helps = runs[number][3] < never
            if helps and part == own:
                finish(number, now)
            else:
                event = (now, "goes on") if helps else (now + patience, "patience ends")
                heapq.heappush(events, (*event, number, -1))
            if not missing[row]:
                for program, (its_row, _) in enumerate(order):
                    if its_row == row and runs[program][2] <= now < runs[program][3]:
                        finish(program, now)
        elif event == "patience ends" and now < never == runs[number][3]:
            runs[number][3] = now
            help_or_return(number, now)
        elif event == "goes on":  # after all that is computed at this moment
            help_or_return(number, now)
    return [PartRun(*run) for run in runs]


class Iteration(NamedTuple):
    """One iteration of a pipelined loop: its load issued, its arithmetic, its end."""

    issued: float
    begin: float
    end: float


def pipelined(
    iterations: int, num_stages: int, load: float, compute: float, store: float
) -> list[Iteration]:
    """Runs a loop whose loads Triton's compiler has pipelined.

    As in the TTGIR of a softmax over rows. With s > 1 stages, s − 1 loads are issued
    before the loop. Iteration i waits for its load, computes, stores, and then issues
    the load of iteration i + s − 1 into the buffer that it has emptied. With one stage
    an iteration issues its own load and waits for it. Loads do not slow each other.

    Args:
        iterations: of the loop.
        num_stages: of the pipeline, at least 1.
        load: from issuing a load to its arrival.
        compute, store: the time of each, in the same unit.
    """
    ahead = num_stages - 1
    issued, now, runs = [0.0] * ahead, 0.0, []
    for i in range(iterations):
        if not ahead:
            issued.append(now)
        begin = max(now, issued[i] + load)
        now = begin + compute + store
        runs.append(Iteration(issued[i], begin, now))
        if ahead:
            issued.append(now)
    return runs


def served_by_lru(order: Iterable[Hashable], capacity: int) -> list[bool]:
    """Whether each access finds its block in a cache that is empty at first.

    The cache holds `capacity` blocks. A new block replaces the least recently used one
    (LRU). A GPU's L2 only resembles it.

    Args:
        order: the blocks, in the order of the accesses.
        capacity: in blocks.
    """
    held: dict[Hashable, None] = {}  # the most recently used block comes last
    found = []
    for block in order:
        found.append(block in held)
        held.pop(block, None)
        held[block] = None
        if len(held) > capacity:
            del held[next(iter(held))]
    return found


def grouped_tile(
    program: int, tiles_m: int, tiles_n: int, group_m: int = 1
) -> tuple[int, int]:
    """The (row, column) of the tile that a program of a matrix product computes.

    The programs go down `group_m` rows of tiles, then on to the next column. With 1
    they take one row of tiles after another.

    Args:
        program: its number.
        tiles_m, tiles_n: the rows and the columns of tiles.
        group_m: rows of tiles in a group; the last group may have fewer.
    """
    group, place = divmod(program, group_m * tiles_n)
    height = min(tiles_m - group * group_m, group_m)
    return group * group_m + place % height, place // height


def loads_of_tiles(
    tiles: Sequence[tuple[int, int]],
    steps: int,
    resident: int,
    widths: tuple[int, int] = (1, 1),
) -> list[tuple[str, int, int]]:
    """The loads of a tiled matrix product, in order, for `served_by_lru`.

    The first `resident` programs run in lockstep: all load the blocks of step 0, then
    those of step 1, and so on. Then the next programs begin. Real programs drift apart.

    Args:
        tiles: the tile (row, column) of each program, in the order of their numbers.
        steps: along K.
        resident: programs that run at once.
        widths: the sizes of a block of A and of a block of B, in any one unit. A block
            is loaded unit by unit.

    Returns:
        ("A" or "B", the row or the column in units, the step) of each load.
    """
    wide_a, wide_b = widths
    loads = []
    for first in range(0, len(tiles), resident):
        wave = tiles[first : first + resident]
        for step in range(steps):
            for row, col in wave:
                loads += [("A", wide_a * row + i, step) for i in range(wide_a)]
                loads += [("B", wide_b * col + i, step) for i in range(wide_b)]
    return loads


def elements_of_lane(
    block_cols: int,
    warp: int,
    lane: int,
    *,
    size_per_thread: int = 4,
    threads_per_warp: int = 32,
    warps_per_cta: int = 4,
) -> list[int]:
    """The elements of a block that a lane holds, in the order of its registers.

    Triton's blocked layout in one dimension: each lane takes `size_per_thread`
    neighbours, lane after lane and warp after warp, round after round until the block
    is covered. If one round is larger than the block, it wraps round, and several lanes
    hold the same element.

    Args:
        block_cols: the block's elements, a power of two.
        warp, lane: whose elements, counted from 0.
        size_per_thread, threads_per_warp, warps_per_cta: the layout, as the TTGIR
            states it in `#ttg.blocked`.
    """
    first = (warp * threads_per_warp + lane) * size_per_thread
    per_round = size_per_thread * threads_per_warp * warps_per_cta
    return [
        (start + first + element) % block_cols
        for start in range(0, block_cols, per_round)
        for element in range(min(size_per_thread, block_cols))
    ]


def butterfly(
    values: Sequence[Any], combine: Callable[[Any, Any], Any] = max
) -> list[list[Any]]:
    """What the lanes of a warp hold before and after each step of a butterfly.

    In each step every lane combines its value with that of the lane whose number
    differs in one bit, by a shuffle. The highest bit comes first. After the last step
    every lane holds the combination of all values.

    Args:
        values: one per lane; a power of two of them.
        combine: a function of two values, associative and commutative.

    Raises:
        ValueError: the number of values is no power of two.

    Returns:
        log2(len(values)) + 1 lists, each with a value per lane.
    """
    lanes = len(values)
    if lanes.bit_count() != 1:
        raise ValueError(f"the number of values must be a power of two, got {lanes}")
    halvings = range(1, lanes.bit_length())
    return exchanged(values, [lanes >> step for step in halvings], combine)


def exchanged(
    values: Sequence[Any],
    distances: Iterable[int],
    combine: Callable[[Any, Any], Any] = max,
) -> list[list[Any]]:
    """What lanes hold before and after each of several shuffles.

    In a step of distance d, lane i combines its value with that of lane i ^ d, where ^
    is the exclusive or of the two numbers' bits, as in CUDA's `__shfl_xor_sync`.

    Args:
        values: one per lane.
        distances: of each step.
        combine: a function of two values.

    Raises:
        ValueError: a lane's partner is none of the lanes.

    Returns:
        One list more than there are distances, each with a value per lane.
    """
    steps, lanes = [list(values)], len(values)
    for distance in distances:
        last = steps[-1]
        partners = [lane ^ distance for lane in range(lanes)]
        if max(partners, default=-1) >= lanes:
            raise ValueError(
                f"distances must lead to one of the {lanes} lanes, got {distance}, "
                f"which leads to lane {max(partners)}"
            )
        steps.append(
            [combine(last[lane], last[its]) for lane, its in enumerate(partners)]
        )
    return steps


class BlockReduction(NamedTuple):
    """A block's reduction: shuffles within warps, shared memory between them.

    Attributes:
        first: the steps of the butterflies of all warps, each with a value per thread.
        shared: what each warp writes to shared memory.
        second: the steps of the butterfly that every warp makes of the shared values.
        result: what every thread holds in the end.
    """

    first: list[list[Any]]
    shared: list[Any]
    second: list[list[Any]]
    result: Any


def block_reduction(
    values: Sequence[Any],
    combine: Callable[[Any, Any], Any] = max,
    *,
    identity: Any = -math.inf,
    warp_size: int = 32,
    missing: Any = None,
) -> BlockReduction:
    """Reduces one value per thread of a block as a CUDA kernel does.

    Each warp reduces its values by a butterfly and writes one result to shared memory.
    After a barrier, each warp loads all results, one a lane, and reduces them again.

    Args:
        values: one per thread, of at most warp_size warps.
        combine: a function of two values, associative and commutative.
        identity: of combine; the lanes without a warp's result hold it.
        warp_size: lanes of a warp, a power of two.
        missing: what a shuffle reads of lanes that the last warp lacks. CUDA leaves it
            undefined.

    Raises:
        ValueError: the last warp lacks lanes and `missing` is None; or there are more
            warps than a warp has lanes.
    """
    threads = len(values)
    absent = -threads % warp_size
    if absent and missing is None:
        raise ValueError(
            f"values must fill warps of {warp_size} lanes, got {threads}: the last "
            f"warp lacks {absent} lanes, and its shuffles would read them all the same"
        )
    filled = [*values, *[missing] * absent]
    if not 0 < len(filled) <= warp_size**2:
        raise ValueError(
            f"the number of values must be 1 to {warp_size**2}, got {len(values)}"
        )
    firsts = range(0, len(filled), warp_size)
    warps = [butterfly(filled[i : i + warp_size], combine) for i in firsts]
    first = [[*itertools.chain(*step)][:threads] for step in zip(*warps, strict=True)]
    shared = [steps[-1][0] for steps in warps]
    idle = [identity] * (warp_size - len(shared))
    second = butterfly([*shared, *idle], combine)
    return BlockReduction(first, shared, second, second[-1][0])


def bank_passes(addresses: Iterable[int], n_bytes: int = 4) -> int:
    """How many passes through shared memory one access of a warp takes.

    Shared memory has 32 banks, each of which serves 4 bytes at a time: the bank of an
    address is address // 4 % 32. Lanes that want the same 4 bytes are served together.
    Lanes that want other bytes of the same bank wait for another pass: a bank conflict.
    An access of 8 or 16 bytes a lane is served half a warp or a quarter at a time.

    Args:
        addresses: the first byte of each lane, in the order of the lanes; negative for
            a lane that is masked off.
        n_bytes: that a lane moves, at most 16.
    """
    addresses, words = list(addresses), max(n_bytes // 4, 1)
    passes = 0
    for first in range(0, len(addresses), 32 // words):
        served = addresses[first : first + 32 // words]
        wanted = {a // 4 + word for a in served if a >= 0 for word in range(words)}
        passes += max(Counter(word % 32 for word in wanted).values(), default=0)
    return passes
