"""Multi label tagging of road scenes. Trainer with an event writer that does its file work on a thread."""
import json
import os
import queue
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TAGS = ("car", "person", "bike", "sign", "truck")


@dataclass
class TrainConfig:
    epochs: int = 6
    batch_size: int = 16
    lr: float = 4e-3
    train_images: int = 320
    val_images: int = 96
    flush_every: int = 16
    queue_size: int = 10
    seed: int = 21
    logdir: str = field(default_factory=lambda: os.environ.get("LOGDIR", ""))


class EventWriter:
    """Appends events as json lines. add_* only puts to a short queue, a thread does the rest."""

    def __init__(self, logdir, queue_size, flush_every):
        os.makedirs(logdir, exist_ok=True)
        self.path = os.path.join(logdir, "events.jsonl")
        self._queue = queue.Queue(maxsize=queue_size)
        self._flush_every = flush_every
        self._thread = threading.Thread(target=self._write_loop, name="event-writer", daemon=True)
        self._thread.start()

    def _write_loop(self):
        with open(self.path, "a") as out:
            for n in range(1 << 62):
                event = self._queue.get()
                if event is None:
                    return
                out.write(json.dumps(event) + "\n")
                if n % self._flush_every == 0:
                    out.flush()

    def add_scalar(self, tag, value, step):
        self._queue.put({"wall": time.time(), "tag": tag, "step": step, "value": value})

    def add_scalars(self, group, values, step):
        for name, value in values.items():
            self.add_scalar(f"{group}/{name}", value, step)

    def add_config(self, config):
        self._queue.put({"wall": time.time(), "config": asdict(config)})

    def close(self):
        self._queue.put(None)
        self._thread.join()


class NullWriter:
    def __getattr__(self, name):
        return lambda *a, **k: None


class SceneTags(Dataset):
    def __init__(self, n, seed, train):
        rng = np.random.default_rng(seed)
        patterns = np.random.default_rng(5).normal(size=(len(TAGS), 3, 14, 14)).astype(np.float32)
        self.y = (rng.random((n, len(TAGS))) < 0.35).astype(np.float32)
        self.x = np.einsum("nk,kchw->nchw", self.y, patterns) + rng.normal(size=(n, 3, 14, 14)).astype(np.float32)
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = torch.from_numpy(self.x[i])
        if self.train:
            x = x + 0.1 * torch.randn_like(x)
        return x.float(), torch.from_numpy(self.y[i])


def average_precision(scores, labels):
    order = np.argsort(-scores, kind="stable")
    hits = labels[order]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1, dtype=np.float32)
    return (precision * hits).sum() / max(hits.sum(), 1)


class TagTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        net = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 32, 3, 2), nn.SiLU(),
                            nn.Flatten(), nn.Linear(32 * 4, len(TAGS)))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optim = torch.optim.Adam(net.parameters(), lr=cfg.lr)
        train = SceneTags(cfg.train_images, 1, True)
        val = SceneTags(cfg.val_images, 2, False)
        self.sampler = DistributedSampler(train, seed=cfg.seed)
        self.train_loader = DataLoader(train, cfg.batch_size, sampler=self.sampler, num_workers=1)
        self.val_loader = DataLoader(val, cfg.batch_size, sampler=DistributedSampler(val, shuffle=False))
        if self.rank == 0:
            logdir = cfg.logdir or tempfile.mkdtemp(prefix="tags_")
            self.writer = EventWriter(logdir, cfg.queue_size, cfg.flush_every)
        else:
            self.writer = NullWriter()
        self.global_step = 0
        self.best = {"map": 0.0, "epoch": -1}

    def fit(self):
        self.writer.add_config(self.cfg)
        for epoch in range(self.cfg.epochs):
            self.sampler.set_epoch(epoch)
            self.run_train_epoch()
            scores, labels = self.predict()
            self.report(epoch, scores, labels)
        self.writer.close()

    def run_train_epoch(self):
        self.model.train()
        for x, y in self.train_loader:
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(x), y)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.global_step += 1
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            self.writer.add_scalar("train/loss", mean_loss.item() / self.world, self.global_step)

    @torch.no_grad()
    def predict(self):
        self.model.eval()
        mine = torch.cat([torch.stack([self.model.module(x).sigmoid(), y]) for x, y in self.val_loader], 1)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        scores, labels = torch.cat(parts, 1).numpy()
        return scores, labels

    def report(self, epoch, scores, labels):
        ap = {tag: average_precision(scores[:, k], labels[:, k]) for k, tag in enumerate(TAGS)}
        mean_ap = float(np.mean(list(ap.values())))
        self.writer.add_scalar("val/mAP", mean_ap, self.global_step)
        if mean_ap > self.best["map"]:
            self.best = {"map": mean_ap, "epoch": epoch}
        if (epoch + 1) % 2 == 0:
            self.writer.add_scalars("val/AP", {tag: float(v) for tag, v in ap.items()}, self.global_step)
        if self.rank == 0:
            print(f"epoch {epoch:2d}  mAP {mean_ap:.4f}  best {self.best['map']:.4f} @ {self.best['epoch']}", flush=True)


def main():
    dist.init_process_group("gloo")
    cfg = TrainConfig()
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    TagTrainer(cfg).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
