import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .collectives import copy_to_ranks, reduce_from_ranks


def _shard(full, dim):
    return nn.Parameter(full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class ColumnLinear(nn.Module):
    """Output features split over the ranks."""

    def __init__(self, i, o):
        super().__init__()
        self.weight = _shard(torch.randn(o, i) / math.sqrt(i), 0)
        self.bias = _shard(torch.zeros(o), 0)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """Input features split over the ranks; the bias is whole on each of them."""

    def __init__(self, i, o):
        super().__init__()
        self.weight = _shard(torch.randn(o, i) / math.sqrt(i), 1)
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return reduce_from_ranks(F.linear(x, self.weight)) + self.bias


class ParallelMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = ColumnLinear(dim, hidden)
        self.down = RowLinear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(copy_to_ranks(x))))


class ParallelAttention(nn.Module):
    """Heads split over the ranks."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads // dist.get_world_size()
        self.q, self.k, self.v = (ColumnLinear(dim, dim) for _ in range(3))
        self.out = RowLinear(dim, dim)

    def forward(self, x):
        x = copy_to_ranks(x)
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
