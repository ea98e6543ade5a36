"""Which blocks the selected branch reads: importance from the compressed keys, then the best n (paper, eq. 8 to 12).

Dimensions: N batch x groups, h heads of a group, C queries of a tile, S compressed blocks, b selection blocks,
n places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from . import NAMESPACE
from .attend import CompletedBlocks
from .cpu_threads import run_in_threads, split_work
from .kernels import autocast_disabled, compute_dtype, tiles
from .packed import compressed_starts, sequence_numbers
from .table_cache import cached_table

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
    _memos: ClassVar[WeakValueDictionary[int, SelectionMemo]] = WeakValueDictionary()

    def __init__(self) -> None:
        number = next(self._next)
        self.number = torch.tensor(number)  # on the CPU: reading it waits for no device
        self.indices: Tensor | None = None
        self._memos[number] = self

    @classmethod
    def lookup(cls, number: Tensor | None) -> SelectionMemo | None:
        return None if number is None else cls._memos[int(number)]


def select_blocks(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    selection: Selection,
    memo_number: Tensor | None = None,
    *,
    lse_BHT: Tensor | None = None,
    starts: Tensor | None = None,
    ranked_by: str = "tiles",
) -> Tensor:
    """Indices [B, G, T, n] (int32) of the selected blocks, EMPTY where a query has fewer visible blocks than places.

    Blocks 0, the current and the previous one come first, then the most important; equal ones by the lower index.
    The query heads of a group share one row. Nothing is random and nothing depends on tokens after the query.
    With the number of a memo that is already filled, what stands there. `ranked_by` is a name of RANKERS; the fused
    one takes the log-sum-exp of the queries over the keys. `starts` are those of packed sequences (ops/packed.py).
    """
    with torch.no_grad():
        return _select(
            q_BHTD,
            k_BGSD,
            selection.block_len,
            selection.block_stride,
            selection.select_len,
            selection.select_count,
            selection.scale,
            memo_number,
            lse_BHT,
            starts,
            ranked_by,
        )


@torch.library.custom_op(f"{NAMESPACE}::select_blocks", mutates_args=())
def _select(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    block_len: int,
    block_stride: int,
    select_len: int,
    select_count: int,
    scale: float,
    memo_number: Tensor | None,
    lse_BHT: Tensor | None,
    starts: Tensor | None,
    ranked_by: str,
) -> Tensor:
    memo = SelectionMemo.lookup(memo_number)
    if memo is not None and memo.indices is not None:
        return memo.indices.clone()
    selection = Selection(
        block_len=block_len, block_stride=block_stride, select_len=select_len, select_count=select_count, scale=scale
    )
    indices = RANKERS[ranked_by](q_BHTD, k_BGSD, selection, lse_BHT, starts)
    if memo is not None:
        memo.indices = indices.clone()
    return indices


@_select.register_fake
def _(q_BHTD: Tensor, k_BGSD: Tensor, _l: int, _d: int, _size: int, count: int, *_: object) -> Tensor:
    return q_BHTD.new_empty((q_BHTD.shape[0], k_BGSD.shape[1], q_BHTD.shape[2], count), dtype=torch.int32)


def _select_by_tiles(
    q_BHTD: Tensor, k_BGSD: Tensor, selection: Selection, _lse: Tensor | None, starts: Tensor | None
) -> Tensor:
    if starts is not None:
        return _select_packed(q_BHTD, k_BGSD, selection, starts)
    batch, _, queries, width = q_BHTD.shape
    groups = k_BGSD.shape[1]
    rows = batch * groups
    q_NhTD = q_BHTD.reshape(rows, q_BHTD.shape[1] // groups, queries, width)
    k_NSD = k_BGSD.reshape(rows, k_BGSD.shape[2], width)
    indices = torch.full((rows, queries, selection.select_count), EMPTY, dtype=torch.int32, device=q_BHTD.device)

    def piece(rows: slice, _heads: slice) -> None:
        _fill_tiles(q_NhTD[rows], k_NSD[rows], selection, indices[rows])

    run_in_threads([partial(piece, *share) for share in split_work(q_BHTD.device, rows)])
    return indices.reshape(batch, groups, queries, selection.select_count)


def _select_packed(q_1HTD: Tensor, k_1GSD: Tensor, selection: Selection, starts: Tensor) -> Tensor:
    """A sequence of no more blocks than a query may choose needs no ranking: it takes all that begin before it."""
    sequence_T = sequence_numbers(starts, q_1HTD.shape[2])
    current_T = (torch.arange(len(sequence_T), device=starts.device) - starts[sequence_T]) // selection.select_len
    place_n = torch.arange(selection.select_count, device=starts.device)
    taken_Tn = torch.where(place_n <= current_T[:, None], place_n, EMPTY).to(torch.int32)
    indices = taken_Tn.expand(1, k_1GSD.shape[1], -1, -1).contiguous()
    bounds = starts.tolist()
    blocks = compressed_starts(starts, selection.block_len, selection.block_stride).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end - begin > selection.select_count * selection.select_len:
            keys = k_1GSD[:, :, blocks[number] : blocks[number + 1]]
            indices[:, :, begin:end] = _select_by_tiles(q_1HTD[:, :, begin:end], keys, selection, None, None)
    return indices


def _fill_tiles(q_NhTD: Tensor, k_NSD: Tensor, selection: Selection, indices_NTn: Tensor) -> None:
    """Fill in the indices, which are empty."""
    rows, heads, queries, _ = q_NhTD.shape
    blocks = -(-queries // selection.select_len)
    per_query = rows * max(heads * k_NSD.shape[1], 2 * blocks)
    for start, stop in tiles(queries, per_query, LONGEST_TILE):
        best = best_blocks(q_NhTD[:, :, start:stop], k_NSD, start, selection)
        indices_NTn[:, start:stop, : best.shape[-1]] = best


# What computes a selection from queries, keys, numbers, log-sum-exp and starts. The fused kernels add theirs.
RANKERS: dict[str, Callable[[Tensor, Tensor, Selection, Tensor | None, Tensor | None], Tensor]] = {
    "tiles": _select_by_tiles
}


def best_blocks(q_NhCD: Tensor, k_NSD: Tensor, start: int, selection: Selection) -> Tensor:
    """Indices [N, C, at most n] (int32) for the tile of queries that begins with query `start`, best first.

    `k_NSD` are the compressed keys from the first on, at least those that the last of these queries sees.
    """
    with autocast_disabled(q_NhCD):
        importance_NbC = _importance(q_NhCD, k_NSD, start, selection)
    positions_1C = torch.arange(start, start + q_NhCD.shape[2], device=q_NhCD.device)[None]
    return _forced_and_best(importance_NbC.transpose(1, 2), positions_1C, selection)


def key_probabilities(q_NhCD: Tensor, k_NSD: Tensor, seen_XSC: Tensor, scale: float) -> Tensor:
    """Each query's softmax over the keys that it sees, [N, S, h, C], in float32 at least; X is N or 1.

    Of a query that sees none all are 0.
    """
    scores_NShC = _scores(q_NhCD, k_NSD, scale)
    if not k_NSD.shape[1]:
        return scores_NShC
    return _softmax_over_keys_(scores_NShC.masked_fill_(~seen_XSC[:, :, None], -torch.inf))


def best_blocks_from_probabilities(
    shares_NSC: Tensor, positions_XC: Tensor, blocks: int, selection: Selection
) -> Tensor:
    """What `best_blocks` gives, from the sum over heads of `shares_of_keys`, for queries at these places.

    No place is beyond the last of `blocks` selection blocks. X is N, or 1 where all rows are at the same places.
    """
    keys, dtype, device = shares_NSC.shape[1], shares_NSC.dtype, shares_NSC.device
    # The layers ask for it one after the other, and it stays the same until a block is complete.
    overlap = cached_table(
        None,
        device,
        ("overlap weights", blocks, keys, selection, dtype),
        lambda: overlap_weights(blocks, keys, selection, dtype, device),
    )
    return _forced_and_best(_sum_overlapping(shares_NSC, *overlap).transpose(1, 2), positions_XC, selection)


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


def _importance(q_NhCD: Tensor, k_NSD: Tensor, start: int, selection: Selection) -> Tensor:
    """Importance [N, b, C] of the blocks up to the last query's own.

    A softmax over the visible compressed blocks, summed over the heads. The queries stand last, so that a compressed
    block's share is one row: taking the rows that overlap a selection block moves memory in whole.
    """
    rows, _, queries, _ = q_NhCD.shape
    stop, dtype = start + queries, compute_dtype(q_NhCD)
    pattern = CompletedBlocks(selection.block_len, selection.block_stride)
    keys = min(pattern.count(stop), k_NSD.shape[1])
    blocks = -(-stop // selection.select_len)
    if keys == 0:
        return q_NhCD.new_zeros(rows, blocks, queries, dtype=dtype)
    scores_NShC = _scores(q_NhCD, k_NSD[:, :keys], selection.scale)
    # Blocks that the first query of the tile sees are seen by all of them.
    seen_by_all = pattern.count(start + 1)
    unseen_SC = ~pattern.visible(start, stop, q_NhCD.device)[:, seen_by_all:keys].t()
    scores_NShC[:, seen_by_all:].masked_fill_(unseen_SC[:, None], -torch.inf)
    shares_NSC = _softmax_over_keys_(scores_NShC).sum(2)
    return _sum_overlapping(shares_NSC, *overlap_weights(blocks, keys, selection, dtype, q_NhCD.device))


def _scores(q_NhCD: Tensor, k_NSD: Tensor, scale: float) -> Tensor:
    """[N, S, h, C], scaled."""
    dtype = compute_dtype(q_NhCD)
    q_NDr = q_NhCD.to(dtype).mul(scale).flatten(1, 2).transpose(1, 2)
    return (k_NSD.to(dtype) @ q_NDr).unflatten(2, q_NhCD.shape[1:3])


def _sum_overlapping(shares_NSC: Tensor, overlapping_bK: Tensor, weight_bK: Tensor) -> Tensor:
    """Importance [N, b, C]: what each selection block gets from the compressed blocks that overlap it."""
    rows, keys, queries = shares_NSC.shape
    importance_NbC = shares_NSC.new_zeros(rows, len(overlapping_bK), queries)
    if keys == 0:
        return importance_NbC
    for overlapping, weight in zip(overlapping_bK.t(), weight_bK.t(), strict=True):
        importance_NbC.addcmul_(shares_NSC.index_select(1, overlapping), weight[:, None])
    return importance_NbC


def _softmax_over_keys_(scores_NShC: Tensor) -> Tensor:
    """In place. A query before the first complete block sees none: its shares are 0."""
    highest = scores_NShC.amax(1, keepdim=True)
    weights = scores_NShC.sub_(highest.masked_fill_(highest == -torch.inf, 0.0)).exp_()
    total = weights.sum(1, keepdim=True)
    return weights.mul_(total.masked_fill_(total == 0, 1.0).reciprocal_())


def _forced_and_best(importance_NCb: Tensor, positions_XC: Tensor, selection: Selection) -> Tensor:
    """The forced blocks and the most important visible ones, best first, at most n of them."""
    blocks = importance_NCb.shape[-1]
    current = positions_XC[:, :, None] // selection.select_len
    block = torch.arange(blocks, device=importance_NCb.device)
    forced = (block == 0) | (block == current) | (block == current - 1)
    ranked = importance_NCb.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)
    best = _top_by_packed_keys if ranked.dtype is torch.float32 else _top_by_sort
    score, order = best(ranked, min(blocks, selection.select_count))
    return torch.where(score < 0, EMPTY, order).to(torch.int32)


def _top_by_sort(ranked_NCb: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores and indices of the first `count`. A stable sort promises ties to the lower index; topk does not."""
    score, order = torch.sort(ranked_NCb, dim=-1, descending=True, stable=True)
    return score[..., :count], order[..., :count]


def _top_by_packed_keys(ranked_NCb: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same by topk, which sorts only what it returns: no two numbers are equal with the index in their low half.

    The bits of floats of one sign rise with their value; minus infinity, the only negative one, stays negative.
    """
    blocks = ranked_NCb.shape[-1]
    from_behind = torch.arange(blocks - 1, -1, -1, device=ranked_NCb.device)
    packed = ranked_NCb.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(from_behind)
    first = packed.topk(count, dim=-1).values
    return first, blocks - 1 - first.bitwise_and(0xFFFFFFFF)
