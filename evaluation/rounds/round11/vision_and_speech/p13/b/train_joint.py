import argparse
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import manifest


class Tagger(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.rnn = nn.GRU(manifest.BANDS, dim, batch_first=True)
        self.out = nn.Linear(dim, manifest.CLASSES)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h.mean(1))


def run_source(model, opt, rows, batch_size, seed):
    loss_sum, hits, seen = 0.0, 0, 0
    for i in range(0, len(rows) - batch_size + 1, batch_size):
        x, y = manifest.features(rows[i:i + batch_size], seed + i)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss_sum += loss.item() * len(y)
        hits += (logits.argmax(1) == y).sum().item()
        seen += len(y)
    return {"loss": loss_sum, "hits": hits, "seen": seen}


def summarize(stats):
    table = [None] * dist.get_world_size()
    dist.all_gather_object(table, stats)
    seen = max(1, sum(t["seen"] for t in table))
    return sum(t["loss"] for t in table) / seen, sum(t["hits"] for t in table) / seen


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--unit", type=int, default=12)
    p.add_argument("--batch-size", type=int, default=4)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp(prefix="joint_") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "manifest.csv")
    if rank == 0:
        manifest.write(path, args.unit)
    dist.barrier()

    corpus = manifest.Manifest(path)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for rnd in range(args.rounds):
        for source in corpus.sources:
            rows = corpus.subset(source, rank, world)
            stats = run_source(model, opt, rows, args.batch_size, seed=rnd * 1000 + rank)
            loss, acc = summarize(stats)
            if rank == 0:
                print(f"round {rnd} {source:<11} loss {loss:.3f} acc {acc:.3f}", flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
