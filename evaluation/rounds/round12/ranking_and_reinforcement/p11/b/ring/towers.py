import torch
import torch.nn as nn
import torch.nn.functional as F


class Towers(nn.Module):
    def __init__(self, queries, items, dim):
        super().__init__()
        self.q = nn.Embedding(queries, dim)
        self.i = nn.Embedding(items, dim)
        self.q_out = nn.Linear(dim, dim)
        self.i_out = nn.Linear(dim, dim)

    def forward(self, q, i):
        return F.normalize(self.q_out(self.q(q)), dim=-1), F.normalize(self.i_out(self.i(i)), dim=-1)


class Momentum:
    """SGD with momentum on averaged gradients."""

    def __init__(self, params, lr, beta=0.8):
        self.params, self.lr, self.beta = list(params), lr, beta
        self.velocity = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, v in zip(self.params, self.velocity):
            v.mul_(self.beta).add_(p.grad)
            p.sub_(self.lr * v)
            p.grad = None
