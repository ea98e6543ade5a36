"""Tiny language model, data parallel, optimizer states of the big matrices sharded by hand (stage 1)."""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = Attention(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.ln1(x))
        return x + self.ff(self.ln2(x))


class LM(nn.Module):
    def __init__(self, vocab, dim, depth, heads, ctx):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(ctx, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.ln = nn.LayerNorm(dim)
        nn.init.normal_(self.tok.weight, std=0.02)

    def forward(self, idx):
        x = self.tok(idx) + self.pos[: idx.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.ln(x), self.tok.weight)


class ShardedAdamW:
    """Matrices live in one padded flat buffer, each rank updates its slice of it.

    Gains and biases are small and are kept whole on every rank.
    """

    def __init__(self, model, lr, weight_decay=0.1, max_norm=1.0):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.max_norm = max_norm
        params = list(model.parameters())
        self.big = [p for p in params if p.ndim >= 2]
        self.small = (p for p in params if p.ndim < 2)
        numel = sum(p.numel() for p in self.big)
        self.slice_len = math.ceil(numel / self.world)
        self.flat = torch.zeros(self.slice_len * self.world)
        self.flat_grad = torch.zeros_like(self.flat)
        off = 0
        for p in self.big:
            view = self.flat[off:off + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.grad = self.flat_grad[off:off + p.numel()].view_as(p)
            off += p.numel()
        mine = slice(self.rank * self.slice_len, (self.rank + 1) * self.slice_len)
        self.master = self.flat[mine].clone().requires_grad_(True)
        self.opt = torch.optim.AdamW([self.master], lr=lr, weight_decay=weight_decay)
        self.small_opt = torch.optim.AdamW(self.small, lr=lr, weight_decay=0.0)

    def zero_grad(self):
        self.flat_grad.zero_()
        self.small_opt.zero_grad(set_to_none=False)

    def reduce_grads(self):
        grad = torch.empty(self.slice_len)
        dist.reduce_scatter_tensor(grad, self.flat_grad)
        self.master.grad = grad.div_(self.world)
        for p in self.small:
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)

    def clip(self):
        sq = self.master.grad.square().sum()
        dist.all_reduce(sq)
        for p in self.small:
            sq += p.grad.square().sum()
        norm = sq.sqrt()
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.master.grad.mul_(scale)
        for p in self.small:
            p.grad.mul_(scale)
        return norm.item()

    def step(self):
        self.reduce_grads()
        norm = self.clip()
        self.opt.step()
        self.small_opt.step()
        dist.all_gather_into_tensor(self.flat, self.master.detach())
        return norm

    def set_lr(self, lr):
        for opt in (self.opt, self.small_opt):
            for group in opt.param_groups:
                group["lr"] = lr


def make_corpus(length, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(0, vocab, (vocab, 3), generator=g)
    picks = torch.randint(0, 3, (length,), generator=g)
    out = [0]
    for i in range(length - 1):
        out.append(int(table[out[-1], picks[i]]))
    return torch.tensor(out)


def get_batch(data, batch, ctx, gen):
    at = torch.randint(0, len(data) - ctx - 1, (batch,), generator=gen)
    return (torch.stack([data[i:i + ctx] for i in at]),
            torch.stack([data[i + 1:i + ctx + 1] for i in at]))


def lr_at(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=70)
    ap.add_argument("--warmup", type=int, default=10)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--ctx", type=int, default=32)
    ap.add_argument("--dim", type=int, default=48)
    ap.add_argument("--depth", type=int, default=3)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--out", default="zero_lm.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LM(64, args.dim, args.depth, 4, args.ctx)
    opt = ShardedAdamW(model, args.lr)
    corpus = make_corpus(12000, 64, seed=5)
    train, valid = corpus[:10000], corpus[10000:]
    gen = torch.Generator().manual_seed(100 + rank)
    tic = time.time()
    for step in range(args.steps):
        opt.set_lr(lr_at(step, args))
        x, y = get_batch(train, args.batch, args.ctx, gen)
        opt.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = opt.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{step:4d} loss {mean.item() / opt.world:.4f} norm {norm:.3f} {time.time() - tic:.1f}s", flush=True)

    model.eval()
    with torch.no_grad():
        gen = torch.Generator().manual_seed(9)
        nll = torch.stack([F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                           for x, y in (get_batch(valid, 16, args.ctx, gen) for _ in range(4))]).mean()
    if rank == 0:
        print(f"valid {nll.item():.4f}", flush=True)
        torch.save(model.state_dict(), args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
