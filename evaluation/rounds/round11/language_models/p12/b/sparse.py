"""Mixture of experts with bias-based load balancing (no auxiliary loss)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class BalancedRouter(nn.Module):
    """Sigmoid gates; the bias enters only the choice of experts, not their weight."""

    def __init__(self, dim, experts, top_k, rate=0.02):
        super().__init__()
        self.proj = nn.Linear(dim, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("seen", torch.zeros(experts), persistent=False)
        self.top_k, self.rate = top_k, rate
        self.reduce = dist.is_initialized() and dist.get_world_size() > 1

    def forward(self, x):
        gates = torch.sigmoid(self.proj(x))
        chosen = (gates.detach() + self.bias).topk(self.top_k, dim=-1).indices
        if self.training:
            self.seen += torch.bincount(chosen.flatten(), minlength=len(self.bias))
        weight = gates.gather(-1, chosen)
        return chosen, weight / weight.sum(-1, keepdim=True)

    @torch.no_grad()
    def rebalance(self):
        """Raise the bias of experts below the mean load, lower that of the others."""
        load = self.seen.clone()
        if self.reduce:
            dist.all_reduce(load)
        self.bias += self.rate * torch.sign(load.mean() - load)
        self.seen.zero_()
        return (load.max() / load.mean()).item()


class SparseMLP(nn.Module):
    def __init__(self, dim, experts=6, top_k=2):
        super().__init__()
        self.router = BalancedRouter(dim, experts, top_k)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        chosen, weight = self.router(flat)
        spread = torch.zeros(len(flat), len(self.up)).scatter(1, chosen, weight)
        hidden = F.silu(torch.einsum("nd,edh->neh", flat, self.up))
        out = torch.einsum("neh,ehd->ned", hidden, self.down)
        return (out * spread.unsqueeze(-1)).sum(1).view_as(x)
