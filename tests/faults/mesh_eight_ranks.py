"""Eight ranks, two by two by two; rank 5 waits for a file lock that a child of its own holds and never gives back."""

import fcntl
import os
import subprocess

import torch
import torch.distributed as dist
from _job import FAULT, begin, end
from torch.distributed.device_mesh import init_device_mesh

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [5], "ranks": 8}

rank, _ = begin()
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "data", "tensor"))
own = os.memfd_create("claim")
keeper = None
for step in range(1, 5):
    for axis in ("tensor", "data", "pipe"):
        dist.all_reduce(torch.ones(4), group=mesh.get_group(axis))
    if FAULT and rank == 5 and step == 3:
        name = f"/proc/{os.getpid()}/fd/{own}"
        keeper = subprocess.Popen(["flock", name, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        keeper.stdin.write(b"held\n")
        keeper.stdin.flush()
        keeper.stdout.readline()
    fcntl.flock(own, fcntl.LOCK_EX)  # to blame
    fcntl.flock(own, fcntl.LOCK_UN)
end()
