"""A native library aborts rank 2 of four: a mutex that is not held is given back, and the library checks that."""

import os

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "FAIL", "cause": "aborted", "culprit": [2], "ranks": 4}


def check(held: bool) -> None:
    if not held:
        os.abort()  # to blame


rank, _ = begin()
total = torch.ones(4)
for turn in range(5):
    check(not (FAULT and rank == 2 and turn == 3))
    dist.all_reduce(total)
end()
