import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from .files import assign


def read(paths):
    xs, ys = [], []
    for p in paths:
        with np.load(p) as z:
            xs.append(z["x"])
            ys.append(z["y"])
    return TensorDataset(torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys)))


def make_loader(root, split, rank, world, batch_size=16, shuffle=False, drop_last=False, seed=0):
    paths, count = assign(root, split, rank, world)
    gen = torch.Generator().manual_seed(seed + rank)
    loader = DataLoader(read(paths), batch_size, shuffle=shuffle, drop_last=drop_last, generator=gen)
    return loader, count


def endless(loader):
    while True:
        yield from loader
