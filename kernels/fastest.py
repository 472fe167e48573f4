"""One softmax for every shape: the kernel that measurement says is the fastest.

Builds on: `tiled`, `unaligned`, `online`, `cooperative`; three later chapters.
Changes: nothing in the kernels. A rule chooses a kernel from a tensor's shape and
    strides, behind PyTorch's own signature.
Costs: MN values read and MN written; 2MN read by `online` and `columns`.
Source: measured (`notebooks/recorded/`); PyTorch's documentation of softmax.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kernels import cooperative, online, tiled, unaligned
from kernels.lab import backend, launch

DTYPES = (*backend.DTYPES, torch.float64)
ONE_PASS = {(a, b) for a in DTYPES for b in DTYPES if torch.promote_types(a, b) == b}

LONGEST_TILE, LONGEST_OF_FEW = 65536, 32768  # bytes of a row that one program takes
LONGEST_APART = {2: 16384, 4: 32768}  # the same where it loads by element
LONGEST_SPLIT, LONGEST_NARROW = 8192, 32768  # for `tiled`: in two blocks; by 8 bytes
WARPS = 4  # an SM issues from 4 at once: with fewer for each SM, tiles shrink
BYTES_PER_WARP = 2048  # of a row that has an SM to itself
STAGED, WINDOWS = 64, range(600, 65537)  # 16-bit columns: the most, and which


def choose(
    n_rows: int,
    n_cols: int,
    dtype: torch.dtype,
    vector: int | None = None,
    same_shift: bool = True,
) -> str:
    """Returns the name of the chapter whose kernel takes a matrix of adjacent columns.

    A program takes a row of up to LONGEST_TILE bytes; LONGEST_OF_FEW if the matrix is
    too small to fill the GPU; LONGEST_APART if it loads by element. Programs share a
    longer row if all run at once, beside others; `online` takes the rest. `tiled` takes
    rows with wide accesses, unless several warps would hold two blocks, `staged` many
    short ones of 16 bits, and `windows` many that start elsewhere in the output.

    Args:
        n_rows, n_cols, dtype: the matrix's; dtype is one of DTYPES.
        vector, same_shift: `unaligned.alignment`'s; by default a contiguous matrix's.
    """
    element_size, row_bytes = dtype.itemsize, n_cols * dtype.itemsize
    if dtype == torch.float64 or n_rows > tiled.MAX_ROWS:
        return "online"
    if vector is None:
        vector = tiled.choose_vector(n_cols, element_size, n_cols)
    sms, _ = launch.sms_and_threads()
    few = n_rows * row_bytes < cooperative.FEW_BYTES * sms
    is_split = tiled.split_block(n_cols, vector)[1] > 0
    longest = LONGEST_OF_FEW if few else LONGEST_TILE
    if vector == 1 and not same_shift:
        if element_size == 2 and not few and n_cols in WINDOWS:
            return "windows"
        longest = LONGEST_APART[element_size]
    if row_bytes <= longest:
        wide = vector * element_size == 16
        if n_rows > sms:  # then 8 bytes will do, but not for very short or long rows
            fits_8 = tiled.SHORT_BYTES <= row_bytes <= LONGEST_NARROW or not same_shift
            wide = wide or vector == n_cols or (vector > 1 and fits_8)
            wide = wide and not (is_split and same_shift and row_bytes > LONGEST_SPLIT)
        short = n_cols <= STAGED and element_size == 2 and same_shift and not few
        return "tiled" if wide else "staged" if short else "unaligned"
    form = n_rows, n_cols, element_size, vector, same_shift
    return "cooperative" if cooperative.are_resident(*form) else "online"


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The softmax of x along a dimension.

    Works under `torch.compile` and `torch.func`, in CUDA graphs, on several streams. A
    new configuration is compiled at first use.

    Args:
        x: of any shape and strides, float16, bfloat16, float32 or float64; computed in
            float32, or in float64 if x or dtype is. May require a gradient.
        dim: the dimension along which values sum to 1.
        dtype: of the result; None means x's, under `torch.autocast` too. x is converted
            to it first, and may then have any real dtype. That takes a pass of its own
            unless x has one of the four dtypes and dtype holds all of its values.
        out: where to write, of x's shape, the result's dtype and x's device; may be x.

    Returns:
        out, or a new contiguous tensor of x's shape; empty if x is.

    Raises:
        TypeError, ValueError: x, dtype or out is not such, or not where kernels run.
        IndexError: x has no such dimension.
        RuntimeError: out is given where a gradient is needed.
    """
    if not is_dynamo_compiling() and type(x) is Tensor:
        try:
            alike = known.get(x.shape, ())
        except (RuntimeError, TypeError):  # a nested tensor's shape, or a symbolic one
            alike = ()
        for again in alike:
            if (y := again(x, dim, dtype, out)) is not None:
                return y
    from kernels import operator  # a later chapter: how PyTorch sees this function
    from kernels.lab.operator import call

    return call(torch.ops.kernels.softmax.default, operator.rules, x, dim, dtype, out)


