import os
import shutil

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from .clipcache import ClipCache
from .recordings import bands, trim, waveform


class Recordings(Dataset):
    def __init__(self, cfg):
        self.n, self.classes, self.frames = cfg["recordings"], cfg["classes"], cfg["frames"]
        self.cache = ClipCache(cfg["cache"], self._prepare, self.frames)
        self.epoch = 0

    def _prepare(self, i):
        return bands(trim(waveform(i, self.classes)))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        clip = self.cache.get(i)
        rng = np.random.default_rng((self.epoch, i))
        s = int(rng.integers(0, clip.shape[1] - self.frames + 1))
        return torch.from_numpy(clip[:, s:s + self.frames].copy()), i % self.classes


def fresh_folder(path):
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    dist.barrier()


def make_loader(cfg):
    fresh_folder(cfg["cache"])
    ds = Recordings(cfg)
    sampler = DistributedSampler(ds, seed=cfg["seed"], drop_last=True)
    return DataLoader(ds, cfg["batch"], sampler=sampler, num_workers=cfg["workers"], drop_last=True)
