import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ShapesDataset(Dataset):
    """Rectangles and discs of different classes on noise."""

    def __init__(self, n, size, classes, seed):
        rng = np.random.default_rng(seed)
        self.images = np.empty((n, 1, size, size), np.float32)
        self.masks = np.zeros((n, size, size), np.int64)
        yy, xx = np.mgrid[:size, :size]
        for i in range(n):
            for c in rng.permutation(np.arange(1, classes))[:2]:
                cy, cx = rng.integers(4, size - 4, 2)
                r = rng.integers(3, 7)
                if c % 2:
                    hit = (yy - cy) ** 2 + (xx - cx) ** 2 <= r * r
                else:
                    hit = (abs(yy - cy) <= r) & (abs(xx - cx) <= r)
                self.masks[i][hit] = c
            self.images[i, 0] = self.masks[i] / classes + rng.normal(0, 0.1, (size, size))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return torch.from_numpy(self.images[i]), torch.from_numpy(self.masks[i])


def build_loader(ds, batch, shuffle):
    sampler = DistributedSampler(ds, shuffle=shuffle, drop_last=shuffle)
    return DataLoader(ds, batch_size=batch, sampler=sampler, drop_last=shuffle)
