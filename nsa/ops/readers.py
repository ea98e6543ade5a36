"""The selection turned round: for each block of keys the queries that chose it.

Dimensions: N batch x groups, T queries, n places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Who reads which block. A query that named a block twice, or one that begins after it, is not counted for that."""

    all_seeing: int  # the first so many queries see every block up to their own: plain causal attention
    select_len: int
    keys: int
    rows: int
    # Of all blocks of all rows, ascending within a block; counted from the first query that is not all-seeing.
    queries: Tensor
    ends: list[int]  # where each block's queries end, row by row

    def rows_left(self, rows: slice) -> range:
        """Of these rows the ones in which somebody is not all-seeing."""
        return range(self.rows if len(self.queries) else 0)[rows]

    def chunks(self, row: int, longest: int) -> Iterator[Chunk]:
        """The row's blocks with their queries, at most `longest` at a time."""
        blocks = -(-self.keys // self.select_len)
        for block in range(blocks):
            place = row * blocks + block
            begin, end = self.ends[place - 1] if place else 0, self.ends[place]
            first = block * self.select_len
            last = min(first + self.select_len, self.keys)
            for start in range(begin, end, longest):
                queries = self.queries[start : min(start + longest, end)]
                yield Chunk(queries=queries, before=self.all_seeing, first=first, last=last)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some queries and the one block of keys, [first, last), that all of them read."""

    queries: Tensor  # counted from the query `before`
    before: int
    first: int
    last: int

    def hide_later_(self, scores_mhL: Tensor) -> None:
        """Minus infinity, in place, for keys after their query: the block's own queries alone have such keys."""
        own = self.queries[: self.last - self.first, None] + self.before
        later = torch.arange(self.first, self.last) > own
        scores_mhL[: len(own)].masked_fill_(later[:, None], -torch.inf)


def readers(indices_NTn: Tensor, select_len: int, keys: int, *, set_apart: bool) -> Readers:
    """Turn the selection round. `set_apart`: leave the first queries out as long as all of them see everything."""
    rows, queries, _ = indices_NTn.shape
    blocks = -(-keys // select_len)
    pair = _pairs(indices_NTn, select_len, blocks)
    all_seeing = _all_seeing(pair, rows, queries, select_len, blocks) if set_apart else 0
    query = pair % max(1, queries)
    left = query >= all_seeing
    ends = torch.bincount(pair[left] // max(1, queries), minlength=rows * blocks).cumsum(0)
    return Readers(
        all_seeing=all_seeing,
        select_len=select_len,
        keys=keys,
        rows=rows,
        queries=query[left] - all_seeing,
        ends=ends.tolist(),
    )


def _pairs(indices_NTn: Tensor, select_len: int, blocks: int) -> Tensor:
    """(row, block, query) as one number each, ascending, every one once."""
    rows, queries, _ = indices_NTn.shape
    block = indices_NTn.long()
    query = torch.arange(queries)[:, None]
    row = torch.arange(rows)[:, None, None]
    seen = (block >= 0) & (block * select_len <= query)
    pair = torch.where(seen, (row * blocks + block) * queries + query, -1).flatten().sort().values
    first_of_its_kind = torch.ones_like(pair, dtype=torch.bool)
    torch.ne(pair[1:], pair[:-1], out=first_of_its_kind[1:])
    return pair[first_of_its_kind & (pair >= 0)]


def _all_seeing(pair: Tensor, rows: int, queries: int, select_len: int, blocks: int) -> int:
    of_row = torch.div(pair, queries * blocks, rounding_mode="floor") * queries + pair % queries
    seen_NT = torch.bincount(of_row, minlength=rows * queries).view(rows, queries)
    sees_all = (seen_NT == torch.arange(queries) // select_len + 1).all(0)
    return int(sees_all.long().cumprod(0).sum())
