"""Rotary embeddings. On a CPU they are computed in tiles that fit into its cache, on a GPU by a Triton kernel.

The products of whole tensors would write six intermediates of the size of the queries to memory. Compiled code fuses
these products on its own.

Dimensions: B batch, H heads, T tokens, D width, p pairs of dimensions (D/2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config import Implementation
from . import NAMESPACE
from .cpu_threads import TILE_ELEMENTS, is_eager_on_cpu, run_in_threads, split_work
from .dispatch import rotates_in_triton

ROTARY_BASE = 10000.0


def rotary_frequencies(width: int, base: float = ROTARY_BASE, device: torch.device | None = None) -> Tensor:
    """Return the rotary angle per position for each pair of dimensions, in radians, as a float32 tensor [D/2]."""
    exponents = -torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    return torch.as_tensor(base**exponents, dtype=torch.float32)


def rotary_cos_sin(frequencies: Tensor, tokens: int) -> Tensor:
    """Return the cosines and sines of the rotary angles at positions 0 to T - 1, shape [2, T, D/2]."""
    return cos_sin_at(frequencies, torch.arange(tokens, device=frequencies.device))


def cos_sin_at(frequencies: Tensor, positions: Tensor) -> Tensor:
    """Return the cosines and sines of the rotary angles at integer positions [T] or [B, T], shape [2, (B,) T, D/2]."""
    angles = positions.to(frequencies.dtype).unsqueeze(-1) * frequencies
    return torch.stack((angles.cos(), angles.sin()))


class RotaryTable:
    """A cache of rotary cosines and sines that grows with the highest position requested."""

    def __init__(self) -> None:
        self._cos_sin: Tensor | None = None  # None until the first call, which provides the frequencies

    def __call__(self, frequencies: Tensor, end: int) -> Tensor:
        """Return the rotary cosines and sines of at least the first `end` positions, shape [2, positions, D/2]."""
        if self._cos_sin is None or end > self._cos_sin.shape[1]:
            self._cos_sin = rotary_cos_sin(frequencies, max(64, 1 << (end - 1).bit_length()))
        return self._cos_sin


def rotate(x_BHTD: Tensor, cos_sin: Tensor, implementation: Implementation = Implementation.AUTO) -> Tensor:
    """Apply rotary embeddings to `x_BHTD`.

    The pairs (i, i + D/2) of row t are rotated by the angles of row t of `cos_sin`, whose cosines and sines are
    [2, T, p], or [2, B, T, p] if sequences differ. The result has the dtype of `x_BHTD`. `implementation` is that of
    the layer: Triton's interpreter runs only if it is requested.
    """
    return _apply([x_BHTD], [cos_sin], implementation, [False])[0]


def rotate_queries_and_keys(
    q_BHTD: Tensor,
    keys: Sequence[Tensor],
    tables: Sequence[Tensor],
    implementation: Implementation = Implementation.AUTO,
) -> list[Tensor]:
    """Apply rotary embeddings to the queries and to the keys of all branches, on a GPU in a single launch.

    `tables` has the cosines and sines of the queries, then those of each of the `keys`, as in `rotate`. The Triton
    kernel writes the heads of a query next to each other, because the attention kernels gather all of them, and the
    keys of a head next to each other.
    """
    return _apply([q_BHTD, *keys], tables, implementation, [True, *(False for _ in keys)])


def _apply(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], implementation: Implementation, by_token: list[bool]
) -> list[Tensor]:
    if not torch.compiler.is_compiling():
        if rotates_in_triton(implementation, tensors[0]):
            return _rotate(list(tensors), list(tables), 1.0, by_token, "triton")
        if is_eager_on_cpu(tensors[0]):
            return _rotate(list(tensors), list(tables), 1.0, [False for _ in tensors], "tiles")
    return [_products(x_BHTD, cos_sin) for x_BHTD, cos_sin in zip(tensors, tables, strict=True)]


def _products(x_BHTD: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary embeddings with products of whole tensors."""
    cosine, sine = _for_all_heads(cos_sin).to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def _for_all_heads(cos_sin: Tensor) -> Tensor:
    """Return `cos_sin` with a dimension of size 1 for the heads if sequences have different angles."""
    return cos_sin.unsqueeze(2) if cos_sin.dim() == 4 else cos_sin


