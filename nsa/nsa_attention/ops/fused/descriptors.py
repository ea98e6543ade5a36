"""Tiles by descriptor: from compute capability 9.0 on one instruction copies a tile of a tensor, whatever its strides.

The hardware takes tensors with dense rows whose address and strides are multiples of 16 bytes. Others go by pointers,
row by row, and so do all on GPUs before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MIN_CAPABILITY = (9, 0)
_ALIGNMENT_BYTES = 16


def supports_descriptors(tensor: Tensor) -> bool:
    """Of half types only: exact products take no tensor core, which is what waits for copies."""
    if not tensor.is_cuda or tensor.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= _MIN_CAPABILITY


def can_describe(*tensors: Tensor) -> bool:
    """Whether a descriptor can take all of them; for one without elements, its dimensions decide."""
    return all(supports_descriptors(tensor) and _fits(tensor) for tensor in tensors)


def _fits(tensor: Tensor) -> bool:
    size = tensor.element_size()
    if not tensor.numel():
        return tensor.shape[-1] * size % _ALIGNMENT_BYTES == 0
    strides = [stride for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    *outer, last = strides if tensor.shape[-1] > 1 else [*strides, 1]
    is_aligned = all(stride > 0 and stride * size % _ALIGNMENT_BYTES == 0 for stride in outer)
    return last == 1 and is_aligned and tensor.data_ptr() % _ALIGNMENT_BYTES == 0


def make_descriptor(tensor: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """A tensor that is describable, to be read in tiles of this shape. What lies outside of it reads as zeros."""
    if not tensor.numel():
        tensor = tensor.new_zeros([max(1, length) for length in tensor.shape])
    # The stride of a dimension of one is never walked, and may be any number in torch.
    strides = [
        stride if length > 1 else _ALIGNMENT_BYTES for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:-1], 1], list(block))
