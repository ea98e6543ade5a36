"""Expert-parallel mixture-of-experts layer (top-1 routing)."""
import torch
import torch.distributed as dist
import torch.nn as nn


class Exchange(torch.autograd.Function):
    """Exchange of equally sized slots between the ranks of the expert group."""

    @staticmethod
    def forward(ctx, slots):
        out = torch.empty_like(slots)
        dist.all_to_all_single(out, slots.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        back = torch.empty_like(grad)
        dist.all_to_all_single(back, grad.contiguous())
        return back


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class ExpertParallelMoE(nn.Module):
    def __init__(self, dim, hidden, experts_per_rank):
        super().__init__()
        self.world = dist.get_world_size()
        self.local = experts_per_rank
        self.total = self.world * experts_per_rank
        self.router = nn.Linear(dim, self.total, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(self.local))
        for p in self.experts.parameters():
            p.expert = True
        self.load = torch.zeros(self.total)

    def dispatch_plan(self, choice):
        """Tokens per expert on every rank, as (sender, receiver, expert)."""
        mine = torch.bincount(choice, minlength=self.total)
        table = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(table, mine)
        return torch.stack(table).view(self.world, self.world, self.local)

    def forward(self, x):
        shape = x.shape
        flat = x.reshape(-1, shape[-1])
        weight, choice = self.router(flat).softmax(-1).max(-1)
        order = torch.argsort(choice, stable=True)
        table = self.dispatch_plan(choice)
        capacity = len(order)  # worst case: no token is dropped
        me = dist.get_rank()

        to_rank = choice[order] // self.local
        first = torch.cat([torch.zeros(1, dtype=torch.long), table[me].sum(1).cumsum(0)[:-1]])
        slot = to_rank * capacity + torch.arange(len(order)) - first[to_rank]
        outbox = flat.new_zeros(self.world * capacity, shape[-1]).index_copy(0, slot, flat[order])
        inbox = Exchange.apply(outbox)

        arrived = table[:, me]
        if arrived.sum() == 0:
            return torch.zeros_like(x)
        done = torch.zeros_like(inbox)
        for e, expert in enumerate(self.experts):
            rows = []
            for src in range(self.world):
                lo = src * capacity + int(arrived[src, :e].sum())
                rows.append(torch.arange(lo, lo + int(arrived[src, e])))
            rows = torch.cat(rows)
            done = done.index_add(0, rows, expert(inbox[rows]))
        back = Exchange.apply(done)

        handled = arrived.sum(0)
        everyone = [torch.empty_like(handled) for _ in range(self.world)]
        dist.all_gather(everyone, handled)
        self.load = 0.9 * self.load + 0.1 * torch.cat(everyone)

        out = torch.zeros_like(flat).index_copy(0, order, back[slot])
        return (out * weight.unsqueeze(1)).reshape(shape)
