import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from .transforms import BoxAwareCrop, Compose, Normalize, RandomFlip


def synth(n, canvas, seed=5):
    """Grey images with bright rectangles; sizes follow a long-tailed distribution."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        img = rng.normal(0, 0.1, (canvas, canvas)).astype(np.float32)
        boxes = []
        for _ in range(int(rng.integers(1, 3))):
            side = np.clip(5 + rng.pareto(1.8, 2) * 4, 5, canvas - 2).astype(int)
            y, x = (int(rng.integers(0, canvas - s + 1)) for s in side)
            img[y:y + side[0], x:x + side[1]] += 1
            boxes.append((y, x, y + side[0], x + side[1]))
        out.append((img, np.array(boxes, np.float32)))
    return out


class BoxDataset(Dataset):
    def __init__(self, cfg):
        self.items = synth(cfg["images"], cfg["canvas"])
        self.seed = cfg["seed"]
        self.epoch = 0
        self.tf = Compose(
            RandomFlip(),
            BoxAwareCrop(cfg["crop"], cfg["min_visible"]),
            Normalize())

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        rng = np.random.default_rng((self.seed, self.epoch, i))
        img, boxes = self.tf(*self.items[i], rng)
        return torch.from_numpy(np.ascontiguousarray(img))[None], torch.from_numpy(boxes)


def collate(items):
    imgs, boxes = zip(*items)
    return torch.stack(imgs), list(boxes)


def make_loader(cfg):
    ds = BoxDataset(cfg)
    sampler = DistributedSampler(ds, seed=cfg["seed"], drop_last=True)
    return DataLoader(ds, cfg["batch"], sampler=sampler, collate_fn=collate, drop_last=True)
