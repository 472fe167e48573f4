"""Tensors of any rank and layout, and inputs that go to a given chapter's kernel."""

import math
from collections.abc import Callable
from functools import partial

import torch

from kernels import cooperative, fastest, online, tiled, unaligned
from kernels.lab import backend

STEMS = {
    **{"tiled": tiled, "unaligned": unaligned},
    **{"online": online, "cooperative": cooperative},
}

SHAPES = ((), (5,), (3, 7), (2, 9, 3), (3, 2, 5, 4), (2, 3, 1, 5, 3))
DIMS = [(shape, dim) for shape in SHAPES for dim in range(max(len(shape), 1))]
EMPTY = ((0,), (0, 5), (5, 0), (2, 0, 3), (0, 0, 0))


def tensor(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """A random tensor of any rank, on the device that kernels run on."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    values = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(backend.DEVICE, dtype)


def sliced(*shape: int, step: int, **how: object) -> torch.Tensor:
    """Every step-th index of each dimension of a larger tensor, from the second on."""
    wide = tensor(*(step * n + 1 for n in shape), **how)
    return wide[tuple(slice(1, step * n + 1, step) for n in shape)]


def permuted(*shape: int, **how: object) -> torch.Tensor:
    return tensor(*shape[::-1], **how).permute(tuple(range(len(shape)))[::-1])


def expanded(*shape: int, keep: Callable[[int], bool], **how: object) -> torch.Tensor:
    """A tensor in which those dimensions repeat one index whose place is not kept."""
    sizes = [n if keep(place) else 1 for place, n in enumerate(shape)]
    return tensor(*sizes, **how).expand(shape)


LAYOUTS = {
    "contiguous": tensor,
    "permuted": permuted,
    "sliced": partial(sliced, step=1),
    "every second": partial(sliced, step=2),
    "expanded": partial(expanded, keep=lambda place: place % 2 == 0),
    "all alike": partial(expanded, keep=lambda place: False),
    "offset": lambda *shape, **how: tensor(math.prod(shape) + 1, **how)[1:].view(shape),
}
WRITABLE = ("contiguous", "permuted", "sliced", "every second", "offset")


def width_for(stem: str, dtype: torch.dtype = torch.float32) -> int:
    """A width, as small as can be, at which a few rows go to this chapter's kernel."""
    odd = int(stem == "unaligned")
    widths = (9 * 2**power + odd for power in range(3, 17))
    return next(n for n in widths if fastest.choose(3, n, dtype) == stem)


def input_of(stem: str, n_rows: int = 3, **how: object) -> torch.Tensor:
    """A matrix of few rows that goes to this chapter's kernel."""
    if stem == "online":
        return tensor(50, n_rows, **how).t()
    return tensor(n_rows, width_for(stem, how.get("dtype", torch.float32)), **how)
