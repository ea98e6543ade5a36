import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from dataset import cycle, loaders
from lr_finder import LRFinder

DEFAULTS = {"n": 2048, "batch": 32, "epochs": 5, "seed": 5, "width": 64, "lr": "auto", "ckpt": "model.pt"}


def sgd(params, lr):
    return torch.optim.SGD(params, lr, momentum=0.9, weight_decay=1e-4)


def mae(net, loader):
    t = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            t += torch.tensor([(net(x) - y).abs().sum().item(), len(y)])
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    cfg = dict(DEFAULTS)
    if len(sys.argv) > 1:
        with open(sys.argv[1]) as f:
            cfg.update(json.load(f))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(cfg["seed"])
    train, test = loaders(cfg["n"], cfg["batch"], cfg["seed"])
    net = nn.Sequential(nn.Linear(12, cfg["width"]), nn.ReLU(), nn.Linear(cfg["width"], cfg["width"]), nn.ReLU(),
                        nn.Linear(cfg["width"], 1))
    lr = cfg["lr"]
    if lr == "auto":
        lr = LRFinder(net, sgd, F.mse_loss).run(cycle(train))
        if rank == 0:
            print(f"learning rate from the range test: {lr:.5f}", flush=True)
    model = DDP(net)
    opt = sgd(model.parameters(), lr)
    total = cfg["epochs"] * len(train)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, total)
    for epoch in range(cfg["epochs"]):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        err = mae(net, test)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} test MAE {err:.4f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), cfg["ckpt"] + ".tmp")
        os.replace(cfg["ckpt"] + ".tmp", cfg["ckpt"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
