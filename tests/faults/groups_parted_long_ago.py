"""Rank 1 once sums two numbers in the other order, which nobody notices; rank 0 alone comes to a barrier at the end."""

import torch
import torch.distributed as dist
from _job import FAULT, Trainer, begin

LABEL = {"verdict": "HANG", "kind": "deadlock", "cause": "rank0_only_collective", "culprit": [0], "ranks": 3}
ROUNDS = 600  # of two calls each: more than are kept


def mean_of(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def count_of(value: torch.Tensor) -> None:
    dist.all_reduce(value)


rank, _ = begin()
trainer = Trainer()
for done in range(ROUNDS):
    both = [mean_of, count_of]
    if FAULT and rank == 1 and done == 2:
        both.reverse()
    for share in both:
        share(torch.ones(1))
trainer.step()
if not FAULT or rank == 0:  # to blame
    dist.barrier()
trainer.step()
dist.destroy_process_group()
