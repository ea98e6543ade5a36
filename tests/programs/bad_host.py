"""A program that fails on one host, which its first argument names, and communicates on the others."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
host = os.environ.get("SLURMD_NODENAME") or os.environ.get("HOST_NAME")
if host == sys.argv[1]:
    raise RuntimeError(f"the device of {host} does not answer")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
