import dataclasses

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .checkpoint import CheckpointManager


@dataclasses.dataclass
class Settings:
    total_steps: int
    seed: int = 31
    rows: int = 640
    features: int = 24
    hidden: int = 96
    batch_size: int = 16
    accum: int = 2
    lr: float = 3e-3
    save_every: int = 8
    poll_every: int = 4
    mse_until: int = 20


def make_rows(s):
    g = torch.Generator().manual_seed(s.seed)
    x = torch.randn(s.rows, s.features, generator=g)
    w = torch.randn(s.features, 1, generator=g)
    y = torch.tanh(x @ w / 3) + 0.05 * torch.randn(s.rows, 1, generator=g)
    cut = s.rows - 128
    return TensorDataset(x[:cut], y[:cut]), (x[cut:], y[cut:])


class Engine:
    def __init__(self, settings, root, signals):
        self.s = settings
        self.signals = signals
        torch.manual_seed(settings.seed)
        self.net = nn.Sequential(
            nn.Linear(settings.features, settings.hidden), nn.SiLU(), nn.LayerNorm(settings.hidden),
            nn.Linear(settings.hidden, settings.hidden), nn.SiLU(), nn.Linear(settings.hidden, 1),
        )
        self.ddp = DistributedDataParallel(self.net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=settings.lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=60)
        train, self.val = make_rows(settings)
        self.sampler = DistributedSampler(train, shuffle=True, seed=settings.seed, drop_last=True)
        self.loader = DataLoader(train, batch_size=settings.batch_size, sampler=self.sampler, drop_last=True)
        self.ckpt = CheckpointManager(root)
        self.step = 0
        self.epoch = 0
        self.in_epoch = 0

    def batches(self):
        while True:
            self.sampler.set_epoch(self.epoch)
            skip = self.in_epoch
            for i, batch in enumerate(self.loader):
                if i < skip:
                    continue
                self.in_epoch = i + 1
                yield batch
            self.epoch += 1
            self.in_epoch = 0

    def loss(self, x, y):
        pred = self.ddp(x)
        if self.step < self.s.mse_until:
            return nn.functional.mse_loss(pred, y)
        return nn.functional.huber_loss(pred, y, delta=0.5)

    def train_step(self, stream):
        total = 0.0
        with self.ddp.no_sync():
            for _ in range(self.s.accum - 1):
                part = self.loss(*next(stream)) / self.s.accum
                part.backward()
                total += part.item()
        part = self.loss(*next(stream)) / self.s.accum
        part.backward()
        total += part.item()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.sched.step()
        self.opt.zero_grad()
        self.step += 1
        return total

    def fit(self):
        stream = self.batches()
        while self.step < self.s.total_steps:
            loss = self.train_step(stream)
            if self.step % self.s.save_every == 0:
                self.ckpt.save(self.step, self.state_dict())
                if dist.get_rank() == 0:
                    print(f"step {self.step:3d} loss {loss:.4f}", flush=True)
            if self.step % self.s.poll_every == 0 and self.signals.stop_agreed():
                break
        self.ckpt.save(self.step, self.state_dict())

    def close(self):
        self.ckpt.flush()
        dist.barrier()

    def state_dict(self):
        return {
            "net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
            "where": [self.step, self.epoch, self.in_epoch],
        }

    def resume(self):
        state = self.ckpt.load_latest()
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.step, self.epoch, self.in_epoch = state["where"]

    @torch.no_grad()
    def evaluate(self):
        x, y = (t.tensor_split(dist.get_world_size())[dist.get_rank()] for t in self.val)
        out = nn.functional.mse_loss(self.net(x), y)
        dist.all_reduce(out)
        return out.item() / dist.get_world_size()
