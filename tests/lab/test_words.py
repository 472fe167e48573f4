"""Words are enough, tags are new, and no memory pool of a caller's holds them."""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import cooperative, fastest, operator, softmax
from kernels.lab import backend, direct, words
from kernels.lab.words import LAST_TAG, StreamWords
from tests.helpers import assert_right, matrix

CPU = torch.device("cpu")


class FakeStream:
    """Stands in for a stream of a GPU: knows which streams have waited for it."""

    def __init__(self, device: torch.device) -> None:
        self.waited: list[FakeStream] = []

    def synchronize(self) -> None:
        self.waited.append(CPU)

    def wait_stream(self, other: "FakeStream") -> None:
        other.waited.append(self)

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FakeCuda:
    """Stands in for the GPU: its streams, and who has allocated on which of them.

    Attributes:
        handle: of the current stream, as Triton would report it.
        capturing: whether a CUDA graph captures that stream.
        made: (number of words, thread) of each allocation that is to be kept.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle, self.capturing = 101, False
        self.current = FakeStream(CPU)
        self.made: list[tuple[int, int]] = []
        self.side: list[FakeStream] = []
        zeros = torch.zeros

        def new_stream(device: torch.device) -> FakeStream:
            self.side.append(FakeStream(device))
            return self.side[-1]

        def new_zeros(size: int, **how: object) -> torch.Tensor:
            self.made.append((size, threading.get_ident()))
            return zeros(size, **how)

        for module, name, stand_in in (
            (backend, "INTERPRETED", False),
            (torch, "zeros", new_zeros),
            (torch.cuda, "Stream", new_stream),
            (torch.cuda, "stream", lambda stream: stream),
            (torch.cuda, "current_stream", lambda device: self.current),
            (words, "_is_capturing", lambda: self.capturing),
            (words, "_stream_of", lambda index: self.handle),
            (words, "_streams", {}),
            (words, "_rooms", {}),
            (words, "ROOM", 128),
        ):
            monkeypatch.setattr(module, name, stand_in)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


# ---- words and tags ------------------------------------------------------------------


def test_words_are_enough_and_tags_are_new(cuda):
    stream = StreamWords()
    first, tag = stream.take(5, CPU)
    assert (first.dtype, len(first)) == (torch.int64, 8)
    again, next_tag = stream.take(3, CPU)
    assert again is first and tag != next_tag
    grown, _ = stream.take(1000, CPU)
    assert len(grown) == 1024 and grown.eq(0).all()
    assert stream.take(3, CPU)[0] is grown


def test_words_that_were_outgrown_are_kept(cuda):
    """A call that was made before may still run on them."""
    stream, addresses = StreamWords(), set()
    for n_words in (4, 100, 30, 5000, 2**20):
        addresses.add(stream.take(n_words, CPU)[0].data_ptr())
    kept = {old.data_ptr() for old in stream.outgrown if len(old)}
    assert kept | {stream.current[0].data_ptr()} == addresses
    assert sum(map(len, stream.outgrown)) < 2**20


def test_tags_that_come_again_find_other_words(cuda):
    stream = StreamWords()
    old, first = stream.take(4, CPU)
    stream.current = old, 4, itertools.count(LAST_TAG - 1)
    old.fill_(first)  # what a call left, 2³¹ calls ago
    found = [stream.take(4, CPU) for _ in range(4)]
    assert [tag for _, tag in found] == [LAST_TAG - 1, LAST_TAG, 1, 2]
    assert [there.any().item() for there, _ in found] == [True, True, False, False]
    assert found[2][0] is found[3][0]
    assert LAST_TAG < 2**31  # it is passed to kernels as a 32-bit integer


def test_tags_fit_the_words_that_a_call_asks_for_when_they_come_again(cuda):
    stream = StreamWords()
    stream.current = torch.ones(64, dtype=torch.int64), 64, itertools.count(2**31)
    there, tag = stream.take(100, CPU)
    assert (len(there), tag, there.any().item()) == (128, 1, False)
    stream.current = there, 128, itertools.count(2**31)
    assert len(stream.take(3, CPU)[0]) == 128  # no fewer than there were


class Contested(StreamWords):
    """Words that another thread replaces by fewer after each look and each store."""

    @property
    def current(self) -> tuple:
        state = self.state
        self.fewer()
        return state

    @current.setter
    def current(self, state: tuple) -> None:
        self.state = state
        self.fewer()

    def fewer(self) -> None:
        self.state = torch.zeros(4, dtype=torch.int64), 4, itertools.count(1)


@pytest.mark.parametrize("n_there", [0, 2048])
def test_another_thread_cannot_take_a_call_s_words(cuda, n_there):
    stream = Contested()
    there = torch.zeros(n_there, dtype=torch.int64)
    stream.state = there, n_there, itertools.count(7)
    taken, tag = stream.take(2048, CPU)
    assert (len(taken), tag) == (2048, 7 if n_there else 1)


def test_many_threads_on_one_stream(cuda):
    seen, lock, wrong = {}, threading.Lock(), []
    words.take(4, CPU)
    (stream,) = words._streams.values()
    stream.current = *stream.current[:2], itertools.count(LAST_TAG - 500)

    def ask(sizes):
        for n_words in sizes:
            taken, tag = words.take(n_words, CPU)
            with lock:
                tags = seen.setdefault(id(taken), (taken, set()))[1]
                if len(taken) < n_words or tag in tags or not 0 < tag < 2**31:
                    wrong.append((n_words, len(taken), tag))
                tags.add(tag)

    sizes = [2**i for i in (3, 11, 5, 12, 4) * 100]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, 8 * [sizes]))
    assert wrong == []
    assert len(words._streams) == 1


def test_a_stream_that_many_threads_meet_first_has_one_set_of_words(cuda):
    """Two sets would be no fault while both live; but one would be forgotten."""
    start = threading.Barrier(8)

    def ask(_) -> int:
        start.wait()
        return words.take(64, CPU)[0].data_ptr()

    with ThreadPoolExecutor(8) as threads:
        addresses = set(threads.map(ask, range(8)))
    (stream,) = words._streams.values()
    assert addresses == {stream.current[0].data_ptr()}


# ---- whose words they are ------------------------------------------------------------


def test_each_stream_has_its_own_words(cuda):
    found = []
    for cuda.handle in (101, 102, 101):
        found.append(words.take(4, CPU)[0])
    first, other, again = found
    assert again is first is not other


def in_a_thread(function: Callable) -> object:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


@pytest.mark.parametrize(("handle", "shared"), [(0, True), (101, True), (2, False)])
def test_threads_default_streams_have_one_handle_but_words_of_their_own(
    cuda, handle, shared
):
    cuda.handle = handle
    mine = words.take(4, CPU)[0]
    assert words.take(4, CPU)[0] is mine
    assert (in_a_thread(lambda: words.take(4, CPU)[0]) is mine) == shared


def test_a_captured_call_has_words_for_itself_for_good(cuda):
    kept = words.take(4, CPU)[0]
    cuda.capturing = True
    take = words.taker(33, CPU)
    (one, *tags), (other, *more) = take(101), take(101)
    assert tags == more == [None]
    assert one.tolist() == other.tolist() == [0] * 33
    assert other.data_ptr() - one.data_ptr() == 2 * 256  # a cache line each, or more
    cuda.capturing = False
    assert words.take(4, CPU)[0] is kept


def test_only_a_captured_call_gets_words_of_the_room(cuda):
    words.take(4, CPU)  # makes the room
    assert words.of_room(16, CPU) is None
    cuda.capturing = True
    first, second = words.of_room(16, CPU), words.of_room(16, CPU)
    assert len(first) == len(second) == 16
    assert second.data_ptr() - first.data_ptr() == 256
    assert words.of_room(128, CPU) is None  # not so many are left
    assert words.of_room(16, torch.device("cuda", 1)) is None


def test_a_captured_call_without_room_has_words_of_the_graph(cuda):
    cuda.capturing = True
    assert words.taker(6, CPU)(101)[1] == 1  # there was no first call
    cuda.capturing = False
    words.take(4, CPU)
    cuda.capturing = True
    found = [words.taker(n_words, CPU)(101) for n_words in (129, 128, 1)]
    found.append(words.take(2, CPU))  # as a launch through Triton does
    assert [len(taken) for taken, _ in found] == [129, 128, 1, 2]
    assert [tag for _, tag in found] == [1, None, 1, 1]
    assert len({taken.data_ptr() for taken, _ in found}) == 4


def test_words_that_are_kept_come_from_another_thread_and_stream(cuda):
    """A pool that takes this thread's allocations, or this stream's, gets none."""
    words.take(4, CPU)
    words.take(4, CPU)
    assert [size for size, _ in cuda.made] == [128, 4]
    assert threading.get_ident() not in {thread for _, thread in cuda.made}
    room, side = cuda.side  # the words are cleared before they are used
    assert room.waited == [CPU, cuda.current] and side.waited == [cuda.current]


@pytest.mark.skipif(not backend.INTERPRETED, reason="is about the interpreter")
def test_in_the_interpreter_words_are_new():
    one, other = words.take(6, CPU), words.take(6, CPU)
    assert one[0].tolist() == [0] * 6 and one[1] == other[1] == 1
    assert one[0] is not other[0]


# ---- on a GPU ------------------------------------------------------------------------


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_a_captured_call_without_room_has_words_that_replays_clear(device, monkeypatch):
    shared, _ = words.take(64, device)
    monkeypatch.setattr(words, "_rooms", {})
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        taken, tag = words.take(64, device)
        seen = taken.clone()
        taken.fill_(5)
    for _ in range(2):
        graph.replay()
        assert seen.eq(0).all() and taken.eq(5).all()
    assert tag == 1 and taken.data_ptr() != shared.data_ptr()


def count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """How many kernels and other steps a graph has that was made with `keep_graph`."""
    count, handle = ctypes.c_size_t(), ctypes.c_void_p(graph.raw_cuda_graph())
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    return count.value


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["known", "new"])
@pytest.mark.parametrize("with_room, n_nodes", [(True, 1), (False, 2)])
def test_replays_are_right_and_clear_only_where_there_is_no_room(
    with_room, n_nodes, form, monkeypatch
):
    x = matrix(4, 2**18)
    softmax(x)  # compiles, but not what a graph replays
    if form == "new":  # as if that had been a call of another form
        monkeypatch.setattr(operator.rules(), "launches", {})
        fastest.known.clear()
        monkeypatch.setattr(direct, "_compiled", {})
    if not with_room:
        monkeypatch.setattr(words, "_rooms", {})
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        y = softmax(x)
    assert count_nodes(graph) == n_nodes
    for seed in range(20):
        x.copy_(matrix(4, 2**18, seed=seed))
        graph.replay()
        assert_right(y, x)
    assert_right(softmax(x), x)  # not what the graph replays


@pytest.fixture
def forgotten(monkeypatch) -> Iterator[None]:
    """No stream has words yet. Those that there were are kept until the test ends."""
    torch.cuda.synchronize()
    monkeypatch.setattr(words, "_streams", {})
    yield
    torch.cuda.synchronize()


def held_by(pool: torch.cuda.MemPool) -> int:
    """The bytes of a pool that are in use."""
    segments = torch.cuda.memory_snapshot(pool.id)
    return sum(segment["active_size"] for segment in segments)


@pytest.mark.gpu
def test_a_callers_pool_holds_no_words(device, forgotten):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        mine = torch.zeros(1000, device=device)
        taken, _ = words.take(5000, device)
        assert 4000 <= held_by(pool) < 8 * 5000
    assert taken.eq(0).all() and mine.eq(0).all()


SHARED = [(4, 2**18), (4, 50_257), (300, 2**17)]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("shape", SHARED)
def test_compiled_in_every_mode(shape, mode, forgotten):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: softmax(x) * 2, mode=mode)
    for seed in range(5):
        x = matrix(*shape, seed=seed)
        assert_right(compiled(x) / 2, x)
        assert_right(cooperative.softmax(x), x)  # between replays


@pytest.mark.gpu
def test_compiled_functions_in_turn(forgotten):
    """Their graphs are a tree: which one follows another is found out at each call."""
    torch.compiler.reset()
    doubled = torch.compile(lambda x: softmax(x) * 2, mode="reduce-overhead")
    again = torch.compile(lambda x: softmax(softmax(x)), mode="reduce-overhead")
    for seed in range(12):
        x = matrix(*SHARED[seed % 3], seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        y = doubled(x)
        if seed % 2:
            y = again(y)
            assert_right(y, cooperative.softmax(2 * cooperative.softmax(x)))
        else:
            assert_right(y / 2, x)


@pytest.mark.gpu
def test_graphs_side_by_side(forgotten):
    calls = []
    for seed, shape in enumerate(SHARED):
        x = matrix(*shape, seed=seed)
        softmax(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = softmax(softmax(x))
        calls.append((graph, x, y, torch.cuda.Stream()))
    wanted = [cooperative.softmax(cooperative.softmax(x)) for _, x, _, _ in calls]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, _, y, stream in calls:
            with torch.cuda.stream(stream):
                y.fill_(7)
                graph.replay()
    torch.cuda.synchronize()
    for (_, _, y, _), right in zip(calls, wanted, strict=True):
        assert torch.equal(y, right)


def wrong_in_many_threads(streams: list, inputs: list[torch.Tensor]) -> list[int]:
    """Calls all at once, each thread on one of the streams.

    Threads allocate and free nothing there but words, which are kept. PyTorch takes
    the default streams of all threads for one: what one of them frees, another gets
    while it is in use. Any operator's results may show that, and so may comparisons.

    Returns:
        Of each thread, how many calls had other results than the same call alone.
    """
    start, n_threads = threading.Barrier(len(streams)), len(streams)
    right = [cooperative.softmax(x) for x in inputs]
    outputs = [[torch.empty_like(x) for x in inputs] for _ in streams]

    def call(stream: torch.cuda.Stream, results: list[torch.Tensor]) -> None:
        start.wait()  # each of the threads takes one of the streams
        with torch.cuda.stream(stream):
            for y, x in zip(results, inputs, strict=True):
                cooperative.launch_for(y, x)(y, x)

    wrong = [0] * n_threads
    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(5):
            torch._foreach_zero_([y for results in outputs for y in results])
            torch.cuda.synchronize()
            list(threads.map(call, streams, outputs))
            torch.cuda.synchronize()
            for thread, results in enumerate(outputs):
                pairs = zip(results, right, strict=True)
                wrong[thread] += sum(not torch.equal(y, wanted) for y, wanted in pairs)
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["one stream", "streams", "external", "per thread"])
def test_threads(which, forgotten):
    """The bits may differ between shapes, whose rows are cut into other parts."""
    x = matrix(300, 50_257)
    inputs = [x[:n] for n in (1, 40, 3, 200, 7, 90, 2, 64, 5, 300)]
    one = torch.cuda.Stream()
    streams = {
        "one stream": lambda: one,
        "streams": torch.cuda.Stream,
        "external": lambda: torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream),
        "per thread": lambda: torch.cuda.ExternalStream(words.PER_THREAD),
    }[which]
    wrong = wrong_in_many_threads([streams() for _ in range(8)], inputs)
    assert wrong == [0] * 8
