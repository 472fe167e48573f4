"""Programs that do not wait for each other are found, and those that wait are right."""

import pytest
import torch
import triton
import triton.language as tl

from kernels import cooperative, gradient, online, persistent, tiled
from kernels.lab import accesses, backend, trials

pytestmark = pytest.mark.skipif(
    not backend.INTERPRETED, reason="is about the interpreter"
)


@triton.jit
def chain_kernel(y_ptr, x_ptr, flag_ptr, WAY: tl.constexpr):
    """Each program adds its number to the sum that the program before it stores."""
    i = tl.program_id(0)
    if i > 0:
        if WAY == "plain":
            flag = tl.load(flag_ptr + i)
        elif WAY == "once":
            flag = tl.load(flag_ptr + i, volatile=True)
        elif WAY == "once by an atomic":
            flag = tl.atomic_add(flag_ptr + i, 0)
        elif WAY == "once by a comparison":
            flag = tl.atomic_cas(flag_ptr + i, 0, 0)
        elif WAY == "loop of atomics":
            flag = tl.atomic_add(flag_ptr + i, 0)
            while flag == 0:
                flag = tl.atomic_add(flag_ptr + i, 0)
        else:
            flag = tl.load(flag_ptr + i, volatile=True)
            while flag == 0:
                flag = tl.load(flag_ptr + i, volatile=True)
        before = tl.load(y_ptr + i - 1) if flag > 0 else 0.0
    else:
        before = 0.0
    if WAY == "flag before data":
        tl.atomic_xchg(flag_ptr + i + 1, 1)
    tl.store(y_ptr + i, before + tl.load(x_ptr + i))
    if WAY == "relaxed":
        tl.atomic_xchg(flag_ptr + i + 1, 1, sem="relaxed")
    elif WAY == "of the block":
        tl.atomic_xchg(flag_ptr + i + 1, 1, scope="cta")
    elif WAY == "atomic store":
        tl.atomic_store(flag_ptr + i + 1, 1)
    elif WAY == "stored flag":
        tl.store(flag_ptr + i + 1, 1)
    else:
        tl.atomic_xchg(flag_ptr + i + 1, 1)


def chain(way):
    """The result for 1, 2, 3, 4, and what was looked at once."""
    x = torch.arange(1.0, 5.0)
    y, flags = torch.zeros(4), torch.zeros(5, dtype=torch.int32)
    with trials.watched() as notes:
        chain_kernel[(4,)](y, x, flags, WAY=way)
    return y.tolist(), notes.early


OF_3_9 = pytest.mark.skipif(
    not hasattr(tl, "atomic_store"), reason="Triton 3.9 has atomic stores"
)


@pytest.mark.parametrize(
    "way", ["loop", "loop of atomics", pytest.param("atomic store", marks=OF_3_9)]
)
def test_a_program_that_waits_is_right(way):
    assert chain(way) == ([1, 3, 6, 10], [])


@pytest.mark.parametrize("way", ["once", "once by an atomic", "once by a comparison"])
def test_a_program_that_looks_once_comes_too_early(way):
    y, early = chain(way)
    assert y == [1, 2, 3, 4]
    assert early[0] == (
        "chain_kernel, program 1, looked once at offset 1 of flag_ptr, before program "
        "0 had written there"
    )


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("plain", "offset 1 of flag_ptr, which program 0 wrote"),
        ("flag before data", "offset 0 of y_ptr, which program 0 wrote"),
        ("relaxed", "offset 0 of y_ptr, which program 0 wrote"),
        ("of the block", "offset 0 of y_ptr, which program 0 wrote"),
        ("stored flag", "offset 0 of y_ptr, which program 0 wrote"),
    ],
)
def test_what_no_wait_orders_is_a_race(way, words):
    with pytest.raises(accesses.Race) as caught:
        chain(way)
    assert str(caught.value) == f"chain_kernel, program 1: load at {words}"


def test_only_who_asks_is_told():
    y, flags = torch.zeros(4), torch.zeros(5, dtype=torch.int32)
    with accesses.observed(lambda *_: None):
        chain_kernel[(4,)](y, torch.ones(4), flags, WAY="plain")
    assert y.tolist() == [1, 2, 3, 4]
    with trials.watched(), trials.watched():
        pass
    assert accesses._notes is None


