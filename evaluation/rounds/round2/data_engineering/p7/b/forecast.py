"""Load forecasting. Windows are cut and normalised in a child process and handed over in a queue."""
import logging
import multiprocessing
import os
import queue
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(processName)s %(message)s", datefmt="%H:%M:%S")
log = logging.getLogger("forecast")
mp = multiprocessing.get_context("spawn")


@dataclass
class Cfg:
    meters: int = 5
    hours: int = 1200
    past: int = 48
    future: int = 12
    stride: int = 6
    batch: int = 16
    epochs: int = 2
    depth: int = 4
    hidden: int = 32
    lr: float = 2e-3
    seed: int = 17


def create_store(root: Path, cfg: Cfg):
    """Meter readings as .npy, with a manifest in sqlite."""
    db = sqlite3.connect(root / "manifest.db")
    db.execute("create table meter (id integer primary key, file text, hours integer)")
    rng = np.random.default_rng(cfg.seed)
    t = np.arange(cfg.hours)
    for m in range(cfg.meters):
        load = 2 + np.sin(2 * np.pi * (t / 24 + rng.random())) + 0.5 * np.sin(2 * np.pi * t / 168)
        np.save(root / f"meter{m}.npy", (load + 0.1 * rng.normal(size=cfg.hours)).astype(np.float32))
        db.execute("insert into meter values (?, ?, ?)", (m, f"meter{m}.npy", cfg.hours))
    db.commit()
    db.close()


def my_meters(root: Path, rank: int, world: int):
    db = sqlite3.connect(f"file:{root / 'manifest.db'}?mode=ro", uri=True)
    rows = db.execute("select file, hours from meter where id % ? = ? order by id", (world, rank)).fetchall()
    db.close()
    return rows


def windows_of(hours, cfg):
    return (hours - cfg.past - cfg.future) // cfg.stride


def cut_windows(root, files, cfg, out, quit_event):
    """Body of the child: all windows of all meters, in batches, epoch after epoch."""
    x, y = [], []
    for epoch in range(cfg.epochs):
        for name, hours in files:
            series = np.load(os.path.join(root, name), mmap_mode="r")
            mean, std = float(series.mean()), float(series.std())
            for k in range(windows_of(hours, cfg)):
                if quit_event.is_set():
                    return
                at = k * cfg.stride
                part = (np.array(series[at:at + cfg.past + cfg.future]) - mean) / std
                x.append(part[:cfg.past])
                y.append(part[cfg.past:])
                if len(x) == cfg.batch:
                    out.put((np.stack(x), np.stack(y)))
                    x, y = [], []


class Feeder:
    def __init__(self, root, files, cfg):
        self.queue = mp.Queue(maxsize=cfg.depth)
        self.quit = mp.Event()
        self.child = mp.Process(target=cut_windows, args=(str(root), files, cfg, self.queue, self.quit), name="cutter")
        self.child.start()

    def get(self):
        x, y = self.queue.get()
        return torch.from_numpy(x), torch.from_numpy(y)

    def close(self):
        self.quit.set()
        while self.child.is_alive():
            try:
                self.queue.get(timeout=0.1)
            except queue.Empty:
                pass
        self.child.join()
        self.queue.close()


class Forecaster(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.rnn = nn.GRU(1, cfg.hidden, batch_first=True)
        self.head = nn.Linear(cfg.hidden, cfg.future)

    def forward(self, x):
        _, h = self.rnn(x.unsqueeze(-1))
        return self.head(h[-1])


def main(cfg: Cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    root = [None]
    if rank == 0:
        root = [Path(tempfile.mkdtemp(prefix="forecast-"))]
        create_store(root[0], cfg)
    dist.broadcast_object_list(root, src=0)
    root = root[0]

    files = my_meters(root, rank, world)
    have = torch.tensor(cfg.epochs * sum(windows_of(h, cfg) for _, h in files) // cfg.batch)
    dist.all_reduce(have, op=dist.ReduceOp.MIN)
    steps = int(have)
    if rank == 0:
        log.info("%d steps, %d meters here", steps, len(files))

    torch.manual_seed(cfg.seed)
    model = nn.parallel.DistributedDataParallel(Forecaster(cfg))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=cfg.lr * 5, total_steps=steps)
    feeder = Feeder(root, files, cfg)
    began = time.time()
    for step in range(steps):
        x, y = feeder.get()
        loss = nn.functional.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 10 == 9:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                log.info("step %d/%d loss %.4f (%.1f steps/s)", step + 1, steps, mean, (step + 1) / (time.time() - began))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "cfg": vars(cfg)}, root / "forecast.pt")
        log.info("saved %s", root / "forecast.pt")
    dist.barrier()
    feeder.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Cfg())
