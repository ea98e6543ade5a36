import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from .shards import ShardStore
from .util import Heartbeat, get_logger


class Preempted(RuntimeError):
    pass


class TwoTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.doc = nn.Sequential(nn.Linear(16, dim), nn.Tanh(), nn.Linear(dim, dim))
        self.items = nn.Embedding(vocab, dim)

    def forward(self, q, d, item):
        return self.query(q) @ (self.doc(d) + self.items(item)).T


class Trainer:
    """Data parallel; each parameter has one owner that runs its update."""

    def __init__(self, cfg, attempt):
        self.cfg, self.attempt = cfg, attempt
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.log = get_logger("tower")
        torch.manual_seed(cfg.seed)
        self.model = TwoTower(cfg.vocab, cfg.dim)
        named = list(self.model.named_parameters())
        parts = {"query": 0, "doc": 1 % self.world, "items": self.world - 1}
        self.owner = {n: parts[n.split(".")[0]] for n, _ in named}
        self.mine = {n: p for n, p in named if self.owner[n] == self.rank}
        self.opt = torch.optim.Adam(self.mine.values(), lr=cfg.lr)
        self.store = ShardStore(cfg.out, cfg.keep, cfg.disk_mb_per_s, self.log)
        if attempt == 0:
            self.store.wipe()
        self.beat = Heartbeat(os.path.join(self.store.dir, "alive"))
        self.beat.start()
        self.step = self.resume()

    def state(self):
        return {"params": {n: p.detach() for n, p in self.mine.items()},
                "opt": self.opt.state_dict(), "step": self.step}

    def resume(self):
        step = self.store.newest()
        if step > 0:
            state = self.store.load(step)
            for n, p in self.mine.items():
                p.data.copy_(state["params"][n])
            self.opt.load_state_dict(state["opt"])
        self.spread()
        self.log.info("attempt %d starts at step %d", self.attempt, step)
        return step

    @torch.no_grad()
    def spread(self):
        for n, p in self.model.named_parameters():
            dist.broadcast(p.data, src=self.owner[n])

    def batch(self, step):
        g = torch.Generator().manual_seed(step * 977 + self.rank)
        q = torch.randn(self.cfg.batch, 16, generator=g)
        item = torch.randint(0, self.cfg.vocab, (self.cfg.batch,), generator=g)
        return q, q + 0.3 * torch.randn(q.shape, generator=g), item

    def train_step(self):
        scores = self.model(*self.batch(self.step))
        loss = F.cross_entropy(scores, torch.arange(len(scores)))
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        for n, p in self.model.named_parameters():
            dist.reduce(p.grad, dst=self.owner[n])
            p.grad.div_(self.world)
        self.opt.step()
        self.spread()
        return loss.item()

    def fit(self):
        while self.step < self.cfg.max_steps:
            loss = self.train_step()
            self.step += 1
            if self.step % 20 == 0:
                self.log.info("step %d loss %.4f", self.step, loss)
            if self.step % self.cfg.save_every == 0:
                self.store.save(self.step, self.state())
            if self.attempt == 0 and self.step == self.cfg.notice_after:
                self.store.save(self.step, self.state(), deadline=self.cfg.grace_s)
                raise Preempted(f"notice at step {self.step}")

    def report(self):
        with torch.no_grad():
            scores = self.model(*self.batch(10**6))
            hits = (scores.argmax(1) == torch.arange(len(scores))).float().mean()
        every = [torch.zeros_like(hits) for _ in range(self.world)]
        dist.all_gather(every, hits)
        if self.rank == 0:
            self.log.info("recall@1 %.3f", torch.stack(every).mean())

    def close(self):
        self.beat.stop()
