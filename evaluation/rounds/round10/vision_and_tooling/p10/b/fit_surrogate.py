"""Surrogate of a damped oscillator: (stiffness, damping, x0) -> trajectory."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from kit.callbacks import EarlyStopping, ScalarLogger, StepTimer
from kit.trainer import Trainer


def trajectories(n, seed):
    rng = np.random.default_rng(seed)
    k, c, x0 = rng.uniform(1, 4, n), rng.uniform(0.1, 0.6, n), rng.uniform(-1, 1, n)
    t = np.linspace(0, 3, 24)
    w = np.sqrt(k - c ** 2 / 4)
    y = x0[:, None] * np.exp(-c[:, None] * t / 2) * np.cos(w[:, None] * t)
    x = np.stack([k, c, x0], 1)
    return TensorDataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32)))


def loader(ds, batch, train):
    return DataLoader(ds, batch, sampler=DistributedSampler(ds, shuffle=train), drop_last=train)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--min-delta", type=float, default=0.01)
    p.add_argument("--log-file", default="scalars.jsonl")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 24))
    callbacks = [EarlyStopping(args.patience, args.min_delta)]
    if rank == 0:
        callbacks += [StepTimer(), ScalarLogger(args.log_file)]
    trainer = Trainer(net, loader(trajectories(512, 0), 32, True), loader(trajectories(128, 1), 32, False),
                      lr=1e-2, epochs=args.epochs, callbacks=callbacks)
    final = trainer.fit()
    if rank == 0:
        print(f"stopped after epoch {trainer.epoch}, validation loss {final:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
