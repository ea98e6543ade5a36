#!/usr/bin/env python
"""Contrastive image/text training on tar shards."""
import argparse
import itertools
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F

from pipeline import make_loader, write_shards


def parse_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--n-shards", type=int, default=7)
    p.add_argument("--per-shard", type=int, default=48)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--steps-per-epoch", type=int, default=12)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--vocab", type=int, default=40)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


class Towers(nn.Module):
    def __init__(self, dim, vocab, width=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, width))
        self.text = nn.EmbeddingBag(vocab, width, mode="mean")
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, words):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(words), dim=-1), self.scale.exp()


def contrastive(a, b, scale):
    world, rank = dist.get_world_size(), dist.get_rank()
    all_a = torch.cat(dist_fn.all_gather(a))
    all_b = torch.cat(dist_fn.all_gather(b))
    labels = torch.arange(len(a)) + rank * len(a)
    return (F.cross_entropy(scale * a @ all_b.T, labels) + F.cross_entropy(scale * b @ all_a.T, labels)) / 2


def prepare(args, rank):
    box = [None]
    if rank == 0:
        box[0] = tempfile.mkdtemp(prefix="pairs_")
        write_shards(box[0], args.n_shards, args.per_shard, args.dim, args.vocab, args.seed)
    dist.broadcast_object_list(box, src=0)
    return box[0]


def train_one_epoch(model, loader_iter, opt, args):
    seen, total = 0, 0.0
    for images, words in itertools.islice(loader_iter, args.steps_per_epoch):
        loss = contrastive(*model(images, words))
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(images)
        total += loss.item() * len(images)
    stats = torch.tensor([total, float(seen)])
    dist.all_reduce(stats)
    return (stats[0] / stats[1]).item(), int(stats[1])


def main():
    args = parse_args()
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = prepare(args, rank)
    torch.manual_seed(args.seed)
    loader = make_loader(folder, rank, world, args.batch_size, args.workers, args.seed)
    model = nn.parallel.DistributedDataParallel(Towers(args.dim, args.vocab))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    stream = iter(loader)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        loss, seen = train_one_epoch(model, stream, opt, args)
        if rank == 0:
            row = {"epoch": epoch, "loss": round(loss, 4), "pairs": seen, "pairs_s": seen / (time.perf_counter() - began)}
            with open(os.path.join(folder, "log.jsonl"), "a") as f:
                f.write(json.dumps(row) + "\n")
            print(row, flush=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(folder, f"epoch_{epoch}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
