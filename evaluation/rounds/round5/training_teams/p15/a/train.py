import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fw import EarlyStop, EvalEvery, JsonLog, Trainer

MAX_STEPS = int(os.environ.get("MAX_STEPS", 200))


def digits(n, seed):
    """Noisy 5x5 glyphs."""
    g = torch.Generator().manual_seed(seed)
    glyphs = (torch.rand(7, 25, generator=torch.Generator().manual_seed(8)) > 0.5).float()
    y = torch.randint(0, 7, (n,), generator=g)
    return glyphs[y] + 0.5 * torch.randn(n, 25, generator=g), y


def batches(data, size, rank, world, seed=0):
    x, y = data
    epoch = 0
    while True:
        g = torch.Generator().manual_seed(seed + epoch)
        idx = torch.randperm(len(y), generator=g)[rank::world]
        for part in idx[: len(idx) // size * size].split(size):
            yield x[part], y[part]
        epoch += 1


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(25, 40), nn.ReLU(), nn.Linear(40, 7)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    val = digits(120, seed=3)
    val = tuple(t[rank::world] for t in val)
    callbacks = [EvalEvery(10, val)]
    if rank == 0:
        callbacks.append(JsonLog("log.jsonl"))
    callbacks.append(EarlyStop(target=0.95))

    trainer = Trainer(model, opt, callbacks)
    reason = trainer.fit(batches(digits(400, seed=2), 10, rank, world), MAX_STEPS)
    dist.barrier()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": trainer.step}, "final.pt")
        print(f"finished at step {trainer.step}: {reason}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
