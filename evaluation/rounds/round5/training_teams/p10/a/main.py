import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tools.data import shapes
from tools.ema import Ema
from tools.publish import Publisher

ROOT = pathlib.Path("exchange")
STEPS, EVAL_EVERY, BATCH = 60, 10, 16


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 4),
    )


@torch.no_grad()
def evaluate(state, val, rank, world):
    net = build()
    net.load_state_dict(state)
    net.eval()
    x, y = (t[rank::world] for t in val)
    hits = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir()
    dist.barrier()

    torch.manual_seed(2)
    model = DDP(build())
    ema = Ema(model.module)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    publisher = Publisher(ROOT, rank)
    train, val = shapes(600, 1), shapes(150, 2)
    gen = torch.Generator().manual_seed(30 + rank)

    best = 0.0
    for step in range(1, STEPS + 1):
        idx = torch.randint(0, 600, (BATCH,), generator=gen)
        loss = F.cross_entropy(model(train[0][idx]), train[1][idx])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        ema.update(model.module)

        if step % EVAL_EVERY == 0:
            acc = evaluate(publisher.publish(ema.shadow), val, rank, world)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} ema acc {acc:.3f}", flush=True)
                if acc > best:
                    best = acc
                    publisher.keep(ema.shadow, "best")

    dist.barrier()
    if rank == 0:
        print(f"best {best:.3f}, files: {sorted(p.name for p in ROOT.iterdir())}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
