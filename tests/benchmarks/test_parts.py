"""A row's head, body and tail are what the kernel takes, and are judged in words."""

import pytest

from benchmarks import parts


def test_the_picture_shows_every_value(capsys):
    parts.picture(13, 4)
    lines = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["BBBB BBBB BBBB t", ".hhh BBBB BBBB tt"]
    for line in lines:
        assert sum(line.count(part) for part in "hBt") == 13


@pytest.mark.parametrize("vector", [2, 4, 8])
def test_lengths_are_the_kernels(vector):
    for n_cols in (1, 3, 13, 16, 33):
        found = parts.places(n_cols, vector, n_rows=vector).to_numpy().tolist()
        for row, cols in enumerate(found):
            head, body, tail = parts.lengths(row * n_cols, n_cols, vector)
            held = [str(col) for col in (*range(head), *range(head + body, n_cols))]
            assert [col for col in cols if col != "."] == held
            assert head + body + tail == n_cols


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
