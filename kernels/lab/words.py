"""The words in which the programs of one call exchange values, and how long they live.

A word has 64 bits: a value, and the tag of the call that wrote it. A program believes a
word only if the tag is its own call's. So nothing is cleared between calls. Two calls
that use the same words at once take longer, and both are right, unless they write to
their input.

- A stream has words of its own, which its first call makes. Calls on one stream run one
  after the other, whichever threads make them, so they share the words. CUDA gives the
  per-thread default streams of all threads one handle, so under this handle each thread
  has words of its own. PyTorch's allocator takes the handle for a single stream. So on
  these streams a tensor that any operator frees may be given to another thread while
  kernels still use it.
- A call that needs more words than there are, or finds no tag left, makes new ones. The
  old words are kept, because earlier calls may still use them. Sizes are powers of two,
  so the words that were outgrown are fewer, together, than the new ones.
- Words that are kept never come from a memory pool that a caller has set up: see
  `zeros_apart`. They are kept to the end of the process, also where their stream or
  thread has ended: a later one may have the same handle, and then gets them.
- A call that a CUDA graph captures gets words of its own, for good: no other call, of
  this graph or another, ever gets them. A graph passes the same arguments in every
  replay. So the tag is None, for which Triton compiles (at the first such call, while
  the graph is captured) a kernel whose programs count the replays, each in one word
  more. The count is the tag. In a replay every program runs once, so all counts agree.
- These words come from a `Room`. A device's first call outside of a capture makes it,
  because a capture could not keep memory, or clear it only once. Without room, a call's
  words are the graph's memory. Other calls of the graph use that memory too, so every
  replay clears it first. A captured `Launch`, which asks `take`, gets such words, too.

Weighed: words of each call's own, as `torch.compile` makes for its kernels. To clear
them is a kernel more in each call. PyTorch keeps cuBLAS's workspaces for each stream,
as here. And for a graph, words that are cleared once for all of its calls. Their memory
would have to stay allocated until the capture ends, and `torch.compile`'s graphs refuse
memory that is allocated then and is no output.
"""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from kernels.lab import backend

LAST_TAG = 2**31 - 1  # tags are 1 to this; 0 is what a cleared word holds
ROOM = 2**19  # words for captured calls: 4 MiB
PER_THREAD = 2  # the handle of the default stream that each thread has for itself


def take(n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns words for one call on the current stream of a device, and the call's tag.

    Args:
        n_words: how many words the call needs.
        device: where the call will run.

    Returns:
        At least n_words words (int64), in which no word carries the tag.
    """
    if backend.INTERPRETED or _is_capturing():
        return torch.zeros(n_words, dtype=torch.int64, device=device), 1
    return taker(n_words, device)(_stream_of(device.index))


def taker(
    n_words: int, device: torch.device
) -> Callable[[int], tuple[torch.Tensor, int | None]]:
    """Returns `take` of these arguments as a function of the current stream's handle.

    Launches that are made again and again keep the function, because a call of `take`
    makes it anew. Not for the interpreter.

    The function gives a captured call words of the device's room and the tag None, if
    there is room.
    """
    index = device.index

    def take_on(stream: int) -> tuple[torch.Tensor, int | None]:
        if _is_capturing():
            words = of_room(n_words, device)
            return take(n_words, device) if words is None else (words, None)
        key = index, stream, threading.get_ident() if stream == PER_THREAD else 0
        if (found := _streams.get(key)) is None:
            if index not in _rooms:
                _rooms.setdefault(index, Room(device))
            found = _streams.setdefault(key, StreamWords())
        return found.take(n_words, device)

    return take_on


def of_room(n_words: int, device: torch.device) -> torch.Tensor | None:
    """Words for a call that is captured, from the device's room.

    None if there is no room, or if nothing is captured.
    """
    if backend.INTERPRETED or not _is_capturing():
        return None
    room = _rooms.get(device.index)
    return None if room is None else room.take(n_words)


# What torch.cuda calls, without the Python around it; absent where there is no CUDA.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class StreamWords:
    """The words that the calls on one stream share, and the tags that are left.

    Threads may call at the same time. So words, size and tags are replaced together,
    and a call reads all three at once. So no two calls on one word have the same tag.
    """

    def __init__(self) -> None:
        self.current = torch.empty(0, dtype=torch.int64), 0, itertools.count(1)
        self.outgrown: list[torch.Tensor] = []
        self.lock = threading.Lock()

    def take(self, n_words: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """See `take` of this module."""
        words, size, tags = self.current
        tag = next(tags)
        if n_words <= size and tag <= LAST_TAG:
            return words, tag
        with self.lock:
            words, size, tags = self.current  # another thread may have made new ones
            tag = next(tags)
            if n_words > size or tag > LAST_TAG:
                self.outgrown.append(words)
                size = triton.next_power_of_2(max(n_words, size))
                words, tags = zeros_apart(size, device), itertools.count(1)
                tag = next(tags)
                self.current = words, size, tags
            return words, tag


class Room:
    """Cleared words on a device, each of which is given to one captured call."""

    def __init__(self, device: torch.device) -> None:
        self.words = zeros_apart(ROOM, device, wait=True)
        self.used, self.lock = 0, threading.Lock()

    def take(self, n_words: int) -> torch.Tensor | None:
        """Returns n_words words, from a multiple of 256 bytes on; None if too few."""
        with self.lock:
            first, end = self.used, self.used + n_words
            if end > ROOM:
                return None
            self.used = triton.cdiv(end, 32) * 32
            return self.words[first:end]


_rooms: dict[int, Room] = {}  # by the device
_streams: dict[tuple[int, int, int], StreamWords] = {}
"""By the device, the stream's handle, and the thread where the handle is PER_THREAD."""


def zeros_apart(n_words: int, device: torch.device, wait: bool = False) -> torch.Tensor:
    """Returns zeroed words from PyTorch's common pool, for use on the current stream.

    With `wait`, for use on any stream.

    A caller may send the allocations of a thread or a stream to a pool of its own, as
    `torch.compile(mode="reduce-overhead")` and `torch.cuda.use_mem_pool` do. What is
    kept must not lie there. So another thread allocates, on another stream.
    """

    def zeros() -> tuple[torch.Tensor, torch.cuda.Stream]:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            return torch.zeros(n_words, dtype=torch.int64, device=device), stream

    with ThreadPoolExecutor(1) as other_thread:
        words, stream = other_thread.submit(zeros).result()
    if wait:
        stream.synchronize()
    torch.cuda.current_stream(device).wait_stream(stream)
    return words
