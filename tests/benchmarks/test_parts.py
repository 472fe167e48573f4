"""A row's head, body and tail are what the kernel takes, and are judged in words."""

import itertools

import pytest

from benchmarks import parts
from kernels import unaligned
from tests.lab.pictures import boxes, gids, texts


def test_the_picture_cuts_each_row_as_the_text_does():
    drawn = gids(parts.picture(13, 4))
    named = dict(reversed(gid.split()) for gid in drawn if " " in gid)
    assert [*map(int, named)] == list(range(4 * 13))
    row = [named[str(13 + col)] for col in range(13)]
    assert row == ["head"] * 3 + ["body"] * 8 + ["tail"] * 2
    assert drawn["before"] == 0 + 1 + 2 + 3


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_every_picture_fits_its_card(vector):
    for n_cols in (1, 3, 13, 16, 20):
        for box in boxes(parts.picture(n_cols, vector), "body"):
            assert box.get_x() + box.get_width() <= 97.5


def test_a_row_too_long_to_be_drawn_is_refused():
    with pytest.raises(ValueError, match="from 1 to 20"):
        parts.picture(21, 4)
    with pytest.raises(ValueError, match="power of two"):
        parts.picture(13, 3)


@pytest.mark.parametrize("vector", [2, 4, 8])
def test_lengths_add_up_and_bodies_are_aligned(vector):
    for n_cols, start in itertools.product((1, 3, 13, 16, 33), range(vector)):
        head, body, tail = parts.lengths(start, n_cols, vector)
        assert head + body + tail == n_cols
        assert not body or (start + head) % vector == body % vector == 0
        assert max(head, tail) < vector


def test_the_kernels_split_is_judged_right(capsys):
    parts.judge(unaligned.split_row)
    assert "every body is aligned" in capsys.readouterr().out


# ---- what threads hold ---------------------------------------------------------------

COPIED = {"body": [[2 * i, 2 * i + 1] for i in range(8)], "edges": 4 * [[0, 1], [2, 3]]}
OWN = {"body": [[i, i + 8] for i in range(8)], "edges": [[i] for i in range(8)]}


def test_what_other_threads_hold_too_is_drawn_as_a_copy():
    figure = parts.holding({"before": (4, COPIED), "after": (2, OWN)}, 2)
    drawn = [*gids(figure)]
    assert sum(gid.endswith("copy") for gid in drawn) == 12
    assert {"before: 0 head 0", "before: 1 tail 2", "before: 2 head 0 copy"} <= {*drawn}
    assert {"after: 1 head 1", "after: 2 tail 2", "after: 7 tail 7"} <= {*drawn}
    assert sum(" body " in gid for gid in drawn) == 2 * 16
    assert {"a thread holds 4 rows × (2 + 2)", "a thread holds 2 rows × (1 + 2)"} <= {
        *texts(figure)
    }


def test_a_frame_holds_neighbours():
    figure = parts.holding({"after": (2, OWN)}, 2)
    assert "0\n–\n1" not in texts(figure)  # 0 and 8 are no neighbours
    assert "0\n–\n1" in texts(parts.holding({"before": (4, COPIED)}, 2))


def test_three_steps_are_too_many():
    with pytest.raises(ValueError, match="from 1 to 2"):
        parts.holding(dict.fromkeys("abc", (4, OWN)), 2)


# ---- the learner's split -------------------------------------------------------------

SPLIT = """
import triton
import triton.language as tl


@triton.jit
def my_split(start, n_cols, VECTOR: tl.constexpr):
    head = {}
    head = tl.minimum(head, n_cols)
    body = {}
    return head, body
"""
HEAD, BODY = "-start & (VECTOR - 1)", "(n_cols - head) & -VECTOR"


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        (HEAD, BODY, "every body is aligned."),
        ("...", BODY, 'of my_split still has "..." in it'),
        (HEAD, "...", 'still has "..." in it'),
        ("0 * start", BODY, "and its body at 13, which 4 does not divide."),
        ("start & (VECTOR - 1)", BODY, "and its body at 14, which 4 does not divide."),
        (HEAD, "n_cols & -VECTOR", "which is outside"),
        (HEAD, "0 * n_cols", "is wrong"),
    ],
)
def test_a_split_is_judged_in_a_sentence(
    tmp_path, monkeypatch, capsys, head, body, said
):
    text = SPLIT.format(head, body)
    name = f"split_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    parts.judge(__import__(name).my_split)
    assert said in capsys.readouterr().out.replace("\n", " ")
