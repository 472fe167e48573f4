"""One program per row: right, counted, and made of what the chapter says it is."""

import re
from pathlib import Path

import nbformat
import pytest
import torch
import triton
import triton.language as tl

from benchmarks import roundings
from kernels import program
from kernels.lab import backend, check, compile, meter, occupancy
from kernels.lab.check import Fault
from tests.helpers import TRITON, assert_right, loaded, matrix

(PAGE,) = Path(__file__).resolve().parents[1].glob("notebooks/*_program.ipynb")
FLOAT, HALF = compile.pointer(torch.float32), compile.pointer(torch.float16)


def vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = matrix(2, n)
    return x, y


# ---- addition ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "block"),
    [(0, 4), (1, 1), (10, 4), (12, 4), (5, 16), (1023, 1024), (2049, 512)],
)
def test_add(n, block):
    x, y = vectors(n)
    assert torch.equal(program.add(x, y, block=block), x + y)


def test_add_reads_twice_and_writes_once():
    counted = meter.count(program.add, *vectors(10), block=4)
    assert counted.values == (20, 10, 0)
    assert counted.rows[0].grid == (3,)


@pytest.mark.parametrize(
    ("x", "got"),
    [
        ([1.0], "list"),
        (torch.ones(2, dtype=torch.int64), r"torch.int64; .*x\.float\(\)"),
        (torch.ones(2, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_add_names_a_wrong_type(x, got):
    with pytest.raises(TypeError, match=f"x must be .*got {got}"):
        program.add(x, vectors(2)[1])


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: matrix(2, 2), r"shape \(2, 2\)"),
        (lambda: matrix(2, 2)[:, 0], r"strides \(2,\)"),
        (lambda: torch.ones(2, device="meta"), "'meta'"),
    ],
)
def test_add_names_what_is_no_vector_and_what_makes_one(make, got):
    with pytest.raises(ValueError, match=f"y must be .*{got}.*flatten"):
        program.add(vectors(2)[0], make())


def test_add_names_a_mismatch():
    with pytest.raises(ValueError, match=r"same length, got 2 and 3; .*expand"):
        program.add(vectors(2)[0], vectors(3)[0])


@pytest.mark.parametrize("block", [-4, 0, 3, 12, 2 * program.MAX_COLS])
def test_add_names_a_block_that_is_no_power_of_two_or_too_long(block):
    with pytest.raises(ValueError, match=f"block must be .*got {block};"):
        program.add(*vectors(2), block=block)


@pytest.mark.parametrize("block", [4.0, "4", None])
def test_add_names_a_block_that_is_no_int(block):
    with pytest.raises(TypeError, match=f"block must be an int, got {block!r};"):
        program.add(*vectors(2), block=block)


# ---- softmax -------------------------------------------------------------------------


def test_softmax_passes_the_check():
    assert check.softmax(program.softmax, layouts=("contiguous",))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 64), (2, 781), (5, 1025)])
def test_reads_and_writes_each_value_once_with_a_program_per_row(shape):
    counted = meter.count(program.softmax, matrix(*shape))
    assert counted.values == meter.fused(*shape)
    (launch,) = counted.rows
    assert launch.grid == (shape[0],)


def test_longest_row():
    x = matrix(1, program.MAX_COLS)
    if backend.INTERPRETED:  # compiling it takes long
        assert_right(program.softmax(x), x)
    with pytest.raises(ValueError, match="at most 131072 columns"):
        program.softmax(matrix(1, program.MAX_COLS + 1))


def test_gaps_between_rows_are_refused():
    for x in (matrix(5, 3).t(), matrix(3, 5, stride=8)):
        with pytest.raises(ValueError, match=r"contiguous.*kernels\.strided"):
            program.softmax(x)


def test_offsets_beyond_32_bits_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "numel", lambda self: 2**31)
    with pytest.raises(ValueError, match=r"2\^31 elements.*got 2147483648.*strided"):
        program.softmax(matrix(2, 2))


# ---- what the chapter shows ----------------------------------------------------------


