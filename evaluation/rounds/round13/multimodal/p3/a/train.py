import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from video import VideoDataModule


@dataclass
class Settings:
    clips: int = 240
    batch_size: int = 10
    workers: int = 1
    epochs: int = 3
    lr: float = 1e-2
    seed: int = 3
    out: str = "runs"


class ClipEncoder(nn.Module):
    def __init__(self, width=24, classes=4):
        super().__init__()
        self.frame = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, width))
        self.temporal = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, clip):
        b, t, h, w = clip.shape
        feats = self.frame(clip.reshape(b * t, 1, h, w)).view(b, t, -1)
        out, _ = self.temporal(feats)
        return self.head(out.mean(1))


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.data = VideoDataModule(cfg.clips, cfg.batch_size, cfg.workers, self.rank, self.world, cfg.seed + self.rank)

    def fit(self):
        self.model = DDP(ClipEncoder())
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)
        self.data.setup()
        loader = self.data.train_loader()
        for epoch in range(self.cfg.epochs):
            loss = self.train_epoch(loader)
            acc = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} val acc {acc:.3f}", flush=True)
                self.save(epoch, acc)
        self.data.teardown()

    def train_epoch(self, loader):
        self.model.train()
        running = torch.zeros(2)
        for clip, label in loader:
            loss = F.cross_entropy(self.model(clip), label)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            running += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(running)
        return (running[0] / running[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        score = torch.zeros(2)
        for clip, label in self.data.valid_loader():
            pred = self.model.module(clip).argmax(-1)
            score += torch.tensor([(pred == label).sum().item(), len(label)], dtype=torch.float)
        dist.all_reduce(score)
        return (score[0] / score[1]).item()

    def save(self, epoch, acc):
        os.makedirs(self.cfg.out, exist_ok=True)
        torch.save({"model": self.model.module.state_dict(), "epoch": epoch, "acc": acc},
                   os.path.join(self.cfg.out, "last.pt"))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(Settings()).fit()
    dist.barrier()
    dist.destroy_process_group()
