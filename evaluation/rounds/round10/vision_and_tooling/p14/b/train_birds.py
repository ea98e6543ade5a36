import json
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from birds.data import make_loader
from birds.recordings import BANDS


class SongNet(nn.Module):
    def __init__(self, classes, width=24):
        super().__init__()
        self.conv1 = nn.Conv1d(BANDS, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        h = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(h.mean(-1))


class Mixup:
    def __init__(self, alpha, classes, seed):
        self.alpha, self.classes = alpha, classes
        self.rng = np.random.default_rng(seed)

    def __call__(self, x, y):
        lam = float(self.rng.beta(self.alpha, self.alpha))
        perm = torch.from_numpy(self.rng.permutation(len(x)))
        y = F.one_hot(y, self.classes).float()
        return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else "config.json") as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg["seed"])
    loader = make_loader(cfg)
    mix = Mixup(cfg["mixup"], cfg["classes"], cfg["seed"] + rank)
    model = DDP(SongNet(cfg["classes"]))
    opt = torch.optim.Adam(model.parameters(), cfg["lr"])
    for epoch in range(cfg["epochs"]):
        loader.sampler.set_epoch(epoch)
        loader.dataset.epoch = epoch
        stat = torch.zeros(3)
        for x, y in loader:
            xm, ym = mix(x, y)
            loss = F.cross_entropy(model(xm), ym)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                hits = (model.module(x).argmax(1) == y).sum().item()
            stat += torch.tensor([loss.item() * len(y), hits, len(y)])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} loss {stat[0] / stat[2]:.4f} accuracy {stat[1] / stat[2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
