"""Tensor descriptors, which let newer GPUs copy a tile of a tensor with a single instruction (TMA).

They exist since compute capability 9.0. The hardware requires dense rows, and an address and strides that are multiples
of 16 bytes. Kernels load other tensors, and all tensors on older GPUs, row by row through pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import compute_capability, with_strides

_MIN_CAPABILITY = 90
_ALIGNMENT_BYTES = 16


def supports_descriptors(tensor: Tensor) -> bool:
    """Return whether the kernels use tensor descriptors for the dtype and device of `tensor`."""
    # The kernels use them for half-precision dtypes since compute capability 9.0. float32 and float64 would not profit,
    # because their products do not use tensor cores.
    return tensor.element_size() == 2 and compute_capability(tensor.device) >= _MIN_CAPABILITY


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


@dataclass(frozen=True, kw_only=True)
class TiledPair:
    """The kernel arguments for a pair of tensors that kernels read in tiles."""

    first: tuple[Any, ...]
    second: tuple[Any, ...]
    uses_descriptors: bool


def keys_and_values(k_BGSD: Tensor, v_BGSE: Tensor, keys: int, sizes: dict[str, Any]) -> TiledPair:
    """Return the kernel arguments for keys and values that are read in tiles of `keys` consecutive rows."""
    first, second = with_strides(k_BGSD), with_strides(v_BGSE)
    if not can_describe(k_BGSD, v_BGSE):
        return TiledPair(first=first, second=second, uses_descriptors=False)
    block = 1, 1, keys
    return TiledPair(
        first=(make_descriptor(k_BGSD, (*block, sizes["D_PADDED"])), *first[1:]),
        second=(make_descriptor(v_BGSE, (*block, sizes["E_PADDED"])), *second[1:]),
        uses_descriptors=True,
    )
