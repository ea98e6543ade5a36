import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from feed.din import InterestNet
from feed.meter import Meter
from feed.prefetch import Prefetcher
from feed.shards import ShardReader, write_shards

FOLDER = os.environ.get("FEED_FOLDER", "work/feed")
STEPS = int(os.environ.get("FEED_STEPS", 32))
BATCH = 8
LR = 0.3


def train(rank, world):
    feed = Prefetcher(ShardReader(FOLDER, rank, world, BATCH))
    torch.manual_seed(4)
    model = DDP(InterestNet())
    meter = Meter()
    for step in range(1, STEPS + 1):
        hist, item, click = next(feed)
        loss = F.binary_cross_entropy_with_logits(model(hist, item), click)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
        meter.add(len(click), loss.item())
        if rank == 0 and step % 8 == 0:
            print(f"step {step}: {meter.text()}", flush=True)
    feed.stop()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
        write_shards(FOLDER, 2 * world, seed=19)
    dist.barrier()
    train(rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
