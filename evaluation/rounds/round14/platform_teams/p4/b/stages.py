import torch
import torch.distributed as dist
from torch import nn


def make_stage(index, count, in_dim, hidden, out_dim):
    first = nn.Linear(in_dim if index == 0 else hidden, hidden)
    if index == count - 1:
        return nn.Sequential(first, nn.Tanh(), nn.Linear(hidden, out_dim))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())


class Link:
    """Point-to-point traffic with the neighbouring stages."""

    def __init__(self, rank, world, micro_rows, hidden):
        self.prev = rank - 1 if rank > 0 else None
        self.next = rank + 1 if rank < world - 1 else None
        self.shape = (micro_rows, hidden)

    def take_activation(self):
        x = torch.empty(self.shape)
        dist.recv(x, src=self.prev, tag=1)
        return x.requires_grad_()

    def give_activation(self, y):
        dist.send(y.detach().contiguous(), dst=self.next, tag=1)

    def take_gradient(self):
        g = torch.empty(self.shape)
        dist.recv(g, src=self.next, tag=2)
        return g

    def give_gradient(self, g):
        dist.send(g.contiguous(), dst=self.prev, tag=2)
