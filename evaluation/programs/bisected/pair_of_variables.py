"""Mean of gradients, tuned by the environment: half precision on the wire and a scale are each fine by themselves."""

import os

import torch
import torch.distributed as dist


def on(name):
    return os.environ.get(name) == "1"


dist.init_process_group("gloo")
gradient = torch.full((64,), 3000.0)
if on("MEAN_SCALED"):
    gradient = gradient * 32
if on("MEAN_IN_HALF"):
    gradient = gradient.half().float()
if on("MEAN_IN_BUCKETS"):
    for bucket in gradient.split(16):
        dist.all_reduce(bucket)
else:
    dist.all_reduce(gradient)
if on("MEAN_LATE"):
    dist.barrier()
print("gradient", gradient.mean().item(), flush=True)
if not torch.isfinite(gradient).all():
    raise FloatingPointError("gradient is not finite")
dist.destroy_process_group()
