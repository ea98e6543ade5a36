import shutil
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from ckpt import CheckpointDir
from loader import StatefulLoader

ROOT = "ckpts"
EPOCHS = 2
SAVE_EVERY = 5
PREEMPT_AT = 17


class Preempted(Exception):
    pass


def make_data(n=768, dim=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=g)
    w = torch.randn(dim, 5, generator=g)
    return x, (x @ w).argmax(1)


def fit(rank, world, preempt_at=None):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 5)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = StatefulLoader(make_data(), 8, rank, world)
    ckpt = CheckpointDir(ROOT, rank)
    step = ckpt.restore(model.module, opt, loader)
    if rank == 0:
        print(f"start at step {step}", flush=True)

    while loader.epoch < EPOCHS:
        epoch = loader.epoch
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            step += 1
            if step % SAVE_EVERY == 0:
                ckpt.save(step, model.module, opt, loader)
                dist.barrier()
                if rank == 0:
                    ckpt.prune()
            if step == preempt_at:
                raise Preempted(step)
        dist.barrier()
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(ROOT, ignore_errors=True)
    dist.barrier()
    try:
        fit(rank, world, preempt_at=PREEMPT_AT)
    except Preempted as e:
        if rank == 0:
            print(f"preempted at step {e}", flush=True)
    dist.barrier()
    fit(rank, world)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
