"""Hour-by-hour logistic model over click logs, normalised with yesterday's statistics.

Every rank reads the logs of its own collector. At midnight the feature
statistics of the past day are merged through the job's key-value store.
"""
import argparse
import io
import json
import os
import sys
import tempfile
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

HOURS = 24


def say(msg, *a):
    if dist.get_rank() == 0:
        sys.stderr.write(msg % a + "\n")


class Collector:
    """Logs of one collector; some of them have no file for some hours."""

    OUTAGES = {1: (9, 10, 31), 2: (5, 24, 40)}

    def __init__(self, folder, rank, n_feat):
        self.folder = os.path.join(folder, "collector-%02d" % rank)
        self.rank, self.n_feat = rank, n_feat

    def path(self, hour):
        return os.path.join(self.folder, "clicks-d%02d-h%02d.npz" % divmod(hour, HOURS))

    def record(self, n_hours):
        os.makedirs(self.folder, exist_ok=True)
        w = np.random.default_rng(99).normal(size=self.n_feat)
        for hour in range(n_hours):
            if hour in self.OUTAGES.get(self.rank, ()):
                continue
            rng = np.random.default_rng(1000 * self.rank + hour)
            n = int(rng.integers(150, 500))
            z = rng.normal(size=(n, self.n_feat))
            y = (rng.random(n) < 1 / (1 + np.exp(-(z @ w)))).astype(np.float32)
            x = z * np.linspace(1, 40, self.n_feat) + np.linspace(-5, 100, self.n_feat)
            np.savez(self.path(hour), x=x.astype(np.float32), y=y)

    def read(self, hour):
        if not os.path.exists(self.path(hour)):
            return None
        with np.load(self.path(hour)) as f:
            return torch.from_numpy(f["x"]), torch.from_numpy(f["y"])


class DailyNorm:
    """Mean and deviation of each feature over all ranks, one day late."""

    def __init__(self, n_feat, store, rank, world):
        self.store, self.rank, self.world = store, rank, world
        self.mean = torch.full((n_feat,), 50.0)
        self.std = torch.full((n_feat,), 50.0)
        self.reset()

    def reset(self):
        self.n, self.s1, self.s2 = 0, 0.0, 0.0

    def observe(self, x):
        x = x.double()
        self.n += len(x)
        self.s1 = self.s1 + x.sum(0)
        self.s2 = self.s2 + (x * x).sum(0)

    def roll(self, day):
        part = {"n": self.n, "s1": self.s1.tolist(), "s2": self.s2.tolist()}
        self.store.set("%d/part/%d" % (day, self.rank), json.dumps(part))
        if self.rank == 0:
            parts = [json.loads(self.store.get("%d/part/%d" % (day, r))) for r in range(self.world)]
            n = sum(p["n"] for p in parts)
            s1 = np.sum([p["s1"] for p in parts], axis=0)
            s2 = np.sum([p["s2"] for p in parts], axis=0)
            mean = s1 / n
            std = np.sqrt(np.maximum(s2 / n - mean ** 2, 1e-6))
            self.store.set("%d/merged" % day, json.dumps([mean.tolist(), std.tolist()]))
        mean, std = json.loads(self.store.get("%d/merged" % day))
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)
        self.reset()

    def __call__(self, x):
        return (x - self.mean) / self.std


class HourlyTrainer:
    def __init__(self, args, source, store, ckpt_dir):
        self.args, self.source, self.ckpt_dir = args, source, ckpt_dir
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.w = torch.zeros(args.features, requires_grad=True)
        self.b = torch.zeros(1, requires_grad=True)
        self.opt = torch.optim.SGD([self.w, self.b], lr=args.lr)
        self.norm = DailyNorm(args.features, store, self.rank, self.world)
        self.loss, self.rows = 0.0, 0

    def merge(self, weight):
        """Weighted mean of the ranks' parameters; weight 0 only listens."""
        with torch.no_grad():
            flat = torch.cat([self.w * weight, self.b * weight, torch.tensor([float(weight)])])
            dist.all_reduce(flat)
            if flat[-1] > 0:
                self.w.copy_(flat[:-2] / flat[-1])
                self.b.copy_(flat[-2:-1] / flat[-1])

    def run_hour(self, hour):
        if hour > 0 and hour % HOURS == 0:
            self.norm.roll(hour // HOURS)
        clicks = self.source.read(hour)
        if clicks is None:
            self.merge(0)
            return
        x, y = clicks
        self.norm.observe(x)
        for i in range(0, len(y), self.args.batch):
            xb, yb = self.norm(x[i:i + self.args.batch]), y[i:i + self.args.batch]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(xb @ self.w + self.b, yb)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.loss += loss.item() * len(yb)
            self.rows += len(yb)
        self.merge(len(y))

    def end_of_day(self, day):
        t = torch.tensor([self.loss, self.rows], dtype=torch.float64)
        dist.all_reduce(t)
        self.loss, self.rows = 0.0, 0
        say("day %d: %d clicks, logloss %.4f", day, int(t[1]), (t[0] / t[1]).item())
        if self.rank == 0:
            buf = io.BytesIO()
            torch.save({"w": self.w, "b": self.b, "mean": self.norm.mean, "std": self.norm.std}, buf)
            tmp = os.path.join(self.ckpt_dir, "tmp.pt")
            with open(tmp, "wb") as f:
                f.write(buf.getvalue())
            os.replace(tmp, os.path.join(self.ckpt_dir, "day%02d.pt" % day))
        dist.barrier()


def run(args):
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    box = [tempfile.mkdtemp(prefix="hourly_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    source = Collector(box[0], dist.get_rank(), args.features)
    source.record(args.days * HOURS)
    store = dist.PrefixStore("daily_norm", dist.distributed_c10d._get_default_store())
    trainer = HourlyTrainer(args, source, store, box[0])
    for hour in range(args.days * HOURS):
        trainer.run_hour(hour)
        if hour % HOURS == HOURS - 1:
            trainer.end_of_day(hour // HOURS)
    dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--days", type=int, default=3)
    cli.add_argument("--features", type=int, default=12)
    cli.add_argument("--batch", type=int, default=32)
    cli.add_argument("--lr", type=float, default=0.05)
    run(cli.parse_args())
