import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from speechclr.corpus import Corpus, collate
from speechclr.encoder import Encoder
from speechclr.loss import GatheredNCE
from speechclr.sampler import FrameBudgetSampler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--utterances", type=int, default=140)
    p.add_argument("--max-frames", type=int, default=240)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1234)
    return p.parse_args()


def seed_everything(seed):
    # each rank gets its own stream for crops and noise
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    corpus = Corpus(args.utterances)
    sampler = FrameBudgetSampler(corpus.lengths, args.max_frames, rank, world, seed=args.seed)
    loader = torch.utils.data.DataLoader(corpus, batch_sampler=sampler, collate_fn=collate)
    model = DDP(Encoder())
    criterion = GatheredNCE(0.1)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total, seen = 0.0, 0
        for a, b in loader:
            za, zb = model(torch.cat([a, b])).chunk(2)
            loss = criterion(za, zb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
            seen += 1
        stat = torch.tensor([total, seen])
        dist.reduce(stat, 0)
        if rank == 0:
            print(f"epoch {epoch}: loss {stat[0] / stat[1]:.4f} over {int(stat[1])} batches", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
