"""Rotary embeddings. On a CPU they are computed in tiles that fit into its cache.

The products of whole tensors would write six intermediates of the size of the queries to memory.

Dimensions: B batch, H heads, T tokens, D width, p pairs of dimensions (D/2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import NAMESPACE
from .cpu_threads import run_in_threads, split_work

# Number of elements of one tile.
TILE_ELEMENTS = 1 << 16
ROTARY_BASE = 10000.0


def rotary_frequencies(width: int, base: float = ROTARY_BASE, device: torch.device | None = None) -> Tensor:
    """Return the rotary angle per token for each pair of dimensions, in radians, float32, shape [D/2]."""
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


def rotate(x_BHTD: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary embeddings to `x_BHTD`.

    The pairs (i, i + D/2) of row t are rotated by the angles of row t of `cos_sin`. The result has the dtype of
    `x_BHTD`.
    """
    if cos_sin.dim() == 4:
        cos_sin = cos_sin.unsqueeze(2)  # all heads of a sequence have the same angles
    if is_eager_on_cpu(x_BHTD):
        return rotate_by_tiles(x_BHTD, cos_sin)
    cosine, sine = cos_sin.to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def is_eager_on_cpu(x_BHTD: Tensor) -> bool:
    """Return whether `x_BHTD` is on a CPU and torch.compile is not tracing."""
    # In eager mode on a CPU, tiles are faster than whole tensors. Compiled code fuses the products on its own.
    return x_BHTD.device.type == "cpu" and not torch.compiler.is_compiling()


def rotate_by_tiles(x_BHTD: Tensor, cos_sin: Tensor) -> Tensor:
    """Apply rotary embeddings to `x_BHTD`, and return a contiguous tensor [B, H, T, D].

    `cos_sin` are the cosines and sines of the angles, [2, T, p], or [2, B, 1, T, p] if sequences differ.
    The gradient of `x` has the memory layout [B, T, H, D], in which the backward pass of a projection reads it.
    """
    rotated_BHTD: Tensor = _rotate(x_BHTD, cos_sin, 1.0, False)
    return rotated_BHTD


@torch.library.custom_op(f"{NAMESPACE}::rotated", mutates_args=())
def _rotate(x_BHTD: Tensor, cos_sin: Tensor, sign: float, by_token: bool) -> Tensor:
    out_BHTD = _empty(x_BHTD, by_token)
    cosine, sine = cos_sin.to(x_BHTD.dtype)
    batch, heads, tokens, width = x_BHTD.shape
    length = max(1, TILE_ELEMENTS // max(1, batch * heads * width))

    def piece(tiles: slice, _: slice) -> None:
        for start in range(tiles.start * length, min(tiles.stop * length, tokens), length):
            span = slice(start, min(start + length, tokens))
            angles = cosine[..., span, :], sine[..., span, :]
            _rotate_tile(x_BHTD[:, :, span], *angles, sign, out_BHTD[:, :, span])

    run_in_threads([partial(piece, *share) for share in split_work(x_BHTD.device, -(-tokens // length))])
    return out_BHTD


def _rotate_tile(x_BHTD: Tensor, cosine: Tensor, sine: Tensor, sign: float, out_BHTD: Tensor) -> None:
    """Rotate the pairs of dimensions (i, i + D/2) of a tile, and write them to `out_BHTD`."""
    (first, second), (out_first, out_second) = x_BHTD.chunk(2, -1), out_BHTD.chunk(2, -1)
    torch.mul(first, cosine, out=out_first).addcmul_(second, sine, value=-sign)
    torch.mul(second, cosine, out=out_second).addcmul_(first, sine, value=sign)


@_rotate.register_fake
def _(x_BHTD: Tensor, _cos_sin: Tensor, _sign: float, by_token: bool) -> Tensor:
    return _empty(x_BHTD, by_token)


def _empty(x_BHTD: Tensor, by_token: bool) -> Tensor:
    batch, heads, tokens, width = x_BHTD.shape
    if by_token:
        return x_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return x_BHTD.new_empty(batch, heads, tokens, width)


def _save_context(ctx: Any, inputs: tuple[Any, ...], **_output: Tensor) -> None:
    _, cos_sin, sign, _ = inputs
    ctx.save_for_backward(cos_sin)
    ctx.sign = sign


def _backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None, None, None]:
    """Return the gradient of the input, which is the upstream gradient rotated by the negative angles."""
    (cos_sin,) = ctx.saved_tensors
    return _rotate(grad_BHTD, cos_sin, -ctx.sign, True), None, None, None


_rotate.register_autograd(_backward, setup_context=_save_context)
