"""DLRM-style CTR model: dense part replicated, id tables row-sharded over ranks.

Rows of other ranks are fetched with all_to_all and kept in a small LFU cache
that is thrown away every ``refresh_every`` steps.
"""
import argparse
import logging
import os
import tempfile
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

log = logging.getLogger("dlrm")


@dataclass
class Config:
    rows: int = 4000
    dim: int = 8
    slots: int = 4
    n_dense: int = 5
    batch: int = 64
    steps: int = 180
    lr: float = 0.05
    emb_lr: float = 0.2
    cache_rows: int = 600
    refresh_every: int = 60
    eval_every: int = 60
    seed: int = 11


def exchange(rows, send_counts, group):
    """Variable-size all_to_all along dim 0; returns (received, counts)."""
    counts_in = torch.tensor(send_counts, dtype=torch.int64)
    counts_out = torch.empty_like(counts_in)
    dist.all_to_all_single(counts_out, counts_in, group=group)
    recv_counts = counts_out.tolist()
    out = rows.new_empty((sum(recv_counts),) + tuple(rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), recv_counts, list(send_counts), group=group)
    return out, recv_counts


class LFUCache:
    def __init__(self, capacity):
        self.capacity = capacity
        self.rows = {}
        self.freq = Counter()

    def clear(self):
        self.rows.clear()

    def missing(self, ids):
        for i in ids.tolist():
            self.freq[i] += 1
        return torch.tensor([i for i in ids.tolist() if i not in self.rows], dtype=torch.int64)

    def put(self, ids, rows):
        for i, r in zip(ids.tolist(), rows):
            self.rows[i] = r.clone()
        over = len(self.rows) - self.capacity
        if over > 0:
            for i in sorted(self.rows, key=self.freq.__getitem__)[:over]:
                del self.rows[i]


class ShardedTable:
    """Row i lives on rank i % world. SGD is applied by the owner."""

    def __init__(self, cfg, rank, world, group):
        self.rank, self.world, self.group = rank, world, group
        g = torch.Generator().manual_seed(cfg.seed + 1000 + rank)
        n_local = (cfg.rows + world - 1) // world
        self.weight = torch.randn(n_local, cfg.dim, generator=g) * 0.05
        self.cache = LFUCache(cfg.cache_rows)
        self.lr = cfg.emb_lr
        self.dim = cfg.dim

    def _by_owner(self, ids):
        owner = ids % self.world
        order = torch.argsort(owner, stable=True)
        return ids[order], order, torch.bincount(owner, minlength=self.world).tolist()

    def _fetch(self, ids):
        want, _, counts = self._by_owner(ids)
        asked, asked_counts = exchange(want, counts, self.group)
        rows, _ = exchange(self.weight[asked // self.world], asked_counts, self.group)
        return want, rows

    def lookup(self, ids):
        local = ids % self.world == self.rank
        out = torch.empty(ids.numel(), self.dim)
        out[local] = self.weight[ids[local] // self.world]
        remote = ids[~local]
        miss = self.cache.missing(remote)
        known = {i: self.cache.rows[i] for i in remote.tolist() if i in self.cache.rows}
        want, rows = self._fetch(miss)
        if want.numel() > 0:
            known.update(zip(want.tolist(), rows))
            self.cache.put(want, rows)
        if remote.numel() > 0:
            out[~local] = torch.stack([known[i] for i in remote.tolist()])
        return out

    def push(self, ids, grads):
        ids, order, counts = self._by_owner(ids)
        got_ids, _ = exchange(ids, counts, self.group)
        got, _ = exchange(grads[order], counts, self.group)
        self.weight.index_add_(0, got_ids // self.world, got, alpha=-self.lr / self.world)


class ClickLog:
    """Synthetic log; every rank reads the log of its own market."""

    def __init__(self, cfg, rank, seed):
        self.cfg = cfg
        self.rng = np.random.default_rng(seed + rank)
        self.catalogue = np.random.default_rng(seed * 7 + rank).permutation(cfg.rows)
        if rank % 2 == 1:
            self.catalogue = self.catalogue[:220]
        truth = np.random.default_rng(5)
        self.taste = truth.normal(size=cfg.rows)

    def batch(self):
        c = self.cfg
        ids = self.catalogue[self.rng.integers(0, len(self.catalogue), (c.batch, c.slots))]
        dense = self.rng.normal(size=(c.batch, c.n_dense)).astype(np.float32)
        logit = self.taste[ids].mean(1) * 2 + dense[:, 0]
        y = (self.rng.random(c.batch) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        return torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(y)


class Top(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(cfg.n_dense, 16), nn.ReLU(), nn.Linear(16, cfg.dim))
        self.top = nn.Sequential(nn.Linear(cfg.dim * (cfg.slots + 1), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, emb, dense):
        z = torch.cat([emb.flatten(1), self.bottom(dense)], 1)
        return self.top(z).squeeze(1)


def average_grads(module, world):
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= world
    o = 0
    for p in module.parameters():
        p.grad.copy_(flat[o:o + p.numel()].view_as(p))
        o += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=Config.steps)
    ap.add_argument("--out", default=None)
    args = ap.parse_args()
    cfg = Config(steps=args.steps)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    emb_group = dist.new_group(backend="gloo")
    torch.manual_seed(cfg.seed)
    net = Top(cfg)
    table = ShardedTable(cfg, rank, world, emb_group)
    opt = torch.optim.SGD(net.parameters(), lr=cfg.lr)
    data = ClickLog(cfg, rank, cfg.seed)

    window = []
    for step in range(1, cfg.steps + 1):
        ids, dense, y = data.batch()
        uniq, inv = torch.unique(ids, return_inverse=True)
        rows = table.lookup(uniq).requires_grad_()
        loss = F.binary_cross_entropy_with_logits(net(rows[inv], dense), y)
        opt.zero_grad()
        loss.backward()
        average_grads(net, world)
        opt.step()
        table.push(uniq, rows.grad)
        window.append(loss.item())
        if step % cfg.refresh_every == 0:
            table.cache.clear()
        if step % cfg.eval_every == 0:
            t = torch.tensor([sum(window), len(window)])
            dist.all_reduce(t)
            window.clear()
            if rank == 0:
                log.info("step %d logloss %.4f cache %d", step, (t[0] / t[1]).item(), len(table.cache.rows))

    out = args.out or os.path.join(tempfile.gettempdir(), "dlrm_%s" % os.environ.get("MASTER_PORT", "0"))
    os.makedirs(out, exist_ok=True)
    torch.save(table.weight, os.path.join(out, "table.%d-of-%d.pt" % (rank, world)))
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(out, "dense.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
