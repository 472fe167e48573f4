"""How many programs live at once: a launch that limits them, and a latency to hide.

Builds on: `kernels.strided`, whose kernel is launched unchanged.
Changes: a launch can reserve shared memory that the kernel does not use. Then fewer
    programs fit on an SM, and the machine code stays the same.
Costs: reads MN values and writes MN, however many programs live at once.
Source: Little, "A proof for the queuing formula L = λW", 1961; Volkov, "Better
    performance at lower occupancy", 2010; this chapter's measurements.
"""

import torch
import triton
import triton.language as tl

from kernels.lab import backend
from kernels.lab.launch import Launch, pointer_to
from kernels.lab.limited import LimitedLaunch
from kernels.strided import MAX_COLS, MAX_ROWS, softmax_kernel

__all__ = [
    "MAX_COLS",
    "MAX_ROWS",
    "chase",
    "launch_for",
    "links",
    "softmax",
    "softmax_kernel",
]

# ---- a latency -----------------------------------------------------------------------


@triton.jit
def chase_kernel(output_ptr, next_ptr, n_steps):
    """One program follows n_steps links. Each load needs the result of the one before.

    Args:
        output_ptr: where the last place is stored, int32.
        next_ptr: at each place, the number of the next place, int32.
        n_steps: how many links to follow.
    """
    place = tl.program_id(0)  # the only program starts at place 0
    for _ in range(n_steps):
        place = tl.load(next_ptr + place)  # an address that is known only now
    tl.store(output_ptr, place)


def links(n_links: int, apart: int = 1024) -> torch.Tensor:
    """Returns a ring of links in random order; place 0 is one of them.

    Args:
        n_links: how many.
        apart: elements from one link to its neighbour in memory, 4 bytes each.

    Returns:
        (n_links * apart,), int32. Follow n_links of them, and you are back at place 0.
    """
    order = torch.randperm(n_links, generator=torch.Generator().manual_seed(0)) * apart
    ring = torch.zeros(n_links * apart, dtype=torch.int32)
    ring[order] = order.roll(-1).to(torch.int32)
    return ring.to(backend.DEVICE)


def chase(ring: torch.Tensor, n_steps: int) -> torch.Tensor:
    """Follows n_steps links from place 0; returns the last place, (1,), int32."""
    output = torch.empty(1, dtype=torch.int32, device=ring.device)
    chase_kernel[(1,)](output, ring, n_steps, num_warps=1)
    return output


# ---- the softmax ---------------------------------------------------------------------


def launch_for(output: torch.Tensor, x: torch.Tensor, **options: int) -> Launch:
    """Returns the launch with one program per row, of 4 warps unless told otherwise.

    Args:
        output, x: tensors of equal shape (M, N), on any device, "meta" included.
        options: launch options such as num_warps or maxnreg.
    """
    n_rows, n_cols = x.shape
    constants = {"BLOCK_COLS": triton.next_power_of_2(n_cols), "num_warps": 4}
    scalars = (*output.stride(), *x.stride(), n_cols)
    pointers = pointer_to(output), pointer_to(x)
    return Launch(softmax_kernel, (n_rows,), scalars, constants | options, pointers)


_limited: dict[tuple, LimitedLaunch] = {}


def softmax(x: torch.Tensor, *, programs_per_sm: int | None = None) -> torch.Tensor:
    """Computes the softmax of every row, in at most so many programs per SM at a time.

    Args:
        x: (M, N), float32, float16 or bfloat16, M at most MAX_ROWS and N at most
            MAX_COLS, any strides.
        programs_per_sm: None lets as many live at once as fit.

    Returns:
        (M, N) in x's dtype; empty if x is empty.

    Raises:
        TypeError, ValueError: x is no such matrix, or an SM never holds so many.
    """
    backend.validate(x, max_rows=MAX_ROWS, max_cols=MAX_COLS)
    output = torch.empty_like(x)
    if x.numel():
        launch = launch_for(output, x)
        if programs_per_sm is not None:
            # Loading machine code takes long, so each limited launch is kept.
            key = launch.grid, launch.scalars, launch.pointers, programs_per_sm
            if key not in _limited:
                _limited[key] = LimitedLaunch(launch, programs_per_sm)
            launch = _limited[key]
        launch(output, x)
    return output
