"""What it costs that shapes share a compiled kernel: a control of `kernels.fastest`.

Its kernels are not compiled for a size, a stride or a shift (`launch.SIZES`). Where the
GPU has an SM for each row, lengths up to a power of two also share a configuration. So
here each matrix is also taken by a kernel of its own: with the chapter's configuration
for its length, and with all these numbers as constants.

On an H200, more than half of all matrices are at least as fast in a kernel that shapes
share. The others lose up to 1.6 %, also at 64 rows of lengths between two powers, whose
configuration differs, too. (A small matrix has larger tiles in its own kernel.) Three
matrices of bfloat16 take about twice as long in a kernel of their own, because the
compiler spills registers there.

from benchmarks import classes
observed = record.observe("fastest_classes", classes.times)

`python -m benchmarks.classes` measures, records and prints.
"""

import os
import statistics
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import regions
from kernels import fastest, unaligned
from kernels.lab import backend, clock, record
from kernels.lab.launch import SIZES, Launch
from kernels.lab.record import Case

TURNS = 3
BETWEEN = (600, 1030, 1600, 3000, 4097, 6000, 12000, 20001)  # two at a power of two
_MANY = (
    *regions.BY_NAME["small"].cases,
    *(Case(dtype, 64, n) for dtype in (torch.float32, torch.bfloat16) for n in BETWEEN),
    *regions.BY_NAME["few"].short,
    *(case for name in ("large", "any") for case in regions.BY_NAME[name].short),
)
CASES = tuple(dict.fromkeys(_MANY))
"""Small matrices, few rows of lengths within a class, few long rows, large matrices."""


def of_its_own(launch: Launch) -> Launch:
    """A launch like this one, but of a kernel that is compiled for its numbers alone.

    Args:
        launch: of a `@triton.jit` kernel, as a chapter's `launch_for` makes it.
    """
    return replace(launch, kernel=with_constants(launch.kernel))


def with_constants(kernel: Any) -> Any:
    """The kernel with all its scalars as constexprs, but the tag."""
    new = copy_of(kernel.fn)
    scalars = {*kernel.arg_names} & {*SIZES, "n_rows"} - {"tag"}
    new.__annotations__ |= dict.fromkeys(scalars, tl.constexpr)
    return triton.jit(new)


def copy_of(function: types.FunctionType, **names: Any) -> types.FunctionType:
    """A function of the same code, which finds other things under these names."""
    new = types.FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    new.__annotations__ = dict(function.__annotations__)
    new.__module__, new.__qualname__ = function.__module__, function.__qualname__
    return new


def calls(case: Case) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What is timed at a matrix: `shared`, as `fastest` launches it, and `own`."""
    x = torch.empty(case[1:3], dtype=case.dtype, device=backend.DEVICE)
    y = torch.empty_like(x)
    shared = fastest.prepare(y, x, 1).launch
    vector, same_shift = unaligned.alignment(y, x)
    stem = fastest.choose(*x.shape, x.dtype, vector, same_shift)
    own = of_its_own(import_module(f"kernels.{stem}").launch_for(y, x))
    launches = {"shared": shared, "own": own}
    return {name: partial(_call, launch, y) for name, launch in launches.items()}


def _call(launch: Launch, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    launch(y, x)
    return y


def times(cases: Iterable[Case] = CASES) -> list[dict[str, Any]]:
    """The GPU's time with a kernel that shapes share, and with one of its own.

    Both take turns, and each has the median of its TURNS medians.

    Returns:
        Rows of dtype, n_rows, n_cols, shared_us, own_us.

    Raises:
        RuntimeError: there is no GPU to time on.
    """
    clock.require_gpu()
    rows = []
    for case in cases:
        x, us = record.random(*case[:3]), {}
        both = calls(case)
        for _ in range(TURNS):
            for name, call in both.items():
                us.setdefault(name, []).append(clock.device_us(call, x)[1])
        row = {"dtype": str(case.dtype).removeprefix("torch.")}
        row |= {"n_rows": case.n_rows, "n_cols": case.n_cols}
        row |= {f"{name}_us": round(statistics.median(us[name]), 3) for name in us}
        rows.append(row)
    return rows


def main() -> None:
    """Measures, records and prints."""
    clock.require_gpu()
    os.environ["COURSE_RECORD"] = "1"
    df = record.observe("fastest_classes", times)
    print(df.drop(columns=record.PROVENANCE).to_string())


if __name__ == "__main__":
    main()
