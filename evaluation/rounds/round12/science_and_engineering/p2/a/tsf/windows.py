import glob
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset


def smallest_over_ranks(n):
    t = torch.tensor([n], dtype=torch.int64)
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    return int(t)


class WindowSet(Dataset):
    """Sliding windows over the turbines of this rank."""

    def __init__(self, folder, context, horizon, stride, part):
        files = sorted(glob.glob(os.path.join(folder, "turbine_*.npy")))
        rank, world = dist.get_rank(), dist.get_world_size()
        self.series = [np.load(f) for f in files[rank::world]]
        self.context, self.horizon = context, horizon
        self.index = self._index(stride, part)

    def _index(self, stride, part):
        span = self.context + self.horizon
        index = []
        for s, values in enumerate(self.series):
            cut = int(0.8 * len(values))
            lo, hi = (0, cut) if part == "train" else (cut, len(values))
            index += [(s, at) for at in range(lo, hi - span + 1, stride)]
        index = [(s, at) for s, at in index if np.isfinite(self.series[s][at:at + span]).all()]
        keep = smallest_over_ranks(len(index))
        pick = np.random.default_rng(3).permutation(len(index))[:keep]
        return [index[i] for i in sorted(pick)]

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        s, at = self.index[i]
        mid = at + self.context
        x = self.series[s][at:mid]
        y = self.series[s][mid:mid + self.horizon, 1]
        return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())
