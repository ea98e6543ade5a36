"""Rotary positions on a CPU: each vector is read once and written once, in tiles that stay in the cache.

As products of whole tensors, which is what `rotate` (attention.py) is elsewhere, each of six intermediates of the
size of the queries would go through memory.

Dimensions: B batch, H heads, T tokens, D width, p pairs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import NAMESPACE
from .cpu_threads import shares, side_by_side

# Of one tile.
TILE_ELEMENTS = 1 << 16


def is_worth_it(x_BHTD: Tensor) -> bool:
    """Compiled code fuses the products itself.

    Nothing else decides: a graph has as many nodes for few tokens as for many, and a pass without one says the same.
    """
    return x_BHTD.device.type == "cpu" and not torch.compiler.is_compiling()


def rotate_by_tiles(x_BHTD: Tensor, turns_2Tp: Tensor) -> Tensor:
    """[B, H, T, D], contiguous. Its gradient lies in memory as [B, T, H, D], which is how a projection reads it."""
    rotated: Tensor = _rotated(x_BHTD, turns_2Tp, 1.0, False)
    return rotated


@torch.library.custom_op(f"{NAMESPACE}::rotated", mutates_args=())
def _rotated(x_BHTD: Tensor, turns_2Tp: Tensor, sign: float, by_token: bool) -> Tensor:
    out_BHTD = _empty(x_BHTD, by_token)
    cosine_Tp, sine_Tp = turns_2Tp.to(x_BHTD.dtype)
    batch, heads, tokens, width = x_BHTD.shape
    length = max(1, TILE_ELEMENTS // max(1, batch * heads * width))

    def piece(tiles: slice, _: slice) -> None:
        for start in range(tiles.start * length, min(tiles.stop * length, tokens), length):
            place = slice(start, min(start + length, tokens))
            _turn(x_BHTD[:, :, place], cosine_Tp[place], sine_Tp[place], sign, out_BHTD[:, :, place])

    side_by_side([partial(piece, *share) for share in shares(x_BHTD.device, -(-tokens // length))])
    return out_BHTD


def _turn(x_BHTD: Tensor, cosine_Tp: Tensor, sine_Tp: Tensor, sign: float, out_BHTD: Tensor) -> None:
    """The two halves as pairs."""
    (first, second), (out_first, out_second) = x_BHTD.chunk(2, -1), out_BHTD.chunk(2, -1)
    torch.mul(first, cosine_Tp, out=out_first).addcmul_(second, sine_Tp, value=-sign)
    torch.mul(second, cosine_Tp, out=out_second).addcmul_(first, sine_Tp, value=sign)


@_rotated.register_fake
def _(x_BHTD: Tensor, _turns: Tensor, _sign: float, by_token: bool) -> Tensor:
    return _empty(x_BHTD, by_token)


def _empty(x_BHTD: Tensor, by_token: bool) -> Tensor:
    batch, heads, tokens, width = x_BHTD.shape
    if by_token:
        return x_BHTD.new_empty(batch, tokens, heads, width).transpose(1, 2)
    return x_BHTD.new_empty(batch, heads, tokens, width)


def _keep(ctx: Any, inputs: tuple[Any, ...], **_output: Tensor) -> None:
    _, turns_2Tp, sign, _ = inputs
    ctx.save_for_backward(turns_2Tp)
    ctx.sign = sign


def _differentiate(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None, None, None]:
    """The inverse of a rotation is its transpose: the same, turned back."""
    (turns_2Tp,) = ctx.saved_tensors
    return _rotated(grad_BHTD, turns_2Tp, -ctx.sign, True), None, None, None


_rotated.register_autograd(_differentiate, setup_context=_keep)
