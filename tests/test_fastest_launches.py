"""Which kernels `softmax` launches, what it keeps, and how often it compiles."""

import math
import types

import pytest
import torch
import triton

import kernels
from kernels import columns, cooperative, fastest, online, staged, tiled, windows
from kernels.lab import direct, operator
from tests.fakes import FakeKernel
from tests.helpers import STEMS, assert_right, input_of, tensor

SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.fixture
def launched(monkeypatch) -> dict[str, FakeKernel]:
    """Each chapter's kernel, which notes its launches, with nothing prepared yet."""
    fakes = {}
    for stem, module in [*STEMS.items(), ("columns", columns)]:
        fakes[stem] = FakeKernel(module.softmax_kernel)
        monkeypatch.setattr(module, "softmax_kernel", fakes[stem])
    forget(monkeypatch)
    monkeypatch.setattr(direct, "_compiled", {})
    return fakes


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, nothing is prepared that was prepared before it."""
    monkeypatch.setattr(kernels.operator.rules(), "launches", {})
    fastest.known.clear()


def through_triton(launched: dict[str, FakeKernel]) -> list[str]:
    """The chapters whose kernels were launched through Triton, once for each launch."""
    return [stem for stem, fake in launched.items() for _ in fake.calls]


def through_a_kept_kernel(launched: dict[str, FakeKernel]) -> list[str]:
    """The chapters whose compiled kernels were launched, once for each launch."""
    return [stem for stem, fake in launched.items() for _ in fake.compiled.calls]


@pytest.mark.parametrize("dtype", fastest.DTYPES)
def test_the_chosen_kernel_is_the_one_launched(launched, dtype, monkeypatch):
    monkeypatch.setattr(online, "choose_parts", lambda *sizes: 1)  # in one launch
    chosen = []
    for shape in ((1, 1), (3, 33), (200, 64), (1, 9000), (1, 17_000)):
        x = tensor(*shape, dtype=dtype)
        assert_right(fastest.softmax(x), x)
        chosen.append(fastest.choose(*shape, dtype))
        used = through_triton(launched) + through_a_kept_kernel(launched)
        assert sorted(used) == sorted(chosen)  # nothing is tried out


def test_few_long_rows_take_two_launches_each_of_which_is_kept(launched):
    for seed in range(3):
        x = tensor(1, 70_000, dtype=torch.float64, seed=seed)
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == ["online"] * 2
    assert through_a_kept_kernel(launched) == ["online"] * 4


def test_every_answer_for_few_rows_is_launched_somewhere(launched):
    for stem in STEMS:
        fastest.softmax(input_of(stem, n_rows=2))
    assert through_triton(launched) == [*STEMS]


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (staged, tensor(5, 63, dtype=HALF)),
        (windows, tensor(5, 70, dtype=HALF)[:, :67]),
    ],
)
def test_answers_for_many_rows_are_launched_too(launched, module, x, monkeypatch):
    """`choose` is patched, since the interpreter would need long for many rows."""
    kernel = FakeKernel(module.softmax_kernel)
    monkeypatch.setattr(module, "softmax_kernel", kernel)
    stem = module.__name__.removeprefix("kernels.")
    monkeypatch.setattr(fastest, "choose", lambda *form: stem)
    for _ in range(2):
        assert_right(fastest.softmax(x), x)
    assert (len(kernel.calls), len(kernel.compiled.calls)) == (1, 1)
    assert through_triton(launched) == []


@pytest.mark.parametrize(
    ("x", "dim", "stems"),
    [
        (tensor(3, 50, 7), 1, ["columns"]),
        (tensor(3, 50, 14)[:, :, ::2], 1, ["online"]),  # no neighbours
        (tensor(50, 3).t(), 1, ["online"]),
        (tensor(3, 100)[:, ::2], 1, ["online"]),
        (tensor(3, 1).expand(3, 50), 1, ["online"]),
        (tensor(3, 52, 1), 1, ["tiled"]),
        (tensor(3, 51, 1), 1, ["unaligned"]),
        (tensor(3, 60)[:, 5:55], 1, ["tiled"]),  # by elements: the output's rows differ
        (tensor(151)[1:].view(3, 50), 1, ["tiled"]),
        (tensor(3, 60)[:, 4:56], 1, ["tiled"]),
        (tensor(1, 52).expand(3, 52), 1, ["tiled"]),
        (tensor(1, 50).expand(3, 50), 1, ["tiled"]),
        (tensor(2, 6, 4, 5)[:, ::2, ::2], 3, ["unaligned"]),  # by way of a copy
        (tensor(3, 0), 1, []),
    ],
)
def test_strides_decide_as_well(launched, x, dim, stems):
    assert_right(fastest.softmax(x, dim), x, dim)
    assert through_triton(launched) == stems


# ---- few compilations ----------------------------------------------------------------


def test_a_new_length_of_a_known_class_uses_the_compiled_kernel(launched):
    for n_cols in (9001, 9003, 9101):
        x = tensor(2, n_cols)
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == ["cooperative"]
    assert through_a_kept_kernel(launched) == ["cooperative"] * 2


def test_another_class_has_a_kernel_of_its_own(launched):
    for n_cols, dtype in ((600, SINGLE), (601, SINGLE), (1200, SINGLE), (600, HALF)):
        x = tensor(2, n_cols, dtype=dtype)
        assert_right(fastest.softmax(x), x)
    assert len(through_triton(launched)) == 4
    assert through_a_kept_kernel(launched) == []


@pytest.mark.parametrize("n_rows", [3, 4, 7])
@pytest.mark.parametrize("shape", [(8704,), (1, 8707)])
def test_more_rows_than_a_grid_has_are_halved(launched, shape, n_rows, monkeypatch):
    monkeypatch.setattr(cooperative, "MAX_ROWS", 3)
    wide = tensor(n_rows, *shape[:-1], shape[-1] + 3)
    for x in (wide[..., 1:-2], wide[..., :-3].contiguous()):
        assert_right(fastest.softmax(x), x)
    out = wide.clone()
    assert fastest.softmax(out, out=out) is out
    assert_right(out, wide)
    assert {*through_triton(launched)} == {"cooperative"}
    assert all(grid[1] <= 3 for grid, *_ in launched["cooperative"].calls)


# ---- the first call, and those after it ----------------------------------------------


def tuned(module):
    """The names of what Triton would tune at its first launch."""
    kinds = triton.runtime.Autotuner
    return [name for name, value in vars(module).items() if isinstance(value, kinds)]


def test_nothing_is_tuned():
    assert not any(tuned(module) for module in (fastest, *STEMS.values()))
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2)]
    kernel = triton.autotune(configs, key=[])(tiled.softmax_kernel)
    assert tuned(types.SimpleNamespace(kernel=kernel)) == ["kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stem", STEMS)
def test_later_calls_pass_to_the_compiled_kernel_what_it_takes(launched, stem, dtype):
    """By position, in the order of the kernel's parameters: a launch names nothing."""
    fake = launched[stem]
    for seed in range(2):
        x = input_of(stem, n_rows=2, seed=seed, dtype=dtype)
        y = fastest.softmax(x)
        assert_right(y, x)
    assert through_triton(launched) == through_a_kept_kernel(launched) == [stem]

    ((first_grid, args, constants),) = fake.calls
    ((grid, values),) = fake.compiled.calls
    assert grid == (*first_grid, 1, 1)[:3]
    parameters = fake.arg_names
    passed = dict(zip(parameters, values, strict=True))
    first = dict(zip(parameters, args, strict=False))
    constexprs = {name: v for name, v in constants.items() if name in parameters}
    assert [*first, *constexprs] == parameters
    options = {"num_warps", "maxnreg", "enable_fp_fusion"}
    assert set(constants) - set(constexprs) <= options

    assert passed.pop("output_ptr").data_ptr() == y.data_ptr()
    assert passed.pop("input_ptr").data_ptr() == x.data_ptr()
    if stem == "cooperative":
        n_words = 2 * math.prod(fake.calls[0][0])
        words, tag = passed.pop("words_ptr"), passed.pop("tag")
        assert (words.dtype, words.device) == (torch.int64, x.device)
        assert len(words) >= n_words and 0 < tag < 2**31
    assert passed == {name: (first | constexprs)[name] for name in passed}
    assert passed["n_cols"] == x.shape[1]


