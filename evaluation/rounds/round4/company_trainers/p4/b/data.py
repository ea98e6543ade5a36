import torch
from torch.utils.data import DataLoader, Dataset


class Documents(Dataset):
    """Arithmetic token runs with a change of stride somewhere in the middle."""

    def __init__(self, cfg):
        g = torch.Generator().manual_seed(cfg["seed"])
        n, t, v = cfg["documents"], cfg["context"], cfg["vocab"]
        start = torch.randint(v, (n, 1), generator=g)
        stride = torch.randint(1, 5, (n, 2), generator=g)
        turn = torch.randint(t // 3, t, (n, 1), generator=g)
        step = torch.where(torch.arange(t + 1) < turn, stride[:, :1], stride[:, 1:])
        self.rows = (start + step.cumsum(1)) % v

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return row[:-1], row[1:]


def make_loader(cfg, epoch):
    """Same order on every stage: the first reads the inputs, the last the targets."""
    shuffle = torch.Generator().manual_seed(cfg["seed"] + 100 * epoch)
    return DataLoader(Documents(cfg), shuffle=True, generator=shuffle, **cfg["loader"])
