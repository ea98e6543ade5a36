"""Layers with an option that does no harm, and a data source that is gone now and then."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--fuse-layers", default="")
args = parser.parse_args()
fused = {int(one) for one in args.fuse_layers.split(",") if one}

dist.init_process_group("gloo")
gone = torch.tensor(int.from_bytes(os.urandom(4), "big") / 2**32 < 0.4, dtype=torch.int)
dist.broadcast(gone, 0)
if gone:
    raise ConnectionError("shard 12 of the data cannot be read")
hidden = torch.ones(4)
for layer in range(8):
    hidden = hidden * (1.0 if layer in fused else 1)
dist.all_reduce(hidden)
print("done", flush=True)
dist.destroy_process_group()
