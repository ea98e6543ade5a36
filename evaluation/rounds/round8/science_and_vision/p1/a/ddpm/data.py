import math

import torch


class TextureSet:
    """Gratings with random orientation and frequency."""

    def __init__(self, size, seed):
        self.gen = torch.Generator().manual_seed(seed)
        ax = torch.linspace(-1, 1, size)
        self.yy, self.xx = torch.meshgrid(ax, ax, indexing="ij")

    def batch(self, n):
        theta = torch.rand(n, 1, 1, generator=self.gen) * math.pi
        freq = 2 + 4 * torch.rand(n, 1, 1, generator=self.gen)
        phase = torch.rand(n, 1, 1, generator=self.gen) * 2 * math.pi
        u = self.xx * torch.cos(theta) + self.yy * torch.sin(theta)
        return torch.sin(freq * u + phase).unsqueeze(1)
