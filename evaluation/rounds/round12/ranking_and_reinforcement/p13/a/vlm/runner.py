import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from .data import loaders
from .registry import DATASETS, HOOKS, MODELS


class Runner:
    def __init__(self, cfg):
        self.rank = dist.get_rank()
        torch.manual_seed(cfg["seed"])
        self.dataset = DATASETS.make(cfg["dataset"], seed=cfg["seed"])
        self.loader, self.sampler = loaders(self.dataset, cfg["batch"], cfg["seed"])
        self.model = DDP(MODELS.make(cfg["model"]))
        self.hooks = [HOOKS.make(h) for h in cfg["hooks"]]
        self.epochs, self.lr, self.losses = cfg["epochs"], cfg["lr"], []

    def contrast(self, photo, title, kind):
        p, t, scale = self.model(photo, title)
        logits = scale * p @ t.t()
        same = (kind.unsqueeze(0) == kind.unsqueeze(1)).float()
        target = same / same.sum(1, keepdim=True)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))

    def run_step(self, batch):
        loss = self.contrast(*batch)
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(self.lr * p.grad)
        self.losses.append(loss.item())
        for hook in self.hooks:
            hook.after_step(self)

    def run(self):
        for self.epoch in range(self.epochs):
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                self.run_step(batch)
            for hook in self.hooks:
                hook.after_epoch(self)

    @torch.no_grad()
    def recall(self):
        net = self.model.module
        p, t = net.encode_photo(self.dataset.photo), net.encode_title(self.dataset.title)
        best = (p @ t.t()).argmax(1)
        return (self.dataset.kind[best] == self.dataset.kind).float().mean().item()
