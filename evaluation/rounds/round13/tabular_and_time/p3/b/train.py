"""Click-through-rate ranker: owned embedding tables, a data-parallel MLP on top."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from clicks import click_stream
from tables import CATEGORIES, OwnedTables, OwnerAdagrad


class Ranker(nn.Module):
    def __init__(self, dim, rank, world_size, dense=4):
        super().__init__()
        self.tables = OwnedTables(dim, rank, world_size)
        self.top = nn.Sequential(nn.Linear(len(CATEGORIES) * dim + dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids, dense):
        return self.top(torch.cat([self.tables(ids), dense.log1p()], dim=1)).squeeze(1)


def average_gradients(params):
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


@torch.no_grad()
def normalized_entropy(model, stream):
    acc = torch.zeros(3, dtype=torch.float64)
    for ids, dense, y in stream:
        loss = F.binary_cross_entropy_with_logits(model(ids, dense), y, reduction="sum")
        acc += torch.tensor([loss.item(), y.sum().item(), len(y)], dtype=torch.float64)
    dist.all_reduce(acc)
    p = (acc[1] / acc[2]).item()
    return (acc[0] / acc[2]).item() / -(p * math.log(p) + (1 - p) * math.log(1 - p))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--dim", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=20)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2024)
    model = Ranker(args.dim, rank, world)
    dense_params = list(model.top.parameters())
    dense_opt = torch.optim.Adam(dense_params, lr=2e-3)
    table_opt = OwnerAdagrad(model.tables)
    if rank == 0:
        print("owners", model.tables.owner, flush=True)

    for step, (ids, dense, y) in enumerate(click_stream(rank, args.steps, args.batch_size, seed=3), 1):
        dense_opt.zero_grad()
        F.binary_cross_entropy_with_logits(model(ids, dense), y).backward()
        average_gradients(dense_params)
        dense_opt.step()
        table_opt.step()
        if step % args.eval_every == 0:
            ne = normalized_entropy(model, click_stream(rank + 100, 4, 512, seed=3))
            if rank == 0:
                print(f"step {step} normalized entropy {ne:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
