#!/usr/bin/env python3
# Decentralised SGD: after each local step the ranks are paired at random and
# each pair averages its parameters (randomised gossip on a complete graph).
import argparse
import csv
import math
import random
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

CLASSES = ("arc", "bar", "cross", "dot", "edge")


def get_args(argv=None):
    p = argparse.ArgumentParser(description="randomised gossip SGD")
    p.add_argument("--epochs", default=4, type=int)
    p.add_argument("--iters", default=60, type=int, help="iterations per epoch")
    p.add_argument("--bs", default=24, type=int)
    p.add_argument("--lr", default=0.05, type=float)
    p.add_argument("--momentum", default=0.9, type=float)
    p.add_argument("--mix", default=0.5, type=float, help="weight of the partner's parameters")
    p.add_argument("--gossip-every", default=2, type=int)
    p.add_argument("--print-freq", default=15, type=int)
    p.add_argument("--seed", default=3, type=int)
    p.add_argument("--csv", default="gossip_log.csv")
    return p.parse_args(argv)


def shapes_dataset(n, seed):
    """16x16 images of five kinds of strokes, with noise and shifts."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (n,), generator=g)
    imgs = 0.35 * torch.randn(n, 1, 16, 16, generator=g)
    off = torch.randint(2, 12, (n, 2), generator=g)
    for i, (lab, (r, c)) in enumerate(zip(labels.tolist(), off.tolist())):
        im = imgs[i, 0]
        if lab == 0:
            for t in range(8):
                im[(r + t // 2) % 16, (c + int(3 * math.sin(t / 2))) % 16] += 1
        elif lab == 1:
            im[r, :] += 1
        elif lab == 2:
            im[r, :] += 1
            im[:, c] += 1
        elif lab == 3:
            im[r - 1:r + 1, c - 1:c + 1] += 1.5
        else:
            im[:r, :] += 0.7
    return imgs, labels


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, len(CLASSES)))


def draw_partner(rank, world):
    """Random perfect matching.  All ranks draw the same one, no messages needed."""
    order = list(range(world))
    random.shuffle(order)
    where = order.index(rank)
    mate = where ^ 1
    return order[mate] if mate < world else None


def exchange(flat, partner):
    inbox = torch.empty_like(flat)
    reqs = [dist.isend(flat, partner), dist.irecv(inbox, partner)]
    for r in reqs:
        r.wait()
    return inbox


@torch.no_grad()
def gossip(model, rank, world, mix):
    partner = draw_partner(rank, world)
    if partner is None:
        return
    flat = torch.cat([p.reshape(-1) for p in model.parameters()])
    theirs = exchange(flat, partner)
    flat.mul_(1 - mix).add_(theirs, alpha=mix)
    at = 0
    for p in model.parameters():
        p.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


@torch.no_grad()
def test(model, imgs, labels):
    model.eval()
    hits = (model(imgs).argmax(1) == labels).float().mean()
    spread = torch.stack([p.norm() for p in model.parameters()]).sum()
    out = torch.stack([hits, spread, spread ** 2])
    dist.all_reduce(out)
    out /= dist.get_world_size()
    model.train()
    return out[0].item(), max(0.0, (out[2] - out[1] ** 2).item()) ** 0.5


@torch.no_grad()
def show_example(model, imgs, labels, preview):
    i = preview.randrange(len(labels))
    probs = model(imgs[i:i + 1]).softmax(-1)[0]
    k = int(probs.argmax())
    print(f"    val[{i}]: {CLASSES[labels[i]]} -> {CLASSES[k]} ({probs[k]:.2f})", flush=True)


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    model = convnet()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    imgs, labels = shapes_dataset(1500, seed=args.seed + 17 * (rank + 1))
    val_imgs, val_labels = shapes_dataset(400, seed=1)
    local = torch.Generator().manual_seed(rank)
    preview = random.Random(args.seed)
    rows = []

    for epoch in range(args.epochs):
        t0, running = time.time(), 0.0
        for it in range(args.iters):
            pick = torch.randint(0, len(labels), (args.bs,), generator=local)
            loss = nn.functional.cross_entropy(model(imgs[pick]), labels[pick])
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.item()
            if (it + 1) % args.gossip_every == 0:
                gossip(model, rank, world, args.mix)
            if rank == 0 and (it + 1) % args.print_freq == 0:
                print(f"epoch {epoch} [{it + 1}/{args.iters}] loss {running / (it + 1):.3f}", flush=True)
                show_example(model, val_imgs, val_labels, preview)
        acc, spread = test(model, val_imgs, val_labels)
        rows.append((epoch, acc, spread, time.time() - t0))
        if rank == 0:
            print(f"epoch {epoch}: acc {acc:.3f} spread {spread:.4f}", flush=True)

    if rank == 0:
        with open(args.csv, "w", newline="") as fh:
            csv.writer(fh).writerows([("epoch", "acc", "spread", "sec"), *rows])
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
