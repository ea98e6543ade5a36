"""Rank 0 writes its log into a pipe that only its own next line would read."""

import os

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "pipe_full", "culprit": [0]}

rank, _ = begin()
reading, writing = os.pipe()
for turn in range(4):
    seen = torch.zeros(1)
    if rank == 0:
        line = b"." * (200_000 if FAULT and turn == 2 else 2_000)
        os.write(writing, line)  # to blame
        seen += len(os.read(reading, 4096))
    dist.broadcast(seen, src=0)
end()
