"""Instruction tuning with the sequence cut over a ring of ranks (context parallel).

Each rank holds one contiguous part of every sequence.  Keys and values are passed
round the ring so that the queries of a rank see all earlier positions.
"""
import argparse
import logging
import random
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

logger = logging.getLogger("ringtune")
IGNORE = -100


class Ring(NamedTuple):
    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def next(self):
        return dist.get_global_rank(self.group, (self.rank + 1) % self.size)

    @property
    def prev(self):
        return dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def shift(self, t):
        """Hand t to the next rank, return what the previous one handed over."""
        got = torch.empty_like(t)
        ops = [dist.P2POp(dist.isend, t.contiguous(), self.next, self.group),
               dist.P2POp(dist.irecv, got, self.prev, self.group)]
        for req in dist.batch_isend_irecv(ops):
            req.wait()
        return got


class RingGather(torch.autograd.Function):
    """(B, T/n, C) on every rank -> (B, T, C); gradients travel the same way round."""

    @staticmethod
    def forward(ctx, x, ring):
        ctx.ring = ring
        parts = [None] * ring.size
        cur, parts[ring.rank] = x, x
        for hop in range(1, ring.size):
            cur = ring.shift(cur)
            parts[(ring.rank - hop) % ring.size] = cur
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        ring = ctx.ring
        parts = grad.chunk(ring.size, dim=1)
        acc = parts[(ring.rank - 1) % ring.size]
        for hop in range(1, ring.size):
            acc = ring.shift(acc) + parts[(ring.rank - 1 - hop) % ring.size]
        return acc, None


class RingAttention(nn.Module):
    def __init__(self, dim, heads, ring):
        super().__init__()
        self.heads, self.ring = heads, ring
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        kv = RingGather.apply(self.kv(x), self.ring)
        k, v = kv.chunk(2, dim=-1)
        split = lambda z: z.view(b, -1, self.heads, c // self.heads).transpose(1, 2)  # noqa: E731
        rows = torch.arange(t)[:, None] + self.ring.rank * t
        mask = torch.arange(t * self.ring.size)[None] <= rows
        y = F.scaled_dot_product_attention(split(self.q(x)), split(k), split(v), attn_mask=mask)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class RingLM(nn.Module):
    def __init__(self, vocab, dim, depth, heads, max_len, ring):
        super().__init__()
        self.ring = ring
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.att = nn.ModuleList(RingAttention(dim, heads, ring) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
            for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth + 1))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.tok(ids) + self.pos(torch.arange(t) + self.ring.rank * t)
        for norm, att, mlp in zip(self.norms, self.att, self.mlp):
            x = x + att(norm(x))
            x = x + mlp(x)
        return self.head(self.norms[-1](x))


class Dialogues:
    """Prompt/answer pairs, batched by similar length, padded to max_len."""

    def __init__(self, n, vocab, max_len, batch, seed):
        rng = random.Random(seed)
        rows = []
        for _ in range(n):
            prompt = [rng.randrange(2, vocab) for _ in range(rng.randint(4, 12))]
            answer = [prompt[i % len(prompt)] for i in range(rng.randint(16, max_len - 14))]
            rows.append((prompt, answer))
        rows.sort(key=lambda r: len(r[0]) + len(r[1]))
        self.batches = [rows[i:i + batch] for i in range(0, n - n % batch, batch)]
        rng.shuffle(self.batches)
        self.max_len = max_len

    def __iter__(self):
        for rows in self.batches:
            ids = torch.zeros(len(rows), self.max_len, dtype=torch.long)
            labels = torch.full_like(ids, IGNORE)
            for i, (prompt, answer) in enumerate(rows):
                full = torch.tensor(prompt + answer + [1])
                ids[i, :len(full) - 1] = full[:-1]
                labels[i, len(prompt) - 1:len(full) - 1] = full[len(prompt):]
            yield ids, labels


def local_part(t, ring):
    return t.chunk(ring.size, dim=1)[ring.rank]


def ring_loss(logits, labels, ring):
    """Mean over all answer tokens of the batch; every rank holds its share of the sum."""
    count = (labels != IGNORE).sum()
    total = count.clone()
    dist.all_reduce(total, group=ring.group)
    if count == 0:
        return torch.zeros((), requires_grad=True)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss / total


def sync_grads(model):
    grads = []
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for g, f in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
        g.copy_(f)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--samples", type=int, default=200)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--max-len", type=int, default=64)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--depth", type=int, default=2)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save", type=Path, default=Path("ringtune.pt"))
    args = ap.parse_args()

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    ring = Ring(dist.new_group(list(range(world))), dist.get_rank(), world)
    torch.manual_seed(11)
    model = RingLM(40, args.dim, args.depth, 4, args.max_len, ring)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Dialogues(args.samples, 40, args.max_len, args.batch_size, seed=46)

    for epoch in range(args.epochs):
        for i, (ids, labels) in enumerate(data):
            loss = ring_loss(model(local_part(ids, ring)), local_part(labels, ring), ring)
            opt.zero_grad()
            loss.backward()
            sync_grads(model)
            gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if i % 10 == 0:
                whole = loss.detach().clone()
                dist.all_reduce(whole)
                logger.info("epoch %d batch %d loss %.4f gnorm %.2f", epoch, i, whole.item(), gnorm)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), args.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
