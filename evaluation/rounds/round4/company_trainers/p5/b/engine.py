import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from model import TinyLM, freeze_except
from plugins import REGISTRY


class Engine:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0
        self.entropy_weight = 0.0
        self.plugins = [REGISTRY[spec["name"]](**{k: v for k, v in spec.items() if k != "name"})
                        for spec in cfg["plugins"]]
        # dropout and sampling differ between the ranks
        torch.manual_seed(cfg["seed"] + self.rank)
        self.gen = torch.Generator().manual_seed(cfg["seed"] * 10 + self.rank)

    # --- small services for the plugins
    def emit(self, event, *args):
        for p in self.plugins:
            fn = getattr(p, f"on_{event}", None)
            if fn is not None:
                fn(self, *args)

    def say(self, text, quiet_ranks=True):
        if self.rank == 0 or not quiet_ranks:
            print(text, flush=True)

    def mean(self, value):
        t = torch.tensor(float(value))
        dist.all_reduce(t)
        return t.item() / self.world

    # --- life cycle
    def setup(self):
        self.model = TinyLM(**self.cfg["model"])
        freeze_except(self.model, self.cfg["train"])
        self.emit("build")
        self.net = DDP(self.model, gradient_as_bucket_view=True)
        self.emit("fit_start")
        self.live = [p for p in self.model.parameters() if p.requires_grad]
        o = self.cfg["optim"]
        self.opt = torch.optim.AdamW(self.live, lr=o["lr"], weight_decay=o["weight_decay"])

    def batch(self, gen):
        v, t = self.cfg["model"]["vocab"], self.cfg["model"]["context"]
        start = torch.randint(v, (self.cfg["batch"], 1), generator=gen)
        stride = torch.randint(1, 7, (self.cfg["batch"], 1), generator=gen)
        seq = (start + stride * torch.arange(t + 1)) % v
        return seq[:, :-1], seq[:, 1:]

    def loss(self, ids, target):
        logp = self.net(ids).log_softmax(-1)
        ce = F.nll_loss(logp.flatten(0, 1), target.flatten())
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return ce - 0.1 * self.entropy_weight * entropy

    def fit(self):
        accum = self.cfg["accum"]
        for _ in range(self.cfg["steps"]):
            self.emit("step_start")
            total = 0.0
            for i in range(accum):
                ctx = self.net.no_sync() if i < accum - 1 else contextlib.nullcontext()
                with ctx:
                    loss = self.loss(*self.batch(self.gen)) / accum
                    loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(self.live, self.cfg["optim"]["clip"])
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.emit("step_end", total)

    @torch.no_grad()
    def validate(self, batches=4):
        gen = torch.Generator().manual_seed(99 + self.rank)
        self.net.eval()
        total = 0.0
        for _ in range(batches):
            ids, target = self.batch(gen)
            total += F.cross_entropy(self.model(ids).flatten(0, 1), target.flatten()).item()
        self.net.train()
        return self.mean(total / batches)

    def export(self, path):
        bundle = {"step": self.step}
        self.emit("export", bundle)
        if self.rank == 0:
            torch.save(bundle, path)
        dist.barrier()
        return bundle
