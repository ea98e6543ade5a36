"""Mixed-objective pretraining of a small language model with DDP."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from recipe import CFG, make_streams

MASK = 1


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, mask):
        h = self.n1(x)
        h, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)
        x = x + h
        return x + self.ff(self.n2(x))


class MixedLM(nn.Module):
    def __init__(self, vocab, block, dim=32):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(block, dim))
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.head = nn.Linear(dim, vocab)
        self.pool = nn.Linear(dim, 16)

    def forward(self, ids, causal=True, pooled=False):
        T = ids.shape[1]
        mask = torch.triu(torch.full((T, T), float("-inf")), 1) if causal else None
        x = self.tok(ids) + self.pos[:T]
        for b in self.blocks:
            x = b(x, mask)
        if pooled:
            return F.normalize(self.pool(x.mean(1)), dim=-1)
        return self.head(x)


def causal_loss(model, batch, gen):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def denoise_loss(model, batch, gen):
    ids = batch[:, :-1].clone()
    hide = torch.rand(ids.shape, generator=gen) < 0.2
    hide[:, 0] = True
    target = ids[hide]
    ids[hide] = MASK
    logits = model(ids, causal=False)
    return F.cross_entropy(logits[hide], target)


def contrastive_loss(model, batch, gen):
    half = batch.shape[1] // 2
    both = torch.cat([batch[:, :half], batch[:, half : 2 * half]])
    z = model(both, causal=False, pooled=True)
    left, right = z.chunk(2)
    pool = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(pool, right.detach().contiguous())
    me = dist.get_rank()
    pool[me] = right
    scores = left @ torch.cat(pool).T / 0.2
    labels = torch.arange(len(left)) + me * len(left)
    return F.cross_entropy(scores, labels)


LOSSES = {"causal": causal_loss, "denoise": denoise_loss, "contrastive": contrastive_loss}


def lr_at(step, cfg):
    if step < cfg["warmup"]:
        return cfg["lr"] * (step + 1) / cfg["warmup"]
    return cfg["lr"] * max(0.1, 1 - (step - cfg["warmup"]) / cfg["steps"])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(CFG["seed"])
    model = DDP(MixedLM(CFG["vocab"], CFG["block"]), find_unused_parameters=True)
    opt = torch.optim.AdamW(model.parameters(), lr=CFG["lr"])
    text, mix = make_streams(CFG, rank)
    noise = torch.Generator().manual_seed(100 + rank)
    running = {}
    for step in range(CFG["steps"]):
        for g in opt.param_groups:
            g["lr"] = lr_at(step, CFG)
        name = mix.pick(step)
        loss = LOSSES[name](model, text.draw(), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        old = running.get(name, loss.item())
        running[name] = 0.8 * old + 0.2 * loss.item()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}", {k: round(v, 3) for k, v in running.items()}, flush=True)
    if rank == 0:
        print("objectives", mix.counts)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
