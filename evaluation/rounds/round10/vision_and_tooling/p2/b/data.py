import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def blobs(n, size, seed=0):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size]
    out = np.empty((n, 1, size, size), np.float32)
    for i in range(n):
        cy, cx = rng.uniform(4, size - 4, 2)
        s = rng.uniform(1.5, 3.0)
        out[i, 0] = 2 * np.exp(-((yy - cy) ** 2 + (xx - cx) ** 2) / (2 * s * s)) - 1
        out[i, 0] += rng.normal(0, 0.3, (size, size))
    return TensorDataset(torch.from_numpy(out))


def make_loader(cfg):
    ds = blobs(cfg.getint("images"), cfg.getint("size"))
    sampler = DistributedSampler(ds, shuffle=True, drop_last=True)
    return DataLoader(ds, batch_size=cfg.getint("batch"), sampler=sampler, drop_last=True)
