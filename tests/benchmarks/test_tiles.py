"""Each step towards chapter `tiled`'s kernel is a softmax, and a small change."""

import importlib
import itertools

import pytest
import torch
import triton

from benchmarks import tiles
from kernels import tiled
from kernels.lab import check, compile, record, show
from tests.helpers import meta_matrix

KERNELS = [tiles.tile_kernel, tiles.wide_kernel, tiles.blocks_kernel]
NEWER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


@pytest.mark.thorough
@pytest.mark.parametrize("name", tiles.STEPS)
def test_each_step_is_a_softmax(name):
    how = {"dtypes": [torch.bfloat16], "max_cols": 136}
    summary = check.softmax(tiles.STEPS[name], **how)
    assert summary, summary


@pytest.mark.thorough
@pytest.mark.parametrize("rows", tiles.TILES)
def test_tiles_of_any_number_of_rows_are_softmaxes(rows):
    def softmax(x):
        one_element = rows == x.shape[1] == 1  # no tile of one element is compiled
        return (tiled.softmax if one_element else tiles.TILES[rows])(x)

    how = {"dtypes": [torch.bfloat16, torch.float32], "layouts": ["sliced", "offset"]}
    summary = check.softmax(softmax, max_cols=136, **how)
    assert summary, summary


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_any_number_of_rows_compile(dtype):
    for rows, n_cols in itertools.product(tiles.TILES, (1, 2, 32, 33, 64)):
        x = meta_matrix(64, n_cols, dtype)
        launch = tiles.changed_launch(x, x, rows=rows, num_warps=1)
        if rows == n_cols == 1:
            with pytest.raises(RuntimeError, match="parsing"):
                compile.aot(launch)
        else:
            compile.aot(launch)


def added(old, new) -> list[str]:
    """The lines that a step adds, but for its name, its decorator and its comments."""
    code = repr(show.diff(old, new)).splitlines()[2:]
    before = {line[1:].split("  # ")[0].strip() for line in code if line[0] == "-"}
    after = [line[1:].split("  # ")[0].strip() for line in code if line[0] == "+"]
    return [
        line
        for line in after
        if line not in before and not line.startswith(("def ", "#", "@"))
    ]


def test_no_step_adds_more_than_about_ten_lines():
    steps = [*KERNELS, tiled.softmax_kernel]
    lengths = [len(added(*pair)) for pair in itertools.pairwise(steps)]
    assert max(lengths) <= 11, lengths


def test_accesses_become_wide_in_step_two():
    assert tiles.widths(1000) == {"persistent": 2, "VECTOR": 8, "wide": 16}
    assert tiles.widths(1024) == {"persistent": 16, "VECTOR": 8, "wide": 16}
    assert tiles.widths(1000, 1001) == {"persistent": 2, "VECTOR": 1, "wide": 2}


def test_a_second_block_computes_fewer_exponentials():
    one, two = (tiles.exponentials(kernel, 8200) for kernel in KERNELS[1:])
    assert (one, two) == (16384, 8192 + 1024)


@pytest.mark.skipif(NEWER_TRITON, reason="keeps fewer values by itself")
def test_two_programs_of_32768_values_fit_an_sm():
    x = meta_matrix(4096, 32768, torch.bfloat16)
    launches = [tiles.changed_launch(x, x, recompute=r) for r in (False, True)]
    kept, again = compile.aot_all(launches)
    assert again.registers <= 128 < kept.registers


def test_the_last_step_is_the_course_softmax_launch():
    x = meta_matrix(4096, 8200, torch.bfloat16)
    assert tiles.launch_for(tiled.softmax_kernel, x, x) == tiled.launch_for(x, x)
    assert tiles.changed_launch(x, x) == tiled.launch_for(x, x)


@pytest.mark.gpu
def test_a_copy_is_no_kernel():
    rows = tiles.copies(2**20)
    copied = [row["runs"].startswith("Memcpy") for row in rows]
    assert copied == [True, True, False, False]


def test_the_profiler_names_what_runs(monkeypatch):
    class Broken:
        def __enter__(self):
            raise RuntimeError("no CUPTI")

        def __exit__(self, *error):
            return False

    monkeypatch.setattr(torch.profiler, "profile", lambda **options: Broken())
    with pytest.raises(record.Unavailable, match="CUPTI"):
        tiles.runs(torch.abs, torch.ones(1))


# ---- the learner's kernel ------------------------------------------------------------

KERNEL = """
@triton.jit
def my_kernel(y_ptr, x_ptr, m, n, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    old = n
    n = {}
    rows = tl.program_id(0) * 4 + tl.arange(0, 4)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (rows < m) & (cols < {})
    x = tl.load(x_ptr + rows * {} + cols, mask=inside, other=-float("inf"))
    numerator = exp_shifted(x, block_max(x))
    y = numerator / tl.sum(numerator, axis=1)[:, None]
    tl.store(y_ptr + rows * {} + cols, y, mask=inside)
"""
VISIBLE = "n // VECTOR * VECTOR"


@pytest.fixture
def kernel_of(tmp_path, monkeypatch):
    """A function that makes the kernel whose lines have these texts."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(number, in_mask, in_address):
        text = "from kernels.tiled import block_max, exp_shifted\n"
        text += "import triton\nimport triton.language as tl\n"
        text += KERNEL.format(number, in_mask, in_address, in_address)
        name = f"wide_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        return importlib.import_module(name).my_kernel

    return make


@pytest.mark.parametrize(
    ("number", "in_mask", "in_address", "said"),
    [
        (VISIBLE, "n", "n", "loads 16 bytes at once and stores 16."),
        ("...", "n", "n", 'still has "..." in it'),
        ("n", "n", "n", "Not yet: right in all"),
        ("tl.multiple_of(n, VECTOR)", "n", "n", "loads 2 bytes at once"),
        (VISIBLE, "old", "n", "loads 2 bytes at once"),
        (VISIBLE, "n", "old", "loads 2 bytes at once"),
        ("n // 8 * 8", "n", "n", "is wrong"),
    ],
)
def test_a_kernel_is_judged_in_a_sentence(
    kernel_of, capsys, number, in_mask, in_address, said
):
    tiles.judge(kernel_of(number, in_mask, in_address))
    assert said in capsys.readouterr().out.replace("\n", " ")


def test_a_promise_about_one_column_compiles(kernel_of):
    kernel = kernel_of("tl.multiple_of(n, VECTOR)", "n", "n")
    x = compile.pointer(torch.bfloat16)
    for n_rows, n_cols in ((1, 1), (8, 1), (1, 8)):
        compile.aot(tiles.unspecialised(kernel), x, x, n_rows, n_cols, n_cols, n_cols)
    with pytest.raises(triton.CompilationError, match="no attribute 'shape'"):
        compile.aot(kernel, x, x, 8, 1, 1, 1)  # as it is: n is a constant
