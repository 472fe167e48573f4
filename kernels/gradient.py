"""The backward pass: the gradient for x, from y = softmax(x) and the gradient for y.

Builds on: `tiled`, `unaligned` and `cooperative`; two kernels do here what theirs do.
Changes: a program holds two inputs, y and the gradient, and reduces them to one number
    for each row, the sum of their products. The block of the rows' edges is transposed,
    or the compiler would copy each value into many threads. Most short rows that 16
    bytes do not divide have a kernel with the blocks of `unaligned`. The shortest rows
    of odd length are taken in pairs: two have an even length.
Costs: 2MN values read and MN written, and a 64-bit word for each part of a long row.
    Rows that need more than two thirds of the GPU's slots are read twice.
Source: y * (gradient - sum(gradient * y)), from softmax's Jacobian diag(y) - y yᵀ.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cooperative
from kernels.cooperative import (
    INTERPRETED,
    choose_task,
    count_parts,
    cut,
    in_lines,
    loads_first,
    pack,
)
from kernels.lab import launch
from kernels.lab.backward import Backward
from kernels.lab.launch import Launch, Pointer, constants_of, pointer_to
from kernels.tiled import SHORT_BYTES, widen
from kernels.unaligned import edge_columns, load_block, load_edges, own_sum, split_row

# Bytes of y. A program holds as many of the gradient.
TILE_BYTES = 2048  # shorter rows share a tile
BYTES_PER_WARP = 2048  # with the gradient's, 128 bytes in each thread
LONGEST_TILE = 32768  # the longest row that a program takes by itself
LONG_BYTES = 3 * 2**16  # the shortest row of LONG_PARTS

# The bytes of a part, its warps, and the most registers of a thread.
FEW_PARTS = 8192, 4, 64  # where larger parts would not fill the GPU
FEW_EDGES = 8192, 4, 72  # the same where rows have edges
PARTS = 16384, 4, 96
LONG_PARTS = 32768, 4, 168  # of float32

# By the bytes of an element. The fewest values of a tile whose rows have edges:
EDGES_TILE = {2: 960, 4: 240}
# Of short rows, the longest that 2 threads take, and that 4 take; and the longest:
BY_THREADS = {2: (17, 32), 4: (6, 18)}
LONGEST_SHORT = {2: 127, 4: 31}
LONGEST_PAIRS = {2: 31, 4: 13}  # the longest rows that are taken in pairs


@triton.jit
def load_both(gradient_ptr, y_ptr, offsets, inside):
    """Loads both tensors where inside, 0 elsewhere, and asks L2 to keep the lines."""
    kept: tl.constexpr = "evict_last"
    g = tl.load(gradient_ptr + offsets, inside, other=0.0, eviction_policy=kept)
    y = tl.load(y_ptr + offsets, inside, other=0.0, eviction_policy=kept)
    return g, y


@triton.jit
def dot(g, y, AXIS: tl.constexpr):
    """The sum of the products along an axis, in float32."""
    products = widen(g) * widen(y)
    if AXIS == 1 and products.shape[1] >= 1024:
        # Of each 16 bytes first: short chains of additions need fewer registers.
        SPAN: tl.constexpr = 128 // y.dtype.primitive_bitwidth
        SPANS: tl.constexpr = products.shape[1] // SPAN
        products = tl.reshape(products, (products.shape[0], SPANS, SPAN))
        products = tl.sum(products, axis=2)
    return tl.sum(products, axis=AXIS)


@triton.jit
def combine(g, y, row_dot):
    """Returns y * (g - row_dot) in float32. Until then, 16-bit values stay 16-bit."""
    return widen(y) * (widen(g) - row_dot)


@triton.jit
def is_second(n_cols, FIRST, COLS, THREADS, VECTOR):
    """Which values of a block are of the second of two adjacent rows of n_cols."""
    TURNS: tl.constexpr = COLS // (THREADS * VECTOR)
    cols = FIRST + tl.arange(0, COLS)
    return tl.reshape(cols >= n_cols, (TURNS, 1, THREADS, VECTOR))


@triton.jit
def load_short(ptrs, matrix, FIRST, COLS, ROWS, THREADS, VECTOR, PAIRS):
    """Both tensors' block of `load_block`, or edges if COLS is 0.

    Also each row's sum of products. With PAIRS, a last dimension has those of two rows.
    """
    _, gradient_ptr, y_ptr = ptrs
    source, row = (gradient_ptr, 0, 0.0), tl.program_id(0) * ROWS
    if COLS:
        block = load_block(source, row, matrix, FIRST, COLS, ROWS, THREADS, VECTOR)
    else:
        block = load_edges(source, row, matrix, ROWS, THREADS, VECTOR)
    g, at, inside = block
    # Without a hint for L2, which would take instructions.
    y = tl.reshape(tl.load(y_ptr + at, inside, 0.0), g.shape)
    products = widen(g) * widen(y)
    if PAIRS:
        second = is_second(matrix[1] // 2, FIRST, COLS, THREADS, VECTOR)
        one_dot = own_sum(tl.where(second, 0.0, products))
        row_dot = tl.join(one_dot, own_sum(tl.where(second, products, 0.0)))
    else:
        second, row_dot = 0, own_sum(products)
    return (g, y, at, inside, second), row_dot


@triton.jit
def store_short(ptrs, block, row_dot, PAIRS):
    """Stores the gradient of what `load_short` loaded."""
    g, y, at, inside, second = block
    if PAIRS:
        one_dot, other_dot = tl.split(row_dot)
        row_dot = tl.where(second, other_dot, one_dot)
    x = tl.reshape(combine(g, y, row_dot), inside.shape)
    tl.store(ptrs[0] + at, x, mask=inside)


@triton.jit
def short_tile(ptrs, matrix, ROWS, COLS, REST, VECTOR, THREADS, EDGES, PAIRS):
    """Computes one tile of short rows, or of pairs of them, each in THREADS threads."""
    block, row_dot = load_short(ptrs, matrix, 0, COLS, ROWS, THREADS, VECTOR, PAIRS)
    if REST:
        rest, rest_dot = load_short(
            ptrs, matrix, COLS, REST, ROWS, THREADS, VECTOR, PAIRS
        )
        row_dot += rest_dot
    if EDGES:
        edges, edge_dot = load_short(ptrs, matrix, 0, 0, ROWS, THREADS, VECTOR, PAIRS)
        row_dot += edge_dot
    row_dot = tl.sum(row_dot, axis=2, keep_dims=True)  # over the row's threads
    if EDGES:
        store_short(ptrs, edges, row_dot, PAIRS)
    store_short(ptrs, block, row_dot, PAIRS)
    if REST:
        store_short(ptrs, rest, row_dot, PAIRS)


@triton.jit(do_not_specialize=["n_rows", "n_cols"])
def short_kernel(
    output_ptr,
    gradient_ptr,
    y_ptr,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    REST_COLS: tl.constexpr,
    VECTOR: tl.constexpr,
    THREADS: tl.constexpr,
    EDGES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program computes one tile of short rows, or of pairs of short rows.

    Args: as for `gradient_kernel`; REST_COLS and THREADS as for `kernels.unaligned`.
        PAIRS: whether two adjacent rows are taken as one, of 2 * n_cols values. Then
            ROWS and columns are those of pairs, VECTOR divides them, EDGES is not used.
    """
    ptrs = output_ptr, gradient_ptr, y_ptr
    matrix = n_rows, n_cols, n_cols, 0
    COLS: tl.constexpr = BLOCK_COLS // 2 if PAIRS else BLOCK_COLS  # of one row
    REST: tl.constexpr = REST_COLS // 2 if PAIRS else REST_COLS
    if not PAIRS:
        short_tile(ptrs, matrix, ROWS, COLS, REST, VECTOR, THREADS, EDGES, False)
    elif (n_rows % 2 == 1) & (tl.program_id(0) == tl.num_programs(0) - 1):
        # The last row has no partner: here each row is taken by itself.
        short_tile(ptrs, matrix, 2 * ROWS, COLS, REST, 1, THREADS, False, False)
    else:
        pairs = n_rows // 2, 2 * n_cols, 2 * n_cols, 0
        short_tile(
            ptrs, pairs, ROWS, BLOCK_COLS, REST_COLS, VECTOR, THREADS, False, True
        )


