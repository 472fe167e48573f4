"""Pictures of what kernels do, each computed from the parameters of the case it shows.

A picture is a card 100 units wide, its y axis pointing down, with boxes, arrows and
texts on it. What a box stands for is its `gid` ("program 3", "sector touched"), which
is also what the tests read. Each function returns a figure that a notebook shows once.

Colours are Okabe and Ito's, lightened under text (https://jfly.uni-koeln.de/color/).
They only repeat what a number, a name or a hatch also says.

Weighed: triton-viz, which records a run of a kernel to be explored in a browser; a page
of a book needs a still that reads without a browser.
"""

from kernels.lab.draw.compiling import stages
from kernels.lab.draw.lanes import heard
from kernels.lab.draw.layouts import allocation, bank_tiles, banks, tile_layout
from kernels.lab.draw.memory import (
    block_layout,
    coalescing,
    mask,
    memory_hierarchy,
    reduction,
    rereading,
    strides,
)
from kernels.lab.draw.programs import (
    coverage,
    fusion,
    ladder,
    launch,
    thread_and_program,
)
from kernels.lab.draw.tiles import orders, product
from kernels.lab.draw.time import occupancy, pipeline, schedule, sharing
from kernels.lab.draw.ways import ways

__all__ = [
    "allocation",
    "bank_tiles",
    "banks",
    "block_layout",
    "coalescing",
    "coverage",
    "fusion",
    "heard",
    "ladder",
    "launch",
    "mask",
    "memory_hierarchy",
    "occupancy",
    "orders",
    "pipeline",
    "product",
    "reduction",
    "rereading",
    "schedule",
    "sharing",
    "stages",
    "strides",
    "thread_and_program",
    "tile_layout",
    "ways",
]
