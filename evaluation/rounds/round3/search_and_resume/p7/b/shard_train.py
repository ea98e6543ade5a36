# Recommender training with per-rank parameter ownership and asynchronous
# incremental checkpoints.
#
# Layout of a checkpoint directory
#   ckpt/<tag>/shard<r>.pt      what rank r owns
#   ckpt/<tag>/MANIFEST.json    written last, by rank 0; without it the tag is void
#
# Shards are written by a thread.  The ranks tell each other through the job's
# key-value store which shards of a tag are on disk.

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pathlib
import queue
import shutil
import threading

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LOG = logging.getLogger("recsys")

CONFIG = dict(
    steps=240,
    save_every=40,
    warm_rows_until=90,     # the id table is frozen after this step
    users=400, items=300, dim=24,
    batch=64, lr=5e-3, seed=1,
    root=pathlib.Path(__file__).resolve().parent / "ckpt",
)


class AsyncShardWriter:
    def __init__(self, root: pathlib.Path, store: dist.Store, rank: int):
        self.root, self.store, self.rank = root, store, rank
        self.inbox: queue.Queue = queue.Queue()
        self.last: tuple[str, pathlib.Path] | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._loop, name=f"shards-{rank}", daemon=True)
        self.thread.start()

    def submit(self, tag: str, state: dict):
        if self.error is not None:
            raise RuntimeError("shard writer failed") from self.error
        self.inbox.put((tag, {k: v.detach().clone() for k, v in state.items()}))

    def drain(self):
        self.inbox.join()

    def _loop(self):
        while True:
            tag, state = self.inbox.get()
            try:
                self._write(tag, state)
            except BaseException as e:  # handed to the next submit()
                LOG.exception("writing %s", tag)
                self.error = e
            finally:
                self.inbox.task_done()

    def _write(self, tag, state):
        path = self.root / tag / f"shard{self.rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = self._digest(state)
        if self.last is not None and self.last[0] == digest:
            # nothing has changed since: share the bytes with the older tag
            os.link(self.last[1], path)
            LOG.info("%s: unchanged, linked to %s", tag, self.last[1].parent.name)
            return
        buf = io.BytesIO()
        torch.save(state, buf)
        part = path.with_suffix(".part")
        part.write_bytes(buf.getvalue())
        part.replace(path)
        self.last = (digest, path)
        self.store.set(f"{tag}/{self.rank}", digest)

    @staticmethod
    def _digest(state):
        h = hashlib.sha1()
        for name in sorted(state):
            h.update(name.encode())
            h.update(state[name].numpy().tobytes())
        return h.hexdigest()


class Committer:
    """Turns a complete set of shards into a checkpoint (rank 0 only)."""

    def __init__(self, root, store, world):
        self.root, self.store, self.world = root, store, world
        self.open_tags: list[str] = []

    def opened(self, tag):
        self.open_tags.append(tag)

    def commit(self):
        while self.open_tags:
            tag = self.open_tags.pop(0)
            keys = [f"{tag}/{r}" for r in range(self.world)]
            self.store.wait(keys)
            digests = [self.store.get(k).decode() for k in keys]
            manifest = self.root / tag / "MANIFEST.json"
            manifest.write_text(json.dumps({"tag": tag, "shards": digests}))
            LOG.info("%s committed", tag)


class Factors(nn.Module):
    def __init__(self, users, items, dim):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mix = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, u, i):
        return self.mix(torch.cat([self.user(u), self.item(i)], -1)).squeeze(-1)


def owners(model, world):
    """Tables go to the last rank, dense layers to the others."""
    return {n: world - 1 if n.startswith(("user", "item")) else name_sum(n) % max(world - 1, 1)
            for n, _ in model.named_parameters()}


def name_sum(name):
    return sum(name.encode())


def sample(cfg, g, taste):
    u = torch.randint(0, cfg["users"], (cfg["batch"],), generator=g)
    i = torch.randint(0, cfg["items"], (cfg["batch"],), generator=g)
    return u, i, taste[u % 20, i % 15]


def update(model, own, opt, rank, world):
    for n, p in model.named_parameters():
        if p.requires_grad:
            dist.reduce(p.grad, dst=own[n], op=dist.ReduceOp.SUM)
            p.grad /= world
    opt.step()
    for n, p in model.named_parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=own[n])


def run(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO, format=f"rank{rank}: %(message)s")
    torch.set_num_threads(1)
    if rank == 0:
        shutil.rmtree(cfg["root"], ignore_errors=True)
    dist.barrier()

    store = dist.PrefixStore("ckpt", dist.distributed_c10d._get_default_store())
    torch.manual_seed(cfg["seed"])
    model = Factors(cfg["users"], cfg["items"], cfg["dim"])
    taste = torch.randn(20, 15, generator=torch.Generator().manual_seed(99)).sign()
    own = owners(model, world)
    mine = {n: p for n, p in model.named_parameters() if own[n] == rank}
    opt = torch.optim.Adagrad(mine.values(), lr=cfg["lr"] * 10)
    writer = AsyncShardWriter(cfg["root"], store, rank)
    committer = Committer(cfg["root"], store, world) if rank == 0 else None

    g = torch.Generator().manual_seed(1000 + rank)
    running = torch.zeros(())
    for step in range(1, cfg["steps"] + 1):
        u, i, t = sample(cfg, g, taste)
        loss = F.mse_loss(model(u, i), t)
        model.zero_grad(set_to_none=True)
        loss.backward()
        update(model, own, opt, rank, world)
        running += loss.detach()
        if step == cfg["warm_rows_until"]:
            model.user.requires_grad_(False)
            model.item.requires_grad_(False)
        if step % cfg["save_every"] == 0:
            dist.all_reduce(running)
            writer.submit(f"step{step:05d}", mine)
            if committer is not None:
                LOG.info("step %d loss %.4f", step, running.item() / world / cfg["save_every"])
                committer.opened(f"step{step:05d}")
                writer.drain()
                committer.commit()
            running.zero_()

    writer.drain()
    if rank == 0:
        done = sorted(p.parent.name for p in cfg["root"].glob("*/MANIFEST.json"))
        LOG.info("%d checkpoints, newest %s", len(done), done[-1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(CONFIG)
