"""Spectrogram patches and their labels.  Only the first stage reads patches, only the last one labels."""
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class Patches(Dataset):
    def __init__(self, n, dim, classes, seed=0):
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(classes, dim))
        self.y = rng.integers(0, classes, n)
        self.x = (centres[self.y] + 0.7 * rng.normal(size=(n, dim))).astype(np.float32)

    def __len__(self):
        return len(self.y)


class InputView(Dataset):
    def __init__(self, ds):
        self.ds = ds

    def __len__(self):
        return len(self.ds)

    def __getitem__(self, i):
        return torch.from_numpy(self.ds.x[i])


class TargetView(InputView):
    def __getitem__(self, i):
        return int(self.ds.y[i])


class EpochOrder(Sampler):
    """The same permutation on every stage."""

    def __init__(self, n, seed):
        self.n = n
        self.seed = seed
        self.epoch = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.n, generator=g).tolist())

    def __len__(self):
        return self.n


def make_loader(view, batch, seed, drop_last=False):
    return DataLoader(view, batch_size=batch, sampler=EpochOrder(len(view), seed), drop_last=drop_last)
