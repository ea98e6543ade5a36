"""Two-stage GPT pre-training on CPU/GPU with DDP.

Stage one runs with a short context, stage two picks the weights, optimizer and
data position up again and goes on with a longer context.

    torchrun --nproc-per-node=2 train_stages.py
"""
import argparse
import logging
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("stages")


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, dim, depth, heads, max_len):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos.weight[: idx.size(1)]
        for blk in self.blocks:
            x = blk(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TokenStream:
    """Contiguous reads out of this rank's part of the corpus."""

    def __init__(self, tokens, rank, world):
        per_rank = len(tokens) // world
        self.tokens = tokens[rank * per_rank:(rank + 1) * per_rank]
        self.cursor = 0

    def next(self, batch, length):
        need = batch * length + 1
        if self.cursor + need > len(self.tokens):
            self.cursor = 0
        chunk = torch.from_numpy(self.tokens[self.cursor:self.cursor + need].astype(np.int64))
        self.cursor += need - 1
        return chunk[:-1].view(batch, length), chunk[1:].view(batch, length)

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]


class Checkpointer:
    def __init__(self, root, rank):
        self.root, self.rank = Path(root), rank

    def save(self, model, optimizer, stream, step):
        if self.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, self.root / "train_state.pt")
            log.info("saved step %d to %s", step, self.root)
        torch.save(stream.state_dict(), self.root / f"stream_{self.rank:05d}.pt")
        dist.barrier()

    def restore(self, model, optimizer, stream):
        try:
            state = torch.load(self.root / "train_state.pt")
            position = torch.load(self.root / f"stream_{self.rank:05d}.pt")
        except OSError:
            log.info("nothing to resume from in %s", self.root)
            return 0
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        stream.load_state_dict(position)
        return state["step"]


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    frac = (step - args.warmup) / max(1, args.stage1_steps + args.stage2_steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, frac))))


@torch.no_grad()
def evaluate(model, tokens, args, length):
    model.eval()
    losses = []
    val = TokenStream(tokens, dist.get_rank(), dist.get_world_size())
    for _ in range(args.eval_iters):
        losses.append(model(*val.next(args.batch_size, length)).item())
    model.train()
    total = torch.tensor(losses).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def run_stage(name, length, last_step, corpus, ckpt, args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = GPT(args.vocab, args.dim, args.depth, args.heads, args.max_len)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    stream = TokenStream(corpus["train"], rank, world)
    step = ckpt.restore(net, optimizer, stream)
    model = DDP(net)
    log.info("%s: context %d, steps %d..%d", name, length, step, last_step)
    t0 = time.time()
    while step < last_step:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, args)
        loss = model(*stream.next(args.batch_size, length))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % args.eval_every == 0:
            val = evaluate(net, corpus["val"], args, length)
            if rank == 0:
                log.info("%s step %d train %.3f val %.3f (%.1fs)", name, step, loss.item(), val, time.time() - t0)
    ckpt.save(net, optimizer, stream, step)


def synthetic_corpus(vocab, seed):
    rng = np.random.default_rng(seed)
    trans = rng.integers(0, vocab, size=(vocab, 4))
    out, cur = np.empty(60_000, dtype=np.uint16), 0
    for i, pick in enumerate(rng.integers(0, 4, size=len(out))):
        cur = trans[cur, pick]
        out[i] = cur
    return {"train": out[:50_000], "val": out[50_000:]}


def main():
    p = argparse.ArgumentParser()
    for name, default in dict(vocab=96, dim=48, depth=2, heads=4, max_len=64, batch_size=8, seed=1337, warmup=8,
                              stage1_steps=20, stage2_steps=20, eval_every=10, eval_iters=4).items():
        p.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--out", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [rank {rank}] %(message)s")
    where = [args.out or tempfile.mkdtemp(prefix="stages_")] if rank == 0 else [None]
    dist.broadcast_object_list(where, src=0)
    ckpt = Checkpointer(where[0], rank)
    corpus = synthetic_corpus(args.vocab, args.seed)

    run_stage("short", 32, args.stage1_steps, corpus, ckpt, args)
    run_stage("long", 64, args.stage1_steps + args.stage2_steps, corpus, ckpt, args)

    dist.destroy_process_group()
    if rank == 0 and args.out is None and os.path.isdir(where[0]):
        shutil.rmtree(where[0])


if __name__ == "__main__":
    main()
