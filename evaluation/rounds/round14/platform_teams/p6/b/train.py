"""Elastic trainer: every generation rebuilds the trainer from the sharded checkpoint of the one before."""
import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from callbacks import EarlyStop, History, PlateauLR
from sharded import ShardedCheckpoint


@dataclasses.dataclass
class Settings:
    lr: float = 0.03
    batch: int = 32
    eval_every: int = 5
    max_steps: int = 200
    steps_per_generation: int = 40
    patience: int = 10
    seed: int = 2


class Source:
    def __init__(self, settings, rank):
        gen = torch.Generator().manual_seed(settings.seed)
        self.mix = torch.randn(10, 2, generator=gen)
        self.gen = torch.Generator().manual_seed(1000 + rank)
        self.batch = settings.batch
        self.val = self._draw(torch.Generator().manual_seed(500 + rank), 200)

    def _draw(self, gen, rows):
        x = torch.randn(rows, 10, generator=gen)
        return x, 0.3 * (x @ self.mix) + 0.5 * torch.randn(rows, 2, generator=gen)

    def next(self):
        return self._draw(self.gen, self.batch)


class Trainer:
    def __init__(self, settings, folder):
        self.cfg = settings
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        self.model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=settings.lr)
        self.source = Source(settings, self.rank)
        self.callbacks = [PlateauLR(patience=6), EarlyStop(settings.patience), History()]
        self.checkpoint = ShardedCheckpoint(folder)
        self.step = 0
        self.should_stop = False

    def train_step(self):
        x, y = self.source.next()
        self.opt.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def validate(self):
        x, y = self.source.val
        value = F.mse_loss(self.model(x), y).reshape(1)
        dist.all_reduce(value)
        return value.item() / self.world

    def fit(self, until):
        while self.step < min(until, self.cfg.max_steps) and not self.should_stop:
            self.train_step()
            if self.step % self.cfg.eval_every == 0:
                value = self.validate()
                for cb in self.callbacks:
                    cb.on_validation(self, value)


def run(settings, folder):
    generation = 0
    while True:
        trainer = Trainer(settings, folder)
        if generation:
            trainer.checkpoint.load(trainer)
        trainer.fit(until=(generation + 1) * settings.steps_per_generation)
        total = trainer.checkpoint.save(trainer)
        if trainer.rank == 0:
            best = next(cb.best for cb in trainer.callbacks if isinstance(cb, EarlyStop))
            print(f"generation {generation} step {trainer.step} best {best:.4f} saved {total} bytes", flush=True)
        if trainer.should_stop or trainer.step >= settings.max_steps:
            return trainer
        generation += 1


def main():
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp(prefix="elastic_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    folder = Path(box[0])
    trainer = run(Settings(), folder)
    value = trainer.validate()
    if dist.get_rank() == 0:
        points = len(next(cb.points for cb in trainer.callbacks if isinstance(cb, History)))
        print(f"finished at step {trainer.step} validation {value:.4f} history {points}", flush=True)
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
