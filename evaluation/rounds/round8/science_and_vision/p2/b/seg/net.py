import torch
import torch.nn as nn


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU())


class TinyUNet(nn.Module):
    def __init__(self, channels, classes, w=8):
        super().__init__()
        self.d1, self.d2 = block(channels, w), block(w, 2 * w)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.u1 = block(3 * w, w)
        self.head = nn.Conv2d(w, classes, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(self.pool(a))
        return self.head(self.u1(torch.cat([a, self.up(b)], 1)))
