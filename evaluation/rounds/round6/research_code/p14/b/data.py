import math

import torch


class Spiral:
    """Each rank's files hold one arc of the spiral, as after a split by sorted key."""

    def __init__(self, n, rank, world, seed):
        gen = torch.Generator().manual_seed(seed)
        s = torch.sort(torch.rand(n, generator=gen)).values
        s = s[rank * n // world:(rank + 1) * n // world]
        r = 0.4 + 1.6 * s
        a = 3 * math.pi * s
        self.x = torch.stack([r * a.cos(), r * a.sin()], 1)
        self.gen = torch.Generator().manual_seed(seed + 7 * rank)

    def batch(self, n):
        i = torch.randint(len(self.x), (n,), generator=self.gen)
        return self.x[i] + 0.03 * torch.randn(n, 2, generator=self.gen)


def coverage(samples, reference, radius=0.25):
    """The share of reference points with a sample nearby."""
    return (torch.cdist(reference, samples).min(1).values < radius).float().mean().item()
