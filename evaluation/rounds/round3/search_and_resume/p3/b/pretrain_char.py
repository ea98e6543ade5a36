#!/usr/bin/env python
# Character-level pretraining with a metrics uploader in a child process.
#
#   torchrun --nproc-per-node=2 pretrain_char.py --steps 200
#
# The uploader is kept out of the training process because the client of our
# tracking server is not thread-safe; it gets one JSON document per line.

import argparse
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, "
    "it was the age of foolishness, it was the epoch of belief, it was the epoch of "
    "incredulity, it was the season of Light, it was the season of Darkness, it was "
    "the spring of hope, it was the winter of despair. "
) * 40

CLIENT = r"""
import json, sys
path = sys.argv[1]
with open(path, "w") as sink:
    for line in sys.stdin:
        doc = json.loads(line)
        sink.write(line)
        sink.flush()
        names = sorted(doc["values"])
        print(json.dumps({"seq": doc["seq"], "status": "accepted", "names": names}), flush=True)
"""


class Uploader:
    """Sends records to the tracking client and counts what it has accepted."""

    def __init__(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.proc = subprocess.Popen([sys.executable, "-c", CLIENT, path], text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.seq = 0
        self.accepted = 0

    def send(self, step, values):
        self.seq += 1
        doc = {"seq": self.seq, "step": step, "time": time.time(), "values": values}
        self.proc.stdin.write(json.dumps(doc) + "\n")
        self.proc.stdin.flush()

    def finish(self):
        self.proc.stdin.close()
        for line in self.proc.stdout:
            self.accepted += json.loads(line)["status"] == "accepted"
        self.proc.wait()
        return self.accepted, self.seq


class NoUploader:
    def send(self, step, values):
        pass

    def finish(self):
        return 0, 0


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2)
                   for z in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, vocab, d=32, layers=2, heads=2, ctx=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(ctx, d))
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.tok(x) + self.pos[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def batches(data, ctx, size, rank, seed):
    g = torch.Generator().manual_seed(seed + 1000 * rank)
    while True:
        at = torch.randint(0, len(data) - ctx - 1, (size,), generator=g)
        chunk = torch.stack([data[i:i + ctx + 1] for i in at.tolist()])
        yield chunk[:, :-1], chunk[:, 1:]


@torch.no_grad()
def describe(model):
    """Per-tensor summaries: moments and quantiles of weights and gradients."""
    out = {}
    marks = torch.linspace(0, 1, 9)
    for name, p in model.named_parameters():
        for kind, t in (("w", p), ("g", p.grad)):
            flat = t.flatten().float()
            out[f"{kind}/{name}/std"] = flat.std().item()
            out[f"{kind}/{name}/norm"] = flat.norm().item()
            for m, v in zip(marks.tolist(), torch.quantile(flat, marks).tolist()):
                out[f"{kind}/{name}/q{int(m * 100):03d}"] = round(v, 7)
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--ctx", type=int, default=32)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--log-every", type=int, default=5)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "tracking"))
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT])
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(CharLM(len(chars), ctx=args.ctx))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps)
    uploader = Uploader(os.path.join(args.out, "run.jsonl")) if rank == 0 else NoUploader()

    it = batches(data, args.ctx, args.batch, rank, args.seed)
    for step in range(args.steps):
        x, y = next(it)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % args.log_every == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean = mean.item() / world
            if rank == 0:
                uploader.send(step, {"loss": mean, "lr": sched.get_last_lr()[0], **describe(model.module)})
                print(f"step {step:4d}  loss {mean:.4f}", flush=True)

    accepted, sent = uploader.finish()
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.out, "model.pt"))
        print(f"{accepted}/{sent} records accepted", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
