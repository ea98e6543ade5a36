"""A pipeline of four stages; stage 2 asks its cache for a lock that the same thread took in the batch before."""

import threading

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "lock_cycle", "culprit": [2], "ranks": 4}


class Cache:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def put(self, release: bool) -> None:
        self.lock.acquire()  # to blame
        if release:
            self.lock.release()


rank, size = begin()
cache = Cache()
for micro in range(5):
    block = torch.full((8,), float(micro))
    if rank > 0:
        dist.recv(block, rank - 1)
    cache.put(release=not (FAULT and rank == 2 and micro == 1))
    if rank + 1 < size:
        dist.send(block * 2, rank + 1)
end()
