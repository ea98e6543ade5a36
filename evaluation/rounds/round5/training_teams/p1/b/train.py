import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from engine.data import train_loader, val_loader
from engine.early_stop import EarlyStopping
from engine.metrics import RunningMean, accuracy


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch_size", type=int, default=16)
    p.add_argument("--n_train", type=int, default=128)
    p.add_argument("--n_val", type=int, default=48)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--seed", type=int, default=7)
    return p.parse_args()


class SmallNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.head = nn.Linear(16 * 4 * 4, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return self.head(x.flatten(1))


def train_epoch(model, loader, opt):
    model.train()
    mean = RunningMean()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        mean.update(loss.item(), len(y))
    return mean.synced()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    loss, acc = RunningMean(), RunningMean()
    for x, y in loader:
        out = model.module(x)
        loss.update(F.cross_entropy(out, y).item(), len(y))
        acc.update(accuracy(out, y), len(y))
    return {"loss": loss.synced(), "acc": acc.synced()}


def main():
    cfg = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = DDP(SmallNet())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    loader, sampler = train_loader(cfg, rank, world)
    vloader = val_loader(cfg, rank, world)
    stopper = EarlyStopping(cfg.patience)

    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        tr = train_epoch(model, loader, opt)
        val = validate(model, vloader)
        if rank == 0:
            print(f"epoch {epoch} train {tr:.4f} val {val['loss']:.4f} acc {val['acc']:.3f}", flush=True)
        if stopper.step(val["loss"]):
            break

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "final.pt")
        print("saved final.pt", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
