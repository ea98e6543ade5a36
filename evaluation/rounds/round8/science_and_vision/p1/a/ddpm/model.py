import torch
import torch.nn as nn
import torch.nn.functional as F


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(3, width), nn.GroupNorm(3, width)
        self.c1 = nn.Conv2d(width, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, width, 3, padding=1)
        self.emb = nn.Linear(width, width)

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x))) + self.emb(e)[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class Denoiser(nn.Module):
    def __init__(self, channels, width, timesteps):
        super().__init__()
        self.time = nn.Embedding(timesteps, width)
        self.stem = nn.Conv2d(2 * channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(2))
        self.out = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x, cond, t):
        e = self.time(t)
        h = self.stem(torch.cat([x, cond], 1))
        for b in self.blocks:
            h = b(h, e)
        return self.out(F.silu(h))
