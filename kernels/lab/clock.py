"""Clocks: how long a call takes on the GPU and on the host, and how a clock misleads.

A time is taken many times, and reported as its 20th, 50th and 80th percentile in µs:
never as a mean, never of a single call. `CLOCKS` names the clocks, and the column
`clock` of a recorded row says which of them took its times:

| name | what it tells |
|---|---|
| `device` | the GPU's time between two CUDA events, once the host has sent the call |
| `host` | the host's time until the call returns, without waiting for the GPU |
| `events` | as `device`, but a late host counts: the GPU waits between the events |
| `unflushed` | as `device`, but the L2 cache keeps what the previous call left in it |
| `written` | as `device`, but the L2 cache is flushed by writing, on one input |
| `wall` | the host's clock around the call and the wait for its end |
| `launch` | the host's clock around the call alone: misleading (chapter `traffic`) |

Two safeguards keep the input out of the L2 cache in `device` and `events`.

1. **The flush.** Before each timed call the GPU reads a buffer at least four times as
   large as L2. The flush must end in reading: a flush that writes leaves modified lines
   in L2, and the timed call then waits for their write-back. On an H200 that costs a
   call less than 1 µs on inputs of up to 4 MB, and 1 to 4 µs from 34 MB on
   (`flush.csv`).
2. **Rotating inputs.** Calls take turns on up to 64 copies of their tensors. On an H200
   these together exceed twice L2 from 2 MB on; smaller inputs rely on the flush, too. A
   kernel may ask L2 to keep its lines longer than others (`evict_last`), and such lines
   outlive a flush: after 1 GiB of other values was read, an H200 still held almost half
   of a matrix of 8 MB (`flush_dram.csv`). With a flush alone, on inputs of 0.3 to 4 MB,
   `online` took 0.3 to 0.6 µs less, `fastest` from 0.3 less to 0.3 more. Others, which
   ask for nothing, were within 0.1 (torch) or 0.5 µs (Liger, the copy; `flush.csv`).

`benchmarks/flush.py` makes both records.

Several learners may share a GPU. `alone()` lets one process measure at a time. With
COURSE_MEASURE=briefly in the environment, a time is of a fifth of the calls: enough to
see that everything runs, as the test suite does, and too few for a record.

Weighed: `triton.testing.do_bench` (it cannot rotate inputs, its flush writes, and it
counts the wait for a late host), `torch.utils.benchmark` (flushes nothing,
and its percentiles are over blocks of calls), `nvbench` (the most careful, but for
C++), replays of a CUDA graph (not every peer can be captured), and a lock file of our
own in place of `filelock` (it would have to know every file system's habits).
"""

import contextlib
import functools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch

from kernels.lab import backend, gpu

Times = tuple[float, float, float]
"""The 20th, 50th and 80th percentile of the time of a call, µs."""

DEVICE_CALLS, LONG_DEVICE_CALLS, LONG_US = 100, 30, 1000  # fewer of calls above 1 ms
HOST_BATCHES, HOST_CALLS = 50, 20  # the GPU's queue must hold a batch's launches
WALL_CALLS = 30
TURNS = {"host": 5}  # a sweep's providers go by turns, so a slow minute hits them all
HOLD, LONGEST_HOLD_US = 4, 4000  # the GPU is held for 4 times the host's time of a call
SPINS_PER_US = 2000  # clock cycles: 1 µs on a GPU of 2 GHz, more on a slower GPU
FLUSH_BYTES, FLUSHED_L2S = 2**28, 4  # the buffer: 256 MiB, and at least 4 times L2
MAX_COPIES, ROTATED_L2S, MEMORY_SHARE = 64, 2, 4  # a quarter of the free memory
BRIEFLY = os.environ.get("COURSE_MEASURE") == "briefly"
PATIENCE_S = 3.0  # a process that waits longer for its turn says so


# ---- whether, and when, this process may measure -------------------------------------


def can_measure() -> bool:
    """Whether times are taken here: on a GPU, unless COURSE_MEASURE=recorded.

    Raises:
        ValueError: COURSE_MEASURE has another value.
    """
    wanted = os.environ.get("COURSE_MEASURE", "")
    if wanted not in ("", "recorded", "briefly"):
        raise ValueError(
            "COURSE_MEASURE must be 'recorded', which shows recorded times, 'briefly', "
            "which measures a fifth of the calls, or unset, which measures where there "
            f"is a GPU; got {wanted!r}"
        )
    return wanted != "recorded" and not backend.INTERPRETED