def test_later_calls_by_way_of_a_copy_use_the_compiled_kernel(launched):
    for seed in range(2):
        x = tensor(2, 6, 4, 5, seed=seed)[:, ::2, ::2]
        assert_right(fastest.softmax(x), x)
    assert through_triton(launched) == through_a_kept_kernel(launched) == ["unaligned"]


def test_later_calls_that_need_a_gradient_use_the_compiled_kernel(launched):
    for seed in range(2):
        x = tensor(3, 64, seed=seed).requires_grad_()
        fastest.softmax(x).sum().backward()
    assert through_triton(launched) == through_a_kept_kernel(launched) == ["tiled"]


def test_each_shape_dtype_stride_dim_and_alignment_has_a_launch(launched):
    square = tensor(8, 8)
    kinds = [
        *[(square, 1), (square, 0), (square.t(), 1), (square.double(), 1)],
        *[(tensor(8, 9)[:, :8], 1), (tensor(8, 9)[:, 1:], 1), (square.view(4, 16), 1)],
    ]
    for _ in range(2):
        for x, dim in kinds:
            assert_right(fastest.softmax(x, dim), x, dim)
    assert len(kernels.operator.rules().launches) == len(kinds)
    calls = through_triton(launched) + through_a_kept_kernel(launched)
    assert len(calls) == 2 * len(kinds)
    # The two lengths that `tiled` takes share a kernel: the second needs no Triton.
    assert len(through_a_kept_kernel(launched)) == len(kinds) + 1


