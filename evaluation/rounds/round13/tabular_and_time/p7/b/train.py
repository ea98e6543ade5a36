"""Load forecasting in two stages: next-hour pretraining, then fine-tuning on a longer horizon."""
import os
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from forecaster import Forecaster, pinball
from gradsync import GradSync
from series import LoadCurves


@dataclass(frozen=True)
class Stage:
    name: str
    horizon: int
    steps: int
    lr: float
    batch: int = 48


STAGES = (Stage("pretrain", 1, 40, 3e-3), Stage("finetune", 12, 40, 1e-3))


class TwoStageTrainer:
    def __init__(self, curves, seed):
        self.rank, self.world, self.curves = dist.get_rank(), dist.get_world_size(), curves
        torch.manual_seed(seed + self.rank)
        self.rng = np.random.default_rng([seed, self.rank])
        self.model = Forecaster(horizon=STAGES[0].horizon)
        self.sync = GradSync(self.model)

    def enter(self, stage):
        if self.model.head.out_features != stage.horizon:
            self.model.reset_head(stage.horizon)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=stage.lr, weight_decay=1e-3)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=stage.lr, total_steps=stage.steps)

    def run(self, stage):
        self.enter(stage)
        self.model.train()
        for step in range(1, stage.steps + 1):
            history, target = self.curves.draw(stage.batch, stage.horizon, self.rng)
            loss = pinball(self.model(history), target)
            self.opt.zero_grad()
            loss.backward()
            self.sync.average()
            self.opt.step()
            self.sched.step()
            if step % 20 == 0:
                self.log(stage, step, self.evaluate(stage))

    @torch.no_grad()
    def evaluate(self, stage):
        self.model.eval()
        history, target = self.curves.draw(128, stage.horizon, np.random.default_rng(0), lo=0.8, hi=1.0)
        loss = pinball(self.model(history), target)
        dist.all_reduce(loss)
        self.model.train()
        return loss.item() / self.world

    def log(self, stage, step, value):
        if self.rank == 0:
            print(f"{stage.name} step {step} lr {self.sched.get_last_lr()[0]:.1e} holdout pinball {value:.4f}", flush=True)

    def save(self):
        if self.rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "forecaster.pt")
                torch.save(self.model.state_dict(), path)
                print(f"saved {os.path.getsize(path)} bytes", flush=True)


def main():
    dist.init_process_group("gloo")
    trainer = TwoStageTrainer(LoadCurves(dist.get_rank()), seed=31)
    for stage in STAGES:
        trainer.run(stage)
    trainer.save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
