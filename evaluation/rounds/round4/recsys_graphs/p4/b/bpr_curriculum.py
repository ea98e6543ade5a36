#!/usr/bin/env python
"""
BPR matrix factorisation with a popularity curriculum.

users are split over the ranks (u % world), their vectors never leave home; the item
matrix is replicated and its gradient summed.  Negatives start uniform over the whole
catalogue; later half of them come from ever more popular items, which are the hard ones.

  torchrun --standalone --nproc-per-node=4 bpr_curriculum.py
"""
import argparse
import queue
import threading
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

N_USERS, N_ITEMS, FRONT_PAGE = 480, 900, 48
# (first epoch, size of the negative pool; None = everything)
SCHEDULE = [(0, None), (1, 200), (2, 40)]


def simulate_feed(seed):
    """user -> items the user was shown and opened, in no order"""
    rng = np.random.default_rng(seed)
    taste = rng.integers(8, size=N_USERS)
    opened = []
    for u in range(N_USERS):
        if u % 160 == 42:
            # editors check the whole front page every morning
            opened.append(list(range(FRONT_PAGE)))
            continue
        front = rng.choice(FRONT_PAGE, size=rng.integers(8, 16), replace=False)
        niche = FRONT_PAGE + np.flatnonzero(np.arange(FRONT_PAGE, N_ITEMS) % 8 == taste[u])
        tail = rng.choice(niche, size=rng.integers(6, 14), replace=False)
        opened.append(front.tolist() + tail.tolist())
    return opened


class Interactions:
    """the part of the feed that belongs to one rank, split into train and held out"""

    def __init__(self, rank, world, seed):
        opened = simulate_feed(seed)
        split_rng = np.random.default_rng(seed + 1)
        self.train_pos, self.held_out, self.seen = {}, {}, {}
        count = Counter()
        for u, items in enumerate(opened):
            items = list(items)
            split_rng.shuffle(items)
            cut = int(0.8 * len(items))
            count.update(items[:cut])
            if u % world == rank:
                self.train_pos[u] = items[:cut]
                self.held_out[u] = items[cut:]
                self.seen[u] = set(items)
        self.by_popularity = [i for i, _ in count.most_common()]
        self.pairs = [(u, i) for u, items in self.train_pos.items() for i in items]


class NegativeSampler:
    def __init__(self, data, seed):
        self.data = data
        self.rng = np.random.default_rng(seed)
        self.everything = np.arange(N_ITEMS)
        self.pool = self.everything

    def set_stage(self, epoch):
        size = [s for start, s in SCHEDULE if epoch >= start][-1]
        self.pool = self.everything if size is None else np.array(self.data.by_popularity[:size])

    def draw(self, u):
        """an item that u has not opened, half the time from the current pool"""
        pool = self.pool if self.rng.random() < 0.5 else self.everything
        if len(self.data.seen[u]) >= len(pool):
            pool = self.everything  # heavy user, the pool may hold nothing for them
        while True:
            j = int(pool[self.rng.integers(len(pool))])
            if j not in self.data.seen[u]:
                return j


class Prefetcher(threading.Thread):
    """builds the batches of one epoch next to the training loop"""

    def __init__(self, data, sampler, rng, steps, batch_size):
        super().__init__(daemon=True)
        self.data, self.sampler, self.rng = data, sampler, rng
        self.steps, self.batch_size = steps, batch_size
        self.q = queue.Queue(maxsize=4)
        self.start()

    def run(self):
        try:
            order = self.rng.permutation(len(self.data.pairs))
            for s in range(self.steps):
                take = order[s * self.batch_size:(s + 1) * self.batch_size]
                rows = [self.data.pairs[k] + (self.sampler.draw(self.data.pairs[k][0]),) for k in take]
                self.q.put(torch.tensor(rows))
            self.q.put(None)
        except BaseException as e:
            self.q.put(e)

    def __iter__(self):
        while True:
            got = self.q.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                return
            yield got


class Adagrad:
    def __init__(self, params, lr):
        self.params, self.lr = params, lr
        self.acc = [torch.full_like(p, 1e-8) for p in params]

    @torch.no_grad()
    def step(self):
        for p, acc in zip(self.params, self.acc):
            acc.addcmul_(p.grad, p.grad)
            p.addcdiv_(p.grad, acc.sqrt(), value=-self.lr)
            p.grad = None


def hit_rate(data, users, items, k=20):
    hit = total = 0
    for u, wanted in data.held_out.items():
        score = items @ users[u]
        score[data.train_pos[u]] = -1e9
        top = set(score.topk(k).indices.tolist())
        hit += len(top.intersection(wanted))
        total += len(wanted)
    return torch.tensor([hit, total], dtype=torch.float64)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--patience", type=int, default=3)
    ap.add_argument("--seed", type=int, default=7)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = Interactions(rank, world, args.seed)
    users = torch.nn.Parameter(0.1 * torch.randn(N_USERS, args.dim))
    items = torch.nn.Parameter(0.1 * torch.randn(N_ITEMS, args.dim))
    opt = Adagrad([users, items], args.lr)

    # the ranks own differently many pairs: everyone walks as far as the shortest
    steps = torch.tensor([len(data.pairs) // args.batch])
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    steps = int(steps)

    sampler = NegativeSampler(data, [args.seed, 1, rank])
    shuffle_rng = np.random.default_rng([args.seed, 2, rank])
    best, bad = -1.0, 0
    for epoch in range(args.epochs):
        sampler.set_stage(epoch)
        seen_loss = torch.zeros(1)
        for batch in Prefetcher(data, sampler, shuffle_rng, steps, args.batch):
            u, i, j = batch.T
            margin = (users[u] * (items[i] - items[j])).sum(1)
            loss = -F.logsigmoid(margin).mean()
            loss.backward()
            dist.all_reduce(items.grad)
            items.grad /= world
            opt.step()
            seen_loss += loss.detach()

        with torch.no_grad():
            hits = hit_rate(data, users, items)
        dist.all_reduce(hits)
        dist.all_reduce(seen_loss)
        hr = (hits[0] / hits[1]).item()
        if rank == 0:
            print(f"epoch {epoch} pool {len(sampler.pool):4d} loss {seen_loss.item() / steps / world:.4f} hr@20 {hr:.4f}", flush=True)
        if hr > best:
            best, bad = hr, 0
        else:
            bad += 1
            if bad >= args.patience:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
