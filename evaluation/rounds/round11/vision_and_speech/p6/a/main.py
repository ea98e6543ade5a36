import gc
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from seg.data import Blobs
from seg.engine import fit
from seg.model import tiny_unet


def main():
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.json")) as f:
        cfg = json.load(f)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)

    train = Blobs(cfg["train_images"], 0, cfg["noise"])
    val = Blobs(cfg["val_images"], 10_000, cfg["noise"])
    sampler = DistributedSampler(train, shuffle=True, seed=0)
    train_loader = DataLoader(train, batch_size=cfg["batch_size"], sampler=sampler)
    val_loader = DataLoader(val, batch_size=cfg["batch_size"], sampler=DistributedSampler(val, shuffle=False))

    model = DDP(tiny_unet())
    opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    history, epochs = fit(model, train_loader, sampler, val_loader, opt, cfg, rank)
    if rank == 0:
        best = max(history, key=lambda s: s["miou"])
        print(f"stopped after {epochs[0]} epochs, best miou {best['miou']:.4f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
