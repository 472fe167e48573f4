"""The controls of kernels whose programs share rows: the same results, other code."""

import pytest
import torch

from benchmarks import details
from kernels import cooperative, gradient
from kernels.lab import compile, gpu, process, record
from kernels.lab.compile import Compiled
from kernels.lab.launch import Launch
from tests.helpers import assert_is_gradient, assert_right, matrix
from tests.sass import loads_before_use


def compiled(launch: Launch) -> dict[str, Compiled]:
    """The controls of a launch, for an H200, made where kernels are compiled."""
    kernel, args, options = compile.bare(launch)

    def kernels() -> list[Compiled]:
        controls = [details.with_helpers(kernel, h) for h in details.CONTROLS.values()]
        bare = [(control, args, options) for control in controls]
        return compile._compile(bare, gpu.named("H200"))

    found = process.call_in("compiler", kernels)
    return dict(zip(details.CONTROLS, found, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("control", details.CONTROLS)
def test_controls_are_right(control):
    x = matrix(2, 50_257, torch.bfloat16)
    y, g = torch.softmax(x.float(), 1).to(x.dtype), torch.empty_like(x)
    details.launches("softmax", g, x)[control](g, x)
    assert_right(g, x)
    details.launches("gradient", g, x, y)[control](g, x, y)
    assert_is_gradient(g, x, y)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel, case", details.CASES)
def test_each_control_is_other_code(kernel, case):
    x = torch.empty(case[1:3], dtype=case.dtype, device="meta")
    chapter, n = {"softmax": (cooperative, 1), "gradient": (gradient, 2)}[kernel]
    usual = chapter.launch_for(x, *[x] * n)
    kernels = compiled(usual)
    assert kernels["course"].sass == compile.aot(usual).sass
    assert len({one.sass for one in kernels.values()}) == len(details.CONTROLS)
    first = {name: loads_before_use(one.sass)[0] for name, one in kernels.items()}
    assert first["mixed"] <= first["course"]


def test_a_helper_is_replaced_at_every_depth_and_only_there():
    kernel = cooperative.softmax_kernel
    other = details.with_helpers(kernel, {"cut": details.anywhere})
    inner = other.fn.__globals__["reduce_part"]
    assert inner.fn.__globals__["cut"] is details.anywhere
    again = other.fn.__globals__["help_row"].fn.__globals__["reduce_part"]
    assert again.fn.__globals__["cut"] is details.anywhere
    assert kernel.fn.__globals__["reduce_part"].fn.__globals__["cut"] is cooperative.cut
    assert gradient.cut is cooperative.cut


def test_the_record_has_every_case():
    rows = record.recorded("cooperative_details")
    found = [*rows[["kernel", "n_rows", "n_cols"]].itertuples(index=False, name=None)]
    assert found == [(kernel, *case[1:3]) for kernel, case in details.CASES]
    assert (rows[[*details.CONTROLS]] > 0).all(axis=None)
