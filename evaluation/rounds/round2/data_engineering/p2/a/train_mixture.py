"""Byte model on a weighted mixture of sources."""
import logging
import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from doc_index import ByteDocs

log = logging.getLogger("mixture")


@dataclass
class Config:
    mixture: dict = field(default_factory=lambda: {"wiki": 0.6, "news": 0.3, "code": 0.1})
    eval_source: str = "news"
    window: int = 48
    batch: int = 8
    steps: int = 36
    eval_every: int = 12
    lr: float = 2e-3
    seed: int = 5


def download_sources(root, cfg):
    """Stands for the fetch from the bucket."""
    rng = random.Random(cfg.seed)
    for k, name in enumerate(cfg.mixture):
        docs = []
        for _ in range(90 + 30 * k):
            docs.append(" ".join(f"{name[0]}{rng.randint(0, 30 + 20 * k)}" for _ in range(rng.randint(8, 30))))
        (root / f"{name}.txt").write_text("\n\n".join(docs))


class ByteGRU(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.emb = nn.Embedding(256, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 256)

    def forward(self, x):
        h, _ = self.rnn(self.emb(x))
        return self.out(h)


class Run:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.root = self._shared_folder()
        self.cache = self.root / "index"
        self.cache.mkdir(exist_ok=True)
        self.sources = {
            n: ByteDocs(self.root / f"{n}.txt", self.cache, self.local_rank, "train") for n in cfg.mixture
        }
        if self.rank == 0:
            log.info("documents: %s", {n: len(s) for n, s in self.sources.items()})
        torch.manual_seed(cfg.seed)
        self.net = DistributedDataParallel(ByteGRU())
        self.opt = torch.optim.Adam(self.net.parameters(), lr=cfg.lr)
        self.rng = np.random.default_rng([cfg.seed, self.rank])
        self.heldout = None
        self.best = float("inf")

    def _shared_folder(self):
        box = [None]
        if self.rank == 0:
            folder = Path(tempfile.mkdtemp(prefix="mixture-"))
            download_sources(folder, self.cfg)
            box[0] = folder
        dist.broadcast_object_list(box)
        return box[0]

    def draw(self):
        names = list(self.cfg.mixture)
        picks = self.rng.choice(names, size=self.cfg.batch, p=[self.cfg.mixture[n] for n in names])
        rows = [self.sources[n].window(int(self.rng.integers(len(self.sources[n]))), self.cfg.window + 1) for n in picks]
        return torch.from_numpy(np.stack(rows))

    def loss(self, rows):
        logits = self.net(rows[:, :-1])
        return nn.functional.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1))

    @torch.no_grad()
    def evaluate(self):
        if self.heldout is None:
            self.heldout = ByteDocs(
                self.root / f"{self.cfg.eval_source}.txt", self.cache, self.local_rank, "heldout"
            )
        self.net.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for i in range(self.rank, len(self.heldout), self.world):
            row = torch.from_numpy(self.heldout.window(i, self.cfg.window + 1))[None]
            logits = self.net.module(row[:, :-1])
            total[0] += nn.functional.cross_entropy(logits[0], row[0, 1:], reduction="sum").item()
            total[1] += self.cfg.window
        dist.all_reduce(total)
        self.net.train()
        return (total[0] / total[1]).item()

    def fit(self):
        for step in range(1, self.cfg.steps + 1):
            loss = self.loss(self.draw())
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % self.cfg.eval_every == 0:
                score = self.evaluate()
                if self.rank == 0:
                    log.info("step %d train %.3f heldout %.3f", step, loss.item(), score)
                    if score < self.best:
                        torch.save(self.net.module.state_dict(), self.root / "best.pt")
                self.best = min(self.best, score)
        dist.barrier()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s r" + os.environ["RANK"] + ": %(message)s")
    dist.init_process_group("gloo")
    Run(Config()).fit()
    dist.destroy_process_group()
