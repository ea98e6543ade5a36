"""A regression model, DistributedDataParallel, and a validation loss now and then."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batches(seed, steps):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(32, 16, generator=generator)
        yield x, x.sum(dim=1, keepdim=True)


def mean_over_ranks(value):
    values = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return torch.stack(values).mean()


def validate(model, x, y):
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(x), y)
    model.train()
    return mean_over_ranks(loss).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = torch.randn(64, 16)

    for step, (x, y) in enumerate(batches(rank, args.steps)):
        if args.fault == "fail" and step == args.at and rank == 1:
            x = x[:, :12]
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            everyone = args.fault != "hang" or step < args.at
            if everyone or rank == 0:
                score = validate(model, held_out, held_out.sum(dim=1, keepdim=True))
                if rank == 0:
                    print(f"step {step} loss {loss.item():.4f} held out {score:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
