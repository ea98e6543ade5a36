import torch
from torch.utils.data import DataLoader, TensorDataset


def make_task(cfg):
    gen = torch.Generator().manual_seed(cfg["seed"])
    x = torch.randn(cfg["samples"], cfg["features"], generator=gen)
    w = torch.randn(cfg["features"], cfg["classes"], generator=gen)
    y = (x @ w + 0.3 * torch.randn(cfg["samples"], cfg["classes"], generator=gen)).argmax(1)
    return x, y


def loader(tensor, cfg, epoch, drop_last=False):
    """Batches of one column of the task; every stage that reads data sees the same order."""
    gen = torch.Generator().manual_seed(cfg["seed"] + epoch)
    return DataLoader(
        TensorDataset(tensor),
        batch_size=cfg["batch_size"],
        shuffle=True,
        drop_last=drop_last,
        generator=gen,
    )


def inputs(cfg, epoch):
    x, _ = make_task(cfg)
    return loader(x, cfg, epoch, drop_last=True)


def labels(cfg, epoch):
    _, y = make_task(cfg)
    return loader(y, cfg, epoch)
