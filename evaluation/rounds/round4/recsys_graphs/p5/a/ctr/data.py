import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIELDS = {"publisher": 120, "advertiser": 300, "creative": 900, "device": 12}
NUMERIC = 5


class ImpressionLog(Dataset):
    """One row per impression: fields, numeric context, click, conversion.

    A conversion is only ever observed behind a click.
    """

    def __init__(self, rows, seed):
        truth = np.random.default_rng(99)
        bias = {f: truth.normal(scale=0.5, size=n) for f, n in FIELDS.items()}
        w_click, w_conv = truth.normal(scale=0.5, size=(2, NUMERIC))
        rng = np.random.default_rng(seed)
        cat = {f: rng.integers(n, size=rows) for f, n in FIELDS.items()}
        num = rng.normal(size=(rows, NUMERIC)).astype(np.float32)
        z = -3.4 + sum(bias[f][cat[f]] for f in FIELDS) * 0.6 + num @ w_click
        click = rng.random(rows) < 1 / (1 + np.exp(-z))
        zc = -0.7 + bias["advertiser"][cat["advertiser"]] + num @ w_conv
        conv = click & (rng.random(rows) < 1 / (1 + np.exp(-zc)))
        self.cat = torch.from_numpy(np.stack([cat[f] for f in FIELDS], 1))
        self.num = torch.from_numpy(num)
        self.click = torch.from_numpy(click.astype(np.float32))
        self.conv = torch.from_numpy(conv.astype(np.float32))

    def __len__(self):
        return len(self.num)

    def __getitem__(self, i):
        return self.cat[i], self.num[i], self.click[i], self.conv[i]


def make_loader(dataset, batch_size, rank, world, train):
    sampler = DistributedSampler(dataset, world, rank, shuffle=train, seed=13, drop_last=train)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=train), sampler