def fixed_block(x: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(x)
    if x.numel():
        program.softmax_kernel[(len(x),)](output, x, x.shape[1], BLOCK_COLS=1024)
    return output


def test_one_shape_does_not_tell_that_a_fixed_block_is_too_short(capsys):
    x = matrix(4, 931)
    assert_right(fixed_block(x), x)
    failure = check.softmax(fixed_block, layouts=("contiguous",)).failure
    assert (failure.fault, failure.shape[1]) == (Fault.UNWRITTEN, 1025)


def test_unpacking_fails_before_an_assertion_on_dim_can():
    def unpack_then_assert(x):
        _rows, _cols = x.shape
        assert x.dim() == 2

    with pytest.raises(ValueError, match="too many values to unpack"):
        unpack_then_assert(torch.ones(2, 3, 4))


def test_row_is_kept_in_registers_and_shared_memory_carries_one_value_per_warp():
    launches = [
        (program.softmax_kernel, (FLOAT, FLOAT, n_cols), {"BLOCK_COLS": n_cols})
        for n_cols in (1024, 4096, 16384)
    ]
    for (_, (*_, n_cols), _), made in zip(
        launches, compile.aot_all(launches), strict=True
    ):
        assert 4 * 32 * made.num_warps * made.registers >= 4 * n_cols
        assert made.shared == 4 * made.num_warps
        assert made.spills == 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_of_32768_does_not_fit_the_registers_of_4_warps_but_of_8(dtype):
    p, n_cols = compile.pointer(dtype), 32768
    made = compile.aot(program.softmax_kernel, p, p, n_cols, BLOCK_COLS=n_cols)
    options = {"BLOCK_COLS": n_cols, "num_warps": 8}
    wider = compile.aot(program.softmax_kernel, p, p, n_cols, **options)
    assert made.num_warps == 4 and made.spills > 0 and wider.spills == 0


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_sm_holds_two_programs_of_4_warps_and_one_of_8_or_16(dtype):
    """So the page's table of warps changes one thing from 8 to 16, and two from 4."""
    p, n_cols = compile.pointer(dtype), 32768
    arguments = program.softmax_kernel, (p, p, n_cols)
    made = compile.aot_all(
        (*arguments, {"BLOCK_COLS": n_cols, "num_warps": warps}) for warps in (4, 8, 16)
    )
    held = [occupancy.of(each).blocks_per_sm for each in made]
    assert held[1:] == [1, 1]
    # Triton 3.9 gives 4 warps of float32 fewer registers, and spills more.
    assert held[0] == (2 if TRITON <= (3, 7) or dtype == torch.bfloat16 else 16)
    assert [each.spills > 0 for each in made] == [True, False, False]


@pytest.mark.parametrize(
    ("n_elements", "loads"),
    [(1024, 4 * ["ld.global.v4.b32"]), (1001, 16 * ["ld.global.b32"])],
)
def test_add_loads_16_bytes_at_a_time_where_the_length_allows(n_elements, loads):
    made = compile.aot(program.add_kernel, *3 * [FLOAT], n_elements, BLOCK=1024)
    assert re.findall(r"ld\.global\S*", made.ptx) == loads
    assert made.lines("reqntid") == [".reqntid 128"]


def test_exponential_and_division_are_approximate_one_of_each_per_element():
    made = compile.aot(program.softmax_kernel, FLOAT, FLOAT, 1024, BLOCK_COLS=1024)
    for instruction in (r"ex2\.approx\.f32", r"div\.full\.f32"):
        assert made.count(instruction) == 1024 // (32 * made.num_warps)


@triton.jit
def exp_kernel(output_ptr, input_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output_ptr + offsets, tl.exp(tl.load(input_ptr + offsets)))


def test_exp_takes_no_16_bit_values():
    with pytest.raises(triton.CompilationError, match=r"fp32.*fp64.*got fp16"):
        compile.aot(exp_kernel, HALF, HALF, BLOCK=1024)


@pytest.mark.parametrize(
    ("low", "product", "constant", "both"),
    [(-5, 1, 1, 2), (-45, 22, 5, 27), (-80, 22, 9, 31)],
)
def test_two_roundings_precede_the_exponential(low, product, constant, both):
    errors = roundings.errors(low).values()
    assert [round(error) for error in errors] == [product, constant, both]


@pytest.mark.gpu
def test_exponential_errs_as_rounding_its_exponent_does():
    for low in range(0, 80, 5):
        x = torch.linspace(-low - 5, -low, 2**16)
        y = torch.empty_like(x, device=backend.DEVICE)
        exp_kernel[(64,)](y, x.to(backend.DEVICE), BLOCK=1024)
        rounded = roundings.exponentials(x)["both"]
        assert abs(roundings.worst(y.cpu(), x) - roundings.worst(rounded, x)) < 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES)
def test_softmax_of_many_long_rows(dtype):
    x = matrix(4096, 16384, dtype)
    assert_right(program.softmax(x), x)


# ---- the page's own kernel -----------------------------------------------------------


def written_on_the_page(tmp_path: Path, *, solved: bool):
    """`my_softmax` of the page, with its gaps or with the solutions in their place."""
    page = nbformat.read(PAGE, as_version=4)
    cells = [cell.source for cell in page.cells]
    text = "\n\n".join(
        cell for cell in cells if re.search(r"^def my_softmax", cell, re.M)
    )
    text = "import torch\n" + text.split("check.softmax(")[0]
    if solved:
        (fold,) = re.findall(r"<summary>Solution<.*?</details>", "".join(cells), re.S)
        gap, *lines = re.findall(r"^\d\. `(.*)`", fold, re.M)
        text = text.replace("other=...", gap)
        for line in lines:
            start = line.split(" = ")[0]
            text = re.sub(rf"^    {start} = .*$", f"    {line}", text, flags=re.M)
    path = tmp_path / "page.py"
    path.write_text(text)
    return loaded(path).my_softmax


def test_the_pages_kernel_has_gaps_and_its_solution_is_right(tmp_path, capsys):
    assert not check.softmax(written_on_the_page(tmp_path, solved=False))
    sentence = 'Not yet: line 6 of my_softmax_kernel still has "..." in it.\n'
    assert capsys.readouterr().out == sentence
    solution = written_on_the_page(tmp_path, solved=True)
    assert check.softmax(solution, layouts=["contiguous"])
    assert meter.count(solution, matrix(3, 5)).values == meter.fused(3, 5)
