"""A ring of four, each sends to the right and receives from the left; rank 2 holds itself for the end of a line."""

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "p2p_unmatched", "culprit": [2], "ranks": 4}


def rotate(block: torch.Tensor, rank: int, size: int, closed: bool) -> torch.Tensor:
    received = torch.empty_like(block)
    handle = dist.isend(block, (rank + 1) % size) if closed else None  # to blame
    dist.recv(received, (rank - 1) % size)
    if handle is not None:
        handle.wait()
    return received


rank, size = begin()
block = torch.full((8,), float(rank))
for turn in range(5):
    block = rotate(block, rank, size, closed=not (FAULT and rank == 2 and turn == 3))
end()
