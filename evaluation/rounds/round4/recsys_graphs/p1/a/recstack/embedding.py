"""Row-wise sharded embedding bags.

Row ``i`` of a table lives on rank ``i % world``.  A lookup is three exchanges:
how many ids go where, the ids, the rows back.  The backward pass sends the row
gradients the other way, so table shards are never all-reduced.
"""
from typing import Dict

import torch
import torch.distributed as dist
from torch import nn

from .data import FEATURES, Jagged


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, group):
        world = dist.get_world_size(group)
        owner = ids % world
        order = torch.argsort(owner, stable=True)
        send = torch.bincount(owner, minlength=world)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send, group=group)
        send, recv = send.tolist(), recv.tolist()

        wanted = ids.new_empty(sum(recv))
        dist.all_to_all_single(wanted, ids[order] // world, recv, send, group=group)
        rows = weight.new_empty(sum(send), weight.size(1))
        dist.all_to_all_single(rows, weight[wanted], send, recv, group=group)

        ctx.save_for_backward(order, wanted)
        ctx.splits, ctx.group, ctx.shape, ctx.world = (send, recv), group, weight.shape, world
        out = torch.empty_like(rows)
        out[order] = rows
        return out

    @staticmethod
    def backward(ctx, grad):
        order, wanted = ctx.saved_tensors
        send, recv = ctx.splits
        back = grad.new_empty(sum(recv), grad.size(1))
        dist.all_to_all_single(back, grad[order].contiguous(), recv, send, group=ctx.group)
        grad_weight = grad.new_zeros(ctx.shape)
        grad_weight.index_add_(0, wanted, back / ctx.world)
        return grad_weight, None, None


class ShardedBag(nn.Module):
    def __init__(self, rows: int, dim: int, group):
        super().__init__()
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        local = (rows - rank + world - 1) // world
        self.weight = nn.Parameter(torch.randn(local, dim) * 0.05)
        self.group = group
        self.dim = dim

    def forward(self, jagged: Jagged) -> torch.Tensor:
        rows = _RowExchange.apply(self.weight, jagged.values, self.group)
        segment = torch.repeat_interleave(torch.arange(jagged.lengths.numel()), jagged.lengths)
        pooled = rows.new_zeros(jagged.lengths.numel(), self.dim).index_add(0, segment, rows)
        return pooled / jagged.lengths.clamp(min=1).unsqueeze(1)


class EmbeddingCollection(nn.Module):
    """All tables of the model; one communicator a table, so that traffic of
    different tables can be told apart (and one day overlapped)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict()
        self.columns: Dict[str, slice] = {}
        start = 0
        for name, (rows, dim) in FEATURES.items():
            self.tables[name] = ShardedBag(rows, dim, dist.new_group())
            self.columns[name] = slice(start, start + dim)
            start += dim
        self.out_dim = start

    def forward(self, sparse: Dict[str, Jagged], batch_size: int) -> torch.Tensor:
        out = torch.zeros(batch_size, self.out_dim)
        for name, jagged in sparse.items():
            out[:, self.columns[name]] = self.tables[name](jagged)
        return out
