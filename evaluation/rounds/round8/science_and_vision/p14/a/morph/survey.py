import math

import torch


class Survey:
    """Ellipses of a class-dependent angle."""

    def __init__(self, count, classes, noise, seed, size=12):
        gen = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, classes, (count,), generator=gen)
        ax = torch.linspace(-1, 1, size)
        yy, xx = torch.meshgrid(ax, ax, indexing="ij")
        th = (self.y * math.pi / classes).view(-1, 1, 1)
        u, v = xx * th.cos() + yy * th.sin(), yy * th.cos() - xx * th.sin()
        img = torch.exp(-(u ** 2 / 0.5 + v ** 2 / 0.05))
        self.x = (img + noise * torch.randn(img.shape, generator=gen)).unsqueeze(1)
        self.seed = seed

    def batches(self, epoch, size, rank, world):
        gen = torch.Generator().manual_seed(self.seed + 10 * epoch)
        order = torch.randperm(len(self.y), generator=gen)
        step = size * world
        for at in range(0, len(order) - step + 1, step):
            idx = order[at + rank * size: at + (rank + 1) * size]
            yield self.x[idx], self.y[idx]
