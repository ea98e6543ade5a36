import torch
import torch.distributed as dist
from torch import nn


class _Enter(torch.autograd.Function):
    """Identity forwards, sum of the gradients backwards."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """Sum of the partial products forwards, identity backwards."""

    @staticmethod
    def forward(ctx, x, group):
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, width, hidden, group):
        super().__init__()
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.group = group
        full_in, full_out = torch.randn(hidden, width), torch.randn(width, hidden)
        part = hidden // world
        rows = slice(rank * part, (rank + 1) * part)
        self.w_in = nn.Parameter(full_in[rows] / width ** 0.5)
        self.b_in = nn.Parameter(torch.zeros(part))
        self.w_out = nn.Parameter(full_out[:, rows] / hidden ** 0.5)

    def forward(self, x):
        h = torch.nn.functional.gelu(_Enter.apply(x, self.group) @ self.w_in.T + self.b_in)
        return x + _Leave.apply(h @ self.w_out.T, self.group)


class SpectralSurrogate(nn.Module):
    """Maps the lowest modes of the inflow to the lowest modes of the wake."""

    def __init__(self, modes, width, hidden, depth, group):
        super().__init__()
        self.lift = nn.Linear(2 * modes, width)
        self.blocks = nn.ModuleList(ParallelMLP(width, hidden, group) for _ in range(depth))
        self.drop = nn.Linear(width, 2 * modes)

    def forward(self, modes):
        h = self.lift(modes)
        for block in self.blocks:
            h = block(h)
        return self.drop(h)
