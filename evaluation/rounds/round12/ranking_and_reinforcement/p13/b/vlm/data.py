import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .registry import DATASETS


@DATASETS.add("captions")
class Captions(Dataset):
    """Product photos as feature vectors, titles as bags of tokens."""

    def __init__(self, size, kinds, seed):
        rng = np.random.default_rng(seed)
        self.kind = torch.from_numpy(rng.integers(0, kinds, size))
        proto = rng.normal(size=(kinds, 20))
        self.photo = torch.tensor(proto[self.kind.numpy()] + 0.4 * rng.normal(size=(size, 20)), dtype=torch.float32)
        self.title = self.kind.unsqueeze(1) * 3 + torch.from_numpy(rng.integers(0, 3, (size, 4)))

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, k):
        return self.photo[k], self.title[k], self.kind[k]


def loaders(dataset, batch, seed):
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed, drop_last=True)
    return DataLoader(dataset, batch, sampler=sampler, drop_last=True), sampler
