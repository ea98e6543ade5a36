"""Pretraining of a language model cut into pipeline stages; micro-batches grow by schedule."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from pipe import Pipeline, Wire

VOCAB, BLOCK, MICRO, DIM = 50, 12, 4, 32
# (first step, micro-batches per step)
RAMP = [(0, 2), (8, 4), (18, 6)]
STEPS = 30


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.register_buffer("mask", torch.triu(torch.full((BLOCK, BLOCK), float("-inf")), 1))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        return x + self.ff(x)


def build_stage(rank, world):
    parts = [Mixer() for _ in range(2)]
    if rank == 0:
        parts.insert(0, nn.Embedding(VOCAB, DIM))
    if rank == world - 1:
        parts.append(nn.Linear(DIM, VOCAB))
    return nn.Sequential(*parts)


def token_loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def micro_batches_at(step):
    return [n for first, n in RAMP if step >= first][-1]


def global_batch(step, n):
    gen = torch.Generator().manual_seed(9000 + step)
    start = torch.randint(0, VOCAB, (n, MICRO, 1), generator=gen)
    stride = torch.randint(1, 4, (n, MICRO, 1), generator=gen)
    ids = (start + stride * torch.arange(BLOCK + 1)) % VOCAB
    return ids[..., :-1], ids[..., 1:]


def clip(stage, limit):
    total = torch.stack([p.grad.pow(2).sum() for p in stage.parameters()]).sum()
    dist.all_reduce(total)
    scale = min(1.0, limit / (total.sqrt().item() + 1e-6))
    for p in stage.parameters():
        p.grad *= scale
    return total.sqrt().item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30 + rank)
    stage = build_stage(rank, world)
    opt = torch.optim.AdamW(stage.parameters(), lr=4e-3)
    shape = (MICRO, BLOCK, DIM)
    engine, current = None, None
    for step in range(STEPS):
        n = micro_batches_at(step)
        if n != current:
            engine = Pipeline(stage, token_loss, Wire(rank, world, n), n, shape)
            current = n
        inputs, targets = global_batch(step, n)
        opt.zero_grad(set_to_none=True)
        loss = engine.run(rank, world, inputs, targets)
        norm = clip(stage, 1.0)
        opt.step()
        if rank == world - 1 and step % 5 == 4:
            print(f"step {step + 1} micro-batches {n} loss {loss:.3f} norm {norm:.2f}", flush=True)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