def require_gpu() -> None:
    """Refuses to go on where nothing is timed.

    Raises:
        RuntimeError: kernels are interpreted here, or COURSE_MEASURE=recorded.
    """
    if can_measure():
        return
    if backend.INTERPRETED:
        why = (
            "kernels run in Triton's interpreter, whose speed says nothing about a GPU"
        )
    else:
        why = "COURSE_MEASURE=recorded is set; unset it to measure on this GPU"
    raise RuntimeError(
        f"nothing can be timed here: {why}; record.sweep and record.observe give the "
        "recorded times"
    )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one process at a time measure on this GPU; the others wait for their turn.

    Every clock does so by itself. A thread that is alone may call this again.
    """
    lock = _lock(_gpu_uuid())
    try:
        lock.acquire(timeout=PATIENCE_S)
    except filelock.Timeout:
        if not os.environ.get("COURSE_WAIT_SILENTLY"):
            print("Another process is measuring on this GPU: waiting for it to finish.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _gpu_uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@functools.cache
def _lock(uuid: str) -> filelock.BaseFileLock:
    """The lock of a GPU. Its file belongs to nobody: every user may take it."""
    # Not in /tmp itself, where Linux and filelock refuse files of other users.
    folder = Path(tempfile.gettempdir(), "measuring-on-gpu")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's folder
        folder.chmod(0o777)  # mkdir alone would heed the umask
    name = re.sub(r"[^\w-]", "", uuid)
    return filelock.FileLock(folder / f"{name}.lock", mode=0o666)


# ---- what is done before a call ------------------------------------------------------


@functools.cache
def _buffer() -> torch.Tensor:
    """What the flush reads or writes: float32 ones, several times as large as L2."""
    n_bytes = max(FLUSH_BYTES, FLUSHED_L2S * gpu.here().l2_bytes)
    return torch.ones(n_bytes // 4, device=backend.DEVICE)


def flush_by_reading() -> None:
    """Fills L2 with other values, none of them modified."""
    _buffer().sum()


def flush_by_writing() -> None:
    """Fills L2 with other values, which still have to be written to memory."""
    _buffer().zero_()


def spin(cycles: int) -> None:
    """Keeps the GPU busy for so many clock cycles; memory is not touched."""
    torch.cuda._sleep(cycles)


def rotated(args: Sequence[Any]) -> list[tuple]:
    """The arguments of the first call, of the second, and so on, to be taken in turn.

    Tensors are copied with their storage, so that strides, offset and alignment stay,
    and two arguments that share memory share it in every copy. Other arguments are
    passed on. There are as many copies as exceed twice the L2 cache together, but at
    most 64, and no more than fit a quarter of the free memory.

    Returns:
        At least one tuple: the first is `args` itself.
    """
    storages = {
        arg.untyped_storage().data_ptr(): arg.untyped_storage()
        for arg in args
        if _is_strided(arg)
    }
    n_bytes = sum(storage.nbytes() for storage in storages.values())
    wanted = ROTATED_L2S * gpu.here().l2_bytes // n_bytes + 1 if n_bytes else 1
    count = min(wanted, MAX_COPIES)
    if count > 1:
        count = min(count, 1 + gpu.free_bytes() // MEMORY_SHARE // n_bytes)
    copies = [tuple(args)]
    with contextlib.suppress(torch.OutOfMemoryError):  # then there are fewer
        while len(copies) < count:
            clones = {where: storage.clone() for where, storage in storages.items()}
            copies.append(tuple(_moved(arg, clones) for arg in args))
    return copies


def _is_strided(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.layout is torch.strided


def _moved(arg: Any, clones: dict[int, torch.UntypedStorage]) -> Any:
    """A tensor as it is, but in the clone of its storage."""
    if not _is_strided(arg):
        return arg
    place = arg.storage_offset(), arg.size(), arg.stride()
    clone = clones[arg.untyped_storage().data_ptr()]
    with torch.no_grad():
        moved = torch.empty(0, dtype=arg.dtype, device=arg.device).set_(clone, *place)
    return moved.requires_grad_(arg.requires_grad)


# ---- the clocks ----------------------------------------------------------------------


def device_us(function: Callable, *args: Any) -> Times:
    """The GPU's time for `function(*args)`; the host may take up to 4 ms for the call.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return device_times(function, args)


def events_us(function: Callable, *args: Any) -> Times:
    """As `device_us`, but the GPU isn't held.

    Where the host needs longer for flush and call than the GPU, its delay counts.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return device_times(function, args, hold=0)


def unflushed_us(function: Callable, *args: Any) -> Times:
    """As `device_us`, but one input, and L2 keeps what the previous call left in it.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return device_times(function, args, flush=lambda: None, rotate=False)


