import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, width=8, dim=16):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, dim)

    def forward(self, a, b):
        z = self.head(self.conv(torch.cat([a, b])))
        return z.chunk(2)


def barlow(za, zb, off_weight=0.02):
    za = (za - za.mean(0)) / (za.std(0) + 1e-4)
    zb = (zb - zb.mean(0)) / (zb.std(0) + 1e-4)
    c = za.t() @ zb / za.shape[0]
    on = (c.diagonal() - 1).pow(2).sum()
    off = c.pow(2).sum() - c.diagonal().pow(2).sum()
    return on + off_weight * off
