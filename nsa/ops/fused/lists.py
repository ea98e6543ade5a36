"""Which queries chose which blocks, in the two orders that the kernels of the selected branch walk.

Forward, by query: for each tile of neighbouring queries the blocks that any of them chose. Backward, by block: the
queries that chose it. Both are built by sorting on the device; nothing here asks it for a value, so sizes are bounds.

A selection block goes by its number in the row of tokens, over all sequences. Dimensions: N batch x groups, T tokens,
n places, b blocks (a bound), U places of a tile (queries x n), L places of all queries (T x n), s segments (a bound).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..packed import alone, selection_starts, sequence_of

EMPTY = -1
MOST_QUERIES = 32  # of a tile: one bit each, and the sum of all bits stays an int64


@dataclass(frozen=True, kw_only=True)
class QueryBlocks:
    """The blocks of each query, and where blocks begin."""

    block_NTn: Tensor  # int32, EMPTY where the caller's number stands for nothing that the query could see
    first_b: Tensor  # [b + 1] int32: the first token of each block; the block ends where the next one begins

    @property
    def blocks(self) -> int:
        return self.first_b.shape[0] - 1


@dataclass(frozen=True, kw_only=True)
class Unions:
    """For each tile of queries the first tokens of the blocks that any of its queries chose, ascending."""

    first_NxU: Tensor  # int32, x tiles; places from `count` on mean nothing
    members_NxU: Tensor  # int64: bit i is set if query i of the tile chose the block
    count_Nx: Tensor  # int32


@dataclass(frozen=True, kw_only=True)
class Segments:
    """For each block the queries that chose it, ascending, cut into segments of at most `length` places.

    Each block has a segment, even if no query chose it.
    """

    query_NL: Tensor  # int32, by block; EMPTY where a query had named the block before
    begin_Nb: Tensor  # [N, b + 1] int32: the first place of each block in query_NL
    segment_Nb: Tensor  # [N, b + 1] int32: the number of the first segment of each block
    partial_Nb: Tensor  # [N, b + 1] int32: the same, counting only blocks of several segments
    block_Ns: Tensor  # int32: the block of each segment, b for a segment that does not exist
    length: int
    partials: int  # a bound for the segments of a row that belong to blocks of several


def query_blocks(indices_BGTn: Tensor, *, select_len: int, starts: Tensor | None) -> QueryBlocks:
    """The caller's numbers, which count from the start of the query's own sequence, as blocks of the row."""
    tokens, places = indices_BGTn.shape[2:]
    begins = alone(tokens, indices_BGTn.device) if starts is None else starts
    block_begins = selection_starts(begins, select_len)
    own_T = sequence_of(begins, tokens)
    # A number beyond the query's own block names a later block, or none at all. It may be any 32 bits: it is compared
    # before anything is added to it.
    latest_T = torch.div(_count(tokens, begins) - begins[own_T], select_len, rounding_mode="floor")
    index_NTn = indices_BGTn.reshape(-1, tokens, places)
    seen = (index_NTn >= 0) & (index_NTn <= latest_T[:, None])
    block_NTn = torch.where(seen, index_NTn, 0) + block_begins[own_T][:, None]
    return QueryBlocks(
        block_NTn=torch.where(seen, block_NTn, EMPTY).to(torch.int32),
        first_b=_first_tokens(begins, block_begins, select_len, tokens),
    )


def unions(of_query: QueryBlocks, queries: int) -> Unions:
    """Tiles of `queries` neighbouring queries each, at most MOST_QUERIES."""
    rows, tokens, places = of_query.block_NTn.shape
    width = queries * places
    block_NxU = functional.pad(of_query.block_NTn, (0, 0, 0, -tokens % queries), value=EMPTY).reshape(rows, -1, width)
    query_U = torch.div(_count(width, block_NxU), places, rounding_mode="floor")
    key_NxU = (torch.where(block_NxU < 0, of_query.blocks, block_NxU) * queries + query_U).sort(-1).values
    block_NxU = torch.div(key_NxU, queries, rounding_mode="floor")
    real = block_NxU < of_query.blocks
    # Equal blocks are a run; they are numbered from 1, and run i ends where run i + 1 starts.
    run_NxU = (_differs(block_NxU) & real).cumsum(-1, dtype=torch.int32)
    bit_NxU = torch.where(_differs(key_NxU) & real, torch.ones_like(key_NxU, dtype=torch.int64) << key_NxU % queries, 0)
    start = torch.searchsorted(run_NxU, _rows(_count(width + 1, run_NxU) + 1, run_NxU))
    return Unions(
        first_NxU=of_query.first_b[block_NxU.gather(-1, start[..., :-1].clamp_max(width - 1))],
        members_NxU=functional.pad(bit_NxU.cumsum(-1), (1, 0)).gather(-1, start).diff(dim=-1),
        count_Nx=run_NxU[..., -1].contiguous(),
    )


def segments(of_query: QueryBlocks, length: int) -> Segments:
    """The queries of each block. A block's share of all places is small on average and large for block 0."""
    tokens, places = of_query.block_NTn.shape[1:]
    key_NL, blocks = _sorted_by_block(of_query), of_query.blocks
    repeated = ~_differs(key_NL)
    begin_Nb = torch.searchsorted(key_NL, _rows(_count(blocks + 1, key_NL) * tokens, key_NL), out_int32=True)
    cuts_Nb = torch.div(begin_Nb.diff(dim=-1) + length - 1, length, rounding_mode="floor").clamp_min(1)
    segment_Nb = _before(cuts_Nb)
    # A block of c places has fewer than c / length + 1 segments, and fewer than 2 c / length if it has several.
    bound = blocks + tokens * places // length
    return Segments(
        query_NL=torch.where(repeated, EMPTY, key_NL % tokens).to(torch.int32),
        begin_Nb=begin_Nb,
        segment_Nb=segment_Nb,
        partial_Nb=_before(torch.where(cuts_Nb > 1, cuts_Nb, 0)),
        block_Ns=torch.searchsorted(
            segment_Nb[:, 1:].contiguous(), _rows(_count(bound, key_NL), segment_Nb), right=True, out_int32=True
        ),
        length=length,
        partials=min(bound, 2 * tokens * places // length),
    )


def _sorted_by_block(of_query: QueryBlocks) -> Tensor:
    """block * T + query for all places, ascending; the empty ones last. Half as wide a sort where 32 bits hold it."""
    rows, tokens, _ = of_query.block_NTn.shape
    kind = torch.int32 if (of_query.blocks + 1) * tokens < 1 << 31 else torch.int64
    block_NTn = torch.where(of_query.block_NTn < 0, of_query.blocks, of_query.block_NTn).to(kind)
    query_T = _count(tokens, block_NTn)
    return (block_NTn * tokens + query_T[:, None]).reshape(rows, -1).sort(-1).values


def _first_tokens(begins: Tensor, block_begins: Tensor, select_len: int, tokens: int) -> Tensor:
    """[b + 1]: blocks beyond the last begin, and end, at the end of the row."""
    sequences = begins.shape[0] - 1
    bound = (tokens + sequences * (select_len - 1)) // select_len
    own_b = sequence_of(block_begins, bound + 1)
    first_b = begins[own_b] + (_count(bound + 1, begins) - block_begins[own_b]) * select_len
    return first_b.clamp_max(tokens)


def _count(number: int, like: Tensor) -> Tensor:
    return torch.arange(number, device=like.device, dtype=like.dtype)


def _differs(sorted_NL: Tensor) -> Tensor:
    """Whether each element differs from the one before it; the first does."""
    return functional.pad(sorted_NL[..., 1:] != sorted_NL[..., :-1], (1, 0), value=True)


def _before(count_Nb: Tensor) -> Tensor:
    """The sum of all counts before each place, and at the end of all."""
    return functional.pad(count_Nb.cumsum(-1, dtype=torch.int32), (1, 0))


def _rows(values: Tensor, like: Tensor) -> Tensor:
    """The same values for each row, as searchsorted wants them."""
    return values.expand(*like.shape[:-1], -1).contiguous()
