"""Parameters that live in equal slices on all ranks; a forward gathers them, a backward reduces the gradient."""
import torch
import torch.distributed as dist
from torch import nn


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        ctx.n = shard.numel()
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.contiguous())
        numel = 1
        for s in shape:
            numel *= s
        return torch.cat(parts)[:numel].view(shape)

    @staticmethod
    def backward(ctx, grad):
        world, rank = dist.get_world_size(), dist.get_rank()
        flat = torch.zeros(ctx.n * world)
        flat[: grad.numel()] = grad.reshape(-1)
        dist.all_reduce(flat)
        return flat[rank * ctx.n:(rank + 1) * ctx.n] / world, None


class ShardedParameter(nn.Module):
    def __init__(self, full):
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.shape = tuple(full.shape)
        n = -(-full.numel() // world)
        flat = torch.zeros(n * world)
        flat[: full.numel()] = full.detach().reshape(-1)
        self.shard = nn.Parameter(flat[rank * n:(rank + 1) * n].clone())

    def forward(self):
        return _Gather.apply(self.shard, self.shape)
