import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def molecules(n, seed=0):
    """Random descriptors with a smooth property; the two assays have different noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 12))
    w = rng.normal(size=(12, 3))
    y = np.tanh(x @ w).sum(1, keepdims=True) + 0.3 * np.sin(3 * x[:, :1])
    y += rng.normal(0, np.where(np.arange(n) % 3, 0.05, 0.6))[:, None]
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32)))


def loaders(n, batch, seed):
    ds = molecules(n)
    cut = n * 7 // 8
    train = torch.utils.data.Subset(ds, range(cut))
    test = torch.utils.data.Subset(ds, range(cut, n))
    tr = DataLoader(train, batch, sampler=DistributedSampler(train, seed=seed, drop_last=True), drop_last=True)
    te = DataLoader(test, batch, sampler=DistributedSampler(test, shuffle=False))
    return tr, te


def cycle(loader):
    while True:
        yield from loader
