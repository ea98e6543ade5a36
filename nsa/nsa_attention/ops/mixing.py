"""The gated sum of the outputs of separate branches (NSA paper, eq. 5), on a CPU in tiles that fit into its cache.

The sum is written as [B, T, H, E], the order in which the output projection reads it. In the backward pass, each tile
of the upstream gradient is used for all branches: for the gradient of each output, and of each gate (a sum over E).

Dimensions: c branches, B batch, H heads, T tokens, t tokens of a tile, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import NAMESPACE
from .cpu_threads import TILE_ELEMENTS, is_eager_on_cpu, run_in_threads, split_work


def gated_sum(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    """Return the sum of the branch outputs [B, H, T, E], weighted by their gates, shape [B, T, H, E].

    The sum has the dtype of the branches; gates may have a different dtype.
    """
    if is_eager_on_cpu(outputs[0]):
        return mix_by_tiles(outputs, gates_cBHT).to(outputs[0].dtype)
    gates = gates_cBHT.unsqueeze(-1)
    mixed_BHTE = outputs[0] * gates[0]
    for output, gate in zip(outputs[1:], gates[1:], strict=True):
        mixed_BHTE = torch.addcmul(mixed_BHTE, output, gate)
    return mixed_BHTE.to(outputs[0].dtype).transpose(1, 2)


def mix_by_tiles(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    """Return the contiguous sum of the branch outputs, weighted by their gates, shape [B, T, H, E]."""
    mixed_BTHE: Tensor = _mix(list(outputs), gates_cBHT)
    return mixed_BTHE


@torch.library.custom_op(f"{NAMESPACE}::mixed_by_tiles", mutates_args=())
def _mix(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    out_BTHE = _empty(outputs[0], gates_cBHT)

    def tile(place: slice) -> None:
        gates = gates_cBHT[:, :, :, place].transpose(2, 3).unsqueeze(-1)
        parts = (output[:, :, place].transpose(1, 2) for output in outputs)
        mixed_BtHE = torch.mul(next(parts), gates[0], out=out_BTHE[:, place])
        for output, gate in zip(parts, gates[1:], strict=True):
            mixed_BtHE.addcmul_(output, gate)

    _run_tiles(outputs[0], tile)
    return out_BTHE


@torch.library.custom_op(f"{NAMESPACE}::mixed_by_tiles_backward", mutates_args=())
def _mix_backward(grad_BTHE: Tensor, outputs: Sequence[Tensor], gates_cBHT: Tensor) -> list[Tensor]:
    output_grads = [_contiguous(output) for output in outputs]
    gate_grads = _contiguous(gates_cBHT)

    def tile(place: slice) -> None:
        grad = grad_BTHE[:, place].transpose(1, 2)
        product = torch.empty_like(grad)
        for number, output in enumerate(outputs):
            torch.mul(grad, gates_cBHT[number, :, :, place].unsqueeze(-1), out=output_grads[number][:, :, place])
            torch.mul(grad, output[:, :, place], out=product)
            gate_grads[number, :, :, place] = product.sum(-1)

    _run_tiles(outputs[0], tile)
    return [*output_grads, gate_grads]


def _run_tiles(like_BHTE: Tensor, tile: Callable[[slice], None]) -> None:
    batch, heads, tokens, width = like_BHTE.shape
    length = max(1, TILE_ELEMENTS // max(1, batch * heads * width))

    def piece(tiles: slice, _: slice) -> None:
        for start in range(tiles.start * length, min(tiles.stop * length, tokens), length):
            tile(slice(start, min(start + length, tokens)))

    run_in_threads([partial(piece, *share) for share in split_work(like_BHTE.device, -(-tokens // length))])


@_mix.register_fake
def _(outputs: Sequence[Tensor], gates_cBHT: Tensor) -> Tensor:
    return _empty(outputs[0], gates_cBHT)


@_mix_backward.register_fake
def _(_grad: Tensor, outputs: Sequence[Tensor], gates_cBHT: Tensor) -> list[Tensor]:
    return [_contiguous(tensor) for tensor in (*outputs, gates_cBHT)]


def _empty(like_BHTE: Tensor, gates_cBHT: Tensor) -> Tensor:
    batch, heads, tokens, width = like_BHTE.shape
    dtype = torch.promote_types(like_BHTE.dtype, gates_cBHT.dtype)
    return like_BHTE.new_empty(batch, tokens, heads, width, dtype=dtype)


def _contiguous(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _save_context(ctx: Any, inputs: tuple[Any, ...], **_output: Tensor) -> None:
    outputs, gates_cBHT = inputs
    ctx.save_for_backward(*outputs, gates_cBHT)


def _backward(ctx: Any, grad_BTHE: Tensor) -> tuple[list[Tensor], Tensor]:
    *outputs, gates_cBHT = ctx.saved_tensors
    *output_grads, gate_grads = _mix_backward(grad_BTHE, outputs, gates_cBHT)
    return output_grads, gate_grads


_mix.register_autograd(_backward, setup_context=_save_context)
