"""Learning-rate / width search for a small spectrum classifier.

Every trial is trained data-parallel over all ranks; the study itself is driven
from rank 0, which draws the hyper-parameters and hands them to the others.
Trials are cut short with a median rule, as in Vizier.
"""
import argparse
import json
import logging
import math
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("search")


class TrialPruned(Exception):
    pass


@dataclass
class Trial:
    number: int
    params: dict
    study: "Study"
    values: dict = field(default_factory=dict)
    state: str = "running"

    def report(self, value, step):
        self.values[step] = float(value)

    def should_prune(self):
        return self.study.pruner.prune(self.study, self)


class MedianPruner:
    def __init__(self, startup_trials=3, warmup=1):
        self.startup_trials = startup_trials
        self.warmup = warmup

    def prune(self, study, trial):
        done = [t for t in study.trials if t.state == "complete"]
        if len(done) < self.startup_trials:
            return False
        step = max(trial.values)
        if step < self.warmup:
            return False
        others = [t.values[step] for t in done if step in t.values]
        return trial.values[step] > statistics.median(others)


class Study:
    def __init__(self, pruner, seed):
        self.pruner = pruner
        self.trials = []
        self.rng = random.Random(seed)

    def ask(self):
        box = [None]
        if dist.get_rank() == 0:
            box[0] = {
                "lr": 10 ** self.rng.uniform(-3.5, -0.3),
                "width": self.rng.choice([16, 32, 48]),
                "dropout": self.rng.choice([0.0, 0.1, 0.4]),
                "momentum": self.rng.choice([0.0, 0.8, 0.9]),
            }
        dist.broadcast_object_list(box, src=0)
        trial = Trial(len(self.trials), box[0], self)
        self.trials.append(trial)
        return trial

    def optimize(self, objective, n_trials):
        for _ in range(n_trials):
            trial = self.ask()
            began = time.time()
            try:
                trial.final = objective(trial)
                trial.state = "complete"
            except TrialPruned:
                trial.state = "pruned"
            log.info("trial %d %s after %d epochs, %.2fs", trial.number, trial.state,
                     len(trial.values), time.time() - began)

    @property
    def best(self):
        return min((t for t in self.trials if t.state == "complete"), key=lambda t: t.final)


def make_data(n, seed, sites=2):
    """Spectra from two instruments; the second one is noisier and shifted."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    grid = torch.linspace(0, 1, 24)
    centre = (y.float() + 0.7) / 5.0
    x = torch.exp(-((grid[None] - centre[:, None]) ** 2) / 0.02)
    site = torch.arange(n) % sites
    noise = 0.25 + 0.65 * site.float()
    x = x + noise[:, None] * torch.randn(n, 24, generator=g) + 0.3 * site[:, None].float()
    return TensorDataset(x, y)


def build_model(params):
    w = params["width"]
    return nn.Sequential(nn.Linear(24, w), nn.ReLU(), nn.Dropout(params["dropout"]),
                         nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 4))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.cross_entropy(model(x), y, reduction="sum").item()
        count += len(y)
    return total, count


def mean_over_ranks(total, count):
    t = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def make_objective(args, train_set, val_set):
    rank, world = dist.get_rank(), dist.get_world_size()

    def objective(trial):
        torch.manual_seed(args.seed + trial.number)
        model = DDP(build_model(trial.params))
        opt = torch.optim.SGD(model.parameters(), lr=trial.params["lr"],
                              momentum=trial.params["momentum"])
        sampler = DistributedSampler(train_set, world, rank, shuffle=False)
        loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
        val_loader = DataLoader(val_set, batch_size=128,
                                sampler=DistributedSampler(val_set, world, rank, shuffle=False))
        val_loss = math.inf
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            model.train()
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
            total, count = validate(model.module, val_loader)
            val_loss = mean_over_ranks(total, count)
            if rank == 0:
                log.info("trial %d epoch %d val %.4f", trial.number, epoch, val_loss)
            trial.report(val_loss, epoch)
            if trial.should_prune():
                raise TrialPruned
        return val_loss

    return objective


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--trials", type=int, default=12)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--out", type=Path, default=Path(__file__).parent / "study")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"[%(asctime)s r{rank}] %(message)s")
    torch.set_num_threads(1)

    study = Study(MedianPruner(), args.seed)
    study.optimize(make_objective(args, make_data(1536, 1), make_data(512, 2)), args.trials)

    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        best = study.best
        (args.out / "best.json").write_text(json.dumps({"value": best.final, **best.params}, indent=1))
        log.info("best trial %d: %.4f %s", best.number, best.final, best.params)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
