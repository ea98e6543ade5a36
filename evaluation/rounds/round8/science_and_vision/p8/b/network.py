import torch
import torch.nn as nn
import torch.nn.functional as F


class Backbone(nn.Module):
    def __init__(self, dim, width=12):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GroupNorm(3, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.GroupNorm(3, width), nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, x):
        return self.head(self.conv(x).mean(dim=(2, 3)))


class KeyQueue:
    """Ring of keys, the same on all ranks."""

    def __init__(self, size, dim, seed):
        gen = torch.Generator().manual_seed(seed)
        self.keys = F.normalize(torch.randn(size, dim, generator=gen), dim=1)
        self.at = 0

    def push(self, keys):
        n = len(keys)
        idx = (self.at + torch.arange(n)) % len(self.keys)
        self.keys = self.keys.clone()
        self.keys[idx] = keys
        self.at = int((self.at + n) % len(self.keys))
