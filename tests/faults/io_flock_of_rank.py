"""Rank 0 keeps the lock of a shared file while it waits for the others; rank 1 wants that lock first."""

import fcntl
import os
import tempfile

import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [1]}

rank, _ = begin()
names = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(names, src=0)
cache = open(os.path.join(names[0], "cache"), "w")  # noqa: SIM115
if rank == 0:
    fcntl.flock(cache, fcntl.LOCK_EX)
    cache.write("ready")
    if not FAULT:
        fcntl.flock(cache, fcntl.LOCK_UN)
dist.barrier()
if rank == 1:
    fcntl.flock(cache, fcntl.LOCK_EX)  # to blame
    fcntl.flock(cache, fcntl.LOCK_UN)
dist.barrier()
end()
