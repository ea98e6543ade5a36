import argparse
import gc
import datetime
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel as DDP

from features import FeatureCache

RECIPES = {
    "train": {"seed": 1, "n": 360, "win": 32},
    "dev": {"seed": 2, "n": 90, "win": 32},
    "test": {"seed": 2, "n": 90, "win": 32},
}


def shard(x, y, rank, world):
    n = len(x) // world * world
    return torch.from_numpy(x[rank:n:world].copy()), torch.from_numpy(y[rank:n:world].copy()).long()


@torch.no_grad()
def accuracy(model, x, y):
    hits = torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=20)
    args = p.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    store = dist.PrefixStore("acoustic", _get_default_store())
    store.set_timeout(datetime.timedelta(hours=2))
    folder = [tempfile.mkdtemp(prefix="feat_") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)

    cache = FeatureCache(folder[0], store, rank)
    splits = {}
    for name, recipe in RECIPES.items():
        splits[name] = shard(*cache.load(name, recipe), rank, world)

    x, y = splits["train"]
    model = DDP(nn.Sequential(nn.Linear(x.size(1), 32), nn.ReLU(), nn.Linear(32, 5)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for idx in order.split(args.batch_size):
            loss = F.cross_entropy(model(x[idx]), y[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        dev = accuracy(model, *splits["dev"])
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} dev {dev:.3f}", flush=True)
    test = accuracy(model, *splits["test"])
    if rank == 0:
        print(f"test {test:.3f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
