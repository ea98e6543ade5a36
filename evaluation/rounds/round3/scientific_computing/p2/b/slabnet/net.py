import torch
import torch.nn as nn
import torch.nn.functional as F

from .halo import exchange


class SlabConv(nn.Module):
    """3x3 convolution: halo in latitude, periodic in longitude."""

    def __init__(self, cin, cout, slab):
        super().__init__()
        self.slab = slab
        self.conv = nn.Conv2d(cin, cout, 3)

    def forward(self, x):
        x = exchange(x, self.slab)
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return self.conv(x)


class Block(nn.Module):
    """Residual update that acts on wet cells only."""

    def __init__(self, ch, slab):
        super().__init__()
        self.c1 = SlabConv(ch, ch, slab)
        self.c2 = SlabConv(ch, ch, slab)
        self.norm = nn.GroupNorm(1, ch)

    def forward(self, x, wet):
        h = F.gelu(self.c1(self.norm(x)))
        return x + wet * self.c2(h)


class IceNet(nn.Module):
    def __init__(self, slab, ch=12, blocks=2):
        super().__init__()
        self.lift = nn.Conv2d(3, ch, 1)
        self.blocks = nn.ModuleList(Block(ch, slab) for _ in range(blocks))
        self.head = nn.Conv2d(ch, 2, 1)

    def forward(self, x, wet):
        h = self.lift(torch.cat([x, wet], 1))
        for b in self.blocks:
            h = b(h, wet)
        return x + self.head(h)
