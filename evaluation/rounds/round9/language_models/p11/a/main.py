import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from ckpt import AsyncWriter, full_state
from ema import Ema

OPTIONS = json.loads((pathlib.Path(__file__).parent / "options.json").read_text())


class Bigram(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids[:, :-1])
        logits = self.head(x + self.mlp(x))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batch(step, rank, vocab):
    g = torch.Generator().manual_seed(31 * step + rank)
    return (torch.randint(vocab, (8, 1), generator=g) + 3 * torch.arange(12)) % vocab


def save(writer, ema, model, step):
    state = full_state(model)
    ema.update(state)
    if writer is not None:
        writer.submit("model", step, state)
        writer.submit("ema", step, ema.snapshot())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Bigram(OPTIONS["vocab"], OPTIONS["dim"])
    fully_shard(model.mlp)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"])
    ema = Ema(OPTIONS["ema_decay"])
    writer = AsyncWriter(tempfile.mkdtemp(prefix="async_"), **OPTIONS["writer"]) if rank == 0 else None

    for step in range(1, OPTIONS["steps"] + 1):
        loss = model(batch(step, rank, OPTIONS["vocab"]))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % OPTIONS["save_every"] == 0:
            save(writer, ema, model, step)
            if rank == 0:
                print(f"step {step} loss {loss.item():.3f}, checkpoint queued", flush=True)
    if writer is not None:
        writer.drain()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("training finished", flush=True)


if __name__ == "__main__":
    main()
