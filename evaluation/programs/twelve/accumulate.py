"""Gradients are accumulated over micro-batches without a reduction; blocks are recomputed in the backward."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            h = torch.relu(self.up(x))
            return x + self.down(h)
        return x + self.cache


class Model(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def clip(value, limit):
    if value > limit:
        raise OverflowError(f"loss {value:.1f} is beyond {limit}")
    return value


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=15)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = Model()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    for step in range(args.steps):
        for number in range(args.accumulate):
            x = torch.randn(8, 24, generator=generator)
            if args.fault == "hang" and step == args.at and rank == 1:
                x = x * 1e4
            last = number == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                try:
                    loss = model(x).square().mean() / args.accumulate
                    clip(loss.item(), 1e5)
                    if args.fault == "fail" and step == args.at:
                        network.blocks[1].cache = torch.zeros(8, 24)
                    loss.backward()
                except OverflowError as error:
                    print(f"rank {rank} skips a micro-batch: {error}", flush=True)
                    dist.barrier()  # so that the word stands in every log before training goes on
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
