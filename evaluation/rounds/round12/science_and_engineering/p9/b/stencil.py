import torch
import torch.distributed as dist
from torch import nn


class Stencil(nn.Module):
    """Learned increment from a five point neighbourhood."""

    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, width, 5), nn.Tanh(), nn.Conv1d(width, 1, 1))

    def forward(self, padded):
        return padded[..., 2:-2] + self.net(padded)


def with_ghosts(u, reach=2):
    """Append the edge values of the two neighbouring pieces (as constants)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    edges = torch.stack([u[..., :reach], u[..., -reach:]]).detach().contiguous()
    everyone = [torch.empty_like(edges) for _ in range(world)]
    dist.all_gather(everyone, edges)
    left = everyone[(rank - 1) % world][1]
    right = everyone[(rank + 1) % world][0]
    return torch.cat([left, u, right], dim=-1)


def rollout(model, u, steps):
    states = []
    for _ in range(steps):
        u = model(with_ghosts(u))
        states.append(u)
    return torch.stack(states)
