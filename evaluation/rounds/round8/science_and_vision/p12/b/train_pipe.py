"""Super-resolution network cut into three stages; micro-batches travel point to point."""
import argparse
import math

import torch
import torch.distributed as dist

from pipe.images import PatchLoader
from pipe.optim import build_optimizer
from pipe.stages import Stage, make_stage


def forward_backward(stage, loader_batch, chunks):
    """All forwards, then all backwards in reverse (GPipe)."""
    low, high = loader_batch
    lows, highs = low.chunk(chunks), high.chunk(chunks)
    for lo in lows:
        stage.forward(lo)
    losses = [stage.backward(hi, len(lows)) for hi in reversed(highs)]
    return sum(l for l in losses if l is not None)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--patches", type=int, default=52)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--chunks", type=int, default=2)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--max-lr", type=float, default=0.01)
    p.add_argument("--seed", type=int, default=6)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    loader = PatchLoader(args.patches, args.batch, size=8, seed=args.seed)
    stage = Stage(make_stage(rank, world, width=8), rank, world, width=8, size=8)
    opt, sched = build_optimizer(stage.module, args)
    for epoch in range(args.epochs):
        total = 0.0
        for batch in loader.epoch(epoch):
            opt.zero_grad()
            loss = forward_backward(stage, batch, args.chunks)
            opt.step()
            sched.step()
            total += float(loss)
        if rank == world - 1:
            print(f"epoch {epoch} loss {total / math.ceil(args.patches / args.batch):.4f} "
                  f"psnr {stage.psnr.pop():.2f} lr {sched.get_last_lr()[0]:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
