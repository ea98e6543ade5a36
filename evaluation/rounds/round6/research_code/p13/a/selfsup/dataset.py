import numpy as np
import torch
from torch.utils.data import Dataset


class TwoViews(Dataset):
    def __init__(self, images, augment, seed):
        self.images = images
        self.augment = augment
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        rng = np.random.default_rng((self.seed, self.epoch, i))
        views = [self.augment(self.images[i], rng) for _ in range(2)]
        return tuple(torch.from_numpy(v)[None] for v in views)
