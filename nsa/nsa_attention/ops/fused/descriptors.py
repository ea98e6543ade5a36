"""Tensor descriptors, which let newer GPUs copy a tile of a tensor with a single instruction (TMA).

They exist since compute capability 9.0. The hardware requires dense rows, and an address and strides that are multiples
of 16 bytes. Kernels load other tensors, and all tensors on older GPUs, row by row through pointers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MIN_CAPABILITY = (9, 0)
_ALIGNMENT_BYTES = 16


def supports_descriptors(tensor: Tensor) -> bool:
    """Return whether the kernels use tensor descriptors for the dtype and device of `tensor`."""
    # The kernels use them for half-precision dtypes since compute capability 9.0. float32 and float64 would not profit,
    # because their products do not use tensor cores.
    if not tensor.is_cuda or tensor.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= _MIN_CAPABILITY


def can_describe(*tensors: Tensor) -> bool:
    """Return whether tensor descriptors can describe all these tensors."""
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
    """Return a tensor descriptor that reads `tensor` in tiles of shape `block`.

    Elements outside the tensor are read as 0. `can_describe(tensor)` must be true.
    """
    if not tensor.numel():
        tensor = tensor.new_zeros([max(1, length) for length in tensor.shape])
    # PyTorch allows any stride for a dimension of size 1; it is never used.
    strides = [
        stride if length > 1 else _ALIGNMENT_BYTES for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:-1], 1], list(block))
