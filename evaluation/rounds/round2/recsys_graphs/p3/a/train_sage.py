# GraphSAGE node classification; each rank owns a part of the seed nodes and
# has one process that samples neighbourhoods for it.
import argparse
import multiprocessing as mp
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CTX = mp.get_context("fork")


class CSRGraph:
    def __init__(self, n, n_class, feat_dim, seed):
        rng = np.random.default_rng(seed)
        self.n = n
        self.label = rng.integers(0, n_class, n)
        deg = rng.integers(4, 20, n)
        self.indptr = np.concatenate([[0], np.cumsum(deg)])
        same = [np.flatnonzero(self.label == c) for c in range(n_class)]
        cols = []
        for v in range(n):
            pool = same[self.label[v]]
            k = deg[v]
            near = pool[rng.integers(0, len(pool), k)]
            far = rng.integers(0, n, k)
            cols.append(np.where(rng.random(k) < 0.7, near, far))
        self.indices = np.concatenate(cols)
        centre = rng.normal(size=(n_class, feat_dim))
        self.feat = (centre[self.label] * 0.4 + rng.normal(size=(n, feat_dim))).astype(np.float32)

    def sample(self, nodes, fanout, rng):
        lo = self.indptr[nodes][:, None]
        deg = (self.indptr[nodes + 1] - self.indptr[nodes])[:, None]
        pick = (rng.random((len(nodes), fanout)) * deg).astype(np.int64)
        return self.indices[lo + pick]


def _sampler_main(graph, seeds, batch, fanouts, seed, out, stop):
    rng = np.random.default_rng(seed)
    seeds = rng.permutation(seeds)
    for i in range(0, len(seeds) - batch + 1, batch):
        if stop.is_set():
            break
        s = seeds[i:i + batch]
        n1 = graph.sample(s, fanouts[0], rng)
        n2 = graph.sample(n1.reshape(-1), fanouts[1], rng)
        out.put((graph.feat[s], graph.feat[n1],
                 graph.feat[n2].reshape(batch, fanouts[0], fanouts[1], -1), graph.label[s]))


class NeighborSampler:
    """Samples in a child process, at most ``depth`` batches ahead."""

    def __init__(self, graph, seeds, batch, fanouts, seed, depth=4):
        self.n_batches = len(seeds) // batch
        self.out = CTX.Queue(maxsize=depth)
        self.stop = CTX.Event()
        self.proc = CTX.Process(
            target=_sampler_main, daemon=True,
            args=(graph, seeds, batch, fanouts, seed, self.out, self.stop))
        self.proc.start()

    def next(self):
        return [torch.from_numpy(a) for a in self.out.get()]

    def close(self):
        self.stop.set()
        self.proc.join()
        self.out.close()


class Sage(nn.Module):
    def __init__(self, d_in, d_hid, n_class):
        super().__init__()
        self.l1 = nn.Linear(2 * d_in, d_hid)
        self.l2 = nn.Linear(2 * d_hid, n_class)

    def forward(self, x0, x1, x2):
        h1 = F.relu(self.l1(torch.cat([x1, x2.mean(2)], -1)))
        h0 = F.relu(self.l1(torch.cat([x0, x1.mean(1)], -1)))
        return self.l2(torch.cat([h0, h1.mean(1)], -1))


def assign_seeds(graph, rank, world):
    """Seeds go where most of their neighbours are stored (range partition)."""
    bounds = np.linspace(0, 1, world + 1) ** 0.8
    lo, hi = (bounds[rank:rank + 2] * graph.n).astype(int)
    return np.arange(lo, hi)


def common_steps(n):
    t = torch.tensor([n])
    dist.all_reduce(t, op=dist.ReduceOp.MIN)
    return int(t)


class Trainer:
    def __init__(self, opts):
        self.o = opts
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.graph = CSRGraph(opts.nodes, opts.classes, opts.feat, opts.seed)
        seeds = assign_seeds(self.graph, self.rank, self.world)
        hold = seeds % 10 == 0
        self.train_seeds, self.val_seeds = seeds[~hold], seeds[hold]
        torch.manual_seed(opts.seed)
        self.net = nn.parallel.DistributedDataParallel(Sage(opts.feat, opts.hidden, opts.classes))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=opts.lr)

    def epoch(self, ep):
        o = self.o
        sampler = NeighborSampler(self.graph, self.train_seeds, o.batch, o.fanouts,
                                  o.seed + 97 * ep + self.rank)
        steps = common_steps(sampler.n_batches)
        run = 0.0
        for _ in range(steps):
            x0, x1, x2, y = sampler.next()
            loss = F.cross_entropy(self.net(x0, x1, x2), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            run += loss.item()
        sampler.close()
        return run / max(steps, 1), steps

    @torch.no_grad()
    def validate(self):
        rng = np.random.default_rng(0)
        g, (f1, f2) = self.graph, self.o.fanouts
        hit = torch.zeros(2)
        for i in range(0, len(self.val_seeds), 128):
            s = self.val_seeds[i:i + 128]
            n1 = g.sample(s, f1, rng)
            n2 = g.sample(n1.reshape(-1), f2, rng).reshape(len(s), f1, f2)
            z = self.net.module(*(torch.from_numpy(g.feat[k]) for k in (s, n1, n2)))
            hit += torch.tensor([(z.argmax(1).numpy() == g.label[s]).sum(), len(s)], dtype=torch.float)
        dist.all_reduce(hit)
        return (hit[0] / hit[1]).item()

    def fit(self):
        for ep in range(self.o.epochs):
            t0 = time.time()
            loss, steps = self.epoch(ep)
            acc = self.validate()
            if self.rank == 0:
                print(f"epoch {ep} steps {steps} loss {loss:.3f} val {acc:.3f} ({time.time() - t0:.1f}s)", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--nodes", type=int, default=6000)
    ap.add_argument("--classes", type=int, default=6)
    ap.add_argument("--feat", type=int, default=16)
    ap.add_argument("--hidden", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--fanouts", type=int, nargs=2, default=[6, 4])
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=1)
    opts = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(opts).fit()
    dist.barrier()
    dist.destroy_process_group()
