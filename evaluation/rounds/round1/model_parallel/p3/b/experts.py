"""Top-1 mixture of experts without dropped tokens.

Every expert takes `capacity` tokens from each rank at a time, so that the
exchanges have a fixed size; what does not fit is sent in a further round.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import comm


class Expert(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class MoELayer(nn.Module):
    def __init__(self, d, experts_per_rank, capacity_factor=1.5):
        super().__init__()
        self.local = nn.ModuleList(Expert(d) for _ in range(experts_per_rank))
        self.num_experts = experts_per_rank * comm.ep_size()
        self.router = nn.Linear(d, self.num_experts, bias=False)
        self.capacity_factor = capacity_factor
        self.last_rounds = 0
        self.aux_loss = None

    def plan(self, choice, capacity):
        """Slot of every token: (round, expert, position in the expert's buffer)."""
        onehot = F.one_hot(choice, self.num_experts)
        position = (onehot.cumsum(0) - 1).gather(1, choice[:, None]).squeeze(1)
        return position // capacity, position % capacity

    def num_rounds(self, which_round):
        rounds = which_round.max() + 1
        return int(rounds)

    def run_experts(self, buf):
        # buf: (ranks * experts_per_rank, capacity, d), ordered by target rank
        got = comm.exchange(buf)
        got = got.view(comm.ep_size(), len(self.local), *buf.shape[1:])
        out = torch.stack([e(got[:, i]) for i, e in enumerate(self.local)], dim=1)
        return comm.exchange(out.reshape(buf.shape))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        load = F.one_hot(choice, self.num_experts).float().mean(0)
        self.aux_loss = self.num_experts * (load * probs.mean(0)).sum()

        capacity = max(4, int(self.capacity_factor * x.shape[0] / self.num_experts))
        which_round, slot = self.plan(choice, capacity)
        rounds = self.num_rounds(which_round)
        y = torch.zeros_like(x)
        for r in range(rounds):
            sel = (which_round == r).nonzero().squeeze(1)
            flat = choice[sel] * capacity + slot[sel]
            buf = x.new_zeros(self.num_experts * capacity, x.shape[1]).index_add(0, flat, x[sel])
            back = self.run_experts(buf.view(self.num_experts, capacity, -1)).flatten(0, 1)
            y = y.index_add(0, sel, back[flat] * gate[sel, None])
        self.last_rounds = rounds
        return y.view(shape)
