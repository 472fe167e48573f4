"""Tensor descriptors: which tensors they fit, and launches that pass them.

A descriptor tells a kernel a tensor's address, shape and strides, and the block that it
will load or store. From compute capability 9.0 on, the GPU's tensor memory accelerator
(TMA) copies the block by itself. On other GPUs Triton turns a descriptor back into
pointers and masks.

Weighed: `tl.make_tensor_descriptor`, which makes a descriptor in the kernel, and needs
an allocator that is set for all of Triton (`triton.set_allocator`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.lab.launch import Launch, pointer_to

ALIGNED = 16
"""Rows must be so many bytes apart, or a multiple, and start at such a multiple."""


def fits(*tensors: torch.Tensor) -> bool:
    """Whether all tensors can be described: matrices that are not empty, with adjacent
    columns, and every row at a multiple of 16 bytes. The "meta" device will do.
    """
    return all(
        x.ndim == 2
        and x.numel() > 0
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % ALIGNED == 0
        and pointer_to(x).aligned
        for x in tensors
    )


def described(
    tensors: Iterable[torch.Tensor], blocks: Iterable[Sequence[int]]
) -> tuple[TensorDescriptor, ...]:
    """A descriptor for each tensor, with what the compiler sees in the tensor's place.

    Args:
        tensors: those that `fits`.
        blocks: the shape of the block that the kernel moves of each.
    """
    return tuple(
        TensorDescriptor(pointer_to(x), tuple(x.shape), x.stride(), list(block))
        for x, block in zip(tensors, blocks, strict=True)
    )


class DescriptorLaunch(Launch):
    """A `Launch` that is called with tensors and passes descriptors of them.

    Its `pointers` are `described`.
    """

    def __call__(self, *tensors: torch.Tensor) -> Any:
        pairs = zip(self.pointers, tensors, strict=True)
        return super().__call__(*(replace(form, base=x) for form, x in pairs))
