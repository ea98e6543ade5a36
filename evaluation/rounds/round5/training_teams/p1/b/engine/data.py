import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

SITES = ("lyon", "oslo", "porto")


class Scans(Dataset):
    """Small synthetic scans; each site has its own annotation quality."""

    def __init__(self, n_per_site, seed, noise=(0.0, 0.05, 0.5)):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(11))
        xs, ys = [], []
        for q in noise:
            y = torch.randint(0, 4, (n_per_site,), generator=g)
            x = proto[y] + 1.2 * torch.randn(n_per_site, 1, 8, 8, generator=g)
            flip = torch.rand(n_per_site, generator=g) < q
            y = torch.where(flip, (y + 1) % 4, y)
            xs.append(x)
            ys.append(y)
        self.x, self.y = torch.cat(xs), torch.cat(ys)
        self.site = [s for s in SITES for _ in range(n_per_site)]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def train_loader(cfg, rank, world):
    ds = Scans(cfg.n_train, seed=1, noise=(0.0, 0.02, 0.02))
    sampler = DistributedSampler(ds, world, rank, shuffle=True, drop_last=True, seed=cfg.seed)
    return DataLoader(ds, cfg.batch_size, sampler=sampler, drop_last=True), sampler


def val_loader(cfg, rank, world):
    ds = Scans(cfg.n_val, seed=2)
    per = (len(ds) + world - 1) // world
    part = Subset(ds, range(rank * per, min((rank + 1) * per, len(ds))))
    return DataLoader(part, cfg.batch_size)
