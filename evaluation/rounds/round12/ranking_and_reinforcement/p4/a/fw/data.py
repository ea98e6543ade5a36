import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class SessionDataset(Dataset):
    """Item sequences of short sessions; the label is the next item."""

    def __init__(self, size, items, length, seed):
        rng = np.random.default_rng(seed)
        start = rng.integers(0, items, size)
        stride = rng.integers(1, 4, size)
        seq = (start[:, None] + stride[:, None] * np.arange(length + 1)) % items
        self.seq = torch.from_numpy(seq)

    def __len__(self):
        return len(self.seq)

    def __getitem__(self, k):
        return self.seq[k, :-1], self.seq[k, -1]


def make_loader(dataset, batch, seed):
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True)
