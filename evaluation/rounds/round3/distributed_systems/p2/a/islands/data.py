import torch


class SensorStream:
    """Synthetic multi-sensor regression; each island has its own site.

    Site 1 has an amplifier that saturates for short periods, as ours does.
    """

    def __init__(self, topo, batch_size, seed, dim=24, n=16_384):
        g = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.mixing = torch.randn(dim, 3, generator=g)
        self.batch_size = batch_size

        site = torch.Generator().manual_seed(seed * 100 + topo.island)
        x = torch.randn(n, dim, generator=site)
        y = torch.tanh(x @ self.mixing) + 0.05 * torch.randn(n, 3, generator=site)
        if topo.island == 1:
            y[3000:3064] *= 40.0
        per = n // (topo.world // topo.n_islands)
        self.x = x[topo.slot * per:(topo.slot + 1) * per]
        self.y = y[topo.slot * per:(topo.slot + 1) * per]
        val = torch.Generator().manual_seed(seed + 5)
        self.val_x = torch.randn(512, dim, generator=val)
        self.val_y = torch.tanh(self.val_x @ self.mixing)

    def batches(self):
        at = 0
        while True:
            if at + self.batch_size > len(self.x):
                at = 0
            yield self.x[at:at + self.batch_size], self.y[at:at + self.batch_size]
            at += self.batch_size

    def validation_shard(self, rank, world):
        return self.val_x[rank::world], self.val_y[rank::world]
