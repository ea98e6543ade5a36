"""Character-level pre-training with z-loss and gradient accumulation."""
import argparse
import contextlib
import json
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STORY = (
    "the river ran past the old mill and under the stone bridge . a heron stood in the reeds and waited . "
    "in the morning the miller opened the gate , and the wheel began to turn . nobody in the village could "
    "remember a summer without its sound . when the frost came , children slid on the pond behind the house . "
)


def make_tables(seed):
    rnd = random.Random(seed)
    words = STORY.split()
    text = " ".join(" ".join(rnd.sample(words, len(words))) for _ in range(60))
    chars = sorted(set(text))
    stoi = {c: i for i, c in enumerate(chars)}
    data = torch.tensor([stoi[c] for c in text])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(chars)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.inp, self.out = h, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.inp(x).reshape(n, t, self.h, 3 * d // self.h).transpose(1, 2).chunk(3, dim=-1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(n, t, d))


class CharLM(nn.Module):
    def __init__(self, vocab, d=64, layers=2, heads=4, ctx=48, z_coef=1e-4):
        super().__init__()
        self.ctx, self.z_coef = ctx, z_coef
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(ctx, d)
        self.att = nn.ModuleList(Attention(d, heads) for _ in range(layers))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers + 1))
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(x.shape[1]))
        for norm, att, ffn in zip(self.norms, self.att, self.ffn):
            h = h + att(norm(h))
            h = h + ffn(h)
        return self.head(self.norms[-1](h))


def unwrap(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def sample(data, batch, ctx, gen):
    at = torch.randint(len(data) - ctx - 1, (batch,), generator=gen)
    win = torch.stack([data[i:i + ctx + 1] for i in at.tolist()])
    return win[:, :-1], win[:, 1:]


def lm_loss(model, x, y):
    net = unwrap(model)
    logits = net(x)
    ce = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    z = torch.logsumexp(logits, dim=-1).pow(2).mean()
    return ce + net.z_coef * z, ce.detach()


def accumulate(model, opt, micro_batches):
    opt.zero_grad(set_to_none=True)
    total = 0.0
    for i, (x, y) in enumerate(micro_batches):
        final = i == len(micro_batches) - 1
        with contextlib.nullcontext() if final else model.no_sync():
            loss, ce = lm_loss(model, x, y)
            (loss / len(micro_batches)).backward()
        total += ce.item() / len(micro_batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return total


@torch.no_grad()
def estimate(model, splits, ns):
    """Same windows of every split, cut between the ranks."""
    net = unwrap(model).eval()
    result = {}
    for name, data in splits.items():
        gen = torch.Generator().manual_seed(99 + dist.get_rank())
        ce = torch.stack([lm_loss(net, *sample(data, ns.batch, net.ctx, gen))[1] for _ in range(ns.eval_batches)]).mean()
        dist.all_reduce(ce)
        result[name] = round(ce.item() / dist.get_world_size(), 4)
    net.train()
    return result


def cli():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--iters", type=int, default=60)
    p.add_argument("--batch", type=int, default=6)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--eval-interval", type=int, default=20)
    p.add_argument("--eval-batches", type=int, default=5)
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--save", default="")
    return p.parse_args()


def main():
    ns = cli()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(ns.seed)
    train, val, vocab = make_tables(ns.seed)
    model = DistributedDataParallel(CharLM(vocab))
    opt = torch.optim.AdamW(model.parameters(), lr=ns.lr, weight_decay=0.1)
    gen = torch.Generator().manual_seed(ns.seed + 1 + rank)
    history = []
    for it in range(1, ns.iters + 1):
        for g in opt.param_groups:
            g["lr"] = ns.lr * min(1.0, it / 10) * (1 - 0.9 * it / ns.iters)
        micro = [sample(train, ns.batch, unwrap(model).ctx, gen) for _ in range(ns.accum)]
        loss = accumulate(model, opt, micro)
        if it % ns.eval_interval == 0:
            row = {"iter": it, "loss": round(loss, 4), **estimate(model, {"train": train, "val": val}, ns)}
            history.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0 and ns.save:
        os.makedirs(os.path.dirname(ns.save) or ".", exist_ok=True)
        torch.save({"model": unwrap(model).state_dict(), "history": history}, ns.save)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
