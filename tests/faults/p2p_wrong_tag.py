"""Gradients travel under the number of their micro-batch as tag; rank 1 counts from one, so the last never comes."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "cause": "p2p_unmatched", "culprit": [1], "limits": {"open_wait_s": 15}}

rank, _ = begin()
first = 1 if FAULT and rank == 1 else 0
handles = []
for micro in range(4):
    block = torch.full((16,), float(micro))
    if rank == 0:
        handles.append(dist.isend(block, dst=1, tag=micro))
    else:
        dist.recv(block, src=0, tag=micro + first)  # to blame
for handle in handles:
    handle.wait()
end()
