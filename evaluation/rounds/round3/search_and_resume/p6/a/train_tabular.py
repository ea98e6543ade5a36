"""Tabular regression with early stopping, roll-back on plateaus and a
background checkpoint writer.  Plain SPMD: same seed everywhere, averaged
gradients, no wrapper module.

    torchrun --nproc-per-node=2 train_tabular.py
"""
import argparse
import copy
import os
import queue
import threading

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=36)
    p.add_argument("--patience", type=int, default=2, help="bad epochs before a roll-back")
    p.add_argument("--rollbacks", type=int, default=4, help="roll-backs before the run is stopped")
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("--decay", type=float, default=0.4)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--outdir", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results"))
    return p.parse_args()


def friedman(n, seed):
    rng = np.random.RandomState(seed)
    x = rng.uniform(size=(n, 10))
    y = (10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
         + 10 * x[:, 3] + 5 * x[:, 4] + rng.normal(size=n))
    y = (y - 14.4) / 5.0
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


class CheckpointWriter:
    """Writes snapshots on a thread so that training need not wait for the disk."""

    def __init__(self, outdir):
        os.makedirs(outdir, exist_ok=True)
        self.outdir = outdir
        self.jobs = queue.Queue(maxsize=2)
        self.thread = threading.Thread(target=self._work, name="ckpt-writer")
        self.thread.start()

    def _work(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            name, payload = job
            tmp = os.path.join(self.outdir, name + ".tmp")
            torch.save(payload, tmp)
            os.replace(tmp, os.path.join(self.outdir, name))

    def put(self, name, payload):
        self.jobs.put((name, copy.deepcopy(payload)))

    def close(self):
        self.jobs.put(None)
        self.thread.join()


class PlateauController:
    """Keeps the best weights; after `patience` bad epochs goes back to them
    with a smaller step, and after `rollbacks` of those ends the run."""

    def __init__(self, model, opt, patience, rollbacks, decay, writer=None):
        self.model, self.opt, self.writer = model, opt, writer
        self.patience, self.rollbacks, self.decay = patience, rollbacks, decay
        self.best = float("inf")
        self.best_state = None
        self.bad = 0
        self.n_rollbacks = 0

    @property
    def finished(self):
        return self.n_rollbacks >= self.rollbacks

    def update(self, value, epoch):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
            self.best_state = copy.deepcopy(self.model.state_dict())
            if self.writer is not None:
                self.writer.put("best.pt", {"model": self.best_state, "epoch": epoch, "value": value})
            return "best"
        self.bad += 1
        if self.bad < self.patience:
            return ""
        self.bad = 0
        self.n_rollbacks += 1
        if self.best_state is not None:
            self.model.load_state_dict(self.best_state)
        for group in self.opt.param_groups:
            group["lr"] *= self.decay
        self.opt.state.clear()
        return "rollback"


def average_gradients(model):
    world = dist.get_world_size()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def global_mse(model, x, y):
    with torch.no_grad():
        err = (model(x).squeeze(1) - y).square()
    acc = torch.stack([err.sum(), torch.tensor(float(len(y)))])
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    x, y = (t[rank::world] for t in friedman(2048, 0))
    xv, yv = (t[rank::world] for t in friedman(512, 1))

    writer = CheckpointWriter(args.outdir) if rank == 0 else None
    control = PlateauController(model, opt, args.patience, args.rollbacks, args.decay, writer)

    steps = len(x) // args.batch_size
    shuffle = torch.Generator().manual_seed(args.seed + rank)
    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=shuffle)
        for k in range(steps):
            idx = order[k * args.batch_size:(k + 1) * args.batch_size]
            loss = (model(x[idx]).squeeze(1) - y[idx]).square().mean()
            opt.zero_grad()
            loss.backward()
            average_gradients(model)
            opt.step()
        value = global_mse(model, xv, yv)
        note = control.update(value, epoch)
        if rank == 0:
            print(f"epoch {epoch:3d}  val {value:.5f}  lr {opt.param_groups[0]['lr']:.2e}  {note}", flush=True)
        if control.finished:
            break

    model.load_state_dict(control.best_state or model.state_dict())
    final = global_mse(model, xv, yv)
    if writer is not None:
        writer.put("final.pt", {"model": model.state_dict(), "value": final})
        writer.close()
        print(f"stopped after epoch {epoch}; best {control.best:.5f}, final {final:.5f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
