"""python -m translate.train: a toy translation model, one sentence pair a step."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .corpus import WORDS, pairs, shard


class Translator(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source):
        hidden, _ = self.mix(self.embed(source))
        return self.head(hidden)


def train_epoch(model, optimizer, sentences, rank, stop_at=None):
    for step, (source, target) in enumerate(sentences):
        if step == stop_at and rank == 1:
            print("nothing left to do", flush=True)
            return
        logits = model(source.unsqueeze(0))
        loss = nn.functional.cross_entropy(logits.squeeze(0), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--fault", choices=["none", "hang", "fail"], default="none")
    parser.add_argument("--at", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(Translator())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    sentences = pairs(args.steps * world_size + 1)
    mine = shard(sentences, rank, world_size, even=args.fault != "hang")
    train_epoch(model, optimizer, mine, rank, args.at if args.fault == "fail" else None)
    if args.fault == "fail" and rank == 1:
        return
    counts = [None] * world_size
    dist.all_gather_object(counts, len(mine))
    if rank == 0:
        print(f"{sum(counts)} sentences", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