@triton.jit
def last_kernel(output_ptr, sums_ptr, count_ptr, WAY: tl.constexpr):
    """The last program adds what all programs stored."""
    i, n = tl.program_id(0), tl.num_programs(0)
    if (WAY == "clears first") & (i == 0):
        tl.store(count_ptr, 0)
    tl.store(sums_ptr + i, i + 1.0)
    came_before = tl.atomic_add(count_ptr, 1)
    if (came_before == n - 1) | (WAY == "all"):
        parts = tl.arange(0, 4)
        sums = tl.load(sums_ptr + parts, mask=parts < n, volatile=WAY == "volatile")
        tl.store(output_ptr, tl.sum(sums, axis=0))
        tl.store(count_ptr, 0)


def last(way):
    output, sums, count = torch.zeros(1), torch.zeros(4), torch.zeros(1).int()
    with trials.watched():
        for _ in "ab":
            last_kernel[(4,)](output, sums, count, WAY=way)
    return output.item(), count.item()


@pytest.mark.parametrize("way", ["right", "volatile"])
def test_a_count_orders_what_was_stored_before_it(way):
    assert last(way) == (10, 0)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("clears first", "atomic at offset 0 of count_ptr, which program 0 stored"),
        ("all", "store at offset 1 of sums_ptr, which program 0 loaded"),
    ],
)
def test_a_count_orders_nothing_else(way, words):
    with pytest.raises(accesses.Race, match=f"program 1: {words}"):
        last(way)


@triton.jit
def ahead_kernel(y_ptr, n):
    """Each program reads what the next one writes."""
    i = tl.program_id(0)
    after = tl.load(y_ptr + i + 1, mask=i + 1 < n, other=0.0)
    tl.store(y_ptr + i, after)


def test_a_load_of_what_a_later_program_writes_is_a_race():
    words = "program 1: store at offset 1 of y_ptr, which program 0 loaded"
    with trials.watched(), pytest.raises(accesses.Race, match=words):
        ahead_kernel[(3,)](torch.ones(3), 3)


@triton.jit
def own_kernel(y_ptr, x_ptr):
    """Each program counts by relaxed atomics, and looks at the count."""
    lanes = tl.arange(0, 4)
    tl.atomic_add(x_ptr + lanes, 1, mask=lanes < 2, sem="relaxed")
    x = tl.load(x_ptr + lanes, mask=lanes < 3, other=7, volatile=True)
    tl.store(y_ptr + tl.program_id(0) * 4 + lanes, x)


def test_a_program_finds_its_own_atomics():
    y, x = torch.zeros(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with trials.watched() as notes:
        own_kernel[(2,)](y, x)
    assert y.tolist() == [1, 1, 0, 7, 2, 2, 0, 7] and not notes.early


@triton.jit
def total_kernel(total_ptr, x_ptr):
    tl.atomic_add(total_ptr, tl.load(x_ptr + tl.program_id(0)))


def test_who_adds_a_zero_need_not_wait():
    total = torch.zeros(1)
    with trials.watched() as notes:
        total_kernel[(3,)](total, torch.tensor([1.0, 0.0, 2.0]))
    assert total.item() == 3 and not notes.early


def test_the_courses_kernels_wait():
    x = torch.randn(3, 130, generator=torch.Generator().manual_seed(0))
    right = torch.softmax(x.double(), dim=1)
    config = cooperative.Config(32, 8, 1, False, True, 50, 1)
    part = gradient.Config(1, 32, 8, 1, False, 50, 1)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with trials.watched():
        for module in (tiled, persistent, online):
            torch.testing.assert_close(module.softmax(x).double(), right)
        y = torch.empty_like(x)
        cooperative.launch_for(y, x, config)(y, x)
        launch = gradient.launch_for(torch.empty_like(g), g, y, part)
        launch(found := torch.empty_like(g), g, y)
    torch.testing.assert_close(y.double(), right)
    wanted = right * (g - (g * right).sum(1, keepdim=True))
    torch.testing.assert_close(found.double(), wanted)
