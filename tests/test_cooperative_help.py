"""Programs that help: they end and are right, and no word or input is lost by it."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from kernels import cooperative
from kernels.lab import backend
from tests.helpers import TOLERANCES, assert_right, expected, like, matrix, patched
from tests.test_cooperative import TAG, Call, garbage, without_rescaling_an_axis

# ---- in place ------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [70, 72, 73])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_may_be_the_input(dtype, offset, stride):
    x = matrix(3, 70, dtype, stride=stride, offset=offset)
    before = x.clone()
    assert_right(Call(x, output=x).launch(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("patience", [1, 50])
@pytest.mark.parametrize("n_cols", [2**17, 100_003, 2**20])
def test_the_output_may_be_the_input_of_real_configs(n_cols, patience):
    for dtype in backend.DTYPES:
        before = matrix(64, n_cols, dtype)
        for _ in range(5):
            x = before.clone()
            launch = cooperative.launch_for(x, x)
            constants = {**launch.constants, "PATIENCE": patience}
            dataclasses.replace(launch, constants=constants)(x, x)
            assert_right(x, before)


@triton.jit
def publish_kernel(word_ptr, seen, tag):
    cooperative.publish(word_ptr, seen, tl.full((), 2.0, tl.float32), tag)


def published(there: int, seen: int) -> int:
    """What is left of a word when a program publishes that has seen another word."""
    word = torch.tensor([there], device=backend.DEVICE)
    publish_kernel[(1,)](word, seen, TAG)
    return word.item()


def test_what_the_parts_own_program_has_published_stays():
    """A helper may have read x after that program had written its results there."""
    old, fresh, others = (garbage(1, tag).item() for tag in (TAG - 1, TAG, TAG + 1))
    two = 0x40000000  # 2.0
    assert published(old, seen=old) == (two << 32) | TAG
    assert published(fresh, seen=old) == fresh  # published after it was seen
    assert published(fresh, seen=fresh) == fresh  # published before
    assert published(others, seen=old) == others


# ---- without partners ----------------------------------------------------------------


def without_the_last_part(x: torch.Tensor, block_cols: int = 1024) -> torch.Tensor:
    """All parts of each row but one, whose programs wait for it in vain.

    So they compute their parts unassisted, on a GPU too: the word that they wait for is
    never written. Returns what they have written of the last row.
    """
    call = Call(x, block_cols)
    y = call.launch(absent=1)
    return y[-1:, : (call.n_parts - 1) * block_cols]


@pytest.mark.parametrize("block_cols", [16, 32])
@pytest.mark.parametrize("n_cols", [96, 102, 101])
@pytest.mark.parametrize("absent", [1, 2])
def test_programs_without_partners_end_and_are_right(absent, n_cols, block_cols):
    call = Call(matrix(3, n_cols), block_cols)
    y = call.launch(absent=absent)
    done = (call.n_parts - absent) * block_cols
    done -= 31 if n_cols == 101 else 0  # these parts end with lines of 32 values
    assert 0 < done < n_cols
    torch.testing.assert_close(y[:, :done], expected(call.x)[:, :done])
    assert (y[:, -1] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("n_cols", [2**17, 100_003])
def test_programs_of_a_real_config_without_partners_are_right(n_cols):
    for dtype in backend.DTYPES:
        x = matrix(2, n_cols, dtype)
        y = like(x)
        launch = cooperative.launch_for(y, x)
        n_words = launch.n_words
        words = torch.zeros(n_words, dtype=torch.int64, device=x.device)
        args = y, x, words, TAG, *launch.scalars
        n_parts, *rows = launch.grid
        launch.kernel[(n_parts - 1, *rows)](*args, **launch.constants)
        done = (n_parts - 1) * launch.constants["BLOCK_COLS"] - 64  # see `cut`
        near = {"rtol": 0.02, "atol": 1e-6}
        torch.testing.assert_close(y[:, :done], expected(x)[:, :done], **near)
        assert (y[:, -1] == 7).all()


@triton.jit
def choose_kernel(tasks_ptr, words_ptr, tag, N: tl.constexpr, BLOCK: tl.constexpr):
    """Every program stores which program it would help."""
    own = tl.program_id(0)
    maxima, sums, missing = cooperative.no_pairs(N, BLOCK)
    words = words_ptr, tag, N
    _, _, missing, n_missing = cooperative.look(words, maxima, sums, missing)
    task = cooperative.choose_task(missing, n_missing, own, N, BLOCK)
    tl.store(tasks_ptr + own, task)


@pytest.mark.parametrize("n_resident", [1, 5, 12, 63])
@pytest.mark.parametrize("n_parts", [63, 64, 100])
def test_helpers_share_the_missing_parts(n_parts, n_resident):
    """A row's first programs help in step, as if the GPU ran only these at once."""
    words = torch.zeros(2, n_parts, dtype=torch.int64, device=backend.DEVICE)
    words[:, :n_resident] = TAG
    helped = 0
    while (words[0] != TAG).any():
        tasks = torch.full((n_resident,), -1, device=backend.DEVICE)
        choose_kernel[(n_resident,)](tasks, words, TAG, n_parts, 128)
        assert (words[0, tasks] != TAG).all()
        words[:, tasks] = TAG
        helped += n_resident
    rest = n_parts - n_resident
    assert helped <= rest + n_resident  # the last round has fewer parts than helpers
    tasks = torch.full((n_resident,), -1, device=backend.DEVICE)
    choose_kernel[(n_resident,)](tasks, words, TAG, n_parts, 128)
    assert tasks.tolist() == list(range(n_resident))  # none is missing


# ---- wrong helpers -------------------------------------------------------------------


def assert_without_the_last_part(n_cols: int) -> None:
    """Asserts that parts which wait in vain are right, even though maxima rise.

    The part that they wait for has a good share of the row's sum.
    """
    x = matrix(1, n_cols)
    x[:, 1024:] += 40
    y = without_the_last_part(x)
    near = TOLERANCES[x.dtype]
    torch.testing.assert_close(y, expected(x)[:, : y.shape[1]], **near)


def nothing_is_missing(words, maxima, sums, missing):
    maxima, sums, missing, n_missing = look(words, maxima, sums, missing)
    return maxima, sums, missing, n_missing * 0


def twice_the_value(word_ptr, seen, value, tag):
    tl.atomic_xchg(word_ptr, pack(2 * value, tag), sem="relaxed")


look, pack = cooperative.look, cooperative.pack


@pytest.mark.parametrize(
    ("helper", "wrong"),
    [
        ("merge_axis", without_rescaling_an_axis),
        ("look", nothing_is_missing),
        ("publish", twice_the_value),
    ],
)
@pytest.mark.parametrize("n_cols", [3072, 3075])
def test_wrong_helpers_are_caught_without_partners(helper, wrong, n_cols):
    with patched(cooperative, helper, wrong), pytest.raises(AssertionError):
        assert_without_the_last_part(n_cols)
    assert_without_the_last_part(n_cols)


def any_tag(word, tag):
    return (word & 0) == 0


def test_words_of_any_call_taken_are_caught():
    """The last part's word stays another call's, as its program is not launched."""

    def launch() -> bool:
        call = Call(matrix(1, 70))
        call.words.copy_(garbage(len(call.words), TAG - 1))
        y = call.launch(absent=1)
        return torch.allclose(y[:, :48], expected(call.x)[:, :48])

    with patched(cooperative, "has_tag", any_tag):
        assert not launch()
    assert launch()
