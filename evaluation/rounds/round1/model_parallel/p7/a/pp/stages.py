import torch
from torch import nn


class ConvUnit(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.net = nn.Sequential(nn.GroupNorm(4, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1))

    def forward(self, x):
        return x + self.net(x)


class ImageStage(nn.Module):
    """Units [first, first + count) of the network plus stem or classifier."""

    def __init__(self, cfg, rank, world):
        super().__init__()
        per, rest = divmod(cfg.units, world)
        counts = [per + (i < rest) for i in range(world)]
        self.first_unit = sum(counts[:rank])
        self.stem = nn.Conv2d(3, cfg.channels, 3, padding=1) if rank == 0 else None
        self.units = nn.ModuleList(ConvUnit(cfg.channels) for _ in range(counts[rank]))
        self.fc = nn.Linear(cfg.channels, cfg.classes) if rank == world - 1 else None

    def forward(self, x):
        if self.stem is not None:
            x = self.stem(x)
        for u in self.units:
            x = u(x)
        return self.fc(x.mean((2, 3))) if self.fc is not None else x


class SyntheticImages:
    """Class dependent stripes with noise."""

    def __init__(self, n, cfg, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, cfg.classes, (n,), generator=g)
        wave = torch.sin(torch.arange(cfg.side)[None] * (self.y[:, None] + 1.0) * 0.6)
        self.x = wave[:, None, None, :].expand(n, 3, cfg.side, cfg.side) + 0.7 * torch.randn(
            n, 3, cfg.side, cfg.side, generator=g)

    def batches(self, size, epoch=None):
        n = len(self.y)
        order = torch.arange(n) if epoch is None else torch.randperm(
            n, generator=torch.Generator().manual_seed(epoch))
        for i in range(0, n - size + 1, size):
            pick = order[i:i + size]
            yield self.x[pick], self.y[pick]
