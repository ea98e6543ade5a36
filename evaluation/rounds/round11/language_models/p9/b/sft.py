"""LoRA fine-tuning of a frozen base model; rank 0 writes snapshots in the background."""
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from async_save import SnapshotWriter

VOCAB, BLOCK, BATCH, STEPS, SAVE_EVERY = 64, 14, 6, 50, 10


class LoRALinear(nn.Module):
    def __init__(self, dim_in, dim_out, r=4):
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, dim_in) * 0.1)
        self.b = nn.Parameter(torch.zeros(dim_out, r))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = LoRALinear(dim, 3 * dim)
        self.up = LoRALinear(dim, 2 * dim)
        self.down = LoRALinear(2 * dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class AdaptedLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim).requires_grad_(False)
        self.pos = nn.Embedding(BLOCK, dim).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.head = LoRALinear(dim, VOCAB, r=16)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def adapters(model):
    """One blob per block and one for the head, with the trainable tensors only."""
    parts = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            key = ".".join(name.split(".")[:2]) if name.startswith("blocks") else "head"
            parts.setdefault(key, {})[name] = p
    return list(parts.values())


def instruct_batch(gen):
    """Copy tasks: the second half of a row answers the first half."""
    half = (BLOCK + 1) // 2
    ask = torch.randint(4, 20, (BATCH, half), generator=gen)
    return torch.cat([ask, ask + 20, ask[:, :1]], 1)[:, : BLOCK + 1]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = DDP(AdaptedLM())
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    gen = torch.Generator().manual_seed(300 + rank)
    writer, folder = None, None
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="lora_")
        writer = SnapshotWriter(folder)
    half = (BLOCK + 1) // 2
    for step in range(1, STEPS + 1):
        rows = instruct_batch(gen)
        logits = model(rows[:, :-1])[:, half - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, half:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % SAVE_EVERY == 0:
            mean = loss.detach().clone()
            dist.reduce(mean, 0)
            if rank == 0:
                writer.submit_many(step, adapters(model.module))
                waiting = writer.status()["queued"]
                print(f"step {step} loss {mean.item() / world:.3f} {'behind' if len(waiting) > 4 else 'on time'}", flush=True)
    if rank == 0:
        writer.close()
        print("kept", writer.status()["written"])
        shutil.rmtree(folder)
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
