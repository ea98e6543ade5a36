import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from feed import Prefetcher, shard_paths, write_shards


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data")
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--log_interval", type=int, default=4)
    return p.parse_args()


def micro_steps(model, feed, accum):
    total = 0.0
    for i in range(accum):
        x, y = next(feed)
        if i < accum - 1:
            with model.no_sync():
                loss = F.cross_entropy(model(x), y) / accum
                loss.backward()
        else:
            loss = F.cross_entropy(model(x), y) / accum
            loss.backward()
        total += loss.item()
    return total


def main():
    args = get_args()
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO"))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards(args.data)
    dist.barrier()

    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=10)
    feed = Prefetcher(shard_paths(args.data, rank, world), args.batch_size)

    for step in range(1, args.steps + 1):
        loss = micro_steps(model, feed, args.accum)
        opt.step()
        opt.zero_grad(set_to_none=True)
        warm.step()
        if step % args.log_interval == 0:
            t = torch.tensor(loss)
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step} loss {t.item() / world:.4f}", flush=True)

    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "out.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
