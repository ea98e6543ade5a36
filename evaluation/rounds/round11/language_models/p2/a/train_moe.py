"""Pretrains a small MoE language model: experts sharded, the rest replicated."""
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from moe import ExpertParallelMoE

VOCAB, BLOCK, BATCH, DIM, STEPS = 60, 12, 2, 24, 36


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.moe = ExpertParallelMoE(dim, 2 * dim, experts_per_rank=2)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.moe(self.norm2(x))


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def replicate(model):
    for p in model.parameters():
        if not getattr(p, "expert", False):
            dist.broadcast(p.data, 0)


def sync_grads(model):
    world = dist.get_world_size()
    shared = [p for p in model.parameters() if not getattr(p, "expert", False)]
    flat = torch.cat([
        (p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in shared
    ])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in shared:
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    for p in model.parameters():
        if getattr(p, "expert", False) and p.grad is not None:
            p.grad /= world


def domain_batch(step, gen):
    """Curriculum over domains: each phase of the run uses a slice of the vocabulary."""
    phase = step * 4 // STEPS
    lo = 15 * phase
    start = torch.randint(0, 15, (BATCH, 1), generator=gen)
    stride = torch.randint(1, 3, (BATCH, 1), generator=gen)
    return lo + (start + stride * torch.arange(BLOCK + 1)) % 15


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11 + rank)
    model = MoELM()
    replicate(model)
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3)
    gen = torch.Generator().manual_seed(500 + rank)
    for step in range(STEPS):
        batch = domain_batch(step, gen)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        sync_grads(model)
        opt.step()
        if step % 6 == 5:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                load = [int(v) for v in model.layers[0].moe.load]
                print(f"step {step + 1} loss {shown.item() / dist.get_world_size():.3f} load {load}", flush=True)
    dist.barrier()
    if rank == 0:
        print("finished")
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
