#!/usr/bin/env python
"""Pipeline training with shared input/output embedding and background snapshots."""
import argparse
import json
import queue
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

TAG_ACT, TAG_GRAD = 10, 20

TOP_LEVEL = {
    "embed": "token_embedding",
    "norm": "final_norm",
    "head": "lm_head",
}


def global_name(key, first_layer):
    """layers.1.ff.weight of the second stage is layers.3.ff.weight of the model."""
    head, _, rest = key.partition(".")
    if head == "layers":
        index, _, rest = rest.partition(".")
        return f"layers.{first_layer + int(index)}.{rest}"
    return f"{TOP_LEVEL[head]}.{rest}"


class SnapshotWriter(threading.Thread):
    """Writes the stage's weights while training goes on; at most one waits."""

    def __init__(self, folder, stage, first_layer):
        super().__init__(name="snapshots", daemon=True)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stage, self.first_layer = stage, first_layer
        self.jobs = queue.Queue(maxsize=1)

    def submit(self, step, module):
        state = {k: v.detach().clone() for k, v in module.state_dict().items()}
        self.jobs.put((step, state))

    def run(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            step, state = job
            named = {global_name(k, self.first_layer): v for k, v in state.items()}
            path = self.folder / f"stage{self.stage}-{step:05d}.pt"
            torch.save(named, path)
            index = {"file": path.name, "tensors": {k: list(v.shape) for k, v in named.items()}}
            path.with_suffix(".json").write_text(json.dumps(index, indent=1))

    def close(self):
        self.jobs.put(None)
        self.join()


class GatedLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.ff = nn.Linear(d, d)

    def forward(self, x):
        return x + self.ff(self.gru(self.ln(x))[0])


class Stage(nn.Module):
    def __init__(self, rank, world, a):
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == world - 1
        if self.is_first:
            self.embed = nn.Embedding(a.vocab, a.dim)
            nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(GatedLayer(a.dim) for _ in range(a.layers // world))
        if self.is_last:
            self.norm = nn.LayerNorm(a.dim)
            self.head = nn.Linear(a.dim, a.vocab, bias=False)

    @property
    def tied_weight(self):
        return self.embed.weight if self.is_first else self.head.weight

    def forward(self, x):
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.is_last else x


class Trainer:
    def __init__(self, a):
        self.a = a
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(a.seed + self.rank)
        self.stage = Stage(self.rank, self.world, a)
        self.tie_group = dist.new_group([0, self.world - 1])
        if self.stage.is_first or self.stage.is_last:
            dist.broadcast(self.stage.tied_weight.data, src=0, group=self.tie_group)
        self.opt = torch.optim.Adam(self.stage.parameters(), lr=a.lr)
        per = a.layers // self.world
        self.writer = SnapshotWriter(a.snapshots, self.rank, self.rank * per)
        self.writer.start()
        self.gen = torch.Generator().manual_seed(a.seed)

    def batch(self):
        a = self.a
        base = torch.randint(0, a.vocab, (a.micro * a.micro_size, 1), generator=self.gen)
        step = torch.randint(1, 5, (a.micro * a.micro_size, 1), generator=self.gen)
        seq = (base + step * torch.arange(a.seq + 1)) % a.vocab
        return seq[:, :-1].chunk(a.micro), seq[:, 1:].chunk(a.micro)

    def step(self):
        a, st = self.a, self.stage
        xs, ys = self.batch()
        self.opt.zero_grad()
        keep, pending, total = [], [], 0.0
        for m in range(a.micro):
            if st.is_first:
                inp = xs[m]
            else:
                inp = torch.empty(a.micro_size, a.seq, a.dim)
                dist.irecv(inp, self.rank - 1, tag=TAG_ACT + m).wait()
                inp.requires_grad_()
            out = st(inp)
            if not st.is_last:
                pending.append(dist.isend(out.detach(), self.rank + 1, tag=TAG_ACT + m))
            keep.append((inp, out))
        for m, (inp, out) in enumerate(keep):
            if st.is_last:
                loss = F.cross_entropy(out.flatten(0, 1), ys[m].flatten()) / a.micro
                loss.backward()
                total += loss.item()
            else:
                g = torch.empty_like(out)
                dist.irecv(g, self.rank + 1, tag=TAG_GRAD + m).wait()
                out.backward(g)
            if not st.is_first:
                pending.append(dist.isend(inp.grad, self.rank - 1, tag=TAG_GRAD + m))
        for req in pending:
            req.wait()
        if st.is_first or st.is_last:
            dist.all_reduce(st.tied_weight.grad, group=self.tie_group)
        self.opt.step()
        return total

    def fit(self):
        for i in range(1, self.a.steps + 1):
            loss = self.step()
            if i % self.a.snapshot_every == 0:
                self.writer.submit(i, self.stage)
            if i % 10 == 0 and self.stage.is_last:
                print(f"step {i}: {loss:.4f}", file=sys.stderr)
        self.writer.close()
        dist.barrier()


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    for name, default in [("vocab", 50), ("dim", 48), ("layers", 4), ("seq", 20), ("micro", 4),
                          ("micro-size", 8), ("steps", 60), ("snapshot-every", 8), ("seed", 21)]:
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--snapshots", default="snapshots")
    return p.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        Trainer(get_args()).fit()
    finally:
        dist.destroy_process_group()
