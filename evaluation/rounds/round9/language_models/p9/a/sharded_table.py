import torch
import torch.distributed as dist
import torch.nn as nn

from shard_plan import ShardPlan


class _Return(torch.autograd.Function):
    """Ships looked-up rows back to the askers; gradients travel to the owners."""

    @staticmethod
    def forward(ctx, rows, counts_in, counts_out):
        ctx.counts = counts_in, counts_out
        out = rows.new_empty(sum(counts_out), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), counts_out, counts_in)
        return out

    @staticmethod
    def backward(ctx, grad):
        counts_in, counts_out = ctx.counts
        back = grad.new_empty(sum(counts_in), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), counts_in, counts_out)
        return back, None, None


class ShardedTable(nn.Module):
    def __init__(self, num_rows, dim):
        super().__init__()
        self.plan = ShardPlan(num_rows, dist.get_world_size())
        rank = dist.get_rank()
        g = torch.Generator().manual_seed(1000 + rank)
        self.weight = nn.Parameter(0.1 * torch.randn(self.plan.local_rows(rank), dim, generator=g))

    def forward(self, ids):
        owner = self.plan.owner(ids)
        order = owner.argsort(stable=True)
        want = torch.bincount(owner, minlength=self.plan.world)
        asked = torch.empty(self.plan.world, dtype=want.dtype)
        dist.all_to_all_single(asked, want)
        want, asked = want.tolist(), asked.tolist()

        requests = torch.empty(sum(asked), dtype=ids.dtype)
        dist.all_to_all_single(requests, ids[order].contiguous(), asked, want)
        rows = _Return.apply(self.weight[self.plan.local(requests)], asked, want)
        return torch.empty_like(rows).index_copy(0, order, rows)
