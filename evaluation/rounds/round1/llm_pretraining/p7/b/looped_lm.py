#!/usr/bin/env python
"""Looped decoder: a small stack of layers applied several times (weights shared over depth)."""
import math
import os
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def rotary(x, base=10000.0):
    *_, t, d = x.shape
    freq = base ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    ang = torch.outer(torch.arange(t, dtype=x.dtype), freq)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()), -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.pre = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.mid = nn.LayerNorm(d)
        self.ff1 = nn.Linear(d, 4 * d)
        self.ff2 = nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = [z.reshape(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.pre(x)).chunk(3, -1)]
        att = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + self.o(att.transpose(1, 2).reshape(b, t, d))
        return x + self.ff2(F.gelu(self.ff1(self.mid(x))))


class LoopedLM(nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.loops = opt.loops
        self.save_memory = opt.checkpointing
        self.embed = nn.Embedding(opt.vocab, opt.width)
        self.stack = nn.ModuleList(Layer(opt.width, opt.heads) for _ in range(opt.layers))
        self.norm = nn.LayerNorm(opt.width)
        self.readout = nn.Linear(opt.width, opt.vocab, bias=False)

    def run_layer(self, layer, x):
        if self.save_memory and self.training:
            return checkpoint(layer, x, use_reentrant=True)
        return layer(x)

    def forward(self, ids, labels):
        x0 = x = self.embed(ids)
        for i in range(self.loops):
            for layer in self.stack:
                x = self.run_layer(layer, x)
            if i + 1 < self.loops:
                x = x + x0
        logits = self.readout(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1))


class CopyTask:
    """Sequences whose second half repeats the first."""

    def __init__(self, opt, seed):
        self.opt, self.gen = opt, torch.Generator().manual_seed(seed)

    def __iter__(self):
        return self

    def __next__(self):
        o = self.opt
        half = torch.randint(1, o.vocab, (o.batch, o.length // 2), generator=self.gen)
        seq = torch.cat((half, half, half[:, :1]), 1)
        return seq[:, :-1], seq[:, 1:]


class Run:
    def __init__(self, opt):
        dist.init_process_group("gloo")
        self.opt = opt
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(opt.seed)
        self.net = LoopedLM(opt)
        self.ddp = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        decay = [p for p in self.net.parameters() if p.ndim >= 2]
        rest = [p for p in self.net.parameters() if p.ndim < 2]
        self.optim = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=opt.lr)
        self.train_data = CopyTask(opt, 100 + self.rank)

    def lr(self, it):
        w = self.opt.warmup
        return self.opt.lr * ((it + 1) / w if it < w else math.sqrt(w / (it + 1)))

    @torch.no_grad()
    def evaluate(self, n=4):
        self.net.eval()
        data = CopyTask(self.opt, 9000 + self.rank)
        mean = sum(self.net(*next(data)) for _ in range(n)) / n
        dist.all_reduce(mean)
        self.net.train()
        return mean.item() / self.world

    def step(self, it):
        for g in self.optim.param_groups:
            g["lr"] = self.lr(it)
        for micro in range(self.opt.accum):
            self.ddp.require_backward_grad_sync = micro == self.opt.accum - 1
            loss = self.ddp(*next(self.train_data))
            (loss / self.opt.accum).backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optim.step()
        self.optim.zero_grad()
        return loss.item(), norm.item()

    def go(self):
        began = time.time()
        for it in range(self.opt.iters):
            if it % self.opt.eval_every == 0:
                score = self.evaluate()
                if self.rank == 0:
                    print(f"[{time.time() - began:5.1f}s] {it:4d} val {score:.4f}", flush=True)
            loss, norm = self.step(it)
            if self.rank == 0 and it % 10 == 9:
                print(f"[{time.time() - began:5.1f}s] {it + 1:4d} train {loss:.4f} |g| {norm:.2f}", flush=True)
        if self.rank == 0 and self.opt.out:
            Path(self.opt.out).mkdir(parents=True, exist_ok=True)
            torch.save(self.net.state_dict(), os.path.join(self.opt.out, "looped.pt"))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    ap = ArgumentParser()
    for key, val in {"vocab": 64, "width": 48, "layers": 2, "heads": 4, "loops": 3, "length": 32, "batch": 8, "accum": 2,
                     "iters": 30, "warmup": 10, "eval_every": 15, "seed": 0}.items():
        ap.add_argument(f"--{key}", type=int, default=val)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--out", default="")
    ap.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    Run(ap.parse_args()).go()
