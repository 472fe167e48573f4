"""The launches about which chapter `persistent` asks the driver.

from benchmarks import residency
ask = partial(occupancy.table, residency.launches())
observed = record.observe("occupancy", ask)
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from kernels import meta, persistent, program, strided
from kernels.lab import compile
from kernels.lab.launch import Launch

N_ROWS = 4096
COLUMNS = (512, 2048, 4096)
STAGES = (1, 2, 3, 4)


def launches() -> Iterator[tuple[dict[str, Any], Launch]]:
    """The kernels of chapters `program` to `persistent`, on contiguous float32 rows.

    Yields:
        Labels (kernel, block_cols and num_stages) and a launch, for every combination
        of kernel, COLUMNS, `meta.WARPS` and STAGES.
    """
    x = compile.pointer(torch.float32)
    for n_cols, warps, stages in itertools.product(COLUMNS, meta.WARPS, STAGES):
        options = {"num_warps": warps, "num_stages": stages}
        block = {"BLOCK_COLS": n_cols}
        tile = {"ROWS_PER_TILE": 1, **block, "NUM_STAGES": stages}
        strides = (n_cols, 1, n_cols, 1)
        for kernel, pointers, scalars, constants in (
            (program.add_kernel, (x, x, x), (N_ROWS * n_cols,), {"BLOCK": n_cols}),
            (program.softmax_kernel, (x, x), (n_cols,), block),
            (strided.softmax_kernel, (x, x), (*strides, n_cols), block),
            (persistent.softmax_kernel, (x, x), (*strides, N_ROWS, n_cols), tile),
        ):
            module = kernel.fn.__module__.removeprefix("kernels.")
            name = f"{module}.{kernel.fn.__name__}"
            labels = {"kernel": name, "block_cols": n_cols, "num_stages": stages}
            yield labels, Launch(kernel, (1,), scalars, constants | options, pointers)
