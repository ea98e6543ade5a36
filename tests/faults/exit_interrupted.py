"""Rank 2 of four turns a signal of its scheduler into KeyboardInterrupt, and nobody catches it."""

import signal

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "FAIL", "cause": "exception", "culprit": [2], "ranks": 4}


def preempted(*_: object) -> None:
    raise KeyboardInterrupt("preempted")  # to blame


rank, _ = begin()
signal.signal(signal.SIGUSR1, preempted)
total = torch.ones(4)
for turn in range(5):
    if FAULT and rank == 2 and turn == 3:
        signal.raise_signal(signal.SIGUSR1)
    dist.all_reduce(total)
end()
