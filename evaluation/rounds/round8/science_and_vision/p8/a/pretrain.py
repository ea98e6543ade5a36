"""Contrastive pre-training with a momentum teacher and a queue of keys."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from views import ViewMaker
from network import Backbone, KeyQueue


def build(args, rank):
    torch.manual_seed(args.seed + rank)
    student = DDP(Backbone(dim=args.dim))
    teacher = copy.deepcopy(student.module)
    for p in teacher.parameters():
        p.requires_grad_(False)
    queue = KeyQueue(args.queue, args.dim, seed=args.seed)
    return student, teacher, queue


@torch.no_grad()
def momentum_update(student, teacher, m):
    for s, t in zip(student.module.parameters(), teacher.parameters()):
        t.mul_(m).add_(s, alpha=1 - m)


@torch.no_grad()
def gather_keys(k, world):
    parts = [torch.empty_like(k) for _ in range(world)]
    dist.all_gather(parts, k)
    return torch.cat(parts)


def info_nce(q, k, negatives, temperature):
    pos = (q * k).sum(1, keepdim=True)
    neg = q @ negatives.T
    logits = torch.cat([pos, neg], 1) / temperature
    target = torch.zeros(len(q), dtype=torch.long)
    return F.cross_entropy(logits, target), (logits.argmax(1) == 0).float().mean()


def momentum_at(step, steps, base):
    return 1 - (1 - base) * (1 - step / steps)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--queue", type=int, default=192)
    p.add_argument("--momentum", type=float, default=0.99)
    p.add_argument("--temperature", type=float, default=0.2)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=31)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    student, teacher, queue = build(args, rank)
    views = ViewMaker(size=12, seed=args.seed + 1000 * (rank + 1))
    opt = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    for step in range(args.steps):
        a, b = views.two_views(args.batch)
        q = F.normalize(student(a), dim=1)
        with torch.no_grad():
            momentum_update(student, teacher, momentum_at(step, args.steps, args.momentum))
            k = F.normalize(teacher(b), dim=1)
        loss, acc = info_nce(q, k, queue.keys, args.temperature)
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue.push(gather_keys(k, world))
        if (step + 1) % 10 == 0:
            stats = torch.stack([loss.detach(), acc])
            dist.all_reduce(stats)
            if rank == 0:
                stats /= world
                print(f"step {step + 1} loss {stats[0]:.4f} acc {stats[1]:.3f}", flush=True)
    if rank == 0:
        torch.save({"student": student.module.state_dict(), "teacher": teacher.state_dict()}, "ssl.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
