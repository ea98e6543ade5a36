"""Selection of the most important blocks, to which the selected branch attends (NSA paper, eq. 8 to 11).

The importance of a block is computed from the compressed keys. The n most important blocks are selected, including the
forced ones.

Dimensions: B batch, H query heads, G groups, N batch x groups, h heads of a group, T queries, C queries of a tile, S
compressed blocks, b selection blocks, K compressed blocks that overlap a selection block, n selected blocks per query.
X is N, or 1 if all rows have the same positions.
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

from ..config import LayerConfig
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
    """The parameters of block selection. Lengths are in tokens."""

    block_len: int  # l
    block_stride: int  # d
    select_len: int  # l'
    select_count: int  # n, including the forced blocks
    scale: float  # factor of the scores, usually 1 / sqrt(D)

    @classmethod
    def of(cls, config: LayerConfig) -> Selection:
        """Return the parameters that a layer's configuration defines."""
        return cls(
            block_len=config.block_len,
            block_stride=config.block_stride,
            select_len=config.select_len,
            select_count=config.select_count,
            scale=config.scale,
        )


class SelectionMemo:
    """The blocks that a layer selected, stored for the recomputation in gradient checkpointing.

    The operator finds the memo by a number in a tensor. If the first pass and the recomputation differed in a Python
    value, torch.compile would compile them separately, but both must save the same tensors.
    """

    _next = itertools.count()
    _memos: ClassVar[WeakValueDictionary[int, SelectionMemo]] = WeakValueDictionary()

    def __init__(self) -> None:
        number = next(self._next)
        self.number = torch.tensor(number)  # on the CPU, so that reading it does not wait for a device
        self.indices: Tensor | None = None
        self._memos[number] = self

    @classmethod
    def lookup(cls, number: Tensor) -> SelectionMemo:
        """Return the memo with this number."""
        return cls._memos[int(number)]


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
    """Return the indices of the blocks that each query selects, int32, shape [B, G, T, n].

    Block 0, the query's own block and the previous block come first, then the most important blocks that start at or
    before the query; of equally important blocks the lower index comes first. Unused entries are EMPTY. The query heads
    of a group share their selection, which is deterministic and does not depend on later tokens.

    `k_BGSD` are the compressed keys. If the memo with number `memo_number` already has indices, they are returned.
    `ranked_by` is a key of RANKERS; the fused ranker needs `lse_BHT`, the log-sum-exp of the compressed branch.
    `starts` are the starts of packed sequences (ops/packed.py); indices then count from the start of the sequence.
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
    selection = Selection(
        block_len=block_len, block_stride=block_stride, select_len=select_len, select_count=select_count, scale=scale
    )
    return remember(memo_number, lambda: RANKERS[ranked_by](q_BHTD, k_BGSD, selection, lse_BHT, starts))


def remember(memo_number: Tensor | None, select: Callable[[], Tensor]) -> Tensor:
    """Return a copy of the indices in the memo with this number. If it has none, store the result of `select` first.

    Without a number, return the result of `select`.
    """
    if memo_number is None:
        return select()
    memo = SelectionMemo.lookup(memo_number)
    if memo.indices is None:
        memo.indices = select()
    return memo.indices.clone()


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
    """Return the indices of the selected blocks for packed sequences, shape [1, G, T, n]."""
    # A sequence with at most n blocks needs no ranking: each query selects all blocks that start at or before it.
    sequence_T = sequence_numbers(starts, q_1HTD.shape[2])
    current_T = (torch.arange(len(sequence_T), device=starts.device) - starts[sequence_T]) // selection.select_len
    place_n = torch.arange(selection.select_count, device=starts.device)
    all_blocks_Tn = torch.where(place_n <= current_T[:, None], place_n, EMPTY).to(torch.int32)
    indices = all_blocks_Tn.expand(1, k_1GSD.shape[1], -1, -1).contiguous()
    bounds = starts.tolist()
    blocks = compressed_starts(starts, selection.block_len, selection.block_stride).tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if end - begin > selection.select_count * selection.select_len:
            keys = k_1GSD[:, :, blocks[number] : blocks[number + 1]]
            indices[:, :, begin:end] = _select_by_tiles(q_1HTD[:, :, begin:end], keys, selection, None, None)
    return indices


def _fill_tiles(q_NhTD: Tensor, k_NSD: Tensor, selection: Selection, indices_NTn: Tensor) -> None:
    """Write the indices of the selected blocks to `indices_NTn`, one tile of queries at a time."""
    rows, heads, queries, _ = q_NhTD.shape
    blocks = -(-queries // selection.select_len)
    per_query = rows * max(heads * k_NSD.shape[1], 2 * blocks)
    for start, stop in tiles(queries, per_query, LONGEST_TILE):
        best = best_blocks(q_NhTD[:, :, start:stop], k_NSD, start, selection)
        indices_NTn[:, start:stop, : best.shape[-1]] = best


# Functions that compute the selection from queries, compressed keys, parameters, log-sum-exp and starts. The module of
# the fused kernels adds its own.
RANKERS: dict[str, Callable[[Tensor, Tensor, Selection, Tensor | None, Tensor | None], Tensor]] = {
    "tiles": _select_by_tiles
}


def best_blocks(q_NhCD: Tensor, k_NSD: Tensor, start: int, selection: Selection) -> Tensor:
    """Return the indices of the blocks that a tile of queries selects, best first, shape [N, C, n or fewer].

    The tile begins with query `start`. `k_NSD` are the compressed keys, at least those visible to its last query.
    """
    with autocast_disabled(q_NhCD):
        importance_NbC = _importance(q_NhCD, k_NSD, start, selection)
    positions_1C = torch.arange(start, start + q_NhCD.shape[2], device=q_NhCD.device)[None]
    return _forced_and_best(importance_NbC.transpose(1, 2), positions_1C, selection)


def key_probabilities(q_NhCD: Tensor, k_NSD: Tensor, visible_XSC: Tensor, scale: float) -> Tensor:
    """Return the attention probabilities of each query over its visible keys, [N, S, h, C].

    All values are 0 for a query without visible keys.
    """
    scores_NShC = _scores(q_NhCD, k_NSD, scale)
    if not k_NSD.shape[1]:
        return scores_NShC
    return _softmax_over_keys_(scores_NShC.masked_fill_(~visible_XSC[:, :, None], -torch.inf))


def best_blocks_from_probabilities(
    probabilities_NSC: Tensor, positions_XC: Tensor, blocks: int, selection: Selection
) -> Tensor:
    """Return the indices of the selected blocks, given attention probabilities summed over the heads.

    `blocks` is the number of selection blocks up to the highest of the queries' positions.
    """
    keys, dtype, device = probabilities_NSC.shape[1], probabilities_NSC.dtype, probabilities_NSC.device
    # All layers need the same table, and it does not change until the next block is complete.
    overlap = cached_table(
        None,
        device,
        ("overlap weights", blocks, keys, selection, dtype),
        lambda: overlap_weights(blocks, keys, selection, dtype, device),
    )
    return _forced_and_best(_sum_overlapping(probabilities_NSC, *overlap).transpose(1, 2), positions_XC, selection)


def overlap_weights(
    blocks: int, compressed_blocks: int, selection: Selection, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the compressed blocks that overlap each selection block, and their weights, both [b, K].

    K = (l' + l) // d + 1 is a bound on their number. The weight is the number of shared tokens divided by d, for
    example 1 2 2 2 1 for l=32, d=16, l'=64 (paper, eq. 9). Other compressed blocks have weight 0.
    """
    length, stride, size = selection.block_len, selection.block_stride, selection.select_len
    starts = torch.arange(blocks, device=device)[:, None] * size
    # The first compressed block with i*d + l > start. At most this many blocks from it on start before the selection
    # block ends.
    first = torch.div(starts - length, stride, rounding_mode="floor") + 1
    candidates = first + torch.arange((size + length) // stride + 1, device=device)
    begin, end = candidates * stride, candidates * stride + length
    shared_tokens = (torch.minimum(end, starts + size) - torch.maximum(begin, starts)).clamp_min(0)
    exists = (candidates >= 0) & (candidates < compressed_blocks)
    return candidates.clamp(0, max(0, compressed_blocks - 1)), (shared_tokens * exists).to(dtype) / stride


def _importance(q_NhCD: Tensor, k_NSD: Tensor, start: int, selection: Selection) -> Tensor:
    """Return the importance of each selection block for each query, shape [N, b, C] (NSA paper, eq. 8 to 10)."""
    # Queries are the last dimension, so the values of a compressed block are contiguous, and selecting overlapping
    # blocks copies whole rows.
    rows, _, queries, _ = q_NhCD.shape
    end, dtype = start + queries, compute_dtype(q_NhCD)
    pattern = CompletedBlocks(selection.block_len, selection.block_stride)
    keys = min(pattern.count(end), k_NSD.shape[1])
    blocks = -(-end // selection.select_len)
    if keys == 0:
        return q_NhCD.new_zeros(rows, blocks, queries, dtype=dtype)
    scores_NShC = _scores(q_NhCD, k_NSD[:, :keys], selection.scale)
    # Blocks visible to the first query of the tile are visible to all its queries.
    visible_to_all = pattern.count(start + 1)
    hidden_SC = ~pattern.visible(start, end, q_NhCD.device)[:, visible_to_all:keys].t()
    scores_NShC[:, visible_to_all:].masked_fill_(hidden_SC[:, None], -torch.inf)
    probabilities_NSC = _softmax_over_keys_(scores_NShC).sum(2)
    return _sum_overlapping(probabilities_NSC, *overlap_weights(blocks, keys, selection, dtype, q_NhCD.device))


def _scores(q_NhCD: Tensor, k_NSD: Tensor, scale: float) -> Tensor:
    dtype = compute_dtype(q_NhCD)
    q_NDr = q_NhCD.to(dtype).mul(scale).flatten(1, 2).transpose(1, 2)
    return (k_NSD.to(dtype) @ q_NDr).unflatten(2, q_NhCD.shape[1:3])


def _sum_overlapping(probabilities_NSC: Tensor, overlapping_bK: Tensor, weight_bK: Tensor) -> Tensor:
    """Return each selection block's importance [N, b, C]: the weighted sum of its overlapping blocks' probabilities."""
    rows, keys, queries = probabilities_NSC.shape
    importance_NbC = probabilities_NSC.new_zeros(rows, len(overlapping_bK), queries)
    if keys == 0:
        return importance_NbC
    for overlapping, weight in zip(overlapping_bK.t(), weight_bK.t(), strict=True):
        importance_NbC.addcmul_(probabilities_NSC.index_select(1, overlapping), weight[:, None])
    return importance_NbC


def _softmax_over_keys_(scores_NShC: Tensor) -> Tensor:
    """Compute the softmax over the keys in place. For queries without visible keys, the result is 0."""
    highest = scores_NShC.amax(1, keepdim=True)
    weights = scores_NShC.sub_(highest.masked_fill_(highest == -torch.inf, 0.0)).exp_()
    total = weights.sum(1, keepdim=True)
    return weights.mul_(total.masked_fill_(total == 0, 1.0).reciprocal_())


def _forced_and_best(importance_NCb: Tensor, positions_XC: Tensor, selection: Selection) -> Tensor:
    """Return the indices of the always selected blocks and of the most important other blocks, best first."""
    blocks = importance_NCb.shape[-1]
    current = positions_XC[:, :, None] // selection.select_len
    block = torch.arange(blocks, device=importance_NCb.device)
    is_forced = (block == 0) | (block == current) | (block == current - 1)
    rank_value = importance_NCb.masked_fill(is_forced, torch.inf).masked_fill(block > current, -torch.inf)
    top = _top_by_packed_keys if rank_value.dtype is torch.float32 else _top_by_sort
    score, order = top(rank_value, min(blocks, selection.select_count))
    return torch.where(score < 0, EMPTY, order).to(torch.int32)


def _top_by_sort(ranked_NCb: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the scores and indices of the `count` best blocks, found with a stable sort."""
    # Of equal scores the lower index comes first, which topk does not guarantee.
    score, order = torch.sort(ranked_NCb, dim=-1, descending=True, stable=True)
    return score[..., :count], order[..., :count]


def _top_by_packed_keys(ranked_NCb: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the scores and indices of the `count` best blocks, found with topk on packed integers."""
    # Each score and its index are packed into one 64-bit integer, so no two values are equal. The bits of non-negative
    # floats are ordered like their values; -inf, the only negative value, stays negative.
    blocks = ranked_NCb.shape[-1]
    from_behind = torch.arange(blocks - 1, -1, -1, device=ranked_NCb.device)
    rank_key = ranked_NCb.contiguous().view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(from_behind)
    best_keys = rank_key.topk(count, dim=-1).values
    return best_keys, blocks - 1 - best_keys.bitwise_and(0xFFFFFFFF)
