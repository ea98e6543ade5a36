"""One-day ahead emulator of the upper ocean, spatially parallel (latitude slabs).

    torchrun --nproc-per-node=3 train_ice.py
"""
import argparse
import logging
import os

import torch
import torch.distributed as dist

from slabnet import IceNet, Ocean, Slab

log = logging.getLogger("ice")


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--nlat", type=int, default=24)
    p.add_argument("--nlon", type=int, default=36)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "ckpt"))
    return p.parse_args()


def sum_gradients(model):
    """Every rank has the gradient of its own rows, the parameters are shared."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    i = 0
    for p in model.parameters():
        p.grad = flat[i:i + p.numel()].view_as(p).clone()
        i += p.numel()


def masked_mse(pred, y, wet):
    """Global mean over wet cells; the local part of the sum."""
    n = wet.sum() * y.shape[1]
    dist.all_reduce(n)
    return ((pred - y).pow(2) * wet).sum() / n.clamp(min=1)


@torch.no_grad()
def evaluate(model, ocean, slab, days):
    model.eval()
    tot = torch.zeros(2)
    for d in days:
        x, y, w = ocean.batch([d], slab)
        tot += torch.stack([((model(x, w) - y).pow(2) * w).sum(), w.sum() * 2])
    dist.all_reduce(tot)
    model.train()
    return (tot[0] / tot[1]).sqrt().item()


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING,
                        format=f"%(asctime)s [{rank}] %(message)s")
    slab = Slab(rank, size, a.nlat)
    ocean = Ocean(a.nlat, a.nlon)
    torch.manual_seed(0)
    model = IceNet(slab)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    train_days = list(range(0, 88))
    test_days = [0, 2, 4, 90, 92]
    log.info("slab of %d rows on each of %d ranks", slab.rows, size)
    for epoch in range(a.epochs):
        for i in range(0, len(train_days), a.batch):
            x, y, w = ocean.batch(train_days[i:i + a.batch], slab)
            loss = masked_mse(model(x, w), y, w)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            sum_gradients(model)
            opt.step()
            if (i // a.batch) % 4 == 0:
                log.info("epoch %d day %3d local loss %.4e", epoch, train_days[i], loss.item())
        rmse = evaluate(model, ocean, slab, test_days)
        log.info("epoch %d rmse %.4f", epoch, rmse)
        if rank == 0:
            os.makedirs(a.out, exist_ok=True)
            torch.save(model.state_dict(), os.path.join(a.out, f"ice_{epoch}.pt"))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
