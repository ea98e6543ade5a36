"""Finetune a sequence tagger; checkpoints go to the hub folder in the background while training goes on."""
import argparse
import json
import logging
import queue
import re
import shutil
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger(__name__)
TAGS = 5


class PartialState:
    """Who am I, and helpers that need to know it."""

    def __init__(self):
        dist.init_process_group("gloo")
        self.process_index = dist.get_rank()
        self.num_processes = dist.get_world_size()

    @property
    def is_main_process(self):
        return self.process_index == 0

    def on_main_process(self, fn):
        def wrapper(*a, **k):
            return fn(*a, **k) if self.is_main_process else None
        return wrapper

    def wait_for_everyone(self):
        dist.barrier()

    def gather(self, t):
        out = [torch.empty_like(t) for _ in range(self.num_processes)]
        dist.all_gather(out, t)
        return torch.cat(out)


class HubPusher:
    """Uploads folders one after the other from a thread of its own.

    `settle` seconds lie between an order and its upload, since the file system of the cluster shows
    new files late.
    """

    def __init__(self, remote, settle):
        self.remote, self.settle = Path(remote), settle
        self.orders = queue.Queue()
        self.commits = []
        self.thread = threading.Thread(target=self._work, name="hub-pusher", daemon=True)
        self.thread.start()

    def push(self, folder, message):
        self.orders.put((Path(folder), message))

    def _upload(self, folder, message):
        target = self.remote / folder.name
        target.mkdir(parents=True, exist_ok=True)
        for file in ("model.pt", "optimizer.pt", "state.json"):
            shutil.copyfile(folder / file, target / file)
        self.commits.append(message)
        log.info("pushed %s: %s", folder.name, message)

    def _work(self):
        while True:
            folder, message = self.orders.get()
            time.sleep(self.settle)
            try:
                self._upload(folder, message)
            except OSError as e:
                log.warning("could not push %s: %s", folder.name, e)
            finally:
                self.orders.task_done()

    def finish(self):
        log.info("waiting for %d uploads", self.orders.qsize())
        self.orders.join()
        return self.commits


class Tagger(nn.Module):
    def __init__(self, vocab=300, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * dim, TAGS)

    def forward(self, x):
        return self.out(self.lstm(self.emb(x))[0])


def make_split(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 300, (n, length), generator=g)
    return x, (x + x.roll(1, dims=1)) % TAGS


def rotate_checkpoints(out, limit):
    found = sorted(out.glob("checkpoint-*"), key=lambda p: int(re.search(r"\d+$", p.name).group()))
    for old in found[:-limit]:
        log.info("deleting older checkpoint %s (save_total_limit=%d)", old.name, limit)
        shutil.rmtree(old)


class TaggerTrainer:
    def __init__(self, args):
        self.args = args
        self.state = PartialState()
        torch.manual_seed(args.seed)
        self.model = DDP(Tagger())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.train_x, self.train_y = make_split(args.train_size, 20, 1)
        self.eval_x, self.eval_y = make_split(120, 20, 2)
        self.out = Path(args.output_dir)
        self.pusher = HubPusher(args.hub_dir, args.settle) if self.state.is_main_process else None
        self.save = self.state.on_main_process(self._save)
        self.step = 0

    def batches(self, epoch):
        g = torch.Generator().manual_seed(self.args.seed + epoch)
        per_step = self.args.batch_size * self.state.num_processes
        order = torch.randperm(len(self.train_x), generator=g)
        for chunk in order[: len(order) // per_step * per_step].split(per_step):
            mine = chunk[self.state.process_index:: self.state.num_processes]
            yield self.train_x[mine], self.train_y[mine]

    def _save(self):
        folder = self.out / f"checkpoint-{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.module.state_dict(), folder / "model.pt")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "state.json").write_text(json.dumps({"step": self.step, "args": vars(self.args)}))
        rotate_checkpoints(self.out, self.args.save_total_limit)
        self.pusher.push(folder, f"Training in progress, step {self.step}")

    @torch.no_grad()
    def evaluate(self):
        r, w = self.state.process_index, self.state.num_processes
        x, y = self.eval_x[r::w], self.eval_y[r::w]
        hits = (self.model.module(x).argmax(-1) == y).float().mean(1)
        return self.state.gather(hits).mean().item()

    def train(self):
        for epoch in range(self.args.epochs):
            for x, y in self.batches(epoch):
                loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                if self.step % self.args.save_steps == 0:
                    self.save()
            accuracy = self.evaluate()
            if self.state.is_main_process:
                log.info("epoch %d  loss %.4f  accuracy %.3f", epoch, loss.item(), accuracy)
        if self.state.is_main_process:
            for message in self.pusher.finish():
                log.info("commit: %s", message)
        self.state.wait_for_everyone()


def main():
    p = argparse.ArgumentParser(description=__doc__)
    base = os.path.join(tempfile.gettempdir(), f"tagger_{os.getppid()}")
    p.add_argument("--output_dir", default=base)
    p.add_argument("--hub_dir", default=base + "_hub")
    p.add_argument("--settle", type=float, default=3.0)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch_size", type=int, default=8)
    p.add_argument("--train_size", type=int, default=256)
    p.add_argument("--save_steps", type=int, default=5)
    p.add_argument("--save_total_limit", type=int, default=1)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s: %(message)s")
    TaggerTrainer(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
