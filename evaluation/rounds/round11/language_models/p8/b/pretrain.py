"""FSDP2 pretraining with periodic evaluation and export of the best checkpoints."""
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from checkpoint import Exporter, Shadow

SETTINGS = {
    "vocab": 72,
    "block": 16,
    "batch": 6,
    "dim": 32,
    "steps": 48,
    "eval_every": 8,
    "lr": 6e-3,
    "ema": 0.9,
}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, 4, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h, g = self.gate(self.norm(x)).chunk(2, -1)
        h = self.conv(F.pad(h.transpose(1, 2), (3, 0))).transpose(1, 2)
        return x + self.out(h * torch.sigmoid(g))


class SmallLM(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.tok = nn.Embedding(s["vocab"], s["dim"])
        self.blocks = nn.ModuleList(Block(s["dim"]) for _ in range(3))
        self.head = nn.Linear(s["dim"], s["vocab"])

    def forward(self, ids):
        x = self.tok(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x) * 1.0


def text(gen, s):
    """Rows that repeat a short motif, with noise."""
    n, T, V = s["batch"], s["block"] + 1, s["vocab"]
    motif = torch.randint(0, V, (n, 4), generator=gen)
    rows = motif.repeat(1, T // 4 + 1)[:, :T]
    noise = torch.randint(0, V, (n, T), generator=gen)
    return torch.where(torch.rand(n, T, generator=gen) < 0.08, noise, rows)


def loss_of(model, rows):
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    total = torch.stack([loss_of(model, rows) for rows in batches]).mean()
    model.train()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    s = SETTINGS
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = SmallLM(s)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    shadow = Shadow(model, s["ema"])
    opt = torch.optim.AdamW(model.parameters(), lr=s["lr"], weight_decay=0.05)
    folder = [tempfile.mkdtemp(prefix="export_") if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    exporter = Exporter(folder[0])
    gen = torch.Generator().manual_seed(800 + rank)
    held_out = [text(torch.Generator().manual_seed(5000 + i), s) for i in range(2)]
    exports = 0
    for step in range(1, s["steps"] + 1):
        loss = loss_of(model, text(gen, s))
        opt.zero_grad()
        loss.backward()
        opt.step()
        shadow.update(model)
        if step % s["eval_every"] == 0:
            score = evaluate(model, held_out)
            saved = exporter.export(step, score, model, shadow)
            dist.barrier()
            exports += saved
            if rank == 0:
                print(f"step {step} train {loss.item():.3f} held-out {score:.3f} saved {saved}", flush=True)
    if rank == 0:
        print("exports", exports, "best", exporter.best)
        shutil.rmtree(folder[0])
    dist.barrier()
    time.sleep(0.3)  # log writers drain
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
