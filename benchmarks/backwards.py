"""Chapter `gradient`'s kernel on its way, and what PyTorch runs in its place.

from benchmarks import backwards
backwards.judge(my_kernel)
show.diff(backwards.tile_kernel, backwards.edges_kernel)
show.table(backwards.ends(), backwards.ENDS)
observed = record.observe("gradient_kernels", backwards.kernels)

The kernels of this module take contiguous matrices.
"""

import gc
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks import peers, profilers, training
from kernels import gradient
from kernels.gradient import combine, dot, load_both
from kernels.lab import backend, clock, compile, occupancy, record, verdict
from kernels.lab.compile import Compiled
from kernels.unaligned import edge_columns, split_row

WayBack = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the gradient for y, and y; returns the gradient for x. All are (M, N)."""


@triton.jit
def row_kernel(x_ptr, g_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """One program computes the gradient of one row.

    Args:
        x_ptr, g_ptr, y_ptr: the gradient for x, the gradient for y, and y.
        n: the length of a row.
        BLOCK: n rounded up to a power of two.
    """
    cols = tl.arange(0, BLOCK)
    places = tl.program_id(0) * n + cols
    g = tl.load(g_ptr + places, mask=cols < n, other=0.0)
    y = tl.load(y_ptr + places, mask=cols < n, other=0.0)
    row_dot = tl.sum(g * y, axis=0)
    x = y * (g - row_dot)
    tl.store(x_ptr + places, x, mask=cols < n)


SIZES = ("n_rows", "n_cols")


@triton.jit(do_not_specialize=SIZES)
def tile_kernel(
    output_ptr,
    gradient_ptr,
    y_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program computes the gradient of one tile of aligned rows.

    Args:
        output_ptr, gradient_ptr, y_ptr: start at multiples of 16 bytes.
        n_rows, n_cols: the shape of all three.
        ROWS, BLOCK_COLS: of a tile, powers of two.
        VECTOR: elements that a thread moves at once; it divides n_cols.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    start = rows.to(tl.int64) * n_cols
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    inside = is_row[:, None] & (cols < n_cols // VECTOR * VECTOR)
    offsets = (start // VECTOR * VECTOR)[:, None] + cols
    g, y = load_both(gradient_ptr, y_ptr, offsets, inside)
    row_dot = dot(g, y, 1)
    tl.store(output_ptr + offsets, combine(g, y, row_dot[:, None]), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def edges_kernel(
    output_ptr,
    gradient_ptr,
    y_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """As `tile_kernel`, for rows that start anywhere.

    Args:
        As for `tile_kernel`, but VECTOR may be any power of two.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    is_row = rows < n_rows  # the last tile may lack rows
    start = rows.to(tl.int64) * n_cols
    head, body = split_row(start, n_cols, VECTOR)
    edge = tl.arange(0, 2 * VECTOR)[:, None]  # a row of the tile is a column here
    heads, bodies = head[None, :], body[None, :]
    edge_cols, at_edge = edge_columns(edge, heads, bodies, n_cols, VECTOR)
    edges, at_edge = start[None, :] + edge_cols, at_edge & is_row[None, :]
    edge_g, edge_y = load_both(gradient_ptr, y_ptr, edges, at_edge)
    start += head
    # "// VECTOR * VECTOR" changes no number, but tells the compiler what divides it.
    inside = is_row[:, None] & (cols // VECTOR * VECTOR < body[:, None])
    offsets = (start // VECTOR * VECTOR)[:, None] + cols
    g, y = load_both(gradient_ptr, y_ptr, offsets, inside)
    row_dot = dot(g, y, 1) + dot(edge_g, edge_y, 0)
    tl.store(output_ptr + offsets, combine(g, y, row_dot[:, None]), mask=inside)
    edge_x = combine(edge_g, edge_y, row_dot[None, :])
    tl.store(output_ptr + edges, edge_x, mask=at_edge)


def by_rows(kernel: Any) -> WayBack:
    """A gradient by a kernel with the parameters of `row_kernel`, a program a row."""

    def way_back(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, n = torch.empty_like(y), y.shape[1]
        kernel[(len(y),)](x, g, y, n, BLOCK=triton.next_power_of_2(n))
        return x

    return way_back


# ---- the learner's kernel ------------------------------------------------------------

JUDGED = (3, 5), (1, 1), (4, 64), (7, 100)
"""The matrices that `judge` tries."""

_MISTAKES: dict[str, WayBack] = {
    "this is g * y. The row's sum is still to be subtracted": lambda g, y: g * y,
    "y, the factor, is missing": lambda g, y: g - _dot(g, y),
    "row_dot sums g alone, and not g * y": lambda g, y: y * (g - _sum(g)),
    "row_dot sums y alone, and not g * y": lambda g, y: y * (g - _sum(y)),
    "the row's sum is added, and not subtracted": lambda g, y: y * (g + _dot(g, y)),
    "the row's sum is not multiplied by y": lambda g, y: g * y - _dot(g, y),
}


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum(1, keepdim=True)


def _dot(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _sum(g * y)


def judge(kernel: Any) -> None:
    """Says in a sentence whether a learner's kernel is right, or what it still lacks.

    Args:
        kernel: has the parameters of `row_kernel`. It is compared with autograd in
            float64, on the matrices of JUDGED.
    """
    print(textwrap.fill(_judgement(kernel), 80))


def _judgement(kernel: Any) -> str:
    if place := verdict.unfinished(kernel):
        return f'Not yet: line {place[1]} of {place[0]} still has "..." in it.'
    generator = torch.Generator().manual_seed(0)
    for n_rows, n_cols in JUDGED:
        both = torch.randn(2, n_rows, n_cols, generator=generator, dtype=torch.float64)
        g, x = both.to(backend.DEVICE)
        y = torch.softmax(x.requires_grad_(), 1)
        (right,) = torch.autograd.grad(y, x, g)
        g, y = g.float(), y.detach().float()
        where = f"a {n_rows} × {n_cols} matrix"
        try:
            got = by_rows(kernel)(g, y)
        except Exception as error:
            return f"Not yet: for {where} it raised {verdict.raised(error, kernel)}."
        wrong = ~((got - right).abs() <= 1e-5)  # NaN is wrong, too
        if wrong.any():
            row, col = wrong.nonzero()[0].tolist()
            value, wanted = got[row, col].item(), right[row, col].item()
            said = f"Not yet: in row {row} of {where}, column {col} is {value:.4f}, "
            said += f"and {wanted:.4f} is right"
            for cause, mistake in _MISTAKES.items():
                if torch.allclose(got, mistake(g, y), atol=1e-5):
                    return f"{said}: {cause}."
            total = got[row].sum().item()
            return f"{said}. The row sums to {total:.4f}. It should sum to 0."
    return f"Right: every value of {len(JUDGED)} matrices is autograd's."


# ---- what the compiler makes of it ---------------------------------------------------


@triton.jit
def ends_kernel(y_ptr, x_ptr, n_cols, ACROSS: tl.constexpr):
    """One program subtracts the sums of 4 rows from a large and a small block.

    Args:
        y_ptr, x_ptr: first elements of matrices.
        n_cols: of the matrices; 256 go to the large block, 8 to the small one.
        ACROSS: whether the small block lies on its side: a row is a column of it.
    """
    AXIS: tl.constexpr = 0 if ACROSS else 1  # of the small block's columns
    starts, ends = tl.arange(0, 4) * n_cols, 256 + tl.arange(0, 8)
    body = (starts // 8 * 8)[:, None] + tl.arange(0, 256)[None, :]
    ends = tl.expand_dims(starts, AXIS) + tl.expand_dims(ends, 1 - AXIS)
    x = tl.load(x_ptr + body).to(tl.float32)
    at_ends = tl.load(x_ptr + ends).to(tl.float32)
    row_sum = tl.sum(x, axis=1) + tl.sum(at_ends, axis=AXIS)
    tl.store(y_ptr + body, x - row_sum[:, None])
    tl.store(y_ptr + ends, at_ends - tl.expand_dims(row_sum, AXIS))


ENDS = ("small block", "loads of it, per thread", "instructions")
"""What the columns of `ends` are."""


def ends() -> list[tuple[str, int, int]]:
    """What the two forms of `ends_kernel` compile to, for 64 threads; see ENDS."""
    pointer, rows = compile.pointer(torch.bfloat16), []
    for across in (False, True):
        made = compile.aot(ends_kernel, pointer, pointer, 265, across, num_warps=2)
        small = made.count(r"ld\.global\S*\.b16\b")
        instructions = made.count(r"^    [^N]", "sass")
        rows.append(("on its side" if across else "upright", small, instructions))
    return rows


RESIDENT = (
    *("dtype", "columns", "rows of a tile", "parts of a row", "registers"),
    *("spilled bytes", "16-byte accesses", "KiB on an SM"),
)
"""What the columns of `resident` are."""


def resident(columns: Iterable[int] = (257, 8192, 50257)) -> list[tuple]:
    """What the chapter's launches for 256 MiB compile to for an H200; see RESIDENT.

    The last column counts the bytes of g and y in the programs that one SM runs.
    """
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for n_cols in columns:
            n_rows = 2**28 // (n_cols * dtype.itemsize)
            y = torch.empty(n_rows, n_cols, dtype=dtype, device="meta")
            launch = gradient.launch_for(y, y, y)
            made, chosen = compile.aot(launch, gpu="H200"), launch.constants
            held = chosen["ROWS"] * min(n_cols, chosen["BLOCK_COLS"])
            held *= 2 * dtype.itemsize * occupancy.of(made).blocks_per_sm
            shape = str(dtype)[6:], n_cols, chosen["ROWS"], launch.scalars[-1]
            found = made.registers, made.spills, _is_wide(made), held // 1024
            rows.append((*shape, *found))
    return rows


def _is_wide(made: Compiled) -> bool:
    """Whether a thread loads and stores 16 bytes at once."""
    return all(made.count(rf"{kind}\.global\S*\.v4") for kind in ("ld", "st"))


# ---- what PyTorch runs ---------------------------------------------------------------

CALLS = 10  # that are profiled


def kernels(
    columns: Iterable[int] = (1024, 50257), n_bytes: int = 2**28
) -> list[dict[str, Any]]:
    """The kernels of the stream, of PyTorch's gradient and of the course's, in order.

    Args:
        columns: of the float32 matrices.
        n_bytes: of each matrix.

    Returns:
        Rows of n_cols, call, kernel, us (one run of the kernel) and new_mib (the most
        memory that the call needs besides its inputs).

    Raises:
        RuntimeError: nothing is timed here.
        record.Unavailable: torch.profiler does not work here.
    """
    clock.require_gpu()
    rows = []
    for n_cols in columns:
        both = training.pair(torch.float32, n_bytes // 4 // n_cols, n_cols)
        ways = {"stream": training.stream}
        ways["torch"] = training.WayBack(peers.native)
        ways["gradient"] = training.WayBack(training.ours)
        for call, way in ways.items():
            way(both)  # compiles, and computes y
            gc.collect()  # nothing of this call may be freed during the next
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way(both)
            torch.cuda.synchronize()
            mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            for name, us in ran(way, both):
                row = {"n_cols": n_cols, "call": call, "kernel": name}
                rows.append(row | {"us": round(us, 1), "new_mib": round(mib)})
    return rows


def ran(function: Callable, both: torch.Tensor) -> list[tuple[str, float]]:
    """The kernels that function(both) runs, and the time of each, µs.

    Raises:
        record.Unavailable: torch.profiler does not work here.
    """
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    try:
        with torch.profiler.profile(activities=cuda, acc_events=True) as profiler:
            for _ in range(CALLS):
                function(both)
            torch.cuda.synchronize()
    except RuntimeError as error:
        raise record.Unavailable(str(error)) from error
    return [
        (profilers.kernel_name(event.key), event.self_device_time_total / event.count)
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
