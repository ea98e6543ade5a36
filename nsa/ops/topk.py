"""Which blocks the selected branch reads: importance from the compressed keys, then the best n (paper, eq. 8 to 12).

Dimensions: N batch x groups, h heads of a group, C queries of a tile, S compressed blocks, b selection blocks,
n places.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nsa.ops.patterns import CompletedBlocks
from nsa.ops.tiles import compute_dtype, tiles

EMPTY = -1
LONGEST_TILE = 512


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The numbers that decide a selection, in tokens and places."""

    block_len: int
    block_stride: int
    select_len: int
    select_count: int
    scale: float


class SelectionMemo:
    """What one forward pass of a layer selected, so that its recomputation reads the same blocks.

    The operator finds the memo by a number in a tensor. Python state that differs between the two passes would give
    each its own compiled graph, and a recomputation must save what the first pass saved.
    """

    _next = itertools.count()
    _living: ClassVar[WeakValueDictionary[int, SelectionMemo]] = WeakValueDictionary()

    def __init__(self) -> None:
        number = next(self._next)
        self.number = torch.tensor(number)  # on the CPU: reading it waits for no device
        self.indices: Tensor | None = None
        self._living[number] = self

    @classmethod
    def found(cls, number: Tensor | None) -> SelectionMemo | None:
        return None if number is None else cls._living[int(number)]


def choose_blocks(q_BHTD: Tensor, k_BGSD: Tensor, selection: Selection, memo_number: Tensor | None = None) -> Tensor:
    """Indices [B, G, T, n] (int32) of the chosen blocks, EMPTY where a query has fewer visible blocks than places.

    Blocks 0, the current and the previous one come first, then the most important; equal ones by the lower index.
    The query heads of a group share one row. Nothing is random and nothing depends on tokens after the query.
    With the number of a memo that is already filled, what stands there.
    """
    with torch.no_grad():
        return _choose(
            q_BHTD,
            k_BGSD,
            selection.block_len,
            selection.block_stride,
            selection.select_len,
            selection.select_count,
            selection.scale,
            memo_number,
        )


@torch.library.custom_op("nsa::choose_blocks", mutates_args=())
def _choose(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    block_len: int,
    block_stride: int,
    select_len: int,
    select_count: int,
    scale: float,
    memo_number: Tensor | None,
) -> Tensor:
    memo = SelectionMemo.found(memo_number)
    if memo is not None and memo.indices is not None:
        return memo.indices.clone()
    selection = Selection(
        block_len=block_len, block_stride=block_stride, select_len=select_len, select_count=select_count, scale=scale
    )
    indices = _chosen(q_BHTD, k_BGSD, selection)
    if memo is not None:
        memo.indices = indices.clone()
    return indices


@_choose.register_fake
def _(q_BHTD: Tensor, k_BGSD: Tensor, _l: int, _d: int, _size: int, count: int, *_: object) -> Tensor:
    return q_BHTD.new_empty((q_BHTD.shape[0], k_BGSD.shape[1], q_BHTD.shape[2], count), dtype=torch.int32)


def _chosen(q_BHTD: Tensor, k_BGSD: Tensor, selection: Selection) -> Tensor:
    batch, _, queries, width = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    q_NhTD = q_BHTD.reshape(rows, -1, queries, width)
    k_NSD = k_BGSD.reshape(rows, -1, width)
    blocks = -(-queries // selection.select_len)
    indices = torch.full((rows, queries, selection.select_count), EMPTY, dtype=torch.int32, device=q_BHTD.device)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        weights = overlap_weights(blocks, k_NSD.shape[1], selection, compute_dtype(q_BHTD), q_BHTD.device)
        per_query = rows * max(q_NhTD.shape[1] * k_NSD.shape[1], 2 * blocks)
        for start, stop in tiles(queries, per_query, LONGEST_TILE):
            importance = _importance(q_NhTD[:, :, start:stop], k_NSD, start, selection, weights)
            chosen = _best(importance, start, selection)
            indices[:, start:stop, : chosen.shape[-1]] = chosen
    return indices.reshape(batch, groups, queries, selection.select_count)


def overlap_weights(
    blocks: int, compressed: int, selection: Selection, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each selection block the compressed blocks that overlap it and by how much, [b, K] each, K constant in T.

    The weight is the number of shared tokens over d: 1 2 2 2 1 for l=32, d=16, l'=64. A place beyond the last
    compressed block has weight 0.
    """
    length, stride, size = selection.block_len, selection.block_stride, selection.select_len
    starts = torch.arange(blocks, device=device)[:, None] * size
    # The first block with i*d + l > start; from there on, no more than this many begin before the block ends.
    first = torch.div(starts - length, stride, rounding_mode="floor") + 1
    candidates = first + torch.arange((size + length) // stride + 1, device=device)
    begin, end = candidates * stride, candidates * stride + length
    shared = (torch.minimum(end, starts + size) - torch.maximum(begin, starts)).clamp_min(0)
    exists = (candidates >= 0) & (candidates < compressed)
    return candidates.clamp(0, max(0, compressed - 1)), (shared * exists).to(dtype) / stride


def _importance(
    q_NhCD: Tensor, k_NSD: Tensor, start: int, selection: Selection, weights: tuple[Tensor, Tensor]
) -> Tensor:
    """Importance [N, C, b] of the selection blocks: softmax over visible compressed blocks, summed over the heads."""
    rows, heads, queries, _ = q_NhCD.shape
    if k_NSD.shape[1] == 0:
        return q_NhCD.new_zeros(rows, queries, weights[0].shape[0], dtype=weights[1].dtype)
    dtype = weights[1].dtype
    scores = q_NhCD.flatten(1, 2).to(dtype) @ k_NSD.to(dtype).transpose(1, 2) * selection.scale
    visible = _visible_blocks(start, start + queries, k_NSD.shape[1], selection, q_NhCD.device)
    scores = scores.unflatten(1, (heads, queries)).masked_fill(~visible, -torch.inf)
    # A query before the first complete block has NaN in its softmax and no visible block that could keep it.
    shares_NCS = torch.softmax(scores, -1).masked_fill(~visible, 0.0).sum(1)
    overlapping, weight = weights
    return (shares_NCS[..., overlapping] * weight).sum(-1)


def _visible_blocks(start: int, stop: int, compressed: int, selection: Selection, device: torch.device) -> Tensor:
    pattern = CompletedBlocks(selection.block_len, selection.block_stride)
    visible = torch.zeros(stop - start, compressed, dtype=torch.bool, device=device)
    seen = pattern.seen(start, stop, device)
    visible[:, : seen.shape[-1]] = seen
    return visible


def _best(importance_NCb: Tensor, start: int, selection: Selection) -> Tensor:
    """The forced blocks and the most important visible ones, best first, at most n of them."""
    queries, blocks = importance_NCb.shape[1:]
    current = torch.arange(start, start + queries, device=importance_NCb.device)[:, None] // selection.select_len
    block = torch.arange(blocks, device=importance_NCb.device)
    forced = (block == 0) | (block == current) | (block == current - 1)
    ranked = importance_NCb.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)
    # A stable sort is the only torch operation that promises ties to the lower index; topk does not.
    score, order = torch.sort(ranked, dim=-1, descending=True, stable=True)
    order = order.masked_fill(score == -torch.inf, EMPTY)
    return order[..., : selection.select_count].to(torch.int32)