def test_an_empty_tensor_launches_nothing(launched):
    for _ in range(2):
        fastest.softmax(tensor(3, 0))
    assert through_triton(launched) == through_a_kept_kernel(launched) == []


@pytest.mark.parametrize("stem", STEMS)
def test_a_launch_that_is_prepared_serves_other_tensors(stem):
    for seed in range(2):
        x = input_of(stem, n_rows=2, seed=seed)
        assert_right(fastest.softmax(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_launch_is_prepared_for_one_alignment(dtype):
    for n_cols in (64, 33):
        for offset in (0, 1, 2, 3, 4, 8, 0):  # elements from an aligned address
            x = tensor(4 * n_cols + 8, dtype=dtype)[offset:][: 4 * n_cols]
            x = x.view(4, n_cols)
            assert_right(fastest.softmax(x), x)


def test_so_many_launches_are_kept_and_no_more(monkeypatch):
    forget(monkeypatch)
    monkeypatch.setattr(operator, "MOST_LAUNCHES", 3)
    for n_cols in (*range(1, 9), *range(1, 9)):
        x = tensor(2, n_cols)
        assert_right(fastest.softmax(x), x)
        assert len(kernels.operator.rules().launches) <= 3


def test_bad_input_is_named_after_a_good_call():
    x = tensor(2, 3)
    fastest.softmax(x, 1)
    with pytest.raises(TypeError, match="must be a"):
        fastest.softmax(x.tolist(), 1)
    with pytest.raises(TypeError, match="int32"):
        fastest.softmax(x.int(), 1)
    with pytest.raises(ValueError, match="meta"):
        fastest.softmax(x.to("meta"), 1)


def test_a_later_call_with_out_uses_the_compiled_kernel(launched):
    for offset in (0, 1, 0, 1):
        x, buffer = tensor(3, 64), tensor(3 * 64 + 1)
        fastest.softmax(x, out=buffer[offset:][: 3 * 64].view(3, 64))
    assert through_triton(launched) == ["tiled", "tiled"]  # the second by elements
    assert through_a_kept_kernel(launched) == ["tiled", "tiled"]


def test_vmap_makes_one_launch(launched):
    x = tensor(7, 3, 64)
    y = torch.vmap(lambda v: fastest.softmax(v, 0), in_dims=1, out_dims=1)(x)
    assert_right(y, x, 0)
    assert through_triton(launched) == ["columns"]
    assert through_a_kept_kernel(launched) == []
    of_values = torch.vmap(lambda v: fastest.softmax(v, -1))(tensor(4))
    assert torch.equal(of_values, torch.ones_like(of_values))
    with pytest.raises(IndexError, match=r"from -1 to 0 for shape \(64,\), got 1"):
        torch.vmap(torch.vmap(lambda v: fastest.softmax(v, 1)))(x)
