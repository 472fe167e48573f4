"""Each step towards chapter `persistent`'s kernel is a softmax, and a small change."""

import pytest
import torch
import triton

from benchmarks import steps
from kernels import persistent, strided
from kernels.lab import check, compile, show


def by_tiles(x: torch.Tensor) -> torch.Tensor:
    return launch(steps.tile_kernel, x, triton.cdiv(len(x), 4))


def by_a_loop(x: torch.Tensor) -> torch.Tensor:
    return launch(steps.loop_kernel, x, 3)


def launch(kernel, x: torch.Tensor, n_programs: int) -> torch.Tensor:
    output = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        strides = *output.stride(), *x.stride()
        kernel[(n_programs,)](output, x, *strides, *x.shape, 4, block)
    return output


@pytest.mark.parametrize("function", [by_tiles, by_a_loop])
def test_each_step_is_a_softmax(function):
    summary = check.softmax(function, dtypes=[torch.float32], max_cols=33)
    assert summary, summary


def changed(old, new, **options) -> list[str]:
    lines = repr(show.diff(old, new, **options)).splitlines()[2:]
    return [line for line in lines if line[0] == "+" and "+def " not in line]


def test_no_step_adds_more_than_ten_lines():
    tile = changed(strided.softmax_kernel, steps.tile_kernel)
    loop = changed(steps.tile_kernel, steps.loop_kernel, indentation=False)
    stages = changed(steps.loop_kernel, persistent.softmax_kernel)
    assert [len(step) for step in (tile, loop, stages)] == [10, 5, 2]


def test_a_launchs_num_stages_does_not_pipeline_the_loop():
    x, sizes = compile.pointer(torch.float32), (4096, 1, 4096, 1, 64, 4096)
    asynchronous = r"cp\.async\.c[ag]"
    plain = compile.aot(steps.loop_kernel, x, x, *sizes, 1, 4096, num_stages=3)
    assert plain.count(asynchronous) == 0
    staged = compile.aot(persistent.softmax_kernel, x, x, *sizes, 1, 4096, 3)
    assert staged.count(asynchronous) > 0


# ---- the learner's loop --------------------------------------------------------------

# fmt: off
KERNEL = """
@triton.jit
def my_kernel(
    out_ptr, in_ptr, n_rows, n_cols, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    cols = tl.arange(0, BLOCK)[None, :]
    n_tiles = tl.cdiv(n_rows, ROWS)
    for tile in range({}, n_tiles, {}):
        rows = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (rows < n_rows) & (cols < n_cols)
        places = rows * n_cols + cols
        x = tl.load(in_ptr + places, mask=inside, other=-float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
        y = numerator / tl.sum(numerator, axis=1)[:, None]
        tl.store(out_ptr + places, y, mask=inside)
"""
# fmt: on


@pytest.mark.parametrize(
    ("first", "step", "said"),
    [
        ("tl.program_id(0)", "tl.num_programs(0)", "Right in all"),
        ("tl.program_id(0)", "...", 'still has "..." in it'),
        ("0", "1", "read 5 times"),
        ("tl.program_id(0)", "1", "read 3.92 times"),
        ("0", "tl.num_programs(0)", "never written"),
        ("tl.program_id(0)", "ROWS", "read 1.22 times"),
    ],
)
def test_a_loop_is_judged_in_a_sentence(
    tmp_path, monkeypatch, capsys, first, step, said
):
    text = "import triton\nimport triton.language as tl\n" + KERNEL.format(first, step)
    (tmp_path / f"written_{abs(hash(text))}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    steps.judge(__import__(f"written_{abs(hash(text))}").my_kernel)
    assert said in capsys.readouterr().out.replace("\n", " ")
