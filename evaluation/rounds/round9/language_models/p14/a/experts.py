import torch
import torch.distributed as dist
import torch.nn as nn


class Swap(torch.autograd.Function):
    """Fixed-capacity exchange of token slots inside an expert-parallel row."""

    @staticmethod
    def forward(ctx, slots, group):
        ctx.group = group
        out = torch.empty_like(slots)
        dist.all_to_all_single(out, slots.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class Experts(nn.Module):
    def __init__(self, dim, layout, capacity):
        super().__init__()
        self.layout, self.capacity = layout, capacity
        self.router = nn.Linear(dim, layout.ep_size, bias=False)
        g = torch.Generator().manual_seed(70 + layout.ep_rank)
        self.w_in = nn.Parameter(torch.randn(dim, 2 * dim, generator=g) / dim ** 0.5)
        self.w_out = nn.Parameter(torch.randn(2 * dim, dim, generator=g) / (2 * dim) ** 0.5)

    def expert_parameters(self):
        return [self.w_in, self.w_out]

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gate, choice = self.router(flat).softmax(-1).max(-1)
        slots = flat.new_zeros(self.layout.ep_size, self.capacity, flat.shape[1])
        place = []
        for e in range(self.layout.ep_size):
            index = (choice == e).nonzero().squeeze(1)[: self.capacity]
            slots = slots.index_put((torch.tensor(e), torch.arange(len(index))), flat[index])
            place.append(index)
        inbox = Swap.apply(slots.flatten(0, 1), self.layout.ep_group)
        outbox = torch.relu(inbox @ self.w_in) @ self.w_out
        back = Swap.apply(outbox, self.layout.ep_group).view_as(slots)
        y = torch.zeros_like(flat)
        for e, index in enumerate(place):
            y = y.index_add(0, index, back[e, : len(index)] * gate[index, None])
        return x + y.view_as(x)
