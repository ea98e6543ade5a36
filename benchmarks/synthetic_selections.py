"""Which blocks queries choose, made up: at random, or so that neighbouring queries share most of theirs.

Random choices are the worst case: the union of a tile of queries is as large as it can be. How much a trained model's
neighbours share, benchmarks/nsa_choices.py measures.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORCED = 3  # block 0, the query's own, and the one before it


def choices(
    tokens: int, *, groups: int = 1, count: int = 16, select_len: int = 64, shared: float = 0.0, seed: int = 0
) -> Tensor:
    """Indices [1, G, T, n] (int32, -1 for none) as the importance ranks them: forced ones among n, no duplicates.

    `shared` is the part of its n blocks that a query has in common with the one before it, on average, where there is
    choice; less than what is forced cannot be, so that 0 is a fresh draw for every query.
    """
    generator = torch.Generator().manual_seed(seed)
    free = count - FORCED
    query = torch.arange(tokens)
    own = query // select_len
    # Each free place draws from blocks of its own, those of one residue: no block is drawn twice.
    place = torch.arange(free)
    available = (own[:, None] - 3 - place).div(free, rounding_mode="floor") + 1  # blocks 1 + place + free * i
    # A place that draws anew draws the same block once in so many times.
    renewed = (1 - shared) * count / free / (1 - 1 / available.clamp_min(2))
    is_new = torch.rand(groups, tokens, free, generator=generator) < renewed
    # With one block there is nothing to draw, and what was drawn from none is no number.
    is_new |= available <= 1
    drawn = torch.rand(groups, tokens, free, generator=generator) * available
    since = torch.where(is_new, query[:, None], 0).cummax(1).values
    block = drawn.gather(1, since).to(torch.int32) * free + place + 1
    block = torch.where(available > 0, block, -1)
    forced = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1), own - 1], 1)
    forced[:, 2] = torch.where(own > 1, own - 1, -1)
    indices = torch.cat([forced.expand(groups, -1, -1).to(torch.int32), block.to(torch.int32)], 2)
    return indices[None]


def shared_by_neighbours(indices: Tensor) -> float:
    """The part of its blocks that a query has in common with the one before it, on average over all."""
    now, before = indices[0, :, 1:], indices[0, :, :-1]
    same = ((now[..., None] == before[..., None, :]) & (now >= 0)[..., None]).any(-1).sum(-1)
    return float((same / (now >= 0).sum(-1).clamp_min(1)).mean())


def union_size(indices: Tensor, queries: int) -> float:
    """Blocks that any query of a tile of neighbours chose, on average over tiles and groups."""
    tokens, blocks = indices.shape[2], int(indices.max()) + 1
    named = torch.zeros(indices.shape[1], tokens + -tokens % queries, blocks + 1, dtype=torch.bool)
    named[:, :tokens].scatter_(2, torch.where(indices[0] < 0, blocks, indices[0]).long(), True)
    return float(named[..., :blocks].unflatten(1, (-1, queries)).any(2).sum(-1).float().mean())
