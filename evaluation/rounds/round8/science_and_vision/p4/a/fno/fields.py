import math

import torch


class FieldSampler:
    """Random periodic fields and their state after one advection-diffusion step."""

    def __init__(self, grid, seed, terms=4):
        self.gen = torch.Generator().manual_seed(seed)
        self.x = torch.arange(grid) / grid
        self.k = torch.arange(1, terms + 1).float()

    def pairs(self, n):
        amp = torch.randn(n, len(self.k), generator=self.gen) / self.k
        phase = 2 * math.pi * torch.rand(n, len(self.k), generator=self.gen)
        arg = 2 * math.pi * self.k[:, None] * self.x
        u0 = (amp[..., None] * torch.sin(arg + phase[..., None])).sum(1)
        decay = torch.exp(-0.05 * self.k ** 2)
        u1 = (amp[..., None] * decay[:, None] * torch.sin(arg + phase[..., None] - 0.4)).sum(1)
        return u0.unsqueeze(1), u1.unsqueeze(1)
