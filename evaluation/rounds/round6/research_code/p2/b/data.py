import math

import torch


class MixtureRing:
    """Points on a ring of Gaussians with a class label, one stream for each rank."""

    def __init__(self, modes, batch, seed, rank):
        self.modes = modes
        self.batch = batch
        self.gen = torch.Generator().manual_seed(seed + 101 * rank)

    def draw(self):
        label = torch.randint(self.modes, (self.batch,), generator=self.gen)
        angle = 2 * math.pi * label / self.modes
        centre = torch.stack([angle.cos(), angle.sin()], 1) * 2.0
        return centre + 0.08 * torch.randn(self.batch, 2, generator=self.gen), label

    def noise(self, dim):
        return torch.randn(self.batch, dim, generator=self.gen)