known: dict[torch.Size, tuple[Callable[..., Tensor | None], ...]] = {}
"""How to repeat the last calls of each shape, by `direct.repeat`."""


def prepare(output: Tensor, x: Tensor, dim: int) -> Callable[[Tensor, Tensor], None]:
    """Prepares the launch for tensors like these; it is passed only their addresses."""
    from kernels.lab.direct import CachedLaunch  # nothing needs it before a call

    if x.numel() == 0:
        return lambda output, x: None
    sizes = x.shape or (1,)
    dim = dim % len(sizes)
    n_cols, n_inner = sizes[dim], math.prod(sizes[dim + 1 :])
    try:
        if (x.dtype, output.dtype) not in ONE_PASS:
            raise RuntimeError("the output's dtype lacks some of x's values")
        shape = (-1, n_cols) if n_inner == 1 else (-1, n_cols, n_inner)
        is_matrix = len(sizes) == 2 and dim == 1
        matrix = x if is_matrix else x.view(shape)
    except RuntimeError:  # or no strides describe these rows: copy x first
        like_copy = torch.empty(x.shape, dtype=output.dtype, device="meta")
        of_copy = prepare(output, like_copy, dim)
        return lambda output, x: of_copy(output, x.to(output.dtype).contiguous())
    output = output if is_matrix else output.view(shape)
    if n_inner > 1:
        stem = "columns" if matrix.stride(2) == output.stride(2) == 1 else "online"
        return import_module(f"kernels.{stem}").prepare(output, matrix, CachedLaunch)
    vector, same_shift = unaligned.alignment(output, matrix)
    n_rows, size = matrix.shape[0], output.element_size()  # the wider dtype's
    stem = choose(n_rows, n_cols, output.dtype, vector, same_shift)
    if stem == "online" or (matrix.stride(1) != 1 and n_cols > 1):
        return online.prepare(output, matrix, CachedLaunch)
    if stem == "cooperative" and n_rows > cooperative.MAX_ROWS:
        rows = slice(n_rows // 2), slice(n_rows // 2, n_rows)
        halves = [(r, prepare(output[r], matrix[r], 1)) for r in rows]
        return lambda y, x: [f(y.view(shape)[r], x.view(shape)[r]) for r, f in halves]
    in_tiles = stem in ("tiled", "unaligned")
    few = in_tiles and n_rows <= launch.sms_and_threads()[0]
    config = _config_of_few(n_cols, size, stem == "tiled", same_shift) if few else None
    made = import_module(f"kernels.{stem}").launch_for(output, matrix, config)
    return CachedLaunch(in_smaller_tiles(made, n_rows) if in_tiles else made)


def _config_of_few(n_cols: int, size: int, aligned: bool, same: bool) -> tiled.Config:
    """A configuration for few rows: lengths up to a power of two share a kernel."""
    vector = 16 // size if aligned or same else 1
    body = n_cols // vector * vector
    longest = max(launch.power_of_2(body), 512 // size)
    if body <= longest * 5 // 8 and longest * size == 32768:  # split, as in `tiled`
        longest = longest * 5 // 8
    config = unaligned.choose_config(longest, size, same)
    if aligned or (size == 4 and not same):
        config = tiled.choose_config(longest, size, vector)
    warps = min(longest * size // BYTES_PER_WARP, 8)
    return replace(config, num_warps=max(warps, config.num_warps))


def in_smaller_tiles(made: launch.Launch, n_rows: int) -> launch.Launch:
    """The launch, its tiles halved until a tile has one row or an SM WARPS warps."""
    rows, warps = made.constants["ROWS"], made.constants["num_warps"]
    least = WARPS * launch.sms_and_threads()[0]
    fewest = 1 + (made.constants["BLOCK_COLS"] == 1)  # `tiled.widen` takes pairs
    while rows > fewest and launch.ceil_div(n_rows, rows) * warps < least:
        rows, warps = rows // 2, max(1, warps // 2)
    constants = made.constants | {"ROWS": rows, "num_warps": warps}
    return replace(made, grid=(launch.ceil_div(n_rows, rows),), constants=constants)
