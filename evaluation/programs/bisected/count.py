"""Layers that are sharded take a communicator from a pool each; the pool was sized for four of them."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--shard-layers", default="")
args = parser.parse_args()
sharded = [int(one) for one in args.shard_layers.split(",") if one]

dist.init_process_group("gloo")
pool = ["a", "b", "c", "d"]
weights = {layer: torch.ones(4) for layer in range(8)}
for layer in sharded:
    weights[layer] = weights[layer] * len(pool.pop())
for weight in weights.values():
    dist.all_reduce(weight)
print("sharded", sharded, flush=True)
dist.destroy_process_group()
