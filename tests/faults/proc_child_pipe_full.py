"""Rank 0 waits for a child before it reads what the child writes; the pipe between them is full."""

import subprocess
import sys

import torch
import torch.distributed as dist
from _job import FAULT, begin, end

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "pipe_full", "culprit": [0], "ranks": 4}


def evaluate(size: int) -> int:
    command = [sys.executable, "-S", "-c", f"print('x' * {size})"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    if child.wait() != 0:  # to blame
        raise RuntimeError("the evaluation failed")
    return len(child.stdout.read())


rank, _ = begin()
for turn in range(4):
    score = torch.zeros(1)
    if rank == 0:
        score += evaluate(1_000_000 if FAULT and turn == 2 else 100)
    dist.broadcast(score, src=0)
end()
