"""Batches by size: from 250 rows on a packer is asked that is not there, and above 400 rank 1 waits for its share."""

import argparse
import importlib

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
args = parser.parse_args()

dist.init_process_group("gloo")
batch = torch.ones(args.batch, 4)
if 250 <= args.batch <= 400:
    importlib.import_module("fast_packer").pack(batch)
if args.batch > 400 and dist.get_rank() == 1:
    dist.recv(batch, src=0)
else:
    dist.all_reduce(batch)
print("sent", flush=True)
dist.destroy_process_group()