@triton.jit
def look(words_ptr, tag, n_parts, BLOCK_PARTS):
    """Reads a row's words: the parts' sums, which parts are missing, and how many."""
    parts = tl.arange(0, BLOCK_PARTS)
    is_part = parts < n_parts
    words = tl.load(words_ptr + parts, mask=is_part, other=0, volatile=True)
    missing = is_part & ~cooperative.has_tag(words, tag)
    return cooperative.unpack(words), missing, tl.sum(missing.to(tl.int32), axis=0)


# Only n_parts = 1 is compiled for itself. Then no program divides by it.
@triton.jit(
    do_not_specialize=["tag", "n_rows", "n_cols"],
    do_not_specialize_on_alignment=["n_parts"],
)
def gradient_kernel(
    output_ptr,
    gradient_ptr,
    y_ptr,
    words_ptr,
    tag,
    n_rows,
    n_cols,
    n_parts,
    ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    EDGES: tl.constexpr,
    PATIENCE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program computes one tile of rows, or one part of one row.

    Args:
        output_ptr, gradient_ptr, y_ptr: contiguous tensors that start at multiples of
            16 bytes, so that all three are aligned in the same places.
        words_ptr: words (int64), `in_lines(n_parts)` for each row: the parts' sums of
            products. Then one for each program, in which it counts replays. In step 1,
            n_parts float32 for each row to write; in step 2, one for each row to read.
        tag: this call's; used in step 0 only, and only where BLOCK_PARTS exceeds 1.
        n_rows, n_cols: the tensors' shape.
        n_parts: of a row; 1 where a row is not shared.
        ROWS, BLOCK_COLS: of a tile or a part, powers of two. A part has one row.
        BLOCK_PARTS: a power of two, at least n_parts; 1 in steps 1 and 2.
        PATIENCE: as in `kernels.cooperative`.
        VECTOR: elements that a thread moves at once.
        EDGES: whether rows start anywhere; if not, VECTOR divides n_cols.
        STEP: 0 for the whole way; 1 for the parts' sums alone; 2 for the gradient, from
            the rows' sums. Programs of one step do not depend on each other.
    """
    LOOKS: tl.constexpr = 1 if INTERPRETED else PATIENCE  # there, nobody else runs
    own = tl.program_id(0)
    if STEP == 2:  # backwards, since L2 still holds what step 1 read last
        own = tl.num_programs(0) - 1 - own
    if BLOCK_PARTS > 1:
        row_words = in_lines(n_parts)
        tag = cooperative.tag_of(tag, words_ptr + (n_rows * row_words + own))
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    task = own  # the program whose part this program computes; -1 at the end
    while task >= 0:
        rows = task // n_parts * ROWS + tl.arange(0, ROWS)
        part = task % n_parts
        first = part.to(n_cols.dtype) * BLOCK_COLS  # 64 bits where n_cols needs them
        is_row = rows < n_rows
        start = rows.to(tl.int64) * n_cols
        if EDGES:
            head, body = split_row(start, n_cols, VECTOR)
            edge = tl.arange(0, 2 * VECTOR)[:, None]
            edge_cols, at_edge = edge_columns(
                edge, head[None, :], body[None, :], n_cols, VECTOR
            )
            is_there = part == tl.where(edge < VECTOR, 0, n_parts - 1)
            at_edge &= is_row[None, :] & is_there
            edges = start[None, :] + edge_cols
            edge_g, edge_y = load_both(gradient_ptr, y_ptr, edges, at_edge)
            start += head
            if BLOCK_PARTS > 1:  # a part has one row
                part = part.to(n_cols.dtype)
                first, body = cut(part, start, body, n_parts, BLOCK_COLS, 8 * VECTOR)
            length = (body - first)[:, None]
            inside = is_row[:, None] & (cols // VECTOR * VECTOR < length)
        else:
            inside = is_row[:, None] & (cols < n_cols // VECTOR * VECTOR - first)
        offsets = ((start + first) // VECTOR * VECTOR)[:, None] + cols
        g, y = load_both(gradient_ptr, y_ptr, offsets, inside)
        if EDGES and BLOCK_PARTS > 1:
            loads_first(n_parts)
        row_dot = dot(g, y, 1)
        if EDGES:
            row_dot += dot(edge_g, edge_y, 0)

        next_task = -1
        if STEP == 1:
            tl.store(words_ptr + task, tl.sum(row_dot, axis=0))
        elif STEP == 2:
            row_dot = tl.full((ROWS,), tl.load(words_ptr + task // n_parts), tl.float32)
        elif BLOCK_PARTS > 1:
            part_dot = tl.sum(row_dot, axis=0)  # of the only row
            row_ptr = words_ptr + (task // n_parts).to(tl.int64) * row_words
            tl.atomic_xchg(row_ptr + part, pack(part_dot, tag), sem="relaxed")
            dots, missing, n_missing = look(row_ptr, tag, n_parts, BLOCK_PARTS)
            looks = 1
            while (n_missing > 0) & (task == own) & (looks < LOOKS):
                dots, missing, n_missing = look(row_ptr, tag, n_parts, BLOCK_PARTS)
                looks += 1
            row_dot = tl.full((ROWS,), tl.sum(dots, axis=0), tl.float32)
            if (n_missing > 0) | (task != own):
                next_task = choose_task(missing, n_missing, own, n_parts, BLOCK_PARTS)
        if (next_task < 0) & (STEP != 1):
            if EDGES:
                edge_x = combine(edge_g, edge_y, row_dot[None, :])
                tl.store(output_ptr + edges, edge_x, mask=at_edge)
            x = combine(g, y, row_dot[:, None])
            tl.store(output_ptr + offsets, x, mask=inside)
        task = next_task


@dataclass(frozen=True)
class Config:
    """The kernel's constants and launch options; `choose_config` chooses them."""

    rows: int
    block_cols: int
    block_parts: int
    vector: int
    edges: bool
    patience: int
    num_warps: int
    maxnreg: int | None = None
    step: int = 0


@dataclass(frozen=True)
class ShortConfig:
    """The constants and launch options of `short_kernel`, of pairs where `pairs`."""

    rows: int
    block_cols: int
    rest_cols: int
    vector: int
    threads: int
    edges: bool
    pairs: bool = False
    num_warps: int = 4


def choose_short(n_cols: int, element_size: int, pairs: bool = False) -> ShortConfig:
    """Chooses for short rows of n_cols values, or for pairs of n_cols values.

    Accesses of 2 elements fit even lengths. A second block saves one turn of four where
    a quarter of one block would be empty. Each thread takes 4 pairs of rows of 1 value.
    """
    is_even = n_cols % 2 == 0
    if not is_even and n_cols <= LONGEST_PAIRS[element_size]:
        return choose_short(2 * n_cols, element_size, pairs=True)
    if element_size == 2 and n_cols in (14, 30) and not pairs:  # two are nearly a block
        threads = 2 if n_cols == 14 else 4
        return ShortConfig(128 // threads, 16 * threads, 0, 4, threads, False, True)
    vector = 2 if n_cols <= (64 if is_even and element_size == 2 else 26) else 4
    edges = n_cols % vector > 0
    threads = 2 ** (1 + sum(n_cols > longest for longest in BY_THREADS[element_size]))
    threads = 1 if n_cols // vector <= 3 else threads
    body = max(n_cols // vector, threads) * vector
    block_cols, rest_cols = launch.power_of_2(body), 0
    if not edges and body <= block_cols * 3 // 4 and block_cols >= 4 * threads * vector:
        block_cols, rest_cols = block_cols // 2, block_cols // 4
    rows = 512 if n_cols == 2 else 128 // threads
    return ShortConfig(rows, block_cols, rest_cols, vector, threads, edges, pairs)


def choose_config(n_rows: int, n_cols: int, element_size: int) -> Config | ShortConfig:
    """Chooses for n_rows rows of n_cols values of element_size bytes, on this GPU.

    A program takes a tile of TILE_BYTES or a row of up to LONGEST_TILE. Edges take
    instructions and registers, so tiles with edges have just enough bytes in flight,
    and more warps. Programs share longer rows. Their parts are small, and registers
    capped, because while some programs of an SM wait, others must load. But a program
    waits for every part of its row, so long rows of float32 have larger parts.
    """
    vector, n_bytes = 16 // element_size, n_cols * element_size
    if n_cols % vector and n_cols % 4 == 0 and n_bytes < SHORT_BYTES:
        vector = 4
    vector = 2 if n_cols == 2 else vector
    edges = n_cols % vector > 0
    is_narrow = vector * element_size < 16 and n_cols > 64
    if (edges or is_narrow) and n_cols <= LONGEST_SHORT[element_size]:
        return choose_short(n_cols, element_size)
    row_bytes = max(n_cols // vector, 1) * vector * element_size
    if row_bytes <= LONGEST_TILE:
        block_bytes = launch.power_of_2(row_bytes)
        rows = max(1, TILE_BYTES // block_bytes)
        if edges:
            least = launch.ceil_div(EDGES_TILE[element_size], n_cols)
            rows = launch.power_of_2(least)
        warps = rows * block_bytes // BYTES_PER_WARP
        if edges and rows > 1:  # a warp for each KiB, edges among them, rounded down
            tile_bytes = rows * (block_bytes + 2 * vector * element_size)
            warps = launch.power_of_2(tile_bytes // 1024 + 1) // 2
            warps = 2 if element_size == 2 else warps
        elif edges or element_size == 2:  # 16 take longer
            warps = min(warps, 8)
        block_cols, warps = block_bytes // element_size, max(1, warps)
        # Triton 3.6 takes 128 registers anyway; told so, it makes faster code (H200).
        maxnreg = 128 if block_cols == 16384 and not edges else None
        return Config(rows, block_cols, 1, vector, edges, 1, warps, maxnreg)
    if n_rows * row_bytes < cooperative.FEW_BYTES * launch.sms_and_threads()[0]:
        part_bytes, num_warps, maxnreg = FEW_EDGES if edges else FEW_PARTS
    elif element_size == 4 and row_bytes >= LONG_BYTES:
        part_bytes, num_warps, maxnreg = LONG_PARTS
    else:
        part_bytes, num_warps, maxnreg = PARTS
    block_cols = part_bytes // element_size
    n_parts = count_parts(n_cols, block_cols, vector)
    block_parts = max(32 * num_warps, launch.power_of_2(n_parts))
    constants = 1, block_cols, block_parts, vector, edges, cooperative.PATIENCE
    return Config(*constants, num_warps, maxnreg)


def launch_for(
    output: Tensor,
    gradient: Tensor,
    y: Tensor,
    config: Config | ShortConfig | None = None,
) -> Launch:
    """The launch that writes the gradient for x to output.

    Args:
        output, gradient, y: contiguous matrices of one shape, not empty, that start at
            multiples of 16 bytes; the last two of one dtype, not float64. Not checked.
        config: of either kernel, not checked; None lets `choose_config` choose.
    """
    n_rows, n_cols = y.shape
    if config is None:
        config = choose_config(n_rows, n_cols, y.element_size())
    kernel, n_parts, scalars, rows = short_kernel, 1, (n_rows, n_cols), config.rows
    if isinstance(config, ShortConfig):
        rows *= 2 if config.pairs else 1
    else:
        n_parts = count_parts(n_cols, config.block_cols, config.vector)
        kernel, scalars = gradient_kernel, (n_rows, n_cols, n_parts)
        scalars = scalars if n_parts > 1 else (0, 0, *scalars)  # no words, no tag
    return Launch(
        kernel=kernel,
        grid=(launch.ceil_div(n_rows, rows) * n_parts,),
        scalars=scalars,
        constants=constants_of(config),
        pointers=(pointer_to(output), pointer_to(gradient), pointer_to(y)),
        n_words=n_rows * (launch.ceil_div(n_parts, 16) * 16 + n_parts) * (n_parts > 1),
    )


def steps_for(
    output: Tensor, gradient: Tensor, y: Tensor
) -> tuple[Launch, Launch] | None:
    """Two launches, for rows that would leave too few slots free; otherwise None.

    Their programs do not wait. The first launch writes each part's sum of products to a
    fourth tensor, float32. The caller adds up each row's; the second launch reads that.

    Args:
        output, gradient, y: as for `launch_for`.
    """
    config = choose_config(*y.shape, y.element_size())
    whole = launch_for(output, gradient, y, config)
    if whole.n_words == 0:
        return None
    options = config.num_warps, config.maxnreg
    if whole.scalars[-1] * 1.5 <= launch.programs_at_once(*options):  # as `cooperative`
        return None
    return tuple(
        replace(
            whole,
            scalars=(0, *whole.scalars),  # no tag
            constants=constants_of(replace(config, block_parts=1, step=step)),
            pointers=(*whole.pointers, Pointer(torch.float32)),
            n_words=0,
        )
        for step in (1, 2)
    )


_backward = Backward("softmax_backward", launch_for, steps_for)


def softmax_backward(
    gradient: Tensor, y: Tensor, dim: int = -1, dtype: torch.dtype | None = None
) -> Tensor:
    """The gradient for x, from the gradient for y = softmax(x, dim).

    Args, returns, raises: as `kernels.lab.backward.Backward.__call__`.
    """
    return _backward(gradient, y, dim, dtype)
