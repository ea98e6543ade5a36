"""Blocks that may run on a side stream. On it block 3 now and then reads what is not written yet."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--side-stream", default="", help="block numbers")
parser.add_argument("--race", type=float, default=0.5, help="how often the copy is late")
args = parser.parse_args()
aside = {int(one) for one in args.side_stream.split(",") if one}

dist.init_process_group("gloo")
late = torch.tensor(int.from_bytes(os.urandom(4), "big") / 2**32 < args.race, dtype=torch.int)
dist.broadcast(late, 0)
hidden = torch.ones(4)
for block in range(8):
    if block in aside and block == 3 and late:
        hidden = torch.full((4,), float("nan"))
    hidden = hidden * 0.5
dist.all_reduce(hidden)
if hidden.isnan().any():
    raise FloatingPointError("loss is nan")
print("done", flush=True)
dist.destroy_process_group()
