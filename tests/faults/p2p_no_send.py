"""Rank 1 waits for activations that rank 0 does not send in the third step, as it has gone to the barrier."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "p2p_unmatched", "culprit": [0]}

rank, _ = begin()
for step in range(1, 6):
    activations = torch.full((32,), float(step))
    if rank == 1:
        dist.recv(activations, src=0)
    elif not (FAULT and step == 3):
        dist.send(activations, dst=1)  # to blame
    dist.barrier()
end()