@torch.library.custom_op(f"{NAMESPACE}::rotated", mutates_args=())
def _rotate(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], sign: float, by_token: Sequence[bool], rotated_by: str
) -> list[Tensor]:
    """Rotate tensors [B, H, T, D], each by the angles of its table times `sign` (1 or -1).

    `rotated_by` is a key of ROTATIONS. Results are contiguous, or as [B, T, H, D] if `by_token`. Gradients have this
    second layout, in which the backward pass of a projection reads them.
    """
    outputs = _empty_outputs(tensors, by_token)
    ROTATIONS[rotated_by](tensors, tables, sign, outputs)
    return outputs


def _rotate_by_tiles(
    tensors: Sequence[Tensor], tables: Sequence[Tensor], sign: float, outputs: Sequence[Tensor]
) -> None:
    """Write the rotated tensors to `outputs`, in tiles that fit into the cache of a CPU."""
    for x_BHTD, cos_sin, out_BHTD in zip(tensors, tables, outputs, strict=True):
        cosine, sine = _for_all_heads(cos_sin).to(x_BHTD.dtype)
        batch, heads, tokens, width = x_BHTD.shape
        length = max(1, TILE_ELEMENTS // max(1, batch * heads * width))
        piece = partial(_rotate_tiles, x_BHTD, cosine, sine, sign, out_BHTD, length)
        run_in_threads([partial(piece, tiles) for tiles, _ in split_work(x_BHTD.device, -(-tokens // length))])


def _rotate_tiles(
    x_BHTD: Tensor, cosine: Tensor, sine: Tensor, sign: float, out_BHTD: Tensor, length: int, tiles: slice
) -> None:
    tokens = x_BHTD.shape[2]
    for start in range(tiles.start * length, min(tiles.stop * length, tokens), length):
        span = slice(start, min(start + length, tokens))
        (first, second), (out_first, out_second) = (tensor[:, :, span].chunk(2, -1) for tensor in (x_BHTD, out_BHTD))
        cos, sin = cosine[..., span, :], sine[..., span, :]
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)


# The implementations of the operator. The backend of the Triton kernels adds its own.
ROTATIONS: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor], float, Sequence[Tensor]], None]] = {
    "tiles": _rotate_by_tiles
}


@_rotate.register_fake
def _(
    tensors: Sequence[Tensor], _tables: Sequence[Tensor], _sign: float, by_token: Sequence[bool], _rotated_by: str
) -> list[Tensor]:
    return _empty_outputs(tensors, by_token)


def _empty_outputs(tensors: Sequence[Tensor], by_token: Sequence[bool]) -> list[Tensor]:
    return [_empty(x_BHTD, is_by_token) for x_BHTD, is_by_token in zip(tensors, by_token, strict=True)]


def _empty(x_BHTD: Tensor, is_by_token: bool) -> Tensor:
    batch, heads, tokens, width = x_BHTD.shape
    if is_by_token:
        return x_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return x_BHTD.new_empty(batch, heads, tokens, width)


def _save_context(ctx: Any, inputs: tuple[Any, ...], **_output: Any) -> None:
    _, tables, ctx.sign, _, ctx.rotated_by = inputs
    ctx.save_for_backward(*tables)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of the tensors, which are the upstream gradients rotated by the negative angles."""
    tables = list(ctx.saved_tensors)
    rotated = _rotate(list(grads), tables, -ctx.sign, [True for _ in grads], ctx.rotated_by)
    return rotated, [None for _ in tables], None, None, None


_rotate.register_autograd(_backward, setup_context=_save_context)
