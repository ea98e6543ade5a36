import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from evaluate import evaluate
from mixture import Mixture
from tasks import TASKS, make_task

STEPS = int(os.environ.get("STEPS", 90))
EVAL_EVERY = int(os.environ.get("EVAL_EVERY", 15))
ACCUM = int(os.environ.get("ACCUM", 2))
BATCH = 16


def seed_all(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class MultiTask(nn.Module):
    def __init__(self, dim=12, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.trunk(x))


def batches(data, rank, world, seed):
    x, y = (t[rank::world] for t in data)
    g = torch.Generator().manual_seed(seed)
    while True:
        for idx in torch.randperm(len(x), generator=g).split(BATCH):
            yield x[idx], y[idx]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_all(5)
    model = DDP(MultiTask())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train = {n: batches(make_task(n, 192, 1), rank, world, seed=rank) for n in TASKS}
    val = {n: tuple(t[rank::world] for t in make_task(n, 64, 2)) for n in TASKS}
    mix = Mixture(TASKS, seed=17, temperature=0.7)

    for step in range(1, STEPS + 1):
        opt.zero_grad(set_to_none=True)
        for micro in range(ACCUM):
            x, y = next(train[mix.draw()])
            last = micro == ACCUM - 1
            if last:
                loss = F.mse_loss(model(x), y) / ACCUM
                loss.backward()
            else:
                with model.no_sync():
                    loss = F.mse_loss(model(x), y) / ACCUM
                    loss.backward()
        opt.step()
        if step % EVAL_EVERY == 0:
            losses = evaluate(model.module, val, TASKS)
            mix.reweight(losses)
            if rank == 0:
                row = " ".join(f"{k}:{v:.3f}" for k, v in sorted(losses.items()))
                print(f"step {step} {row}", flush=True)

    if rank == 0:
        torch.save({"model": model.module.state_dict(), "mix": mix.state_dict()}, "mt.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
