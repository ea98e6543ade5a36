import math

import torch
import torch.nn as nn


def time_features(t, dim, steps):
    freq = torch.exp(torch.arange(dim // 2) * (-math.log(100.0) / (dim // 2)))
    ang = (t.float() / steps).unsqueeze(1) * 10 * freq
    return torch.cat([ang.sin(), ang.cos()], dim=1)


class Denoiser(nn.Module):
    """Predicts the noise for flat 2-D points; class conditioning is optional."""

    def __init__(self, classes=4, dim=32, steps=100):
        super().__init__()
        self.dim, self.steps = dim, steps
        self.inp = nn.Linear(2, dim)
        self.time = nn.Linear(dim, dim)
        self.label = nn.Embedding(classes + 1, dim)
        self.mid = nn.Sequential(nn.SiLU(), nn.Linear(dim, dim), nn.SiLU())
        self.out = nn.Linear(dim, 2)

    def forward(self, x, t, cond=None):
        h = self.inp(x) + self.time(time_features(t, self.dim, self.steps))
        if cond is not None:
            h = h + self.label(cond)
        return self.out(self.mid(h))
