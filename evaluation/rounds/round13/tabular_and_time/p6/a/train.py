"""Churn model on binned tabular data; every worker reads one part of the table."""
import argparse
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from binning import BinRegistry, encode
from make_parts import write_part
from schema import infer_schema, read_columns


class BinnedMLP(nn.Module):
    def __init__(self, n_columns, n_codes, dim=6):
        super().__init__()
        self.register_buffer("offset", torch.arange(n_columns) * n_codes)
        self.emb = nn.Embedding(n_columns * n_codes, dim)
        self.mlp = nn.Sequential(nn.Linear(n_columns * dim, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, codes):
        return self.mlp(self.emb(codes + self.offset).flatten(1)).squeeze(1)


def load_part(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp(prefix="churn-") if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    write_part(folder[0], rank, args.rows)
    dist.barrier()
    paths = [os.path.join(folder[0], f"part-{i:03d}.csv") for i in range(world)]
    return infer_schema(paths, target="churned"), read_columns(paths[rank])


def batches(x, y, size, epochs, seed):
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for i in range(0, len(order) - size + 1, size):
            idx = order[i:i + size]
            yield torch.from_numpy(x[idx]), torch.from_numpy(y[idx])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=2000)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bins", type=int, default=16)
    ap.add_argument("--hash-buckets", type=int, default=64)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    schema, columns = load_part(args)
    registry = BinRegistry(args.bins)
    registry.publish(columns, schema.numeric)
    edges = registry.collect(schema.numeric)
    x = encode(columns, schema, edges, args.bins, args.hash_buckets)
    y = np.asarray(columns[schema.target], dtype=np.float32)
    if rank == 0:
        print(f"{len(schema.numeric)} numeric and {len(schema.categorical)} categorical columns", flush=True)

    torch.manual_seed(0)
    model = DDP(BinnedMLP(x.shape[1], args.bins + args.hash_buckets))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    running = None
    for step, (codes, target) in enumerate(batches(x, y, 100, args.epochs, seed=rank), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(codes), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        if step % 20 == 0 and rank == 0:
            print(f"step {step} loss {running:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
