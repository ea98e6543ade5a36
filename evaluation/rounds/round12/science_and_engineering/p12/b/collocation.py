import torch
import torch.distributed as dist

from physics import residual


class Collocation:
    """Points of the time slabs; each rank watches one slab and reports where the residual is large."""

    def __init__(self, rank, world, base, seed):
        self.rank, self.world = rank, world
        self.gen = torch.Generator().manual_seed(seed + rank)
        self.lo, self.hi = rank / world, (rank + 1) / world
        self.points = self.sample(base)
        self.added = 0

    def sample(self, n):
        x = torch.rand(n, 1, generator=self.gen) * 2 - 1
        t = self.lo + (self.hi - self.lo) * torch.rand(n, 1, generator=self.gen)
        return torch.cat([x, t], dim=1)

    def refine(self, net, candidates=200, limit=12, factor=1.5):
        """Exchange the worst candidates of all slabs and add an equal share of them to every rank."""
        trial = self.sample(candidates)
        size = residual(net, trial).detach().abs().squeeze(1)
        mean = size.mean().reshape(1)
        dist.all_reduce(mean)
        bar = factor * float(mean) / self.world
        worst = [trial[i] for i in size.argsort(descending=True)[:limit].tolist() if size[i] > bar]

        block = torch.zeros(limit, 3)
        block[:len(worst), :2] = torch.stack(worst)
        block[:len(worst), 2] = 1.0
        blocks = [torch.empty_like(block) for _ in range(self.world)]
        dist.all_gather(blocks, block)
        everything = torch.cat(blocks)
        fresh = everything[everything[:, 2] > 0.5, :2]
        self.points = torch.cat([self.points, fresh[self.rank::self.world]])
        self.added += len(fresh)
        return len(fresh)
