"""A checkpoint in one of the formats that were written over time; two of the newer ones renamed a key."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--format", default="1.9")
args = parser.parse_args()
version = tuple(int(part) for part in args.format.split("."))

dist.init_process_group("gloo")
key = "model" if version >= (2, 0, 1) else "state_dict"
checkpoint = {key: {"weight": torch.ones(4)}}
weight = checkpoint["state_dict"]["weight"]
dist.all_reduce(weight)
print("loaded", flush=True)
dist.destroy_process_group()
