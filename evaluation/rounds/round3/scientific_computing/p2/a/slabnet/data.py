import math

import torch


class Ocean:
    """Synthetic sea surface temperature and height on a lat/lon grid.

    The ice edge wanders through the seasons; cells poleward of it are masked.
    """

    def __init__(self, nlat=24, nlon=36, days=96, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.nlat, self.nlon, self.days = nlat, nlon, days
        self.phase = torch.rand(4, generator=g) * 2 * math.pi
        self.lat = torch.linspace(-1, 1, nlat)[:, None]
        self.lon = torch.arange(nlon)[None, :] * (2 * math.pi / nlon)

    def state(self, day):
        t = 2 * math.pi * day / self.days
        sst = torch.cos(math.pi * self.lat / 2) + 0.2 * torch.sin(2 * self.lon + t + self.phase[0])
        ssh = 0.5 * torch.sin(self.lon + self.phase[1] - 3 * t) * torch.cos(2 * self.lat)
        return torch.stack([sst.expand(self.nlat, self.nlon), ssh.expand(self.nlat, self.nlon)])

    def wet(self, day):
        edge = 0.62 + 0.36 * math.sin(2 * math.pi * day / self.days + math.pi / 2)
        wiggle = 0.03 * torch.sin(3 * self.lon + self.phase[2])
        return ((self.lat < edge + wiggle) & (self.lat > -0.97)).float()[None]

    def batch(self, days, slab):
        rows = slice(slab.lo, slab.hi)
        x = torch.stack([self.state(d) for d in days])[:, :, rows]
        y = torch.stack([self.state(d + 1) for d in days])[:, :, rows]
        w = torch.stack([self.wet(d) for d in days])[:, :, rows]
        return x * w, y * w, w
