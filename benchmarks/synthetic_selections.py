"""Create synthetic block selections with a given overlap between neighbouring queries.

Random selections are the worst case, because neighbouring queries then select as many different blocks as possible.
benchmarks/nsa_choices.py measures the overlap in a trained model.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORCED = 3  # block 0, the query's own, and the one before it


def make_selections(
    tokens: int, *, groups: int = 1, count: int = 16, select_len: int = 64, shared: float = 0.0, seed: int = 0
) -> Tensor:
    """Return the blocks [1, G, T, n] selected by each query. Unused positions are -1.

    `shared` is the average fraction of its n blocks that a query shares with the previous query. With 0, every query
    draws its blocks independently, except for the blocks that are always selected.
    """
    generator = torch.Generator().manual_seed(seed)
    free = count - FORCED
    query = torch.arange(tokens)
    own = query // select_len
    # Each free slot draws from its own residue class of blocks, so no block is drawn twice.
    place = torch.arange(free)
    available = (own[:, None] - 3 - place).div(
        free, rounding_mode="floor"
    ) + 1  # number of blocks 1 + place + free * i of each slot
    # A slot that draws again gets the same block with probability 1 / available.
    redraw_probability = (1 - shared) * count / free / (1 - 1 / available.clamp_min(2))
    is_new = torch.rand(groups, tokens, free, generator=generator) < redraw_probability
    # With at most one block there is nothing to draw, and the probability above is NaN or inf.
    is_new |= available <= 1
    draws = torch.rand(groups, tokens, free, generator=generator) * available
    since = torch.where(is_new, query[:, None], 0).cummax(1).values
    block = draws.gather(1, since).to(torch.int32) * free + place + 1
    block = torch.where(available > 0, block, -1)
    forced_blocks = torch.stack([torch.zeros_like(own), torch.where(own > 0, own, -1), own - 1], 1)
    forced_blocks[:, 2] = torch.where(own > 1, own - 1, -1)
    indices = torch.cat([forced_blocks.expand(groups, -1, -1).to(torch.int32), block.to(torch.int32)], 2)
    return indices[None]


def neighbour_overlap(indices: Tensor) -> float:
    """Return the average fraction of blocks that a query shares with the previous query."""
    now, before = indices[0, :, 1:], indices[0, :, :-1]
    same = ((now[..., None] == before[..., None, :]) & (now >= 0)[..., None]).any(-1).sum(-1)
    return float((same / (now >= 0).sum(-1).clamp_min(1)).mean())


def mean_union_size(indices: Tensor, queries: int) -> float:
    """Return the average number of distinct blocks selected by `queries` neighbouring queries."""
    tokens, blocks = indices.shape[2], int(indices.max()) + 1
    is_selected = torch.zeros(indices.shape[1], tokens + -tokens % queries, blocks + 1, dtype=torch.bool)
    is_selected[:, :tokens].scatter_(2, torch.where(indices[0] < 0, blocks, indices[0]).long(), True)
    return float(is_selected[..., :blocks].unflatten(1, (-1, queries)).any(2).sum(-1).float().mean())
