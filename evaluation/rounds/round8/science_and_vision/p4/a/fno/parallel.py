"""Process layout: ranks [0 1 | 2 3] for tp = 2, data groups across the columns."""
import torch
import torch.distributed as dist


class Layout:
    def __init__(self, tp):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp = tp, world // tp
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        rows = [list(range(i * tp, (i + 1) * tp)) for i in range(self.dp)]
        cols = [list(range(i, world, tp)) for i in range(tp)]
        tp_groups = [dist.new_group(r) for r in rows]
        dp_groups = [dist.new_group(c) for c in cols]
        self.tp_group = tp_groups[self.dp_rank]
        self.dp_group = dp_groups[self.tp_rank]


class GatherChannels(torch.autograd.Function):
    """Concatenate channel shards; the gradient is this rank's slice."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        parts = [torch.empty_like(x) for _ in range(layout.tp)]
        dist.all_gather(parts, x.contiguous(), group=layout.tp_group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.layout.tp, 1)[ctx.layout.tp_rank].contiguous(), None


class CopyToShards(torch.autograd.Function):
    """Identity forward; gradients of the shards are summed."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.layout.tp_group)
        return grad, None