def written_us(function: Callable, *args: Any) -> Times:
    """As `device_us`, but one input, and L2 is flushed by writing.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return device_times(function, args, flush=flush_by_writing, rotate=False)


def device_times(
    function: Callable,
    args: Sequence[Any] = (),
    *,
    flush: Callable[[], Any] = flush_by_reading,
    rotate: bool = True,
    hold: float = HOLD,
) -> Times:
    """`device_us` with its safeguards given, so that they can be compared.

    After the flush the GPU spins for `hold` times as long as the host needs for a call.
    By the end of that the call and both events are in the GPU's queue, so that nothing
    but the call's own kernels is between the events. (With a spin that is shorter than
    the host's part of the call, some of the wait for the host is between them, too.)

    Args:
        function: called with each of the rotated arguments in turn.
        args: its arguments.
        flush: called before each timed call.
        rotate: whether to copy the tensors among the arguments; see `rotated`.
        hold: 0 lets the GPU wait for the host between the events.

    Raises:
        RuntimeError: nothing is timed here.
    """
    require_gpu()
    function(*args)  # compiles, while others may still measure
    with alone():
        copies = rotated(args) if rotate else [tuple(args)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        host_us = _batch_us(function, copies[0], DEVICE_CALLS // 10)
        torch.cuda.synchronize()
        whole_us = 1e6 * (time.perf_counter() - start) / (DEVICE_CALLS // 10)
        calls = some(DEVICE_CALLS if whole_us < LONG_US else LONG_DEVICE_CALLS)
        cycles = int(min(hold * host_us, LONGEST_HOLD_US) * SPINS_PER_US)

        def prepare() -> None:
            flush()
            if cycles:
                spin(cycles)

        return _percentiles(_timed(function, copies, prepare, calls))


def host_us(function: Callable, *args: Any) -> Times:
    """The host's time until `function(*args)` returns.

    Calls follow each other in batches, and nothing waits for the GPU within a batch.
    The GPU's work must be short, or its queue fills and the host waits after all.

    Raises:
        RuntimeError: nothing is timed here.
    """
    require_gpu()
    _batch_us(function, args, HOST_CALLS)  # compiles, while others may still measure
    with alone():
        times = []
        for _ in range(some(HOST_BATCHES)):
            torch.cuda.synchronize()
            times.append(_batch_us(function, args, HOST_CALLS))
        torch.cuda.synchronize()
    return _percentiles(times)


def wall_us(function: Callable, *args: Any) -> Times:
    """The host's clock around `function(*args)` and the wait for its end.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return _by_host_clock(function, args, wait=True)


def launch_us(function: Callable, *args: Any) -> Times:
    """The host's clock around `function(*args)`, which the GPU has yet to finish.

    Raises:
        RuntimeError: nothing is timed here.
    """
    return _by_host_clock(function, args, wait=False)


CLOCKS: dict[str, Callable[..., Times]] = {
    "device": device_us,
    "host": host_us,
    "events": events_us,
    "unflushed": unflushed_us,
    "written": written_us,
    "wall": wall_us,
    "launch": launch_us,
}
"""The clocks by their names in the column `clock` of a recorded file."""


def call_us(function: Callable, *args: Any, wait: bool = True) -> float:
    """One call by the host's clock, µs, with the wait for its end or without."""
    start = time.perf_counter()
    function(*args)
    if wait:
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def some(calls: int) -> int:
    """So many calls, or BRIEFLY a fifth of them."""
    return calls // 5 if BRIEFLY else calls


def turns(clock: str) -> int:
    """How many times a sweep by a clock measures each provider; BRIEFLY once."""
    return 1 if BRIEFLY else TURNS.get(clock, 1)


def _timed(
    function: Callable, copies: Sequence[tuple], prepare: Callable, calls: int
) -> list[float]:
    """The time between two events around each call, µs; nothing waits in between."""
    pairs = []
    for place in range(calls):
        start, end = _event(), _event()
        args = copies[place % len(copies)]
        prepare()
        start.record()
        function(*args)
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _by_host_clock(function: Callable, args: Sequence[Any], wait: bool) -> Times:
    require_gpu()
    with alone():
        times = []
        for _ in range(some(WALL_CALLS)):
            flush_by_reading()
            torch.cuda.synchronize()
            times.append(call_us(function, *args, wait=wait))
            torch.cuda.synchronize()
    return _percentiles(times)


def _batch_us(function: Callable, args: Sequence[Any], calls: int) -> float:
    """The host's time for each of so many calls in a row, µs."""
    start = time.perf_counter()
    for _ in range(calls):
        function(*args)
    return 1e6 * (time.perf_counter() - start) / calls


def medians(turns: Iterable[Times]) -> Times:
    """The median of each percentile over several turns; NaN if it is NaN in one."""
    return tuple(np.median([*turns], axis=0).tolist())


def _percentiles(times: Sequence[float]) -> Times:
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return round(cuts[1], 3), round(cuts[4], 3), round(cuts[7], 3)
