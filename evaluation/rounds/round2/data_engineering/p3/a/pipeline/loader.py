import glob
import io
import os
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .tario import iter_tar


def decode(sample):
    image = np.load(io.BytesIO(sample["npy"]))
    words = [int(w) for w in sample["txt"].decode().split()]
    return torch.from_numpy(image), torch.tensor(words)


def shuffled(stream, size, rng):
    buf = []
    for item in stream:
        if len(buf) < size:
            buf.append(item)
            continue
        k = rng.randrange(size)
        out, buf[k] = buf[k], item
        yield out
    rng.shuffle(buf)
    yield from buf


class ShardStream(IterableDataset):
    """Endless stream of decoded pairs; the trainer decides how long an epoch is."""

    def __init__(self, shards, seed, buffer=64):
        self.shards = shards
        self.seed = seed
        self.buffer = buffer

    def _samples(self, shards, rng):
        while True:
            order = list(shards)
            rng.shuffle(order)
            for path in order:
                yield from iter_tar(path)

    def __iter__(self):
        info = get_worker_info()
        wid, n = (info.id, info.num_workers) if info else (0, 1)
        rng = random.Random(f"{self.seed}/{wid}")
        mine = self.shards[wid::n]
        for sample in shuffled(self._samples(mine, rng), self.buffer, rng):
            yield decode(sample)


def make_loader(folder, rank, world, batch_size, workers, seed):
    shards = sorted(glob.glob(os.path.join(folder, "pairs-*.tar")))[rank::world]
    workers = min(workers, len(shards))
    return DataLoader(
        ShardStream(shards, seed=seed + rank),
        batch_size=batch_size,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )
