import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv, group):
        ctx.meta = send, recv, group
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, recv, group = ctx.meta
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, recv, group=group)
        return out, None, None, None


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoELayer(nn.Module):
    """One expert on each rank of the expert-parallel group, top-1 routing."""

    def __init__(self, dim, hidden, groups):
        super().__init__()
        self.groups = groups
        self.n = len(groups.ep_ranks)
        self.router = nn.Linear(dim, self.n)
        self.expert = Expert(dim, hidden)

    def forward(self, x):
        prob = self.router(x).softmax(-1)
        gate, choice = prob.max(-1)
        order = choice.argsort(stable=True)
        send = torch.bincount(choice, minlength=self.n)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send, group=self.groups.ep)
        send, recv = send.tolist(), recv.tolist()
        arrived = _Exchange.apply(x[order], send, recv, self.groups.ep)
        back = _Exchange.apply(self.expert(arrived), recv, send, self.groups.ep)
        out = torch.zeros_like(x).index_copy(0, order, back)
        load = F.one_hot(choice, self.n).float().mean(0)
        aux = self.n * (load * prob.mean(0)).sum()
        return x + gate[:, None] * out, aux
