"""DeepONet for the antiderivative operator, data parallel.

Functions are drawn from a Gaussian random field on every rank; the root rank
writes prediction snapshots and a metrics log from a background thread.
"""
import argparse
import json
import logging
import os
import queue
import threading

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

logger = logging.getLogger("deeponet")


class MPIWorld:
    """rank/size/root in one place."""

    def __init__(self, root=0):
        dist.init_process_group(backend="gloo")
        self.rank, self.size, self.root = dist.get_rank(), dist.get_world_size(), root

    @property
    def is_root(self):
        return self.rank == self.root

    def sum_(self, t):
        dist.all_reduce(t)
        return t

    def gather(self, t):
        out = [torch.empty_like(t) for _ in range(self.size)] if self.is_root else None
        dist.gather(t, out, dst=self.root)
        return torch.cat(out) if self.is_root else None


class OutputServer(threading.Thread):
    """Keeps the disk out of the training loop."""

    def __init__(self, folder, depth=2):
        super().__init__(name="output", daemon=True)
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self.jobs = queue.Queue(maxsize=depth)
        self.metrics = open(os.path.join(folder, "metrics.jsonl"), "w")

    def submit(self, step, fields, record):
        self.jobs.put((step, fields, record))

    def run(self):
        while True:
            job = self.jobs.get()
            if job is None:
                break
            step, fields, record = job
            np.savez_compressed(os.path.join(self.folder, f"snap_{step:05d}.npz"), **fields)
            self.metrics.write(json.dumps({"step": step, **record}) + "\n")
            self.metrics.flush()

    def close(self):
        self.jobs.put(None)
        self.join()
        self.metrics.close()


class GRF:
    def __init__(self, m=50, length=0.2, seed=0):
        self.x = torch.linspace(0, 1, m, dtype=torch.double)
        k = torch.exp(-0.5 * ((self.x[:, None] - self.x[None]) / length) ** 2)
        self.chol = torch.linalg.cholesky(k + 1e-8 * torch.eye(m, dtype=torch.double))
        self.gen = torch.Generator().manual_seed(seed)

    def sample(self, n):
        z = torch.randn(n, len(self.x), generator=self.gen, dtype=torch.double)
        v = z @ self.chol.T
        dx = self.x[1] - self.x[0]
        s = torch.cumsum((v[:, 1:] + v[:, :-1]) / 2 * dx, 1)
        s = torch.cat([torch.zeros(n, 1, dtype=torch.double), s], 1)
        return v.float(), s.float()


def mlp(*dims):
    mods = []
    for a, b in zip(dims[:-1], dims[1:]):
        mods += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*mods[:-1])


class DeepONet(nn.Module):
    def __init__(self, m, p=32):
        super().__init__()
        self.branch = mlp(m, 48, 48, p)
        self.trunk = mlp(1, 48, 48, p)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, v, y):
        return self.branch(v) @ self.trunk(y).T + self.bias


class Training:
    def __init__(self, cfg, world):
        self.cfg, self.world = cfg, world
        torch.manual_seed(cfg.seed)
        self.data = GRF(cfg.sensors, seed=cfg.seed * 100 + world.rank)
        self.y = self.data.x.float()[:, None]
        self.model = DeepONet(cfg.sensors)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.test = self.data.sample(cfg.test)
        self.best = float("inf")
        self.output = None
        if world.is_root:
            self.output = OutputServer(cfg.folder)
            self.output.start()

    def step(self):
        v, s = self.data.sample(self.cfg.batch)
        loss = (self.model(v, self.y) - s).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            self.world.sum_(p.grad).div_(self.world.size)
        self.opt.step()
        return loss.item()

    @torch.no_grad()
    def validate(self, step, loss):
        v, s = self.test
        pred = self.model(v, self.y)
        rel = (pred - s).norm(dim=1) / s.norm(dim=1)
        every = self.world.gather(rel)
        if not self.world.is_root:
            return
        every = every.numpy()
        record = {"loss": loss, "mean": float(every.mean()), "worst": float(every.max())}
        if step > self.cfg.warmup and record["mean"] < self.best:
            self.best = record["mean"]
            record["median"] = np.median(every)
            torch.save(self.model.state_dict(), os.path.join(self.cfg.folder, "best.pt"))
        logger.info("step %4d loss %.3e rel %.3f worst %.3f", step, loss, record["mean"], record["worst"])
        self.output.submit(step, {"v": v[:4].numpy(), "s": s[:4].numpy(), "pred": pred[:4].numpy()}, record)

    def run(self):
        for step in range(1, self.cfg.steps + 1):
            loss = self.step()
            if step % self.cfg.every == 0:
                self.validate(step, loss)
        if self.output is not None:
            self.output.close()
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--every", type=int, default=20)
    ap.add_argument("--warmup", type=int, default=100, help="no best model before this step")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--test", type=int, default=40)
    ap.add_argument("--sensors", type=int, default=50)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--folder", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "deeponet_out"))
    cfg = ap.parse_args()
    world = MPIWorld()
    logging.basicConfig(level=logging.INFO, format=f"[rank {world.rank}] %(message)s")
    Training(cfg, world).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
