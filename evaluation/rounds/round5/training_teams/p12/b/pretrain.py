import json
import math
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from prepare import prepare

STEPS, BATCH, WARMUP = 24, 8, 6


class CausalLayer(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.heads = heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab, seq, width=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(CausalLayer(width) for _ in range(2))
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(x).clone()


def lr_at(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    settings = json.load(open("data.json"))
    store = dist.distributed_c10d._get_default_store()
    tokens = torch.from_numpy(prepare(settings, store, rank))
    mine = tokens[rank::world]

    torch.manual_seed(1)
    model = GPT(settings["vocab"], settings["seq"])
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)

    for step in range(STEPS):
        i = step * BATCH % (len(mine) - BATCH + 1)
        ids = mine[i : i + BATCH]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 6 == 5:
            t = loss.detach().clone()
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step + 1} loss {t.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
